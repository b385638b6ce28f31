"""`peagle doctor`: versions, devices, and which implementation runs for each operation."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from pallas_kernels.doctor import report

    content = report()
    if arguments.json:
        print(json.dumps(content, indent=1))
        return 0
    for section, values in content.items():
        print(section)
        for name, value in values.items():
            print(f"  {name:<24} {value}")
    return 0
