"""From a recipe to a run: target, drafter, data, objective, optimizer, mesh, placed and jitted."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.load import load_target
from peagle_jax.loading import find_target
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.target import Target
from peagle_jax.sharding import make_mesh
from train.data.hidden_store import HiddenStore, open_store
from train.data.pipeline import (
    Batches,
    PipelineConfig,
    SampleSource,
    Subset,
    batches,
    hold_out,
)
from train.data.prepared import PreparedData, open_prepared
from train.feed import check_batch, on_devices, on_mesh, reading, target_states
from train.identity import target_fingerprint
from train.loop import Run
from train.objective import make_objective
from train.optimizer import learning_rate, make_optimizer
from train.parameters import Params, Trained, kept_ids, parameters_of, split
from train.progress import describe
from train.recipe import DrafterPart, Recipe, resolved
from train.rows import target_head
from train.sampling import CodConfig, count_table
from train.spread import batch_shards
from train.step import (
    TrainState,
    init_state,
    make_step,
    make_validation,
    peagle_gradients,
    place_parameters,
)
from train.warm_start import (
    check_head,
    drafter_config,
    first_unused_id,
    start_parameters,
    with_depths,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembled:
    """A run and the state before its first step.

    config: the drafter's. too_long: of the training and the validation rows, how many are longer
    than a sequence and left out, and how many there are.
    """

    run: Run
    state: TrainState
    config: DrafterConfig
    mesh: Mesh | None
    target_fingerprint: str
    too_long: dict[str, tuple[int, int]]


def assemble(recipe: Recipe, target: Target | None = None) -> Assembled:
    """Load, check and place everything that `recipe` names.

    target: a model in memory, instead of the one that the recipe names.

    Raises:
        ValueError: naming what does not fit together.
    """
    mesh = _mesh(recipe)
    dtype = _dtype(recipe.train.dtype)
    part, parts = reading(mesh)
    check_batch(recipe.train.global_batch, recipe.train.accumulation, parts, mesh)
    target = _target(recipe, mesh) if target is None else target
    fingerprint = target_fingerprint(target)
    source, validation = open_data(recipe)
    config, params = start(recipe, target, source)
    check_source(source, target, config, fingerprint)
    if validation is not None:
        _check_validation(source, validation)
        check_source(validation, target, config, fingerprint)
    trained = Trained(embedding=recipe.train.embedding, head=recipe.train.head)
    learned, frozen = split(config, params, trained, dtype)
    if mesh is not None:
        frozen = place_parameters(frozen, mesh)
    head = target_head(target, kept_ids(config, frozen), residual=_residual(source))
    head = on_mesh(head, mesh)
    training = batches(source, pipeline_config(recipe, mesh))
    too_long = {"training": (len(training.packing.too_long), len(source))}
    if validation is not None:
        try:
            packing = _validation(recipe, validation, mesh).packing
        except ValueError as error:
            raise ValueError(f"validation: {error}") from None
        too_long["validation"] = (len(packing.too_long), len(validation))
    total = recipe.train.steps or training.num_batches
    optimizer = make_optimizer(recipe.optimizer, total)
    step, validate, describe_sums = _programs(recipe, config, dtype, mesh, optimizer)
    online = not isinstance(_inner(source), HiddenStore)
    place = {"mesh": mesh, "process_index": part, "process_count": parts}
    run = Run(
        step=step,
        validate=None if validation is None else validate,
        describe=describe_sums,
        frozen=frozen,
        head=head,
        batches=training,
        validation=None if validation is None else lambda: _validation(recipe, validation, mesh),
        place=lambda part: on_devices(part, accumulation=recipe.train.accumulation, **place),
        place_validation=lambda part: on_devices(part, accumulation=1, **place),
        states=target_states(target, config.taps, mesh) if online else None,
        total_steps=total,
        recipe=resolved(recipe),
        learning_rate=learning_rate(recipe.optimizer, total),
        save_every=recipe.output.save_every,
        validate_every=recipe.output.validate_every,
        log_every=recipe.output.log_every,
    )
    state = init_state(learned, optimizer, jax.random.key(recipe.train.seed), mesh)
    return Assembled(
        run=run,
        state=state,
        config=config,
        mesh=mesh,
        target_fingerprint=fingerprint,
        too_long=too_long,
    )


def start(recipe: Recipe, target: Target, source: SampleSource) -> tuple[DrafterConfig, Params]:
    """Config and first parameters of the drafter, checked against target and data."""
    part, objective = recipe.drafter, recipe.objective
    parallel = objective.kind == "p-eagle"
    if part.start == "head":
        drafter = load_drafter(part.path, target=target, dtype=jnp.float32)
        check_head(drafter.config, target.config, part)
        config = drafter.config
        if parallel:
            config = with_depths(config, objective.num_depths)
        params = parameters_of(drafter)
    else:
        mask = _mask_token(recipe, target) if parallel else None
        depths = objective.num_depths if parallel else None
        config = drafter_config(target.config, part, mask_token_id=mask, num_depths=depths)
        kept = None
        if part.draft_vocab_size not in (None, target.config.vocab_size):
            kept = _draft_vocabulary(source, part, target.config.vocab_size)
        params = start_parameters(
            config,
            target,
            jax.random.key(recipe.train.seed),
            kept=kept,
            from_target_layers=part.start == "target-layers",
        )
    return config, params


def check_source(
    source: SampleSource, target: Target, config: DrafterConfig, fingerprint: str
) -> None:
    """Raise ValueError where rows are not those of the target, or hold the mask token."""
    inner, vocab_size = _inner(source), target.config.vocab_size
    if isinstance(inner, PreparedData):
        inner.check_vocabulary(vocab_size)
        if config.mask_token_id is not None:
            inner.check_mask_token(config.mask_token_id)
    if isinstance(inner, HiddenStore):
        _check_store(inner, config, fingerprint)
        inner.check_tokens(vocab_size, config.mask_token_id)


def _check_validation(source: SampleSource, validation: SampleSource) -> None:
    """Raise ValueError where validation rows cannot go through what the training rows do."""
    inner, other = _inner(source), _inner(validation)
    stores = [isinstance(part, HiddenStore) for part in (inner, other)]
    if stores[0] != stores[1]:
        kinds = ["a store of hidden states" if store else "prepared rows" for store in stores]
        raise ValueError(
            f"data.validation is {kinds[1]}, data.path {kinds[0]}; give the same kind."
        )
    if isinstance(inner, HiddenStore) and isinstance(other, HiddenStore):
        mine, its = ((i.dtype, i.last_hidden) for i in (inner.info, other.info))
        if mine != its:
            raise ValueError(
                f"data.validation holds {its[0]}, {its[1]} states, data.path {mine[0]}, {mine[1]} "
                "ones; capture both alike."
            )


def open_data(recipe: Recipe) -> tuple[SampleSource, SampleSource | None]:
    """The training rows and the validation rows, None without any."""
    source = _open(recipe.data.path, "data.path")
    if recipe.data.validation is not None:
        return source, _open(recipe.data.validation, "data.validation")
    if recipe.data.validation_rows == 0:
        return source, None
    try:
        return hold_out(source, recipe.data.validation_rows, seed=recipe.train.seed)
    except ValueError as error:
        raise ValueError(f"data.validation_rows: {error}") from None


def _open(path: str, key: str) -> SampleSource:
    folder = Path(path)
    if (folder / "manifest.json").is_file():
        return _verified(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{key} is {path}: neither prepared rows (manifest.json) nor a store of hidden states "
            "(*.safetensors) is there."
        )
    return open_store(folder)


def _verified(folder: str | Path) -> PreparedData:
    """A prepared data set whose files are what was written."""
    data = open_prepared(folder)
    data.verify()
    return data


def _inner(source: SampleSource) -> SampleSource:
    return source.source if isinstance(source, Subset) else source


def _residual(source: SampleSource) -> bool:
    inner = _inner(source)
    return isinstance(inner, HiddenStore) and inner.info.last_hidden == "residual"


def _check_store(store: HiddenStore, config: DrafterConfig, fingerprint: str) -> None:
    info = store.info
    if info.tap_layers != config.taps or info.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"{store.folder}: holds taps {list(info.tap_layers)} of width {info.hidden_size}, the "
            f"drafter reads {list(config.taps)} of width {config.target_hidden_size}; set "
            "drafter.taps, or capture again."
        )
    if info.fingerprint not in (None, fingerprint):
        raise ValueError(
            f"{store.folder}: states of the target {info.target} ({info.fingerprint}), the "
            f"recipe's target is {fingerprint}; capture again, or name that target."
        )


def _target(recipe: Recipe, mesh: Mesh | None) -> Target:
    part = recipe.target
    return load_target(
        find_target(part.path),
        dtype=None if part.dtype is None else jnp.dtype(part.dtype),
        mesh=mesh,
        keep_packed=part.keep_packed,
    )


def _mask_token(recipe: Recipe, target: Target) -> int:
    if recipe.drafter.mask_token_id is not None:
        return recipe.drafter.mask_token_id
    from peagle_jax.text.tokenizer import load_tokenizer

    return first_unused_id(
        load_tokenizer(find_target(recipe.target.path)).vocab_size, target.config.vocab_size
    )


def _draft_vocabulary(source: SampleSource, part: DrafterPart, vocab_size: int) -> np.ndarray:
    inner = _inner(source) if part.vocabulary is None else _verified(part.vocabulary)
    if isinstance(inner, PreparedData):
        inner.check_vocabulary(vocab_size)
        return inner.draft_vocabulary(part.draft_vocab_size).target_ids
    raise ValueError(
        "drafter.draft_vocab_size needs the token counts of a prepared data set; a store of hidden "
        "states has none. Name the prepared rows that it was captured from in drafter.vocabulary, "
        "or start from a head that has the vocabulary."
    )


def _mesh(recipe: Recipe) -> Mesh | None:
    sizes = dataclasses.asdict(recipe.mesh)
    if math.prod(sizes.values()) == 1 and jax.process_count() == 1:
        return None
    return make_mesh(**sizes)


def _dtype(name: str | None) -> Any:
    if name is not None:
        return jnp.dtype(name)
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def pipeline_config(recipe: Recipe, mesh: Mesh | None = None, **changes: Any) -> PipelineConfig:
    """How the recipe's rows become this process's part of batches."""
    part, parts = reading(mesh)
    settings: dict[str, Any] = {
        "sequence_length": recipe.data.sequence_length,
        "global_batch": recipe.train.global_batch,
        "seed": recipe.train.seed,
        "pack": recipe.data.pack,
        "epochs": recipe.train.epochs,
        "process_index": part,
        "process_count": parts,
        "read_threads": recipe.data.read_threads,
    }
    return PipelineConfig(**(settings | changes))


def _validation(recipe: Recipe, source: SampleSource, mesh: Mesh | None) -> Batches:
    """Validation batches, of the smallest size that the mesh can share."""
    config = pipeline_config(
        recipe,
        mesh,
        global_batch=batch_shards(mesh),
        epochs=1,
        shuffle=False,
        drop_remainder=False,
    )
    return batches(source, config)


def _programs(
    recipe: Recipe, config: DrafterConfig, dtype: Any, mesh: Mesh | None, optimizer: Any
) -> tuple[Any, Any, Any]:
    """Step, validation, and what describes their sums."""
    part, rows = recipe.objective, recipe.data.sequence_length
    if part.kind == "eagle-3":
        from train.eagle3 import Unroll, eagle3_gradients, make_unroll_validation

        unroll = Unroll(
            config=config,
            num_steps=part.unroll_steps,
            decay=part.decay,
            loss=part.loss,
            outside=part.outside,
            train_head=recipe.train.head,
            dtype=dtype,
            mesh=mesh,
        )
        return (
            make_step(eagle3_gradients(unroll), optimizer),
            make_unroll_validation(unroll),
            describe,
        )
    segments = {"num_chunks": part.num_segments} if part.partition == "algorithm-1" else {}
    options: Mapping[str, Any] = {
        "loss": part.loss,
        "outside": part.outside,
        "train_head": recipe.train.head,
        "dtype": dtype,
        "mesh": mesh,
    }
    objective = make_objective(
        config,
        part.cod,
        rows,
        partition=part.partition,
        chunk_rows=None if segments else part.chunk_rows,
        **segments,
        **options,
    )
    everything = CodConfig(num_depths=part.num_depths, ratio=1)
    full = make_objective(config, everything, rows, chunk_rows=part.chunk_rows, **options)
    table = jnp.asarray(count_table(part.cod, rows))
    step = make_step(peagle_gradients(objective, table), optimizer)
    return step, make_validation(full), describe
