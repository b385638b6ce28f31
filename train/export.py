"""From a run's checkpoint to a drafter's folder, in the raw or the speculators layout."""

import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.models.drafter import Drafter
from train.assemble import Assembled, assemble
from train.checkpoint import Checkpoints
from train.parameters import whole
from train.recipe import Recipe, parse
from train.step import TrainState
from train.warm_start import whole_drafter


def trained_drafter(made: Assembled, state: TrainState, dtype: Any = jnp.float32) -> Drafter:
    """The drafter of a training state; the mask row is back in its table."""
    params = whole(made.config, state.learned, made.run.frozen)
    return whole_drafter(made.config, jax.device_get(params), dtype)


def export_run(
    folder: str | Path,
    output: str | Path,
    *,
    which: Literal["best", "last"] = "best",
    layout: Literal["raw", "speculators"] = "raw",
    dtype: Any = jnp.bfloat16,
    verifier: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the drafter of the run in `folder` to `output`.

    which: the checkpoint of the highest validation acceptance length, or the newest one; without
    validation the newest is the best.

    Raises:
        ValueError: no run there, or no complete checkpoint.
    """
    recipe = run_recipe(folder)
    made = assemble(recipe)
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        best = which == "best" and checkpoints.has_best()
        state, _ = checkpoints.restore(made.state, made.run.recipe, mesh=made.mesh, best=best)
    drafter = trained_drafter(made, state, jnp.float32)
    return save_drafter(
        drafter,
        output,
        layout,
        dtype=dtype,
        verifier=verifier or recipe.target.path,
        overwrite=overwrite,
    )


def run_recipe(folder: str | Path) -> Recipe:
    """The resolved recipe of a run, as written when it first started."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no run (no run.json).")
    content = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    return parse(Recipe, content, "")
