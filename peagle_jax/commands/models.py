"""`peagle models`: targets, their heads, and where their files are on this machine."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    from peagle_jax.checkpoints.catalogue import rows

    table = rows()
    if arguments.json:
        print(json.dumps(table, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    shown = ("target", "head", "method", "tokens per pass", "taps", "files", "verified", "note")
    view = Table(show_lines=True)
    for name in shown:
        view.add_column(name, overflow="fold")
    for row in table:
        view.add_row(*(row[name] for name in shown))
    Console().print(view)
    return 0
