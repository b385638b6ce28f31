"""The command line of the golden checks."""

import argparse
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one family of golden checks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    targets = commands.add_parser("targets", help="target models, under both config files")
    targets.add_argument("folders", nargs="+", metavar="FOLDER")
    smollm2 = commands.add_parser("smollm2", help="prompts, tokenizer cases and greedy tokens")
    smollm2.add_argument("file", metavar="FILE")
    smollm2.add_argument("--model", default="smollm2-135m", help="name or path of the GGUF file")
    smollm2.add_argument("--prompts", type=int, help="only the first N prompts")
    training = commands.add_parser(
        "training", help="P-EAGLE loss and gradients of a public library"
    )
    training.add_argument("folders", nargs="+", metavar="FOLDER")
    for command in (targets, smollm2, training):
        command.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    chosen = parser.parse_args(arguments)

    # Golden values are float32 results; a GPU would have to be asked for by name.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tests.golden.report import show

    if chosen.command == "targets":
        from tests.golden.targets import check_folders

        return show(check_folders(chosen.folders), as_json=chosen.json)
    if chosen.command == "training":
        from tests.golden.training import check_folders

        return show(check_folders(chosen.folders), as_json=chosen.json)
    from tests.golden.smollm2 import check_file

    return show(check_file(chosen.file, chosen.model, chosen.prompts), as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
