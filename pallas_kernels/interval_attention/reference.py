"""The meaning of interval attention in jnp: what runs on CPU and what the kernel is tested against.

Row i attends to keys first[i]..last[i] of one array and, optionally, to keys
own_first[i]..own_last[i] of a second array that has one key per row:

    scores = scale * q @ concat(keys, own_keys).T, minus infinity outside the intervals
    out, lse = softmax(scores) @ concat(values, own_values), logsumexp(scores)

It walks over tiles of rows and, for each, over the blocks of keys between the smallest `first` and
the largest `last` of the tile, with running maxima; then over the rows just before the tile, which
hold its own keys. Both directions hold the scores of one tile and block only, so memory grows with
the number of rows, never with its square.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 128
BLOCK = 128
# How many rows before itself a row may reach in the own keys: the deepest rollout allowed.
MAX_DEPTH = 64
_FAR = jnp.iinfo(jnp.int32).max // 2


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
    i - MAX_DEPTH <= own_first[i] <= own_last[i] <= i for rows that see any.
    """
    cut = _Cut.of(q, k)
    pairs, spans = cut.key_arrays(k, v, own), cut.spans(first, last, own)

    def tile(nothing, x):
        index, span, q_tile = x

        def visit(state, key, value, allowed):
            scores = jnp.where(allowed, _dot(q_tile, key, "qd,kd->qk"), -jnp.inf)
            return _softmax_step(state, scores, value)

        shape = q_tile.shape[:3]
        state = (
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(q_tile.shape, jnp.float32),
        )

        def block(at, state):
            key, value = (_slice(x, at * cut.block, cut.block) for x in pairs[:2])
            return visit(state, key, value, cut.visible(span[:2], at * cut.block, cut.block))

        state = jax.lax.fori_loop(*cut.blocks(span), block, state)
        if own is not None:
            begin, size = index * cut.tile, cut.tile + MAX_DEPTH
            key, value = (_slice(x, begin, size) for x in pairs[2:])
            state = visit(state, key, value, cut.visible(span[2:], begin - MAX_DEPTH, size))
        top, total, mixed = state
        sees = total > 0
        total = jnp.where(sees, total, 1.0)
        out = jnp.where(sees[..., None], mixed / total[..., None], 0.0)
        return nothing, (out, jnp.where(sees, top + jnp.log(total), -jnp.inf))

    q_tiles = cut.rows(q) * jnp.float32(scale)
    _, (out, lse) = jax.lax.scan(tile, None, (cut.indices(), spans, q_tiles))
    return cut.unrows(out).astype(q.dtype), cut.unrows(lse[..., None])[..., 0].transpose(0, 2, 1)


def backward(q, k, v, first, last, own, out, lse, d_out, d_lse, *, scale: float):
    """Cotangents (dq, dk, dv, d own k, d own v) from the saved results of the forward direction."""
    cut = _Cut.of(q, k)
    pairs, spans = cut.key_arrays(k, v, own), cut.spans(first, last, own)
    mean = jnp.einsum("bmnd,bmnd->bmn", d_out.astype(jnp.float32), out.astype(jnp.float32))
    mean = cut.rows((mean - d_lse.transpose(0, 2, 1))[..., None])[..., 0]
    # +inf: rows that see nothing have no weights.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse).transpose(0, 2, 1)
    lse = cut.rows(lse[..., None])[..., 0]

    def tile(d_pairs, x):
        index, span, q_tile, d_out_tile, lse_tile, mean_tile = x

        def visit(d_q, key, value, allowed):
            scores = _dot(q_tile, key, "qd,kd->qk") - lse_tile[..., None]
            weights = jnp.exp(jnp.where(allowed, scores, -jnp.inf))
            d_weights = _dot(d_out_tile, value, "qd,kd->qk")
            d_scores = weights * (d_weights - mean_tile[..., None])
            shares = tuple(
                _dot(x, rows, "qk,qd->kd")
                for x, rows in ((d_scores, q_tile), (weights, d_out_tile))
            )
            return d_q + _dot(d_scores, key, "qk,kd->qd"), shares

        def block(at, carry):
            d_q, d_pairs = carry
            begin = at * cut.block
            key, value = (_slice(x, begin, cut.block) for x in pairs[:2])
            allowed = cut.visible(span[:2], begin, cut.block)
            d_q, shares = visit(d_q, key, value, allowed)
            return d_q, _add_slices(d_pairs[:2], shares, begin) + d_pairs[2:]

        carry = (jnp.zeros(q_tile.shape, jnp.float32), d_pairs)
        d_q, d_pairs = jax.lax.fori_loop(*cut.blocks(span), block, carry)
        if own is not None:
            begin, size = index * cut.tile, cut.tile + MAX_DEPTH
            key, value = (_slice(x, begin, size) for x in pairs[2:])
            allowed = cut.visible(span[2:], begin - MAX_DEPTH, size)
            d_q, shares = visit(d_q, key, value, allowed)
            d_pairs = d_pairs[:2] + _add_slices(d_pairs[2:], shares, begin)
        return d_pairs, d_q

    q_tiles = cut.rows(q) * jnp.float32(scale)
    xs = (cut.indices(), spans, q_tiles, cut.rows(d_out), lse, mean)
    d_pairs, d_q = jax.lax.scan(tile, tuple(jnp.zeros_like(x) for x in pairs), xs)
    d_q = (cut.unrows(d_q) * jnp.float32(scale)).astype(q.dtype)
    d_k, d_v = (_heads_last(x[:, :, : k.shape[1]], k.dtype) for x in d_pairs[:2])
    if own is None:
        return d_q, d_k, d_v, None, None
    rows = slice(MAX_DEPTH, MAX_DEPTH + q.shape[1])
    return d_q, d_k, d_v, *(_heads_last(x[:, :, rows], k.dtype) for x in d_pairs[2:])


class _Cut(NamedTuple):
    """How rows and keys are cut: rows go as [tiles, B, KV, G * T, D], keys as [B, KV, n, D]."""

    num_rows: int
    kv_heads: int
    groups: int
    tile: int
    tiles: int
    block: int

    @classmethod
    def of(cls, q: Float[Array, "B M N D"], k: Float[Array, "B n KV D"]) -> "_Cut":
        rows, kv_heads = q.shape[1], k.shape[2]
        tile = min(TILE, rows)
        groups = q.shape[2] // kv_heads
        return cls(rows, kv_heads, groups, tile, -(-rows // tile), min(BLOCK, k.shape[1]))

    def indices(self) -> Int[Array, "tiles"]:
        return jnp.arange(self.tiles, dtype=jnp.int32)

    def rows(self, x: Float[Array, "B M N D"]) -> Float[Array, "tiles B KV GT D"]:
        batch, width = x.shape[0], x.shape[3]
        pad = self.tiles * self.tile - self.num_rows
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
        x = x.reshape(batch, self.tiles, self.tile, self.kv_heads, self.groups, width)
        x = x.transpose(1, 0, 3, 4, 2, 5)
        return x.reshape(self.tiles, batch, self.kv_heads, self.groups * self.tile, width)

    def unrows(self, x: Float[Array, "tiles B KV GT D"]) -> Float[Array, "B M N D"]:
        batch, width = x.shape[1], x.shape[4]
        x = x.reshape(self.tiles, batch, self.kv_heads, self.groups, self.tile, width)
        x = x.transpose(1, 0, 4, 2, 3, 5)
        x = x.reshape(batch, self.tiles * self.tile, self.kv_heads * self.groups, width)
        return x[:, : self.num_rows]

    def key_arrays(self, k, v, own) -> tuple[Float[Array, "B KV _ D"], ...]:
        """Keys and values padded to whole blocks; own ones with MAX_DEPTH rows before the first."""
        pad = ((0, 0), (0, 0), (0, -k.shape[1] % self.block), (0, 0))
        arrays = [jnp.pad(_heads_first(x), pad) for x in (k, v)]
        if own is not None:
            pad = (MAX_DEPTH, self.tiles * self.tile - self.num_rows)
            pad = ((0, 0), (0, 0), pad, (0, 0))
            arrays += [jnp.pad(_heads_first(x), pad) for x in own[:2]]
        return tuple(arrays)

    def spans(self, first, last, own) -> tuple[Int[Array, "tiles B T"], ...]:
        """first, last (and own_first, own_last) by tile; an empty interval is (FAR, -1)."""
        spans = []
        for low, high in [(first, last)] + ([] if own is None else [own[2:]]):
            empty = low > high
            for x, fill in ((low, _FAR), (high, -1)):
                pad = ((0, 0), (0, self.tiles * self.tile - self.num_rows))
                x = jnp.pad(jnp.where(empty, fill, x), pad, constant_values=fill)
                spans.append(x.reshape(-1, self.tiles, self.tile).transpose(1, 0, 2))
        return tuple(spans)

    def blocks(self, span) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """First and past-the-last block of keys that some row of the tile sees."""
        return jnp.min(span[0]) // self.block, jnp.max(span[1]) // self.block + 1

    def visible(self, span, begin, size: int):
        """[B, 1, G * T, size]: whether each row sees each of the keys from `begin`."""
        first, last = span
        at = (begin + jnp.arange(size, dtype=jnp.int32))[None, None, :]
        inside = (first[:, :, None] <= at) & (at <= last[:, :, None])
        batch, tile, _ = inside.shape
        inside = jnp.broadcast_to(inside[:, None], (batch, self.groups, tile, size))
        return inside.reshape(batch, 1, self.groups * tile, size)


def _softmax_step(state, scores, value):
    """Running maximum, sum and mixture after another block of keys."""
    top, total, mixed = state
    new_top = jnp.maximum(top, jnp.max(scores, axis=3))
    finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp(top - finite)
    weights = jnp.exp(scores - finite[..., None])
    mixed = mixed * fade[..., None] + _dot(weights, value, "qk,kd->qd")
    return new_top, total * fade + jnp.sum(weights, axis=3), mixed


def _dot(a, b, letters: str):
    """Matrix product over the last two axes, for each batch row and key-value head."""
    left, rest = letters.split(",")
    right, out = rest.split("->")
    return jnp.einsum(f"bh{left},bh{right}->bh{out}", a, b)


def _slice(x, begin, size: int):
    return jax.lax.dynamic_slice_in_dim(x, begin, size, axis=2)


def _add_slices(arrays, shares, begin):
    """Each array with its share added from row `begin` on."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(
            array, _slice(array, begin, share.shape[2]) + share, begin, axis=2
        )
        for array, share in zip(arrays, shares, strict=True)
    )


def _heads_first(x: Float[Array, "B n KV D"]) -> Float[Array, "B KV n D"]:
    return x.transpose(0, 2, 1, 3).astype(jnp.float32)


def _heads_last(x: Float[Array, "B KV n D"], dtype) -> Float[Array, "B n KV D"]:
    return x.transpose(0, 2, 1, 3).astype(dtype)
