"""One module per `peagle-train` command: `add_arguments(parser)` and `run(args) -> int`."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on, or an argparse error that names the value."""
    return _at_least(text, 1)


def whole(text: str) -> int:
    """A whole number from 0 on, or an argparse error that names the value."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value
