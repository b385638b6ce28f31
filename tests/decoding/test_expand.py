"""Draft rows of a round: serving.md's examples, A1, and a slow loop over random rounds."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.decoding.drafting import find_continuation
from peagle_jax.decoding.expand import draft_tile, token_at

M = 50


def tile(tokens, first, valid, wanted, k, slots=32):
    buffer = np.zeros((len(tokens), slots), np.int32)
    for row, (start, values) in enumerate(zip(first, tokens, strict=True)):
        buffer[row, start : start + len(values)] = values
    return draft_tile(
        jnp.asarray(buffer),
        jnp.asarray(first, jnp.int32),
        jnp.asarray(valid, jnp.int32),
        jnp.asarray(wanted, jnp.int32),
        num_drafts=k,
        mask_token_id=M,
    )


@pytest.mark.parametrize(
    ("first", "tokens", "valid", "ids", "positions", "sample"),
    [
        # One rejection and none (K=3): committed tokens from the first verified row on.
        (
            [5, 10],
            [[10, 11, 12, 100], [20, 21, 22, 23, 200]],
            [3, 4],
            [[11, 12, 100, M, M, 0], [21, 22, 23, 200, M, M]],
            [[5, 6, 7, 8, 9, -1], [10, 11, 12, 13, 14, 15]],
            [[2, 3, 4], [3, 4, 5]],
        ),
        # Everything rejected, and two rejected.
        (
            [20, 7],
            [[50, 90], [60, 61, 91]],
            [1, 2],
            [[90, M, M, 0, 0, 0], [61, 91, M, M, 0, 0]],
            [[20, 21, 22, -1, -1, -1], [7, 8, 9, 10, -1, -1]],
            [[0, 1, 2], [1, 2, 3]],
        ),
        # A1 (K=4): two of four rows rejected, and none of two; ids shift, positions do not.
        (
            [5, 0],
            [[11, 12, 99], [21, 22, 88]],
            [2, 2],
            [[12, 99, M, M, M, 0, 0, 0], [22, 88, M, M, M, 0, 0, 0]],
            [[5, 6, 7, 8, 9, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1, -1]],
            [[1, 2, 3, 4], [1, 2, 3, 4]],
        ),
        # A4: a prompt of one token gives one row, (first output token, target state 0).
        ([0], [[7, 42]], [1], [[42, M, M, 0, 0, 0]], [[0, 1, 2, -1, -1, -1]], [[0, 1, 2]]),
    ],
)
def test_examples_A1_A4(first, tokens, valid, ids, positions, sample):
    k = len(sample[0])
    found = tile(tokens, first, valid, [k] * len(first), k)
    assert found.token_ids.tolist() == ids
    assert found.positions.tolist() == positions
    assert found.sample_rows.tolist() == sample
    for row, count in enumerate(valid):
        expected = [j if j < count else -1 for j in range(2 * k)]
        assert found.source_rows[row].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_a_slow_loop(data):
    k, batch = data.draw(st.sampled_from([1, 2, 7])), 3
    rows = []
    for _ in range(batch):
        valid = data.draw(st.integers(0, k + 1))
        rows.append((data.draw(st.integers(0, 12)), valid, data.draw(st.integers(0, k))))
    tokens = [list(range(100 + 10 * r, 100 + 10 * r + v + 1)) for r, (_, v, _) in enumerate(rows)]
    found = tile(tokens, [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], k)
    for row, (first, valid, wanted) in enumerate(rows):
        for j in range(2 * k):
            if j < valid:
                expected = (tokens[row][j + 1], first + j, False, j)
            elif valid and j < valid + wanted - 1:
                expected = (M, first + j, True, -1)
            else:
                expected = (None, -1, False, -1)
            mine = (
                int(found.token_ids[row, j]),
                int(found.positions[row, j]),
                bool(found.is_mask[row, j]),
                int(found.source_rows[row, j]),
            )
            assert mine[1:] == expected[1:], (row, j)
            if expected[0] is not None:
                assert mine[0] == expected[0]
        if valid:
            assert found.sample_rows[row].tolist() == [valid - 1 + i for i in range(k)]


def test_tokens_outside_the_buffer_are_zero():
    tokens = jnp.arange(1, 5, dtype=jnp.int32)[None, :]
    assert token_at(tokens, jnp.array([[-1, 0, 3, 4, 99]])).tolist() == [[0, 1, 4, 0, 0]]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3),  # longest n-gram first
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], 3),  # 3-gram beats a later 2-gram
        ([4, 7, 5, 7, 6, 7], 4),  # the latest match of a 1-gram
        ([7, 7, 7], 2),  # a match must leave a token to copy
        ([1, 2, 3], 3),  # none
        ([5], 1),
        ([5, 5], 1),
    ],
)
def test_prompt_lookup(text, start):
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, : len(text)] = text
    found = find_continuation(jnp.asarray(tokens), jnp.array([len(text)], jnp.int32), longest=3)
    assert found.tolist() == [start]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=16))
def test_prompt_lookup_against_a_slow_loop(text):
    expected = len(text)
    for length in (3, 2, 1):
        starts = [j for j in range(len(text) - length) if text[j : j + length] == text[-length:]]
        if len(text) >= length and starts:
            expected = starts[-1] + length
            break
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, : len(text)] = text
    found = find_continuation(jnp.asarray(tokens), jnp.array([len(text)], jnp.int32), longest=3)
    assert found.tolist() == [expected]
