"""What a command says while it works: lines on standard error."""

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """One line that the next one overwrites; on a terminal only, since files keep escape codes."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Take the line of `show` away."""
    show("")
