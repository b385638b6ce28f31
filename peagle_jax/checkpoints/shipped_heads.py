"""Heads that come with the package: int8 matrices, embedding and head rows taken from the target.

    pack_head(drafter, target, "peagle_jax/data/heads/smollm2-135m-p-eagle", target_name=...)
    drafter = load_shipped_head("smollm2-135m-p-eagle", target)

A folder holds `head.safetensors`, `config.json` (that of the raw layout, with the entry
`packed_head`) and README.md, the model card. Every matrix is kept as int8 with one float32 scale
for each output channel; vectors, the draft vocabulary, and the embedding rows that differ from the
target's (the learned mask row) are kept as they are. `packed_head` holds the file's sha256, so that
altered values are noticed. What is loaded is a full drafter, so exports of it are whole.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int8

from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.checkpoints.drafter_config import read_drafter_config
from peagle_jax.checkpoints.drafter_export import new_folder
from peagle_jax.checkpoints.drafter_json import drafter_json
from peagle_jax.checkpoints.drafter_tensors import Part, drafter_parts
from peagle_jax.checkpoints.fields import CheckpointError, PathLike, read_json
from peagle_jax.checkpoints.safetensors_file import (
    SafetensorsFile,
    open_safetensors,
    write_safetensors,
)
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.parameters import weight
from peagle_jax.models.target import Target

WEIGHTS, CONFIG, CARD = "head.safetensors", "config.json", "README.md"
KEY, FORMAT = "packed_head", 1
SCALE = ".scale"
MAX_OWN_ROWS = 64  # more own embedding rows than this is a trained embedding, not a mask row
_FROM_TARGET = ("embedding", "head")


def heads_folder() -> Path:
    """Where the package keeps its heads."""
    return Path(__file__).parents[1] / "data" / "heads"


def shipped_heads() -> tuple[str, ...]:
    """Names of the heads that this installation has; () where none was trained yet."""
    folder = heads_folder()
    return tuple(sorted(one.name for one in folder.glob("*") if (one / WEIGHTS).is_file()))


def find_shipped_head(target_name: PathLike, method: str | None = None) -> Path | None:
    """The folder of the shipped head of a target (by name) for a method; None is P-EAGLE."""
    if method not in (None, "p-eagle", "eagle3"):
        return None
    name = f"{target_name}-{method or 'p-eagle'}"
    return heads_folder() / name if name in shipped_heads() else None


def is_packed_head(folder: PathLike) -> bool:
    """Whether a folder was written by `pack_head`."""
    return (Path(folder) / WEIGHTS).is_file()


def packed_target(folder: PathLike) -> str:
    """The name of the target that a packed head was trained for."""
    return read_json(Path(folder) / CONFIG).child(KEY).text("target")


def pack_head(
    drafter: Drafter,
    target: Target,
    folder: PathLike,
    *,
    target_name: str = "smollm2-135m",
    card: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write `drafter` small; its path.

    card: the text of README.md: data, recipe, figures, licence.

    Raises ValueError where the head's columns are not the target's rows, where more than
    MAX_OWN_ROWS embedding rows are its own, or a weight is not finite; CheckpointError where
    `folder` exists and `overwrite` is False.
    """
    config = drafter.config
    if config.embedding_scale is not None:
        raise ValueError("a head with an embedding scale cannot be packed; export it instead")
    parameters = {
        ".".join(str(key) for key in path): value
        for path, value in nnx.to_flat_state(nnx.state(drafter))
    }
    tensors: dict[str, np.ndarray] = {}
    for part in _stored_parts(config):
        value = np.asarray(weight(parameters[part.parameter], jnp.float32))
        if not np.isfinite(value).all():
            raise ValueError(f"parameter {part.parameter} holds values that are not finite")
        for name, array in zip(part.names, part.split(value), strict=True):
            tensors |= _packed(name, array)
    kept = np.asarray(drafter.kept_ids(), np.int32)
    tensors["kept_ids"] = kept
    _check_head(np.asarray(weight(drafter.head, jnp.float32)), target, kept)
    rows = _own_rows(np.asarray(weight(drafter.embedding, jnp.float32)), target)
    if config.own_embedding:
        tensors |= rows
    elif rows["embedding_row_ids"].size:
        raise ValueError("the config says own_embedding=False, but embedding rows are its own")
    content = drafter_json(config, "raw", dtype="float32", verifier=target_name)
    content[KEY] = {
        "format": FORMAT,
        "target": target_name,
        "target_rows_sha256": _fingerprint(target, kept),
    }
    with new_folder(folder, overwrite=overwrite) as staging:
        write_safetensors(staging / WEIGHTS, tensors)
        content[KEY]["sha256"] = file_sha256(staging / WEIGHTS)
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (staging / CONFIG).write_text(text, encoding="utf-8")
        if card is not None:
            (staging / CARD).write_text(card, encoding="utf-8")
    return Path(folder)


def load_shipped_head(
    name: PathLike, target: Target, *, mesh: jax.sharding.Mesh | None = None
) -> Drafter:
    """The full drafter of a shipped head (by name) or of a folder that `pack_head` wrote.

    Its dtype is the target's. mesh: devices to lay the parameters out on.

    Raises CheckpointError (a ValueError) naming file and tensor for whatever is missing,
    unexpected, of another shape or not finite, for a file that is not the one that was packed, and
    for another target than the head was trained for.
    """
    folder = heads_folder() / str(name)
    if not is_packed_head(folder):
        folder = Path(name)
    if not is_packed_head(folder):
        raise CheckpointError(
            f"{name}: no head of that name comes with this package (it has: "
            f"{', '.join(shipped_heads()) or 'none'}), and it is no folder with {WEIGHTS}"
        )
    _check_format(folder)
    file = open_safetensors(folder / WEIGHTS)
    names = frozenset(file.tensors)
    lent = {"lm_head.weight"} | ({"embed_tokens.weight"} if "embedding_rows" in names else set())
    config = read_drafter_config(folder, target_config=target.config, tensor_names=names | lent)
    _check_names(file, config)
    kept = _read(file, "kept_ids", (config.draft_vocab_size,), np.int32)
    _check_target(folder, target, kept)
    by_parameter = {part.parameter: part for part in _stored_parts(config)}

    def source(name: str, shape: tuple[int, ...], kind: Any) -> Array:
        if name == "d2t":
            return place(name, kept - np.arange(len(kept), dtype=np.int32))
        if name == "embedding":
            return place(name, _embedding(file, target, config).astype(kind))
        if name == "head":
            return place(name, _target_columns(target, kept).astype(kind))
        part = by_parameter[name]
        arrays = tuple(_unpacked(file, name, shape) for name, shape in part.tensors)
        return place(name, np.asarray(part.join(arrays)).astype(kind))

    def place(name: str, value: np.ndarray) -> Array:
        if mesh is None:
            return jnp.asarray(value)
        from peagle_jax.sharding import parameter_spec

        sharding = jax.sharding.NamedSharding(mesh, parameter_spec(name, value.shape, mesh))
        return jax.device_put(value, sharding)

    return Drafter(config, dtype=target.dtype, source=source)


def quantise(
    matrix: Float32[np.ndarray, "out in"],
) -> tuple[Int8[np.ndarray, "out in"], Float32[np.ndarray, " out"]]:
    """Symmetric int8 with one scale for each output channel: matrix is about values x scale.

    The error is at most half a scale, that is 1/254 of the channel's largest weight.
    """
    scale = np.abs(matrix).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.rint(matrix / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def _stored_parts(config: DrafterConfig) -> tuple[Part, ...]:
    return tuple(part for part in drafter_parts(config) if part.parameter not in _FROM_TARGET)


def _packed(name: str, array: np.ndarray) -> Mapping[str, np.ndarray]:
    """The tensors that stand for one: a matrix becomes int8 and scales, a vector stays."""
    if array.ndim != 2:
        return {name: array.astype(np.float32)}
    values, scale = quantise(np.ascontiguousarray(array, np.float32))
    return {name: values, name + SCALE: scale}


def _unpacked(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 2:
        return _read(file, name, shape, np.float32)
    values = _read(file, name, shape, np.int8)
    scale = _read(file, name + SCALE, shape[:1], np.float32)
    if not (scale > 0).all():
        raise CheckpointError(
            f"{file.path}: tensor {name + SCALE!r} has scales that are not above 0"
        )
    return values.astype(np.float32) * scale[:, None]


def _read(
    file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: type[np.generic]
) -> np.ndarray:
    info = file.info(name)
    if info.shape != shape or info.dtype != dtype:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is {info.dtype} {list(info.shape)}, expected "
            f"{np.dtype(dtype)} {list(shape)}"
        )
    values = file.read(name)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{file.path}: tensor {name!r} holds values that are not finite")
    return values


def _check_names(file: SafetensorsFile, config: DrafterConfig) -> None:
    expected = {"kept_ids"}
    if config.own_embedding:
        expected |= {"embedding_rows", "embedding_row_ids"}
    for part in _stored_parts(config):
        for name, shape in part.tensors:
            expected |= {name, name + SCALE} if len(shape) == 2 else {name}
    missing, extra = sorted(expected - set(file.tensors)), sorted(set(file.tensors) - expected)
    if missing or extra:
        raise CheckpointError(
            f"{file.path}: the file does not fit its {CONFIG}: missing {missing or 'nothing'}, "
            f"without a place {extra or 'nothing'}; install the package again"
        )


def _check_format(folder: Path) -> None:
    """That a version of this package that is not newer wrote the head, and that it is whole."""
    packed = read_json(folder / CONFIG).child(KEY)
    if packed.integer("format") != FORMAT:
        packed.fail("format", f"{FORMAT}; a newer version of this package wrote the head")
    if packed.text("sha256") != file_sha256(folder / WEIGHTS):
        raise CheckpointError(
            f"{folder / WEIGHTS}: the file is not the one that was packed, its sha256 is not that "
            f"of {CONFIG}; install the package or copy the head again"
        )


def _check_target(folder: Path, target: Target, kept: np.ndarray) -> None:
    vocab = target.config.vocab_size
    if kept.min() < 0 or kept.max() >= vocab or len(np.unique(kept)) != len(kept):
        raise CheckpointError(
            f"{folder / WEIGHTS}: kept_ids must be different ids of the vocabulary 0..{vocab - 1}"
        )
    packed = read_json(folder / CONFIG).child(KEY)
    if packed.text("target_rows_sha256") != _fingerprint(target, kept):
        raise CheckpointError(
            f"{folder}: this head was trained for {packed.text('target')}, and takes its head and "
            "embedding from it; the weights of the target given here are others"
        )


def _target_columns(target: Target, kept: np.ndarray) -> np.ndarray:
    """The target's head at `kept`: [H, Vd]."""
    if target.config.tied_embeddings:
        return np.asarray(weight(target.embedding, target.dtype))[kept].T
    return np.asarray(weight(target.head, target.dtype))[:, kept]


def _fingerprint(target: Target, kept: np.ndarray) -> str:
    """sha256 of the head rows that are used, as bfloat16: the same in every dtype of the target."""
    rows = np.ascontiguousarray(_rounded(_target_columns(target, kept).T))
    return hashlib.sha256(rows.view(np.uint8)).hexdigest()


def _check_head(head: np.ndarray, target: Target, kept: np.ndarray) -> None:
    columns = _target_columns(target, kept).astype(np.float32)
    if head.shape != columns.shape:
        raise ValueError(f"the head is {list(head.shape)}, the target's {list(columns.shape)}")
    if not np.array_equal(_rounded(head), _rounded(columns)):
        raise ValueError(
            "the head's columns are not the target's (largest difference "
            f"{np.abs(head - columns).max():.3g}); train with the head frozen, or export the "
            "drafter instead"
        )


def _rounded(values: np.ndarray) -> np.ndarray:
    """As bfloat16: a head trained or exported in it still has the target's own rows."""
    return values.astype(ml_dtypes.bfloat16)


def _own_rows(embedding: np.ndarray, target: Target) -> dict[str, np.ndarray]:
    """The embedding rows that are not the target's."""
    theirs = np.asarray(weight(target.embedding, jnp.float32))
    if embedding.shape != theirs.shape:
        raise ValueError(
            f"the embedding is {list(embedding.shape)}, the target's {list(theirs.shape)}"
        )
    other = (_rounded(embedding) != _rounded(theirs)).any(axis=1)
    ids = np.flatnonzero(other).astype(np.int32)
    if len(ids) > MAX_OWN_ROWS:
        raise ValueError(
            f"{len(ids)} embedding rows are not the target's, at most {MAX_OWN_ROWS} can be packed;"
            " train the mask token's row alone, or export the drafter instead"
        )
    return {"embedding_row_ids": ids, "embedding_rows": embedding[ids]}


def _embedding(file: SafetensorsFile, target: Target, config: DrafterConfig) -> np.ndarray:
    """The target's embedding with the head's own rows in place."""
    values = np.asarray(weight(target.embedding, target.dtype))
    if not config.own_embedding:
        return values
    shape = file.info("embedding_row_ids").shape
    if len(shape) != 1:
        raise CheckpointError(
            f"{file.path}: tensor 'embedding_row_ids' is {list(shape)}, expected one dimension"
        )
    count = shape[0]
    ids = _read(file, "embedding_row_ids", (count,), np.int32)
    rows = _read(file, "embedding_rows", (count, config.hidden_size), np.float32)
    if count and (ids.min() < 0 or ids.max() >= len(values)):
        raise CheckpointError(f"{file.path}: embedding_row_ids has an id outside the vocabulary")
    values = values.copy()
    values[ids] = rows.astype(values.dtype)
    return values
