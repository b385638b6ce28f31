"""Load a drafter: config and weights of a folder, checked against each other and the target.

Strict: every tensor has a place and every place a tensor. Two things may come from the target: the
embedding, and the head where the draft vocabulary is the target's. Writing: drafter_export.py.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from peagle_jax.checkpoints.drafter_config import read_drafter_config
from peagle_jax.checkpoints.drafter_tensors import Part, canonical_names, drafter_parts
from peagle_jax.checkpoints.fields import CheckpointError, PathLike
from peagle_jax.checkpoints.load import default_dtype
from peagle_jax.checkpoints.safetensors_file import TensorInfo
from peagle_jax.checkpoints.shards import Shards, open_shards
from peagle_jax.models.config import DrafterConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.parameters import weight
from peagle_jax.models.target import Target

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def load_drafter(
    folder: PathLike,
    *,
    target_config: TargetConfig | None = None,
    target: Target | None = None,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    parallel_drafting: bool | None = None,
) -> Drafter:
    """The drafter in `folder`, in the raw EAGLE-3 or the speculators layout.

    target_config: the target it must fit; `target`'s own by default. target: lends its embedding
    or head where the folder has none. dtype: of parameters and computation, by default the
    target's, or without one float32 on CPU and bfloat16 on a GPU. mesh: devices to lay the
    parameters out on. parallel_drafting: None takes the head for what its files say it is; False
    loads a P-EAGLE head for EAGLE-3 drafting.

    Raises CheckpointError (a ValueError) that names file, tensor and key for whatever is missing,
    unexpected, of another shape, or does not fit the target. Warns about guesses.
    """
    if target_config is None and target is not None:
        target_config = target.config
    files = read_drafter_files(
        folder, target_config=target_config, parallel_drafting=parallel_drafting
    )
    config = files.config
    if dtype is None:
        dtype = default_dtype() if target is None else target.dtype
    kind, place = jnp.dtype(dtype), _placement(mesh)
    by_parameter = {part.parameter: part for part in drafter_parts(config)}

    def source(name: str, shape: tuple[int, ...], wanted: Any) -> Array:
        if name == "d2t":
            return place(name, files.offsets)
        part = by_parameter[name]
        if any(tensor not in files.stored for tensor in part.names):
            return _borrow(files.shards.where, part, config, target, shape, wanted)
        arrays = tuple(files.read(tensor, stored_as) for tensor, stored_as in part.tensors)
        return place(name, np.asarray(part.join(arrays)).astype(wanted))

    return Drafter(config, dtype=kind, source=source)


@dataclasses.dataclass(frozen=True)
class DrafterFiles:
    """A drafter's folder, checked; weights not read yet.

    stored: canonical name of each tensor -> its name in the file. offsets: d2t [Vd] int32, zero
    where draft ids are target ids.
    """

    config: DrafterConfig
    shards: Shards
    stored: dict[str, str]
    offsets: np.ndarray

    def info(self, name: str) -> TensorInfo:
        """Header row of the tensor of canonical name `name`."""
        return self.shards.file(self.stored[name]).info(self.stored[name])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weights."""
        return self.info("norm.weight").dtype

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor of canonical name `name`, regarded as `shape`, in the file's dtype."""
        return self.shards.file(self.stored[name]).read(self.stored[name]).reshape(shape)


def read_drafter_files(
    folder: PathLike,
    *,
    target_config: TargetConfig | None = None,
    parallel_drafting: bool | None = None,
) -> DrafterFiles:
    """Config and headers of a drafter's folder, with every check that needs no weights."""
    shards = open_shards(folder)
    with _naming(shards.where):
        stored = canonical_names(shards.files)
    config = read_drafter_config(
        folder,
        target_config=target_config,
        tensor_names=frozenset(stored),
        parallel_drafting=parallel_drafting,
    )
    _check_tensors(shards, stored, drafter_parts(config), config)
    offsets = _read_offsets(shards, stored, config, target_config)
    return DrafterFiles(config, shards, stored, offsets)


def _check_tensors(
    shards: Shards, stored: dict[str, str], parts: tuple[Part, ...], config: DrafterConfig
) -> None:
    """Names, shapes and dtypes of everything in the file, against what the config asks for."""
    expected = {name: (shape, part) for part in parts for name, shape in part.tensors}
    known = {*expected, "d2t", "t2d"} | ({"mask_hidden"} if not config.parallel_drafting else set())
    missing = [name for name in expected if name not in stored and name not in (_EMBEDDING, _HEAD)]
    if missing and "layers.0.hidden_norm.weight" not in stored and "fc.weight" not in stored:
        raise CheckpointError(
            f"{shards.where}: this looks like a target model, not a drafter: neither fc nor "
            "layers.0.hidden_norm is there"
        )
    if missing:
        raise CheckpointError(
            f"{shards.where}: tensors are missing: {', '.join(sorted(missing))}; the file is "
            "incomplete or its config.json asks for too much (number of layers, model_type, "
            "biases, norm_before_fc, fc_norm)"
        )
    unexpected = sorted(stored[name] for name in stored if name not in known)
    if unexpected:
        raise CheckpointError(
            f"{shards.where}: tensors without a place: {', '.join(unexpected)}; config.json asks "
            "for too little (number of layers, model_type, biases, norm_before_fc, fc_norm)"
        )
    for name, (shape, part) in expected.items():
        if name in stored:
            _check_tensor(shards, stored[name], shape, part)


def _check_tensor(shards: Shards, name: str, shape: tuple[int, ...], part: Part) -> None:
    info = shards.file(name).info(name)
    same = info.shape == shape
    if part.parameter == "mask_hidden":
        same = math.prod(info.shape) == math.prod(shape)
    if not same:
        raise CheckpointError(
            f"{shards.where}: tensor {name!r} has shape {list(info.shape)}, config.json asks for "
            f"{list(shape)} (from {part.keys})"
        )
    if not jnp.issubdtype(info.dtype, jnp.floating) or info.dtype.itemsize < 2:
        raise CheckpointError(
            f"{shards.where}: tensor {name!r} has dtype {info.dtype}; drafters are read as "
            "float32, bfloat16 or float16"
        )


def _read_offsets(
    shards: Shards,
    stored: dict[str, str],
    config: DrafterConfig,
    target: TargetConfig | None,
) -> np.ndarray:
    """d2t [Vd] int32: offsets, so that draft id i stands for target id i + d2t[i]."""
    where, size = shards.where, config.draft_vocab_size
    vocab = config.vocab_size if target is None else min(config.vocab_size, target.vocab_size)
    if "d2t" not in stored:
        if size < vocab:
            raise CheckpointError(
                f"{where}: tensor d2t is missing, but draft_vocab_size {size} is less than the "
                f"vocabulary of {vocab}: the file does not say which tokens the drafts stand for; "
                "export it again with its vocabulary mapping"
            )
        return np.zeros(size, np.int32)
    file = shards.file(stored["d2t"])
    info = file.info(stored["d2t"])
    if info.shape != (size,) or not np.issubdtype(info.dtype, np.integer):
        raise CheckpointError(
            f"{where}: tensor d2t is {info.dtype} {list(info.shape)}, expected integers "
            f"[{size}] (from draft_vocab_size)"
        )
    offsets = file.read(stored["d2t"]).astype(np.int64)
    ids = np.arange(size) + offsets
    outside = (ids < 0) if size > vocab else (ids < 0) | (ids >= vocab)
    if outside.any():
        draft = int(np.flatnonzero(outside)[0])
        raise CheckpointError(
            f"{where}: tensor d2t maps draft id {draft} to {ids[draft]}, outside the target's "
            f"vocabulary of {vocab}; d2t holds offsets, target id = draft id + d2t[draft id]"
        )
    inside = ids[ids < vocab]
    if len(np.unique(inside)) != len(inside):
        raise CheckpointError(
            f"{where}: tensor d2t maps two draft ids to one target id; it must hold offsets, "
            "target id = draft id + d2t[draft id]"
        )
    _check_kept(shards, stored, inside)
    return offsets.astype(np.int32)


def _check_kept(shards: Shards, stored: dict[str, str], ids: np.ndarray) -> None:
    """t2d, where it is there, must mark exactly the ids of d2t; only d2t is used."""
    if "t2d" not in stored:
        return
    file = shards.file(stored["t2d"])
    info, marks = file.info(stored["t2d"]), file.read(stored["t2d"])
    if info.dtype != np.bool_ or marks.ndim != 1 or marks.size <= ids.max():
        raise CheckpointError(
            f"{shards.where}: tensor t2d is {info.dtype} {list(info.shape)}, expected bool "
            "[vocab_size]"
        )
    if marks.sum() != len(ids) or not marks[ids].all():
        raise CheckpointError(
            f"{shards.where}: tensors d2t and t2d disagree on which tokens are drafted; d2t holds "
            "offsets (target id = draft id + d2t[draft id]), t2d marks the target ids"
        )


def _borrow(
    where: str,
    part: Part,
    config: DrafterConfig,
    target: Target | None,
    shape: tuple[int, ...],
    dtype: Any,
) -> Array:
    """The target's embedding or head in place of one that the file lacks; shared, not copied."""
    name = part.names[0]
    if part.parameter == "head" and config.draft_vocab_size < config.vocab_size:
        raise CheckpointError(
            f"{where}: tensor {name} is missing; it can be taken from the target only for the full "
            f"vocabulary, and draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size}"
        )
    if target is None:
        raise CheckpointError(
            f"{where}: tensor {name} is missing; pass target=, whose {part.parameter} is then used"
        )
    if part.parameter == "embedding":
        value = weight(target.embedding, dtype)
    elif target.config.tied_embeddings:
        value = weight(target.embedding, dtype).T
    else:
        value = weight(target.head, dtype)
    if value.shape != shape:
        raise CheckpointError(
            f"{where}: tensor {name} is missing, and the target's {part.parameter} "
            f"{list(value.shape)} has not the shape {list(shape)} that config.json asks for (from "
            f"{part.keys}, hidden_size)"
        )
    return value


def _placement(mesh: jax.sharding.Mesh | None) -> Callable[[str, np.ndarray], Array]:
    """Put one parameter where it belongs, by name."""
    if mesh is None:
        return lambda name, value: jnp.asarray(value)
    from peagle_jax.sharding import parameter_spec

    def place(name: str, value: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, parameter_spec(name, value.shape, mesh))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return place


@contextlib.contextmanager
def _naming(where: str):
    """Put the file's name in front of errors from functions that know no file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
