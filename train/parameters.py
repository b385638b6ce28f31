"""Parameters of a drafter in training: a flat mapping of names, in a trained and a frozen part.

A name is that of the drafter's source ("layers.0.qkv"). Trained parameters are float32, frozen ones
have the dtype of the computation. Training the mask row alone keeps the embedding frozen and one
extra vector `mask_row` in its stead, so that no gradient or moment of the table exists.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import Drafter

Params = dict[str, Any]
MASK_ROW = "mask_row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parameters are trained.

    embedding: the whole table, the mask token's row alone, or nothing. head: the draft head.
    """

    embedding: Literal["table", "mask-row", "frozen"] = "table"
    head: bool = False

    def __post_init__(self):
        if self.embedding not in ("table", "mask-row", "frozen"):
            raise ValueError(f"embedding is {self.embedding!r}; choose table, mask-row or frozen.")


def parameters_of(drafter: Drafter) -> Params:
    """Every parameter of a drafter by name, `d2t` included."""
    flat = nnx.to_flat_state(nnx.state(drafter))
    return {".".join(str(key) for key in path): value.get_value() for path, value in flat}


def build_drafter(config: DrafterConfig, params: Mapping[str, Any], dtype: Any) -> Drafter:
    """A drafter around parameters, inside or outside a traced function.

    Parameters that are not given are shapes alone, for functions that do not read them. A
    `mask_row` is not written into the table: see `whole`.
    """

    def source(name: str, shape: tuple[int, ...], kind: Any) -> Any:
        if name not in params:
            return jax.ShapeDtypeStruct(shape, kind)
        if params[name].shape != shape:
            raise ValueError(f"parameter {name} has shape {params[name].shape}, expected {shape}.")
        return params[name]

    return Drafter(config, dtype=dtype, source=source)


def split(
    config: DrafterConfig, params: Mapping[str, Any], trained: Trained, dtype: Any
) -> tuple[Params, Params]:
    """Trained parameters in float32, and frozen ones in `dtype`.

    Raises:
        ValueError: the mask row is to be trained on a drafter without mask rows.
    """
    fixed = {"d2t"}
    if trained.embedding != "table":
        fixed.add("embedding")
    if not trained.head:
        fixed.add("head")
    learned = {n: jnp.asarray(v, jnp.float32) for n, v in params.items() if n not in fixed}
    frozen = {
        n: v if n == "d2t" else jnp.asarray(v, dtype) for n, v in params.items() if n in fixed
    }
    if trained.embedding == "mask-row":
        if config.mask_token_id is None:
            raise ValueError("embedding is mask-row, but this drafter has no mask token.")
        row = params["embedding"][config.mask_token_id]
        learned[MASK_ROW] = jnp.asarray(row, jnp.float32)
    return learned, frozen


def whole(config: DrafterConfig, learned: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """All parameters as a drafter has them, the mask row back in its table."""
    params = {**frozen, **learned}
    row = params.pop(MASK_ROW, None)
    if row is not None:
        table = params["embedding"]
        params["embedding"] = table.at[config.mask_token_id].set(row.astype(table.dtype))
    return params


def kept_ids(config: DrafterConfig, params: Mapping[str, Any]) -> Array | None:
    """Target id of each draft id; None where the two vocabularies are the same."""
    if config.draft_vocab_size == (config.target_vocab_size or config.vocab_size):
        return None
    offsets = params["d2t"]
    return jnp.arange(offsets.shape[0], dtype=offsets.dtype) + offsets
