"""`peagle-train fit`: train a drafter by a recipe."""

import argparse
import importlib.metadata
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from train import distributed

STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that a signal stopped: 0 means that nothing is left to train."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="TOML file; docs/training.md has an example")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    distributed.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    distributed.join(args)
    from train.assemble import assemble
    from train.checkpoint import Checkpoints
    from train.export import write_draft_ids
    from train.loop import run_loop
    from train.progress import Log, draw_curves
    from train.recipe import load_recipe, resolved

    recipe = load_recipe(args.recipe, args.set)
    folder = Path(recipe.output.folder)
    with Checkpoints(folder / "checkpoints", keep=recipe.output.keep) as checkpoints:
        step = checkpoints.latest()
        if not args.resume:
            checkpoints.check_new()
        try:
            made = assemble(recipe)
        except ValueError as error:
            raise ValueError(f"{args.recipe}: {error}") from None
        state, best, position = made.state, None, None
        if args.resume and step is None:
            print(f"{folder}: no checkpoint yet, starting anew", file=sys.stderr)
        elif step is not None:
            state, record = checkpoints.restore(state, made.run.recipe, mesh=made.mesh)
            best, position = record.best, record.data
        if distributed.is_first():
            write_provenance(folder, resolved(recipe), made, resumed=step)
            for name, (count, rows) in made.too_long.items():
                if count:
                    print(
                        f"{name}: {count} of {rows} rows longer than data.sequence_length left out",
                        file=sys.stderr,
                    )
            write_draft_ids(folder, made.run.frozen["d2t"])
        with Log(
            folder,
            total_steps=made.run.total_steps,
            first_step=step or 0,
            enabled=distributed.is_first(),
            tensorboard=recipe.output.tensorboard,
        ) as log:
            done = run_loop(made.run, state, checkpoints, log, best=best, resumed_data=position)
    if distributed.is_first() and recipe.output.picture:
        draw_curves(folder)
    if done.interrupted:
        print(f"{folder}: stopped at step {int(done.state.step)}, saved", file=sys.stderr)
        return STOPPED
    return 0


def write_provenance(folder: Path, recipe: dict[str, Any], made: Any, *, resumed: Any) -> None:
    """Recipe, drafter config, data, command line, revision, versions: beside the checkpoints."""
    import dataclasses

    folder.mkdir(parents=True, exist_ok=True)
    packages = ("peagle-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    content = {
        "recipe": recipe,
        "drafter": dataclasses.asdict(made.config),
        "target_fingerprint": made.target_fingerprint,
        "rows_longer_than_sequence": {
            name: {"left_out": count, "rows": rows} for name, (count, rows) in made.too_long.items()
        },
        "argv": sys.argv,
        "working_folder": str(Path.cwd()),
        "resumed_from_step": resumed,
        "git_revision": _revision(),
        "versions": {name: _version(name) for name in packages} | {"python": sys.version},
    }
    text = json.dumps(content, indent=1) + "\n"
    name = "run.json" if resumed is None else f"run-from-{resumed}.json"
    part = folder / f".{name}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / name)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of the source tree that runs, None outside of one."""
    command = ["git", "rev-parse", "HEAD"]
    where = Path(__file__).parents[2]
    try:
        found = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
