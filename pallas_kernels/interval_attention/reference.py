"""The meaning of interval attention in jnp: what runs on CPU and what the kernel is tested against.

Row i attends to keys first[i]..last[i] of one array and, optionally, to keys
own_first[i]..own_last[i] of a second array that has one key per row:

    scores = scale * q @ concat(keys, own_keys).T, minus infinity outside the intervals
    out, lse = softmax(scores) @ concat(values, own_values), logsumexp(scores)

It walks over tiles of rows under `jax.checkpoint`, so that forward and backward hold the scores
of one tile only: memory grows with the number of rows, never with its square.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 128
# How many rows before itself a row may reach in the own keys: the deepest rollout allowed.
MAX_DEPTH = 64


def interval_attention(
    q: Float[Array, "B M N D"],
    k: Float[Array, "B n KV D"],
    v: Float[Array, "B n KV D"],
    first: Int[Array, "B M"],
    last: Int[Array, "B M"],
    own: tuple[Array, Array, Array, Array] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B M N D"], Float[Array, "B N M"]]:
    """Output in the queries' dtype and log-sum-exp in float32; empty rows give 0 and -inf.

    `own` is (keys [B, M, KV, D], values [B, M, KV, D], own_first [B, M], own_last [B, M]) with
    i - MAX_DEPTH < own_first[i] <= own_last[i] <= i for rows that see any.
    """
    batch, rows, heads, width = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    tile = min(TILE, rows)
    tiles = -(-rows // tile)
    pad = tiles * tile - rows

    q = jnp.pad(q.astype(jnp.float32) * jnp.float32(scale), ((0, 0), (0, pad), (0, 0), (0, 0)))
    q = q.reshape(batch, tiles, tile, kv_heads, groups, width)
    q = q.transpose(1, 0, 3, 4, 2, 5).reshape(tiles, batch, kv_heads, groups * tile, width)
    keys, values = _heads_first(k), _heads_first(v)
    per_tile = {"first": _tiled(first, tiles, tile, 1), "last": _tiled(last, tiles, tile, 0)}
    if own is not None:
        own_k, own_v, own_first, own_last = own
        reach = ((0, 0), (0, 0), (MAX_DEPTH, pad), (0, 0))
        own = (jnp.pad(_heads_first(own_k), reach), jnp.pad(_heads_first(own_v), reach))
        per_tile["own_first"] = _tiled(own_first, tiles, tile, 1)
        per_tile["own_last"] = _tiled(own_last, tiles, tile, 0)

    attend = jax.checkpoint(functools.partial(_attend_tile, tile=tile, groups=groups))

    def step(carry, x):
        index, q_tile, intervals = x
        return carry, attend(q_tile, keys, values, own, intervals, index)

    indices = jnp.arange(tiles, dtype=jnp.int32)
    _, (out, lse) = jax.lax.scan(step, None, (indices, q, per_tile))
    out = out.reshape(tiles, batch, kv_heads, groups, tile, width).transpose(1, 0, 4, 2, 3, 5)
    out = out.reshape(batch, tiles * tile, heads, width)[:, :rows]
    lse = lse.reshape(tiles, batch, heads, tile).transpose(1, 2, 0, 3)
    return out.astype(q_dtype(k)), lse.reshape(batch, heads, tiles * tile)[:, :, :rows]


def q_dtype(k: Array) -> jnp.dtype:
    """Queries, keys and values share one dtype; outputs have it too."""
    return k.dtype


def _heads_first(x: Float[Array, "B n KV D"]) -> Float[Array, "B KV n D"]:
    return x.transpose(0, 2, 1, 3).astype(jnp.float32)


def _tiled(x: Int[Array, "B M"], tiles: int, tile: int, fill: int) -> Int[Array, "tiles B tile"]:
    x = jnp.pad(x, ((0, 0), (0, tiles * tile - x.shape[1])), constant_values=fill)
    return x.reshape(x.shape[0], tiles, tile).transpose(1, 0, 2)


def _attend_tile(q, keys, values, own, intervals, index, *, tile, groups):
    """Attention of one tile [B, KV, G*T, D]; returns output and log-sum-exp [B, KV, G*T]."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, keys)
    at = jnp.arange(keys.shape[2], dtype=jnp.int32)
    scores = jnp.where(
        _visible(intervals["first"], intervals["last"], at, groups), scores, -jnp.inf
    )
    if own is not None:
        # The rows of this tile and the MAX_DEPTH rows before it (the arrays are padded in front).
        span = tile + MAX_DEPTH
        own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, index * tile, span, axis=2) for x in own)
        own_scores = jnp.einsum("bhqd,bhkd->bhqk", q, own_k)
        at = index * tile - MAX_DEPTH + jnp.arange(span, dtype=jnp.int32)
        allowed = _visible(intervals["own_first"], intervals["own_last"], at, groups)
        scores = jnp.concatenate([scores, jnp.where(allowed, own_scores, -jnp.inf)], axis=3)

    top = jnp.max(scores, axis=3)
    seen = top > -jnp.inf
    top = jnp.where(seen, top, 0.0)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top)[..., None])
    total = jnp.where(seen, jnp.sum(weights, axis=3), 1.0)
    weights = weights / total[..., None]
    split = keys.shape[2]
    out = jnp.einsum("bhqk,bhkd->bhqd", weights[..., :split], values)
    if own is not None:
        out = out + jnp.einsum("bhqk,bhkd->bhqd", weights[..., split:], own_v)
    return out, jnp.where(seen, jax.lax.stop_gradient(top) + jnp.log(total), -jnp.inf)


def _visible(first, last, at, groups):
    """[B, 1, G*T, keys] from intervals [B, T] and key indices [keys]; rows repeat per group."""
    inside = (first[:, :, None] <= at[None, None, :]) & (at[None, None, :] <= last[:, :, None])
    batch, tile, keys = inside.shape
    inside = jnp.broadcast_to(inside[:, None], (batch, groups, tile, keys))
    return inside.reshape(batch, 1, groups * tile, keys)


def backward(q, k, v, first, last, own, out, lse, d_out, d_lse, *, scale: float):
    """Cotangents (dq, dk, dv, d own k, d own v) by differentiating the forward direction."""
    del out, lse
    arrays = (q, k, v) if own is None else (q, k, v, *own[:2])

    def run(q, k, v, *own_arrays):
        own_keys = (*own_arrays, *own[2:]) if own_arrays else None
        return interval_attention(q, k, v, first, last, own_keys, scale=scale)

    found = jax.vjp(run, *arrays)[1]((d_out, d_lse))
    return found if own is not None else (*found, None, None)
