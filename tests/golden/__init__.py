"""Recompute golden data and compare: `python -m tests.golden targets FOLDER...`, `smollm2 FILE`.

The data may be that of tests/data or any other of the same layout. One line per case with its
largest errors; the exit status is 1 when a limit is passed, 2 when a case cannot be computed.
"""
