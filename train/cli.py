"""`peagle-train`: the commands, each in a module that is imported only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "prepare": "tokenise conversations and find what the assistant generated",
    "regenerate": "let the target answer the prompts itself",
    "capture": "store the target's hidden states for offline training",
    "fit": "train a drafter by a recipe",
    "export": "write a trained drafter for serving",
    "evaluate": "measure acceptance length by generation",
}
"""Command name, which is also the module's name in `train.commands`, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed (one line on stderr), 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="peagle-train",
        description="Train P-EAGLE and EAGLE-3 drafters.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
        + "\n\n`peagle-train COMMAND --help` lists a command's options.",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    # Only the first argument is this parser's; the rest belongs to the command.
    name = parser.parse_args(arguments[:1]).command
    command = importlib.import_module(f"train.commands.{name}")
    own = argparse.ArgumentParser(prog=f"peagle-train {name}", description=COMMANDS[name])
    command.add_arguments(own)
    args = own.parse_args(arguments[1:])
    try:
        return command.run(args)
    except (ValueError, OSError) as error:
        print(f"peagle-train {name}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
