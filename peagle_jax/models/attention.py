"""Causal grouped-query attention of new rows, among themselves or over a cache.

The mask goes by absolute position, so that full-length caches, rings, ragged batches and padding
rows (position -1) are one rule: a key is visible when it was written, is not later than the query,
lies in the window, and belongs to the query's document.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import KernelSharding, short_query_attention
from peagle_jax.models.cache import LayerCache, write_layer
from peagle_jax.sharding import spec_of

_QUERY_BLOCK = 512  # scores of longer passes are made block by block, never [T, S] at once


def attention(
    query: Float[Array, "B T KV G D"],
    keys: Float[Array, "B T KV D"],
    values: Float[Array, "B T KV D"],
    positions: Int[Array, "B T"],
    cache: LayerCache | None,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, "KV G"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T KV G D"], LayerCache | None]:
    """Attend from the new rows; with a cache, write them first and attend over the cache.

    Rows at position -1 write nothing and return zeros. `window` counts keys including the query's
    own. `segment_ids` tell documents apart and need `cache` None. Softmax is float32.

    Raises ValueError when a ring is too small for this many rows, or segments meet a cache.
    """
    if cache is None:
        out = attend(
            query,
            keys,
            values,
            positions,
            positions,
            scale=scale,
            window=window,
            sinks=sinks,
            query_segments=segment_ids,
            key_segments=segment_ids,
        )
        return out, None
    if segment_ids is not None:
        raise ValueError("segment_ids are for passes without a cache; a cache row is one document")
    rows, slots = positions.shape[1], cache.num_slots
    if cache.positions is not None and (window is None or rows > slots - window + 1):
        raise ValueError(
            f"a pass of {rows} rows needs a ring of at least window + rows - 1 slots, found "
            f"{slots} slots for window {window}; make the cache with max_new_rows >= {rows}"
        )
    cache = write_layer(cache, keys, values, positions)
    batch, _, kv_heads, group, size = query.shape
    out = short_query_attention(
        query.reshape(batch, rows, kv_heads * group, size),
        cache.keys.astype(query.dtype),
        cache.values.astype(query.dtype),
        positions,
        key_positions=cache.positions,
        scale=scale,
        window=window,
        sinks=None if sinks is None else sinks.reshape(kv_heads * group),
        sharding=_kernel_sharding(batch, kv_heads),
    )
    return out.reshape(query.shape), cache


def _kernel_sharding(batch: int, kv_heads: int) -> KernelSharding | None:
    """How requests and heads lie on the mesh in context, by the table; None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    of_batch, of_heads = spec_of(("batch", "kv_heads"), (batch, kv_heads), mesh)
    return KernelSharding(mesh, batch=of_batch, heads=of_heads)


def attend(
    query: Float[Array, "B T KV G D"],
    keys: Float[Array, "B S KV D"],
    values: Float[Array, "B S KV D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"] | None,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, "KV G"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T KV G D"]:
    """Masked softmax attention; the plain meaning that any kernel is tested against.

    `key_positions` None means that slot p holds position p. Long passes run in blocks of queries.
    """
    if key_positions is None:
        batch, slots = keys.shape[:2]
        key_positions = jnp.broadcast_to(
            jnp.arange(slots, dtype=jnp.int32)[None, :], (batch, slots)
        )

    def block(q: Array, q_positions: Array, q_segments: Array | None) -> Array:
        mask = _visible(q_positions, key_positions, window, q_segments, key_segments)
        return _masked_softmax_product(q, keys, values, mask, scale, sinks)

    rows = query.shape[1]
    if rows <= _QUERY_BLOCK:
        return block(query, query_positions, query_segments)
    padding = -rows % _QUERY_BLOCK

    def split(x: Array | None, fill: int) -> Array | None:
        if x is None:
            return None
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, _QUERY_BLOCK, *x.shape[2:]), 1, 0)

    blocks = (split(query, 0), split(query_positions, -1), split(query_segments, -1))
    out = jnp.moveaxis(jax.lax.map(lambda b: block(*b), blocks), 0, 1)
    return out.reshape(out.shape[0], rows + padding, *out.shape[3:])[:, :rows]


def _visible(
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    window: int | None,
    query_segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
) -> Bool[Array, "B T S"]:
    """Which keys each query may read."""
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    mask = (k >= 0) & (k <= q)
    if window is not None:
        mask &= k > q - window
    if query_segments is not None and key_segments is not None:
        mask &= query_segments[:, :, None] == key_segments[:, None, :]
    return mask


def _masked_softmax_product(
    query: Float[Array, "B T KV G D"],
    keys: Float[Array, "B S KV D"],
    values: Float[Array, "B S KV D"],
    mask: Bool[Array, "B T S"],
    scale: float,
    sinks: Float[Array, "KV G"] | None,
) -> Float[Array, "B T KV G D"]:
    """softmax over visible keys times values; a row that sees no key is zero, never NaN.

    A sink is one more key with logit `sinks` and value zero (gpt-oss), so it only takes weight.
    """
    scores = jnp.einsum("btkgd,bskd->bkgts", query, keys, preferred_element_type=jnp.float32)
    mask = mask[:, None, None, :, :]
    scores = jnp.where(mask, scores * jnp.float32(scale), -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, :, None, None]
        highest = jnp.maximum(highest, sink)
    highest = jax.lax.stop_gradient(highest)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    total = jnp.where(total > 0, total, jnp.float32(1))
    probabilities = (weights / total).astype(values.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", probabilities, values, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)
