"""Layout of a draw's mask rows: chunks of whole rollouts, and Algorithm 1's segments.

The mask rows of one sequence are sorted by anchor, depths 1 .. length in order within a rollout,
and cut into chunks of a fixed number of slots. A rollout is never cut, so a chunk needs nothing but
the depth-0 keys and itself. What the rows compute is not decided here.

`pack_rollouts` fills chunks greedily (the product's own partition). `pack_segments` puts each
rollout into the segment that Algorithm 1 of the paper assigns; both give the same structure.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """Static shape of the chunks: their number and the slots of each."""

    num_chunks: int
    capacity: int

    @property
    def slots(self) -> int:
        return self.num_chunks * self.capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutChunks:
    """Mask rows in C chunks of R slots.

    Attributes:
        anchors: depth-0 row that the slot's rollout starts from, ascending within a chunk. A
            padding slot repeats the last anchor of its chunk (0 in an empty chunk), so that it is
            always a valid index and the order holds.
        depths: 1 .. K-1, in order within a rollout; 0 marks a padding slot. Padding comes last.
        rows_used: slots that hold a row, per chunk.
        rows_left_out: rows that the chunks have no room for; 0 for every plan made for the draw.
    """

    anchors: Int32[Array, "C R"]
    depths: Int32[Array, "C R"]
    rows_used: Int32[Array, "C"]
    rows_left_out: Int32[Array, ""]

    @property
    def valid(self) -> Array:
        """True in slots that hold a mask row, Bool [C, R]."""
        return self.depths > 0

    @property
    def rows(self) -> Array:
        """Depth-0 row whose label and position the slot has, anchor + depth, Int32 [C, R]."""
        return self.anchors + self.depths


def plan_chunks(
    max_rows: int,
    longest: int,
    *,
    num_chunks: int | None = None,
    capacity: int | None = None,
    multiple: int = 1,
) -> ChunkPlan:
    """Chunks that hold any draw of at most `max_rows` mask rows in rollouts of at most `longest`.

    A chunk that is not the last one is left with at most longest - 1 empty slots, because the next
    rollout did not fit.

    Args:
        max_rows: see `sampling.max_mask_rows`.
        longest: longest rollout, K - 1.
        num_chunks, capacity: exactly one of the two; the other follows.
        multiple: the capacity is rounded up to a multiple of this (a kernel's tile).

    Raises:
        ValueError: both or neither are given, or the capacity cannot hold one rollout.
    """
    if (num_chunks is None) == (capacity is None):
        raise ValueError("give either num_chunks or capacity.")
    if multiple < 1 or max_rows < 0 or longest < 0:
        raise ValueError(f"max_rows {max_rows}, longest {longest}, multiple {multiple}: too small.")
    slack = max(longest - 1, 0)
    if num_chunks is not None:
        if num_chunks < 1:
            raise ValueError(f"num_chunks is {num_chunks}; it must be at least 1.")
        needed = max(-(-(max_rows + (num_chunks - 1) * slack) // num_chunks), longest, 1)
        return ChunkPlan(num_chunks=num_chunks, capacity=-(-needed // multiple) * multiple)
    if capacity < max(longest, 1):
        raise ValueError(f"a chunk of {capacity} rows cannot hold a rollout of {longest}.")
    capacity = -(-capacity // multiple) * multiple
    beyond_last = max(0, max_rows - capacity)
    return ChunkPlan(num_chunks=1 + -(-beyond_last // (capacity - slack)), capacity=capacity)


def pack_rollouts(lengths: Int32[Array, "n"], plan: ChunkPlan) -> RolloutChunks:
    """Fill chunks with whole rollouts in anchor order, each chunk as far as it goes.

    Args:
        lengths: rollout length of each anchor (`sampling.sample_rollouts`).
    """
    before = _rows_before(lengths)

    def fill(first_anchor, _):
        room = before[first_anchor] + jnp.int32(plan.capacity)
        # The largest anchor bound whose rows up to there still fit.
        end = jnp.searchsorted(before, room, side="right").astype(jnp.int32) - 1
        return end, (first_anchor, end)

    _, (firsts, ends) = jax.lax.scan(fill, jnp.int32(0), None, length=plan.num_chunks)
    return _chunks(before, firsts, ends, plan.capacity)


def pack_segments(lengths: Int32[Array, "n"], num_segments: int, capacity: int) -> RolloutChunks:
    """Put every rollout into its Algorithm 1 segment; chunk s holds segment s.

    A rollout's segment is that of its depth-1 row, anchor + 1. `segment_capacity` gives a capacity
    that always suffices; with less, `rows_left_out` tells.
    """
    rows = lengths.shape[0]
    starts = np.asarray(segment_starts(rows, num_segments))
    # Anchor a belongs to segment s when starts[s] <= a + 1 < starts[s + 1].
    bounds = np.clip(starts - 1, 0, rows).astype(np.int32)
    bounds[-1] = rows
    before = _rows_before(lengths)
    return _chunks(before, jnp.asarray(bounds[:-1]), jnp.asarray(bounds[1:]), capacity)


def _rows_before(lengths: Int32[Array, "n"]) -> Int32[Array, "n1"]:
    """Mask rows of all anchors before each anchor; the last entry is the total."""
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths)])


def _chunks(
    before: Int32[Array, "n1"], firsts: Int32[Array, "C"], ends: Int32[Array, "C"], capacity: int
) -> RolloutChunks:
    """Chunk c lists the rows of anchors firsts[c] .. ends[c] - 1, as many as fit."""
    wanted = before[ends] - before[firsts]
    used = jnp.minimum(wanted, capacity)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    valid = slots[None, :] < used[:, None]
    # Padding repeats the chunk's last row; an empty chunk has none.
    clipped = jnp.minimum(slots[None, :], jnp.maximum(used - 1, 0)[:, None])
    flat = before[firsts][:, None] + clipped
    anchors = jnp.searchsorted(before, flat, side="right").astype(jnp.int32) - 1
    anchors = jnp.where((used > 0)[:, None], anchors, 0)
    depths = jnp.where(valid, flat - before[anchors] + 1, 0)
    return RolloutChunks(
        anchors=anchors,
        depths=depths,
        rows_used=used,
        rows_left_out=before[-1] - jnp.sum(used, dtype=jnp.int32),
    )


def element_slots(chunks: RolloutChunks, anchors: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Where mask rows given as (anchor, depth) lie: index into the flattened chunks, int64.

    Depth-0 elements have no slot here and get -1; their row is the anchor.

    Raises:
        ValueError: a mask row is not in the chunks.
    """
    anchors, depths = np.asarray(anchors, np.int64), np.asarray(depths, np.int64)
    slot_anchors = np.asarray(chunks.anchors, np.int64).reshape(-1)
    slot_depths = np.asarray(chunks.depths, np.int64).reshape(-1)
    place = {
        (int(a), int(d)): slot
        for slot, (a, d) in enumerate(zip(slot_anchors, slot_depths, strict=True))
        if d > 0
    }
    slots = np.full(anchors.shape, -1, np.int64)
    for index, (anchor, depth) in enumerate(zip(anchors, depths, strict=True)):
        if depth == 0:
            continue
        if (int(anchor), int(depth)) not in place:
            raise ValueError(f"the chunks hold no row (anchor {anchor}, depth {depth}).")
        slots[index] = place[int(anchor), int(depth)]
    return slots


def segment_starts(num_rows: int, num_segments: int) -> tuple[int, ...]:
    """First row of each segment and, last, the number of rows: ceil(s * L / S) for s = 0 .. S.

    The first starts[s + 1] depth-0 rows are the context of segment s.
    """
    if not 1 <= num_segments <= max(num_rows, 1):
        raise ValueError(f"num_segments is {num_segments}; it must be 1 to {num_rows} (rows).")
    return tuple(-(-s * num_rows // num_segments) for s in range(num_segments + 1))


def segment_of(
    anchors: Int32[Array, "*shape"],
    depths: Int32[Array, "*shape"],
    num_rows: int,
    num_segments: int,
) -> Int32[Array, "*shape"]:
    """Algorithm 1 in closed form: a depth-0 row goes by its own row, a rollout by anchor + 1."""
    starts = jnp.asarray(segment_starts(num_rows, num_segments), jnp.int32)
    bucket = jnp.where(depths == 0, anchors, anchors + 1)
    # Compared with the starts rather than divided: bucket * S may leave int32.
    return jnp.searchsorted(starts[1:], bucket, side="right").astype(jnp.int32)


def segments_by_recursion(
    anchors: np.ndarray, depths: np.ndarray, num_rows: int, num_segments: int
) -> np.ndarray:
    """Algorithm 1 as the paper writes it: depths 0 and 1 by row, deeper rows inherit.

    A_d[p] = max{s : s L / S <= p} for d <= 1, and A_d[p] = A_{d-1}[p - 1] above.
    Host code, element by element; the oracle of `segment_of`.

    Raises:
        ValueError: a row at depth >= 2 has no predecessor.
    """
    elements = sorted(zip(map(int, depths), map(int, anchors), strict=True))
    assigned: dict[tuple[int, int], int] = {}
    for depth, anchor in elements:
        row = anchor + depth
        if depth <= 1:
            assigned[depth, row] = max(
                s for s in range(num_segments) if s * num_rows <= row * num_segments
            )
        elif (depth - 1, row - 1) in assigned:
            assigned[depth, row] = assigned[depth - 1, row - 1]
        else:
            raise ValueError(f"row {row} at depth {depth} has no predecessor at depth {depth - 1}.")
    return np.asarray(
        [assigned[int(d), int(a) + int(d)] for a, d in zip(anchors, depths, strict=True)], np.int64
    )


def segment_capacity(num_rows: int, num_segments: int, num_depths: int, max_rows: int) -> int:
    """Slots that hold the mask rows of any segment of any draw of at most `max_rows` rows."""
    starts = segment_starts(num_rows, num_segments)
    most_anchors = max(b - a for a, b in zip(starts[:-1], starts[1:], strict=True))
    return max(1, min(most_anchors * (num_depths - 1), max_rows))
