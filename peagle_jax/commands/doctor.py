"""`peagle doctor`: versions, devices, and which implementation runs for each operation."""

import argparse
import dataclasses
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from pallas_kernels.doctor import diagnose, format_diagnosis

    diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, default=str))
    else:
        print(format_diagnosis(diagnosis))
    return 0
