"""Which key blocks a tile of rows visits, as a few ranges of blocks: the kernels' list of work.

Made from the intervals by XLA, before the kernel, in memory linear in rows. A tile's rows see a
union of intervals; packed documents and windows leave gaps in it, and the gaps are not visited.
Blocks that every row of the tile sees whole are listed apart, because they need no mask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Ranges a tile may have before its remaining gaps are visited after all. Each may be cut in two by
# the blocks that need no mask.
RANGES = 3
PARTIAL_RANGES = 2 * RANGES
# Columns of a schedule: full blocks, masked ranges, and own keys; each as first and past-the-last.
FULL, PARTIAL, OWN = 0, 2, 2 + 2 * PARTIAL_RANGES
WIDTH = OWN + 2
_FAR = jnp.iinfo(jnp.int32).max // 2


def _in_tiles(
    first: Int[Array, "B M"], last: Int[Array, "B M"], tile: int
) -> tuple[Int[Array, "B tiles T"], Int[Array, "B tiles T"]]:
    """Intervals by tile; rows past the end see nothing, and nothing is (FAR, -1)."""
    pad = ((0, 0), (0, -first.shape[1] % tile))
    first = jnp.pad(first, pad, constant_values=_FAR)
    last = jnp.pad(last, pad, constant_values=-1)
    empty = first > last
    first, last = jnp.where(empty, _FAR, first), jnp.where(empty, -1, last)
    return tuple(x.reshape(x.shape[0], -1, tile) for x in (first, last))


def _ranges(first, last, block: int) -> Int[Array, "B tiles R 2"]:
    """Visited blocks of each tile as RANGES ranges (first, past the last); unused: (0, 0)."""
    begin = jnp.where(first < _FAR, first // block, _FAR)
    end = jnp.where(last >= 0, last // block, -1)
    begin, end = jax.lax.sort((begin, end), dimension=2, num_keys=1)
    covered = jax.lax.cummax(end, axis=2)
    before = jnp.pad(covered[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-2)
    real = end >= 0
    opens = real & (begin > before + 1)
    # Rows after the last range that fits widen that one.
    index = jnp.minimum(jnp.cumsum(opens.astype(jnp.int32), axis=2) - 1, RANGES - 1)
    slots = jnp.arange(RANGES, dtype=jnp.int32)[None, None, None, :]
    member = (index[..., None] == slots) & real[..., None]
    low = jnp.min(jnp.where(member, begin[..., None], _FAR), axis=2)
    high = jnp.max(jnp.where(member, end[..., None], -1), axis=2) + 1
    used = jnp.any(member, axis=2)
    return jnp.stack([jnp.where(used, low, 0), jnp.where(used, high, 0)], axis=-1)


def tile_schedule(
    first: Int[Array, "B M"],
    last: Int[Array, "B M"],
    own_first: Int[Array, "B M"] | None,
    own_last: Int[Array, "B M"] | None,
    *,
    tile: int,
    block: int,
) -> Int[Array, "B tiles W"]:
    """For each tile of rows the key blocks to visit; see FULL, PARTIAL and OWN for the columns.

    Padding rows do not take part: a full block is one that every other row of the tile sees whole,
    so the kernel must blank padding rows itself.
    """
    first, last = _in_tiles(first, last, tile)
    ranges = _ranges(first, last, block)
    real = last >= 0
    full_low = -(-jnp.max(jnp.where(real, first, 0), axis=2) // block)
    full_high = (jnp.min(jnp.where(real, last, -1 + _FAR), axis=2) + 1) // block
    none = (full_high <= full_low) | ~jnp.any(real, axis=2)
    full_low, full_high = jnp.where(none, 0, full_low), jnp.where(none, 0, full_high)
    low, high = ranges[..., 0], ranges[..., 1]
    cut_low, cut_high = full_low[..., None], full_high[..., None]
    keep = none[..., None]
    left = jnp.stack([low, jnp.where(keep, high, jnp.minimum(high, cut_low))], axis=-1)
    right = jnp.stack([jnp.where(keep, high, jnp.maximum(low, cut_high)), high], axis=-1)
    partial = jnp.concatenate([left, right], axis=2)
    partial = partial.reshape(*partial.shape[:2], 2 * PARTIAL_RANGES)
    own = jnp.zeros((*full_low.shape, 2), jnp.int32)
    if own_first is not None:
        own_first, own_last = _in_tiles(own_first, own_last, tile)
        own_low = jnp.min(own_first, axis=2)
        own_high = jnp.max(own_last, axis=2) // block + 1
        used = own_low < _FAR
        own = jnp.stack([jnp.where(used, own_low // block, 0), jnp.where(used, own_high, 0)], -1)
    full = jnp.stack([full_low, full_high], axis=-1)
    return jnp.concatenate([full, partial, own], axis=-1).astype(jnp.int32)


def block_schedule(
    first: Int[Array, "B M"],
    last: Int[Array, "B M"],
    *,
    keys: int,
    tile: int,
    block: int,
) -> Int[Array, "B blocks 2"]:
    """For each block of keys the range of tiles (first, past the last) that see any key of it."""
    ranges = _ranges(*_in_tiles(first, last, tile), block)
    blocks = jnp.arange(-(-keys // block), dtype=jnp.int32)[None, None, None, :]
    seen = jnp.any((ranges[..., :1] <= blocks) & (blocks < ranges[..., 1:]), axis=2)
    tiles = jnp.arange(seen.shape[1], dtype=jnp.int32)[None, :, None]
    low = jnp.min(jnp.where(seen, tiles, _FAR), axis=1)
    high = jnp.max(jnp.where(seen, tiles, -1), axis=1) + 1
    return jnp.stack([jnp.where(high > 0, low, 0), high], axis=-1).astype(jnp.int32)
