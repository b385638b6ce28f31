"""What `short_query_attention` means, in jnp; also what a CPU runs.

Keys go by in blocks with a running log-sum-exp, and only blocks that hold a visible key are
visited: a cache of 8,192 slots with 300 keys in it costs three blocks. Long query chunks go by in
blocks of rows. So memory is bounded whatever the lengths, and the cache is never copied as a whole.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROW_BLOCK = 256


def key_block(slots: int) -> int:
    """Keys of a block: few in a short cache, where the part of the last block that holds no key
    costs most; more in a long one, where the loop does. Measured on CPU (2026-12): 32 against 256
    keys is 1.9 to 4.4 times faster in a cache of 256 slots, and twice slower in one of 2,048."""
    return min(slots, 32 if slots <= 256 else 64 if slots <= 512 else 128)


def short_query_attention_reference(
    query: Float[Array, "B T N D"],
    keys: Float[Array, "..."],
    values: Float[Array, "..."],
    query_positions: Int[Array, "B T"],
    block_table: Int[Array, "B M"] | None = None,
    key_positions: Int[Array, "B S"] | None = None,
    num_valid: Int[Array, "B"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    static_bounds: bool = False,
) -> Float[Array, "B T N D"]:
    """softmax(soft_cap(scale * q k^T) where visible, one extra sink column) v, in float32.

    Arguments as in the public function. `static_bounds` visits every block, so that the result can
    be differentiated in reverse.
    """
    batch, rows, heads, size = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    grouped_sinks = None
    if sinks is not None:
        grouped_sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)
    attend = functools.partial(
        _attend_rows,
        keys=keys,
        values=values,
        block_table=block_table,
        key_positions=key_positions,
        num_valid=num_valid,
        sinks=grouped_sinks,
        window=window,
        soft_cap=soft_cap,
        static_bounds=static_bounds,
    )
    # Scaled once here, in float32: [B, KV, G, T, D], so that a group's rows share one product.
    scaled = query.astype(jnp.float32) * jnp.float32(scale)
    scaled = scaled.reshape(batch, rows, kv_heads, group, size).transpose(0, 2, 3, 1, 4)
    if rows <= ROW_BLOCK:
        out = attend(scaled, query_positions)
    else:
        count = -(-rows // ROW_BLOCK)
        extra = count * ROW_BLOCK - rows
        padded = jnp.pad(scaled, ((0, 0), (0, 0), (0, 0), (0, extra), (0, 0)))
        positions = jnp.pad(query_positions, ((0, 0), (0, extra)), constant_values=-1)
        blocks = padded.reshape(batch, kv_heads, group, count, ROW_BLOCK, size)
        out = jax.lax.map(
            lambda block: attend(*block),
            (
                jnp.moveaxis(blocks, 3, 0),
                jnp.moveaxis(positions.reshape(batch, count, ROW_BLOCK), 1, 0),
            ),
        )
        out = jnp.moveaxis(out, 0, 3).reshape(batch, kv_heads, group, count * ROW_BLOCK, size)
        out = out[:, :, :, :rows]
    return out.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _attend_rows(
    query,
    query_positions,
    *,
    keys,
    values,
    block_table,
    key_positions,
    num_valid,
    sinks,
    window,
    soft_cap,
    static_bounds,
):
    """One block of rows: query [B, KV, G, T, D] float32 and scaled -> [B, KV, G, T, D] float32."""
    batch, kv_heads, group, rows, size = query.shape
    slots = keys.shape[1] if block_table is None else keys.shape[1] * block_table.shape[1]
    block = key_block(slots)
    limit = jnp.full((batch,), slots, jnp.int32) if num_valid is None else num_valid
    packed = query.reshape(batch, kv_heads, group * rows, size)
    last = jnp.max(query_positions, axis=1)

    def visit(index, carry):
        highest, total, mixed = carry
        # The last block starts early rather than late: a slice must lie inside the cache.
        start = jnp.minimum(index * block, slots - block)
        slot = start + jnp.arange(block, dtype=jnp.int32)
        key, value, present = _read_block(keys, values, block_table, start, slot)
        position = jnp.broadcast_to(slot[None, :], (batch, block))
        if key_positions is not None:
            position = jax.lax.dynamic_slice_in_dim(key_positions, start, block, axis=1)
        # A slot read by the block before is not read again.
        present &= (slot >= index * block)[None, :] & (slot[None, :] < limit[:, None])
        present &= (position >= 0) & (position <= last[:, None])
        visible = present[:, None, :] & (position[:, None, :] <= query_positions[:, :, None])
        if window is not None:
            visible &= position[:, None, :] > query_positions[:, :, None] - window
        # Stale slots may hold anything: zero times NaN would be NaN.
        value = jnp.where(present[:, :, None, None], value, jnp.zeros((), value.dtype))
        scores = jax.lax.dot_general(
            packed,
            key.astype(jnp.float32),
            (((3,), (3,)), ((0, 1), (0, 2))),
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(batch, kv_heads, group, rows, block)
        if soft_cap is not None:
            scores = jnp.float32(soft_cap) * jnp.tanh(scores / jnp.float32(soft_cap))
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        finite = jnp.where(jnp.isfinite(new_highest), new_highest, jnp.float32(0))
        fade = jnp.exp(highest - finite)
        weights = jnp.exp(scores - finite[..., None])
        product = jax.lax.dot_general(
            weights.reshape(batch, kv_heads, group * rows, block),
            value.astype(jnp.float32),
            (((3,), (1,)), ((0, 1), (0, 2))),
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(query.shape)
        return (
            new_highest,
            total * fade + jnp.sum(weights, axis=-1),
            mixed * fade[..., None] + product,
        )

    statistics = (batch, kv_heads, group, rows)
    carry = (
        jnp.full(statistics, -jnp.inf, jnp.float32),
        jnp.zeros(statistics, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    count = -(-slots // block)
    if count == 1:
        carry = visit(jnp.int32(0), carry)
    elif static_bounds:
        step = jax.checkpoint(lambda carry, index: (visit(index, carry), None))
        carry, _ = jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    else:
        first, past = _block_bounds(query_positions, last, limit, key_positions, window, block)
        carry = jax.lax.fori_loop(first, jnp.minimum(past, count), visit, carry)
    highest, total, mixed = carry
    if sinks is not None:
        sink = sinks[None, :, :, None]
        # Rows that see no key keep a zero: their sum is the sink's alone.
        new_highest = jnp.maximum(highest, sink)
        mixed *= jnp.exp(highest - new_highest)[..., None]
        total = total * jnp.exp(highest - new_highest) + jnp.exp(sink - new_highest)
    seen = total > 0
    return jnp.where(seen[..., None], mixed / jnp.where(seen, total, 1)[..., None], 0)


def _read_block(keys, values, block_table, start, slot):
    """Keys and values of the slots [B, block, KV, D], and which of them exist [B, block]."""
    if block_table is None:
        block = slot.shape[0]
        key = jax.lax.dynamic_slice_in_dim(keys, start, block, axis=1)
        value = jax.lax.dynamic_slice_in_dim(values, start, block, axis=1)
        return key, value, jnp.ones((keys.shape[0], block), jnp.bool_)
    pages, page_size = keys.shape[:2]
    page = block_table[:, slot // page_size]
    exists = (page >= 0) & (page < pages)
    safe = jnp.where(exists, page, 0)
    offset = jnp.broadcast_to((slot % page_size)[None, :], safe.shape)
    return keys[safe, offset], values[safe, offset], exists


def _block_bounds(query_positions, last, limit, key_positions, window, block):
    """First and past-the-last key block that hold a visible key of any request."""
    if key_positions is not None:
        longest = jnp.max(jnp.where(last >= 0, limit, 0))
        return jnp.int32(0), (longest + block - 1) // block
    longest = jnp.max(jnp.minimum(last + 1, limit))
    first = jnp.int32(0)
    if window is not None:
        far = jnp.int32(jnp.iinfo(jnp.int32).max)
        earliest = jnp.min(jnp.where(query_positions >= 0, query_positions, far))
        first = jnp.maximum(earliest - window + 1, 0) // block
    return first, (longest + block - 1) // block
