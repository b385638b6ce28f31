"""Chunks of whole rollouts, their padding, and Algorithm 1's segments."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.partition import (
    ChunkPlan,
    element_slots,
    pack_rollouts,
    pack_segments,
    plan_chunks,
    segment_capacity,
    segment_of,
    segment_starts,
    segments_by_recursion,
)
from train.sampling import (
    CodConfig,
    count_table,
    lengths_from_elements,
    max_mask_rows,
    sample_rollouts,
)

DRAWS = json.loads((Path(__file__).parents[1] / "data" / "peagle_draws.json").read_text())
pack = jax.jit(pack_rollouts, static_argnames="plan")


def rows_of(lengths):
    """Mask rows in the order of the layout: by anchor, then by depth."""
    return [(a, d) for a, length in enumerate(lengths) for d in range(1, length + 1)]


def chunks_by_hand(lengths, plan):
    chunks, current = [], []
    for anchor, length in enumerate(lengths):
        rollout = [(anchor, d) for d in range(1, length + 1)]
        if len(current) + length > plan.capacity:
            chunks.append(current)
            current = []
        current += rollout
    chunks.append(current)
    return chunks + [[]] * (plan.num_chunks - len(chunks))


def listed(chunks, index):
    used = int(chunks.rows_used[index])
    anchors, depths = np.asarray(chunks.anchors[index]), np.asarray(chunks.depths[index])
    assert (np.diff(anchors) >= 0).all(), "anchors ascend, padding included"
    assert (depths[used:] == 0).all() and (depths[:used] > 0).all()
    assert (anchors[used:] == (anchors[used - 1] if used else 0)).all()
    np.testing.assert_array_equal(chunks.valid[index], np.arange(len(depths)) < used)
    return list(zip(anchors[:used].tolist(), depths[:used].tolist(), strict=True))


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 7])
def test_chunks_hold_whole_rollouts_in_order(num_chunks):
    rng = np.random.default_rng(num_chunks)
    rows, longest = 40, 4
    plan = plan_chunks(rows * 2, longest, num_chunks=num_chunks, multiple=4)
    for _ in range(20):
        lengths = rng.integers(0, longest + 1, rows).astype(np.int32)
        while lengths.sum() > rows * 2:
            lengths[rng.integers(rows)] = 0
        chunks = pack(lengths, plan)
        assert int(chunks.rows_left_out) == 0
        found = [listed(chunks, c) for c in range(num_chunks)]
        assert found == chunks_by_hand(lengths, plan)
        assert sum(found, []) == rows_of(lengths)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    spare=st.integers(0, 9),
    num_chunks=st.integers(1, 9),
    capacity=st.integers(5, 40),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_planned_chunks_always_suffice(lengths, spare, num_chunks, capacity, multiple):
    """Whatever the order of the rollouts: the bound behind `rows_left_out == 0`."""
    total = sum(lengths) + spare
    for limits in ({"num_chunks": num_chunks}, {"capacity": capacity}):
        plan = plan_chunks(total, 5, multiple=multiple, **limits)
        assert plan.capacity % multiple == 0
        assert len(chunks_by_hand(lengths, plan)) <= plan.num_chunks


def test_rows_without_room_are_counted():
    lengths = np.full(10, 3, np.int32)
    chunks = pack(lengths, ChunkPlan(num_chunks=2, capacity=7))
    assert int(chunks.rows_left_out) == 30 - 2 * 6


def test_no_rollouts_at_all_gives_padding_only():
    chunks = pack(np.zeros(10, np.int32), plan_chunks(0, 3, num_chunks=2, multiple=4))
    assert not np.asarray(chunks.valid).any() and (np.asarray(chunks.rows) == 0).all()


@functools.cache
def _draw(rows, depths, ratio, prompt):
    """A draw over documents whose first `prompt` share is unsupervised."""
    documents = np.arange(rows, dtype=np.int32) // max(1, rows // 4)
    within = np.arange(rows) % max(1, rows // 4)
    mask = within >= prompt * (rows // 4)
    config = CodConfig(num_depths=depths, ratio=ratio)
    table = jnp.asarray(count_table(config, rows))
    key = jax.random.key(0)
    return (
        config,
        mask,
        np.asarray(jax.jit(sample_rollouts)(key, jnp.asarray(mask), jnp.asarray(documents), table)),
    )


@pytest.mark.parametrize(
    "rows, depths, ratio, num_chunks",
    [(8192, 8, 0.8, 2), (8192, 8, 0.8, 16), (1024, 16, 0.8, 4), (1024, 4, 0.7, 4)],
)
def test_at_most_a_tenth_is_padding(rows, depths, ratio, num_chunks):
    """Supervised throughout: slots of all chunks, tile of 16 rows."""
    config, _, lengths = _draw(rows, depths, ratio, 0)
    plan = plan_chunks(max_mask_rows(config, rows), depths - 1, num_chunks=num_chunks, multiple=16)
    chunks = pack(lengths, plan)
    assert int(chunks.rows_left_out) == 0
    assert 1 - lengths.sum() / plan.slots <= 0.10


@pytest.mark.parametrize("prompt", [0.25, 0.5, 0.75])
def test_at_most_a_tenth_is_padding_with_prompts(prompt):
    """With prompts the trailing chunks stay empty (a loop skips them); the others are full."""
    config, mask, lengths = _draw(8192, 8, 0.8, prompt)
    plan = plan_chunks(max_mask_rows(config, 8192), 7, capacity=512)
    chunks = pack(lengths, plan)
    used = np.asarray(chunks.rows_used)
    in_use = int((used > 0).sum())
    assert used.sum() == lengths.sum() and (used[in_use:] == 0).all()
    assert 1 - lengths.sum() / (in_use * plan.capacity) <= 0.10
    # Where the host knows the supervised rows before the step, the plan itself is that tight.
    known = plan_chunks(max_mask_rows(config, 8192, int(mask.sum())), 7, capacity=512)
    assert 1 - lengths.sum() / known.slots <= 0.10


@pytest.mark.parametrize("case", DRAWS)
def test_a_given_draw_finds_its_slots(case):
    given_ = DRAWS[case]
    anchors, depths = np.array(given_["anchors"]), np.array(given_["depths"])
    rows = len(given_["tokens"])
    lengths = lengths_from_elements(anchors, depths, rows)
    chunks = pack(lengths, plan_chunks(int(lengths.sum()), 3, num_chunks=3))
    slots = element_slots(chunks, anchors, depths)
    assert (slots[depths == 0] == -1).all()
    masked = depths > 0
    assert len(set(slots[masked])) == masked.sum() == lengths.sum()
    np.testing.assert_array_equal(np.ravel(chunks.anchors)[slots[masked]], anchors[masked])
    np.testing.assert_array_equal(np.ravel(chunks.depths)[slots[masked]], depths[masked])
    with pytest.raises(ValueError, match="no row"):
        element_slots(chunks, np.array([0]), np.array([3]))


def test_A6_the_layout_alone_tells_which_rows_see_which():
    """The published example: 50 visible pairs, read off the chunks without any mask."""
    anchors = np.array([0, 1, 2, 3, 4, 5, 0, 1, 3, 4, 0, 3, 0])
    depths = np.array([0] * 6 + [1] * 4 + [2] * 2 + [3])
    lengths = lengths_from_elements(anchors, depths, 6)
    chunks = pack(lengths, plan_chunks(int(lengths.sum()), 3, num_chunks=2))
    slot_of = element_slots(chunks, anchors, depths)
    element_at = {int(slot): e for e, slot in enumerate(slot_of) if slot >= 0}
    sees = []
    for element, (anchor, depth) in enumerate(zip(anchors, depths, strict=True)):
        # A mask row's own keys are the `depth` slots that end with it.
        own = [element_at[slot_of[element] - back] for back in range(depth)]
        sees.append(set(range(anchor + 1)) | set(own) if depth else set(range(anchor + 1)))
    assert sum(map(len, sees)) == 50
    assert sees[9] == {0, 1, 2, 3, 4, 9}
    assert sees[11] == {0, 1, 2, 3, 8, 11}
    assert sees[12] == {0, 6, 10, 12}


def test_worked_example_of_the_paper():
    """n = 16, S = 2: row 8 at depth 2 stays with its predecessor, row 7 at depth 1."""
    rows_at = {
        0: list(range(16)),
        1: [1, 3, 4, 6, 7, 9, 10, 12, 14, 15],
        2: [2, 5, 7, 8, 11, 13, 15],
        3: [3, 6, 9, 12, 14],
    }
    depths = np.concatenate([np.full(len(r), d) for d, r in rows_at.items()])
    rows = np.concatenate(list(rows_at.values()))
    segments = segments_by_recursion(rows - depths, depths, 16, 2)
    assert len(segments) == 38
    assert segments[(depths == 2) & (rows == 8)] == 0
    assert segments[(depths == 0) & (rows == 8)] == 1
    assert segments[(depths == 3) & (rows == 9)] == 0
    np.testing.assert_array_equal(
        segments, segment_of(jnp.int32(rows - depths), jnp.int32(depths), 16, 2)
    )


@pytest.mark.parametrize("rows, num_segments", [(24, 1), (24, 2), (25, 4), (31, 7), (9, 9)])
def test_closed_form_is_the_recursion(rows, num_segments):
    rng = np.random.default_rng(rows)
    longest = 4
    capacity = segment_capacity(rows, num_segments, longest + 1, rows * longest)
    starts = segment_starts(rows, num_segments)
    grid = np.indices((rows, longest + 1)).astype(np.int32)
    closed = np.asarray(segment_of(jnp.asarray(grid[0]), jnp.asarray(grid[1]), rows, num_segments))
    pack_ = jax.jit(pack_segments, static_argnums=(1, 2))
    for _ in range(10):
        lengths = np.minimum(rng.integers(0, longest + 1, rows), rows - 1 - np.arange(rows))
        elements = [(a, d) for a in range(rows) for d in range(lengths[a] + 1)]
        anchors, depths = map(np.array, zip(*elements, strict=True))
        by_recursion = segments_by_recursion(anchors, depths, rows, num_segments)
        np.testing.assert_array_equal(by_recursion, closed[anchors, depths])
        chunks = pack_(lengths.astype(np.int32), num_segments, capacity)
        assert int(chunks.rows_left_out) == 0
        for s in range(num_segments):
            expected = [e for e, at in zip(elements, by_recursion, strict=True) if at == s]
            assert listed(chunks, s) == [e for e in expected if e[1] > 0]
            # A segment sees nothing beyond its cumulative depth-0 prefix.
            assert all(anchor < starts[s + 1] for anchor, _ in expected)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan_chunks(9, 3), "either"),
        (lambda: plan_chunks(9, 3, num_chunks=1, capacity=9), "either"),
        (lambda: plan_chunks(9, 3, capacity=2), "cannot hold a rollout of 3"),
        (lambda: plan_chunks(9, 3, num_chunks=0), "num_chunks is 0"),
        (lambda: segment_starts(4, 5), "num_segments is 5"),
        (
            lambda: segments_by_recursion(np.array([0]), np.array([2]), 4, 2),
            "row 2 at depth 2 has no predecessor",
        ),
    ],
)
def test_impossible_partitions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
