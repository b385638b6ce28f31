"""`peagle`: which command, and how its errors reach the user. The commands are in `commands/`."""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from peagle_jax.cli_flags import UsageError

COMMANDS = {
    "generate": "answer a prompt, streaming, with or without a drafter",
    "demo": "fetch a small chat model and show every way of drafting side by side",
    "bench": "measure methods, draft lengths and concurrency on a data set of prompts",
    "models": "list the public targets and the heads known for them",
    "convert": "write a target or a drafter to plain safetensors, or a drafter for vLLM",
    "doctor": "say which versions, devices and kernels this machine has",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it could not be done, said in one line; 2: bad usage."""
    parser = _Parser(
        prog="peagle", description="Lossless speculative decoding with P-EAGLE drafters, in JAX."
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    arguments = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in arguments if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            _module(name).add_arguments(command)
    options = parser.parse_args(arguments)
    if options.version:
        from peagle_jax import __version__

        print(f"peagle-jax {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    warnings.showwarning = _show_warning
    _keep_compiled_programs()
    try:
        return _module(options.command).run(options)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        print(f"peagle {options.command}: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("PEAGLE_TRACEBACK"):
            raise
        print(f"peagle {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Bad usage in one line; the whole usage is for --help."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _module(name: str):
    return importlib.import_module(f"peagle_jax.commands.{name}")


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """A warning of ours in one line; those of other packages are for their developers."""
    from peagle_jax.models.config import DrafterWarning

    if issubclass(category, DrafterWarning):
        print(f"peagle: {message}", file=sys.stderr)


def _keep_compiled_programs() -> None:
    """Programs compiled once are read from the cache folder the next time."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is not None:
        return
    from peagle_jax.checkpoints.embedded import cache_folder

    # Read by jax when it is imported, which no module has done yet.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder() / "programs")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


if __name__ == "__main__":
    sys.exit(main())
