"""From a run's checkpoint to a drafter's folder, in the raw or the speculators layout.

A run says itself what it is: run.json has recipe and sizes, draft_ids.npy the draft vocabulary. So
neither its data nor its mesh is needed here, and the target only for tables that were not trained.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.load import load_target
from peagle_jax.loading import find_target
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import Drafter
from train.assemble import Assembled
from train.checkpoint import Checkpoints
from train.identity import target_fingerprint
from train.optimizer import make_optimizer
from train.parameters import MASK_ROW, Params, Trained, parameters_of, whole
from train.recipe import Recipe, parse, resolved
from train.step import TrainState
from train.warm_start import parameter_shapes, target_tables, whole_drafter

RUN, DRAFT_IDS = "run.json", "draft_ids.npy"


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
    target: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the drafter of the run in `folder` to `output`.

    which: the checkpoint of the highest validation acceptance length, or the newest one; without
    validation the newest is the best. target: where the run's target is now, if it has moved.

    Raises:
        ValueError: no run there, no complete checkpoint, another target than the run's, or an
            output that would replace the run.
    """
    check_output(folder, output)
    content = read_run(folder)
    recipe, config = run_recipe(folder), _config(folder, content)
    like = _state_shapes(recipe, config)
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        best = which == "best" and checkpoints.has_best()
        state, _ = checkpoints.restore(like, resolved(recipe), best=best)
    learned = jax.device_get(state.learned)
    frozen = _frozen(Path(folder), content, recipe, config, target)
    drafter = whole_drafter(config, whole(config, learned, frozen), jnp.float32)
    return save_drafter(
        drafter,
        output,
        layout,
        dtype=dtype,
        verifier=verifier or recipe.target.path,
        overwrite=overwrite,
    )


def check_output(folder: str | Path, output: str | Path) -> None:
    """Raise ValueError where writing `output` would replace the run in `folder`, or part of it."""
    run, out = Path(folder).resolve(), Path(output).resolve()
    if run.is_relative_to(out) or out.is_relative_to(run / "checkpoints"):
        raise ValueError(
            f"{output}: is, holds or lies in the checkpoints of the run {folder}; give a folder "
            "of its own."
        )


def read_run(folder: str | Path) -> dict[str, Any]:
    """What fit wrote about a run when it first started.

    Raises ValueError where it is not there, or not whole.
    """
    path = Path(folder) / RUN
    if not path.is_file():
        raise ValueError(f"{folder}: no run (no {RUN}).")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, not what fit wrote ({error}).") from None
    for key in ("recipe", "drafter"):
        if not isinstance(content, dict) or not isinstance(content.get(key), dict):
            raise ValueError(f"{path}: damaged, not what fit wrote (no section {key}).")
    return content


def run_recipe(folder: str | Path) -> Recipe:
    """The resolved recipe of a run, as written when it first started."""
    content = read_run(folder)["recipe"]
    try:
        return parse(Recipe, content, "")
    except ValueError as error:
        raise ValueError(f"{Path(folder) / RUN}: recipe.{error}") from None


def write_draft_ids(folder: Path, d2t: Any) -> None:
    """Keep the draft vocabulary beside the checkpoints, which hold trained parameters alone."""
    offsets = np.asarray(d2t).astype(np.int64)
    part = folder / f".{DRAFT_IDS}.part"
    with part.open("wb") as file:
        np.save(file, offsets + np.arange(len(offsets)))
    os.replace(part, folder / DRAFT_IDS)


def _config(folder: str | Path, content: Mapping[str, Any]) -> DrafterConfig:
    try:
        return parse(DrafterConfig, content["drafter"], "")
    except ValueError as error:
        raise ValueError(f"{Path(folder) / RUN}: drafter.{error}") from None


def _trained(recipe: Recipe) -> Trained:
    return Trained(embedding=recipe.train.embedding, head=recipe.train.head)


def _untrained(recipe: Recipe) -> set[str]:
    """The tables that stayed as they were."""
    trained = _trained(recipe)
    names = set() if trained.embedding == "table" else {"embedding"}
    return names if trained.head else {*names, "head"}


def _state_shapes(recipe: Recipe, config: DrafterConfig) -> TrainState:
    """A state like the run's, on the first device: whatever mesh it was trained on."""
    place = SingleDeviceSharding(jax.devices()[0])

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    unchanged = {"d2t", *_untrained(recipe)}
    learned: Params = {n: x for n, x in parameter_shapes(config).items() if n not in unchanged}
    if recipe.train.embedding == "mask-row":
        learned[MASK_ROW] = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
    moments = jax.eval_shape(make_optimizer(recipe.optimizer, 1).init, learned)
    learned, moments = jax.tree.map(shape, (learned, moments))
    return TrainState(
        step=jnp.int32(0), learned=learned, moments=moments, key=jax.random.key(recipe.train.seed)
    )


def _frozen(
    folder: Path, content: Mapping[str, Any], recipe: Recipe, config: DrafterConfig,
    target: str | None,
) -> Params:  # fmt: skip
    """What was not trained: from the run's draft vocabulary, its target and its first head."""
    path = folder / DRAFT_IDS
    if not path.is_file():
        raise ValueError(
            f"{path}: missing; the run is of an earlier version. fit --resume writes it, also "
            "where nothing is left to train."
        )
    kept = np.load(path)
    d2t = jnp.asarray(kept - np.arange(len(kept)), jnp.int32)
    if not _untrained(recipe):
        return {"d2t": d2t}
    where = target or _place(recipe.target.path, content)
    part = recipe.target
    kind = None if part.dtype is None else jnp.dtype(part.dtype)
    model = load_target(find_target(where), dtype=kind, keep_packed=part.keep_packed)
    known, found = content.get("target_fingerprint"), target_fingerprint(model)
    if known not in (None, found):
        raise ValueError(
            f"{where}: is target {found}, the run was trained for {known}; name the run's own "
            "(--target)."
        )
    if recipe.drafter.start == "head":
        head = load_drafter(_place(recipe.drafter.path, content), target=model, dtype=jnp.float32)
        tables = parameters_of(head)
    else:
        tables = target_tables(config, model, kept)
    return {"d2t": d2t, **{name: tables[name] for name in _untrained(recipe)}}


def _place(path: str, content: Mapping[str, Any]) -> str:
    """A path of the recipe, which counts from the folder that fit was called in."""
    there = Path(content.get("working_folder", "")) / path
    return str(there) if there.exists() and not Path(path).exists() else path
