"""Offline benchmarks: prompts, timed runs of several methods in turns, tables and pictures."""
