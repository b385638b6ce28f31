"""The key/value cache: one array pair per layer, written by position, read by masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.models.config import LayerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    A full-length layer keeps position p in slot p and has no `positions`. A ring keeps position p
    in slot p % S and stores which position each slot holds (-1: none), since a slot alone does not
    tell. Entries beyond a request's committed length are stale and never read: the mask goes by
    absolute position, and each is overwritten before a query can reach its position.

    keys, values: [B, S, KV, D]. positions: int32 [B, S] or None. In a mapped tree the fields are
    what stands for the arrays (shapes, shardings), hence no types.
    """

    keys: Any
    values: Any
    positions: Any = None

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The caches of all layers of one model, in layer order."""

    layers: tuple[LayerCache, ...]


def ring_slots(window: int, max_new_rows: int) -> int:
    """Least slots of a ring: a pass of `max_new_rows` rows must not overwrite a key in any window.

    The first row of a pass at position p still reads p - window + 1; the last row writes at
    p + max_new_rows - 1.
    """
    return window + max_new_rows - 1


def init_cache(
    layers: tuple[LayerConfig, ...],
    *,
    batch_size: int,
    num_slots: int,
    max_new_rows: int,
    dtype: Any,
) -> KVCache:
    """Empty caches for `num_slots` positions; windowed layers get a ring where that is smaller.

    `max_new_rows` is the most rows that one pass writes (prefill chunk or verify rows).
    """

    def one(layer: LayerConfig) -> LayerCache:
        slots, positions = num_slots, None
        if layer.window is not None and ring_slots(layer.window, max_new_rows) < num_slots:
            slots = ring_slots(layer.window, max_new_rows)
            positions = jnp.full((batch_size, slots), -1, jnp.int32)
        shape = (batch_size, slots, layer.num_kv_heads, layer.head_dim)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), positions)

    return KVCache(tuple(one(layer) for layer in layers))


def write_layer(
    cache: LayerCache,
    keys: Float[Array, "B T KV D"],
    values: Float[Array, "B T KV D"],
    positions: Int[Array, "B T"],
) -> LayerCache:
    """Store new rows at their positions; rows at -1 or, in a full-length layer, past the end drop.

    Dropped rows point past the last slot: -1 would wrap to it.
    """
    slots = cache.num_slots
    if cache.positions is None:
        keep = (positions >= 0) & (positions < slots)
        index = jnp.where(keep, positions, slots)
    else:
        index = jnp.where(positions >= 0, positions % slots, slots)
    rows = jnp.arange(positions.shape[0], dtype=index.dtype)[:, None]

    def put(old: Array, new: Array) -> Array:
        return old.at[rows, index].set(new.astype(old.dtype), mode="drop")

    stored = None if cache.positions is None else put(cache.positions, positions)
    return LayerCache(put(cache.keys, keys), put(cache.values, values), stored)
