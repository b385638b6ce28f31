"""COD sampling: exact counts, nesting, documents, uniformity."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.sampling import (
    CodConfig,
    alive_masks,
    count_table,
    lengths_from_elements,
    max_mask_rows,
    rollout_limits,
    sample_rollouts,
)

DRAWS = json.loads((Path(__file__).parents[1] / "data" / "peagle_draws.json").read_text())
ROWS, DEPTHS = 24, 5
draw = jax.jit(sample_rollouts)
draw_many = jax.jit(jax.vmap(sample_rollouts, in_axes=(0, None, None, None)))


def limits_by_hand(mask, documents, num_depths):
    """Chain by chain, as the definition reads."""
    limits = np.zeros(len(mask), np.int32)
    for anchor in range(len(mask)):
        if documents[anchor] < 0:
            continue
        for depth in range(1, num_depths):
            row = anchor + depth
            if row >= len(mask) or not mask[row] or documents[row] != documents[anchor]:
                break
            limits[anchor] = depth
    return limits


def random_case(rng):
    cuts = np.sort(rng.choice(np.arange(1, ROWS), 2, replace=False))
    documents = np.repeat([0, 1, -1], np.diff([0, *cuts, ROWS])).astype(np.int32)
    mask = rng.random(ROWS) < rng.choice([0.3, 0.7, 1.0])  # padding too: it must not matter
    return mask, documents


@pytest.mark.parametrize(
    "ratio, floor", [("0.8", 0), (0.7, 0.2), (0.85, 0), ("2/3", 0), (1, 0), (0.5, 1), (0.123457, 0)]
)
def test_counts_are_the_exact_floors(ratio, floor):
    config = CodConfig(num_depths=16, ratio=ratio, min_ratio=floor)
    rows = 300
    table = count_table(config, rows)
    assert table.dtype == np.int32 and table.shape == (16, rows + 1)
    for depth, valid in itertools.product(range(16), range(rows + 1)):
        share = max(Fraction(str(ratio)) ** depth, Fraction(str(floor)))
        expected = valid if ratio == 1 else math.floor(max(0, valid - depth) * share)
        assert table[depth, valid] == expected, (depth, valid)


def test_float32_floors_would_be_off_by_one():
    """Why the table exists: 0.8 * 0.8 * 25 is 16, and float32 says less."""
    table = count_table(CodConfig(num_depths=8, ratio=0.7), 20_000)
    valid = np.arange(20_001, dtype=np.float32)
    floats = np.stack(
        [np.floor(np.maximum(valid - d, 0) * np.float32(0.7) ** np.float32(d)) for d in range(8)]
    )
    assert (floats != table).any()


@pytest.mark.parametrize(
    "ratio, floor, depths, expansion",
    [(0.7, 0.2, 8, 3.373), (0.7, 0, 8, 3.141), (0.8, 0, 8, 4.161), (0.8, 0.2, 10, 4.561)],
)
def test_expansion_of_a_long_sequence(ratio, floor, depths, expansion):
    """Rows per token of the published tables, depth 0 included."""
    config = CodConfig(num_depths=depths, ratio=ratio, min_ratio=floor)
    rows = 100_000
    assert 1 + max_mask_rows(config, rows) / rows == pytest.approx(expansion, abs=1e-3)


def test_draws_meet_the_definition_on_random_masks():
    """Eligibility, nesting and counts, against a row-by-row reading of the definition."""
    rng = np.random.default_rng(0)
    deepest = 0
    for ratio, floor in [(0.8, 0), (0.7, 0.2), (1, 0)]:
        config = CodConfig(num_depths=DEPTHS, ratio=ratio, min_ratio=floor)
        table = count_table(config, ROWS)
        for trial in range(60):
            mask, documents = random_case(rng)
            lengths = np.asarray(draw(jax.random.key(trial), mask, documents, table))
            limits = limits_by_hand(mask, documents, DEPTHS)
            supervised = int(mask[documents >= 0].sum())
            assert (lengths <= limits).all() and (lengths >= 0).all()
            alive = np.asarray(alive_masks(jnp.asarray(lengths), DEPTHS))
            for depth in range(1, DEPTHS):
                eligible = (alive[depth - 1] & (limits >= depth)).sum()
                assert alive[depth].sum() == min(eligible, table[depth, supervised])
                assert not (alive[depth] & ~alive[depth - 1]).any()
            total = alive[1:].sum()
            assert total == lengths.sum() <= max_mask_rows(config, ROWS, supervised)
            deepest = max(deepest, lengths.max())
    assert deepest == DEPTHS - 1


def test_full_ratio_keeps_every_chain():
    rng = np.random.default_rng(1)
    table = count_table(CodConfig(num_depths=DEPTHS, ratio=1), ROWS)
    for trial in range(20):
        mask, documents = random_case(rng)
        lengths = draw(jax.random.key(trial), mask, documents, table)
        np.testing.assert_array_equal(lengths, limits_by_hand(mask, documents, DEPTHS))
        np.testing.assert_array_equal(
            lengths, rollout_limits(jnp.asarray(mask), jnp.asarray(documents), DEPTHS)
        )


def test_all_supervised_documents_never_mix_and_no_anchor_is_negative():
    """The public sampler gave anchor -1 in 29 of 50 such draws and mixed documents in 45."""
    mask = np.ones(ROWS, bool)
    documents = np.repeat(np.int32([0, 1]), ROWS // 2)
    table = count_table(CodConfig(num_depths=DEPTHS, ratio=0.8), ROWS)
    keys = jax.random.split(jax.random.key(5), 50)
    lengths = np.asarray(draw_many(keys, mask, documents, table))
    for one in lengths:
        anchors = np.repeat(np.arange(ROWS), one)
        rows = anchors + np.concatenate([np.arange(1, length + 1) for length in one])
        assert (documents[anchors] == documents[rows]).all()
        assert (anchors >= 0).all() and (rows < ROWS).all()


def test_draw_is_a_function_of_the_key():
    mask, documents = np.ones(ROWS, bool), np.zeros(ROWS, np.int32)
    table = count_table(CodConfig(num_depths=DEPTHS), ROWS)
    first, again, other = (draw(jax.random.key(s), mask, documents, table) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


@pytest.mark.parametrize("mask_rows", [0, 1])
def test_hardly_any_supervision_gives_few_rows(mask_rows):
    mask = np.arange(ROWS) < mask_rows  # row 0 has no anchor before it
    table = count_table(CodConfig(num_depths=DEPTHS), ROWS)
    lengths = draw(jax.random.key(0), mask, np.zeros(ROWS, np.int32), table)
    assert np.asarray(lengths).sum() == 0


def test_every_nested_subset_is_equally_likely():
    """Against the exact law: uniform S_1, then uniform S_2 among the survivors that go on."""
    mask = np.array([0, 1, 1, 0, 1, 1, 1], bool)
    documents = np.zeros(7, np.int32)
    table = count_table(CodConfig(num_depths=3, ratio=0.8), 7)
    m1, m2 = int(table[1, 5]), int(table[2, 5])
    limits = limits_by_hand(mask, documents, 3)
    law = {}
    firsts = list(itertools.combinations(np.flatnonzero(limits >= 1), m1))
    for kept in firsts:
        pool = [a for a in kept if limits[a] >= 2]
        seconds = list(itertools.combinations(pool, min(m2, len(pool))))
        for deeper in seconds:
            lengths = tuple(int(a in kept) + int(a in deeper) for a in range(7))
            law[lengths] = law.get(lengths, 0) + 1 / len(firsts) / len(seconds)
    assert len(law) > 4
    trials = 20_000
    keys = jax.random.split(jax.random.key(3), trials)
    seen, counts = np.unique(draw_many(keys, mask, documents, table), axis=0, return_counts=True)
    assert {tuple(map(int, row)) for row in seen} == set(law)
    expected = np.array([law[tuple(map(int, row))] for row in seen]) * trials
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # Five standard deviations of a chi-square above its mean.
    freedom = len(law) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_table_of_another_length_is_refused():
    table = jnp.asarray(count_table(CodConfig(num_depths=3), 8))
    with pytest.raises(ValueError, match=r"covers 8 rows, the sequence has 7.*count_table"):
        sample_rollouts(jax.random.key(0), jnp.ones(7, bool), jnp.zeros(7, jnp.int32), table)


@pytest.mark.parametrize(
    "field, value",
    [("num_depths", 0), ("num_depths", 99), ("ratio", 0), ("ratio", 1.2)]
    + [("min_ratio", -0.1), ("min_ratio", 2)],
)
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        CodConfig(**{field: value})


@pytest.mark.parametrize("case", DRAWS)
def test_a_given_draw_is_taken_as_it_is(case):
    """The public library's draws are nested, so lengths carry them without loss."""
    given = DRAWS[case]
    anchors, depths = np.array(given["anchors"]), np.array(given["depths"])
    rows = len(given["tokens"])
    shuffled = np.random.default_rng(0).permutation(len(anchors))
    lengths = lengths_from_elements(anchors[shuffled], depths[shuffled], rows)
    back = {(a, d) for a in range(rows) for d in range(lengths[a] + 1)}
    assert back == set(zip(anchors.tolist(), depths.tolist(), strict=True))
    limits = limits_by_hand(given["loss_mask"], given["document_ids"], max(depths) + 1)
    assert (lengths <= limits).all()
    supervised = np.array(given["loss_mask"])[anchors + depths].sum()
    assert supervised == given["supervised_elements"]


@pytest.mark.parametrize(
    "anchors, depths, message",
    [
        ([-1], [1], "outside"),
        ([3], [2], "outside"),
        ([0, 0], [1, 3], "depths 1 to 3 must all be there"),
        ([0, 0], [1, 1], "given twice"),
        ([0], [1, 2], "1 anchors, but 2 depths"),
    ],
)
def test_a_draw_that_is_no_draw_is_refused(anchors, depths, message):
    with pytest.raises(ValueError, match=message):
        lengths_from_elements(np.array(anchors), np.array(depths), 5)
