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
    target = None
    for row in table:
        if row["target"] != target:
            target = row["target"]
            print(target)
        print(f"  {row['head']}")
        facts = [row["method"], row["context"] and "long context"]
        facts += [row["layers"] and f"{row['layers']} layers"]
        facts += [row["tokens per pass"] and f"{row['tokens per pass']} tokens per pass"]
        facts += [row["taps"] and f"taps {row['taps']}"]
        for line in (", ".join(filter(None, facts)), row["files"], row["note"]):
            if line:
                print(f"    {line}")
        print(f"    verified: {row['verified']}")
    return 0
