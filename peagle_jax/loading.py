"""`load`: names to an engine. Finds the files, reads them, and picks the drafter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from peagle_jax.checkpoints import catalogue
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.embedded import EMBEDDED_MODELS, resolve_model
from peagle_jax.checkpoints.fields import PathLike
from peagle_jax.checkpoints.hub import ModelNotFoundError, find_model
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.shipped_heads import (
    find_shipped_head,
    heads_folder,
    is_packed_head,
    load_shipped_head,
    shipped_heads,
)
from peagle_jax.decoding.methods import MethodName
from peagle_jax.engine import Engine
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.products import store_output_major
from peagle_jax.speculative_config import SpeculativeConfig, parse_speculative_config
from peagle_jax.text.tokenizer import load_tokenizer

_WITHOUT_NETWORK = ("none", "prompt-lookup")
LONG_CONTEXT = 10_000  # tokens from which heads for long contexts are recommended by their cards


def load(
    target: PathLike,
    *,
    drafter: PathLike | Mapping[str, Any] | Drafter | None = "auto",
    method: MethodName | None = None,
    num_speculative_tokens: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = None,
    keep_packed: bool = False,
    context_length: int | None = None,
    allow_longer_context: bool = False,
    force_method: bool = False,
) -> Engine:
    """Load a target and its drafter.

    Args:
      target: a model folder, a `.gguf` file, `smollm2-135m`, or a hub name.
      drafter: "auto" takes the head that the catalogue knows for the target, if any; None decodes
        without; a folder or hub name; vLLM's speculative config as a mapping or JSON text; or a
        Drafter.
      method: how to draft; None is what suits the drafter.
      num_speculative_tokens: K, the default of every call; None is the head's own.
      mesh: devices to spread target and drafter over; None is one device.
      dtype: float32 or bfloat16; None is float32 on CPU, bfloat16 on a GPU.
      keep_packed: leave MXFP4 and FP8 weights packed on the device.
      context_length: most tokens of prompt and answer together; None is the target's own.
      force_method: draft in a way that the head was not trained for.

    Raises: ValueError (CheckpointError, ModelNotFoundError) or EmbeddedModelError, naming the
      file or name, what was expected and what to do.
    """
    path = find_target(target)
    config = SpeculativeConfig()
    if isinstance(drafter, Mapping) or (isinstance(drafter, str) and drafter.lstrip()[:1] == "{"):
        config = parse_speculative_config(drafter)
        drafter = config.model or ("auto" if config.method not in _WITHOUT_NETWORK else None)
    method = method or config.method
    if num_speculative_tokens is None:
        num_speculative_tokens = config.num_speculative_tokens
    if method in _WITHOUT_NETWORK:
        drafter = None
    folder = (
        None
        if isinstance(drafter, Drafter)
        else find_drafter(target, path, drafter, method=method, context_length=context_length)
    )
    tokenizer = load_tokenizer(path)
    model = load_target(path, dtype=dtype, mesh=mesh, keep_packed=keep_packed)
    if folder is not None and is_packed_head(folder):
        drafter = load_shipped_head(folder, model, mesh=mesh)
    elif folder is not None:
        drafter = load_drafter(folder, target=model, dtype=model.dtype, mesh=mesh, **_mode(method))
    for part in (model, drafter):
        if isinstance(part, nnx.Module):
            store_output_major(part)
    return Engine(
        model,
        tokenizer,
        drafter if isinstance(drafter, Drafter) else None,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        context_length=context_length,
        allow_longer_context=allow_longer_context,
        force_method=force_method,
        mesh=mesh,
    )


def find_target(name: PathLike) -> Path:
    """The folder or file of a target: a path, an embedded model's name, or a hub name."""
    if str(name) in EMBEDDED_MODELS and not Path(name).exists():
        return resolve_model(name)
    return find_model(name)


def find_drafter(
    target: PathLike,
    path: Path,
    drafter: PathLike | None,
    *,
    method: MethodName | None = None,
    context_length: int | None = None,
) -> Path | None:
    """The folder of a drafter for the target called `target`, whose files are at `path`.

    "auto" is the head that comes with this package, or that the catalogue knows; None where
    neither has one. Any other name is a shipped head's, a folder, or one on the hub.
    """
    if drafter is None:
        return None
    if str(drafter) in shipped_heads():
        return heads_folder() / str(drafter)
    if str(drafter) != "auto":
        return find_model(drafter, beside=path)
    if str(target) in EMBEDDED_MODELS:
        return find_shipped_head(target, method)
    entries = catalogue.lookup(target) or catalogue.lookup(path)
    if not any(entry.head for entry in entries):
        return None
    long_context = context_length is not None and context_length >= LONG_CONTEXT
    entry = catalogue.find_head(entries[0].target, long_context=long_context)
    try:
        return find_model(entry.head, beside=path)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"the head of {entry.target} in the catalogue is {error}. Or name a drafter, or decode "
            "without one (--method none or prompt-lookup; drafter=None)"
        ) from None


def _mode(method: MethodName | None) -> dict[str, bool]:
    """A head without a mark of its own is what the method asks for; P-EAGLE insists."""
    return {"parallel_drafting": True} if method == "p-eagle" else {}
