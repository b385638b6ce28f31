"""Write a drafter's folder, from a drafter in memory or from another folder, in either layout.

vLLM loads what is written here: raw heads with method eagle3 and parallel_drafting true,
speculators heads by their name alone. Nothing is visible under the folder's name until all is
written.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.checkpoints.drafter_files import read_drafter_files
from peagle_jax.checkpoints.drafter_json import Layout, drafter_json
from peagle_jax.checkpoints.drafter_tensors import drafter_parts
from peagle_jax.checkpoints.fields import CheckpointError, PathLike
from peagle_jax.checkpoints.safetensors_file import LazyTensor, write_safetensors
from peagle_jax.models.config import DrafterConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.parameters import weight


def save_drafter(
    drafter: Drafter,
    folder: PathLike,
    layout: Layout = "raw",
    *,
    dtype: Any = None,
    verifier: str | None = None,
    verifier_architectures: tuple[str, ...] = (),
    overwrite: bool = False,
) -> Path:
    """Write `drafter` to `folder`; its path.

    dtype: of the weights, the drafter's own by default. verifier: name or path of the target, for
    vLLM (speculators layout). A shared embedding is not written: readers take the target's.

    Raises ValueError for a weight that is not finite or a network the layout cannot express, and
    CheckpointError where `folder` exists and `overwrite` is False.
    """
    config, kind = drafter.config, jnp.dtype(dtype or drafter.dtype)
    parameters = {
        ".".join(str(key) for key in path): value
        for path, value in nnx.to_flat_state(nnx.state(drafter))
    }
    tensors: dict[str, Any] = {}
    for part in drafter_parts(config):
        bake = part.parameter == "embedding" and config.embedding_scale is not None
        if part.parameter == "embedding" and not config.own_embedding and not bake:
            continue
        value = weight(parameters[part.parameter], drafter.dtype)
        if bake:  # no reader knows a scale; row x scale is what the network computes with
            value = value * jnp.asarray(config.embedding_scale, value.dtype)
        if not bool(jnp.isfinite(value).all()):
            raise ValueError(f"parameter {part.parameter} holds values that are not finite")
        for index, (name, shape) in enumerate(part.tensors):
            tensors[name] = _lazy(shape, kind, lambda p=part, v=value, i=index: _piece(p, v, i))
    tensors |= _vocabulary_tensors(config, np.asarray(drafter.d2t.get_value()))
    if config.embedding_scale is not None:
        config = dataclasses.replace(config, embedding_scale=None, own_embedding=True)
    content = drafter_json(
        config,
        layout,
        dtype=kind.name,
        verifier=verifier,
        verifier_architectures=verifier_architectures,
    )
    return _write(folder, layout, config, tensors, content, overwrite)


def convert_drafter(
    source: PathLike,
    folder: PathLike,
    layout: Layout,
    *,
    target_config: TargetConfig | None = None,
    verifier: str | None = None,
    verifier_architectures: tuple[str, ...] = (),
    overwrite: bool = False,
) -> Path:
    """Write the drafter in `source` again in `layout`, tensor by tensor and bit by bit.

    target_config: to check against, and to guess taps from where the source names none. What the
    source leaves to the target (embedding, head) stays left to it. Raises as load_drafter does.
    """
    files = read_drafter_files(source, target_config=target_config)
    config, tensors = files.config, {}
    for part in drafter_parts(config):
        for name, shape in part.tensors:
            if name in files.stored:
                kind = files.info(name).dtype
                tensors[name] = _lazy(shape, kind, lambda n=name, s=shape: files.read(n, s))
    tensors |= _vocabulary_tensors(config, files.offsets)
    content = drafter_json(
        config,
        layout,
        dtype=files.dtype.name,
        verifier=verifier,
        verifier_architectures=verifier_architectures,
    )
    return _write(folder, layout, config, tensors, content, overwrite)


def _piece(part: Any, value: Any, index: int) -> np.ndarray:
    return part.split(np.asarray(value))[index]


def _lazy(shape: tuple[int, ...], kind: np.dtype, make: Any) -> LazyTensor:
    return LazyTensor(
        shape=shape, dtype=np.dtype(kind), parts=lambda: iter([np.asarray(make()).astype(kind)])
    )


def _vocabulary_tensors(config: DrafterConfig, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """d2t int64 [Vd] and t2d bool [V]; none where draft ids are target ids."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if size >= vocab and not offsets.any():
        return {}
    ids = np.arange(size) + offsets.astype(np.int64)
    marks = np.zeros(vocab, np.bool_)
    marks[ids[ids < vocab]] = True
    return {"d2t": offsets.astype(np.int64), "t2d": marks}


def _write(
    folder: PathLike,
    layout: Layout,
    config: DrafterConfig,
    tensors: Mapping[str, Any],
    content: dict[str, Any],
    overwrite: bool,
) -> Path:
    # SafeAILab's own loader knows the first layer as midlayer only; vLLM takes either name.
    first = "midlayer." if layout == "raw" and config.style == "llama" else "layers.0."
    renamed = {name.replace("layers.0.", first): value for name, value in tensors.items()}
    with new_folder(folder, overwrite=overwrite) as part:
        write_safetensors(part / "model.safetensors", renamed, {"format": "pt"})
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (part / "config.json").write_text(text, encoding="utf-8")
    return Path(folder)


@contextlib.contextmanager
def new_folder(folder: PathLike, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill that takes its name when the block ends without an error, else vanishes.

    Raises CheckpointError where the name is taken by a file, or by a folder that is not empty and
    `overwrite` is False, or that holds anything but a drafter.
    """
    final = Path(folder)
    taken = final.exists() and (not final.is_dir() or any(final.iterdir()))
    if taken and not (overwrite and final.is_dir()):
        raise CheckpointError(f"{final}: exists already; choose another folder or overwrite it")
    if taken and (foreign := _no_head(final)):
        raise CheckpointError(
            f"{final}: {foreign}, so this is not overwritten; only a folder with a drafter alone "
            "is. Choose another folder"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
    part.mkdir()
    try:
        yield part
        if final.exists():
            old = part.with_suffix(".old")
            os.replace(final, old)
            os.replace(part, final)
            shutil.rmtree(old)
        else:
            os.replace(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _no_head(folder: Path) -> str | None:
    """Why a folder is not one that this package writes for a drafter; None where it is."""
    for path in sorted(folder.iterdir()):
        known = path.name in ("config.json", "README.md") or path.suffix == ".safetensors"
        if not known or not path.is_file():
            return f"holds {path.name}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    # Every drafter's config.json says it, no target's does.
    if not isinstance(config, dict) or "draft_vocab_size" not in config:
        return "its config.json is not a drafter's"
    return None
