"""One module per `peagle-train` command: `add_arguments(parser)` and `run(args) -> int`."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on, or an argparse error that names the value."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
