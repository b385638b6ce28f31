"""Acceptance statistics: H3 literally, and records cut anywhere against a replay of the rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.decoding.stats import AcceptanceStats, merge_stats, request_stats


def records(rounds):
    """Records of a prefill token and then rounds of (drafts, accepted)."""
    depth, drafts = [0], [0]
    for drafted, accepted in rounds:
        depth += [*range(1, accepted + 1), 0]
        drafts += [drafted] * (accepted + 1)
    return depth, drafts


def test_accepted_3_0_1_H3():
    stats = request_stats(*records([(3, 3), (3, 0), (3, 1)]), 3)
    assert stats.acceptance_length == pytest.approx(2.333, abs=1e-3)
    assert stats.acceptance_rate == pytest.approx(0.4444, abs=1e-4)
    assert stats.acceptance_rate_per_position == pytest.approx((0.667, 0.333, 0.333), abs=1e-3)


@pytest.mark.parametrize("parts", [[], [request_stats([0], [0], 3)], [AcceptanceStats()]])
def test_nothing_drafted_H3(parts):
    stats = merge_stats(parts)
    assert stats.acceptance_length == 1.0
    assert stats.acceptance_rate is None
    assert stats.acceptance_rate_per_position is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.integers(0, 4).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=8
    ),
    st.integers(0, 50),
)
def test_cut_anywhere_counts_what_is_left(rounds, cut):
    depth, drafts = records(rounds)
    cut = min(cut, len(depth))
    stats = request_stats(depth[:cut], drafts[:cut], 4)
    left, num_drafts, drafted, per_position = cut - 1, 0, 0, np.zeros(4, int)
    for count, accepted in rounds:
        if left <= 0:
            break
        num_drafts += count > 0
        drafted += count
        per_position[: min(accepted, left)] += 1
        left -= accepted + 1
    assert stats == AcceptanceStats(
        num_drafts=num_drafts,
        num_draft_tokens=drafted,
        num_accepted_per_position=tuple(per_position.tolist()),
    )


def test_merging_adds_and_pads():
    one = request_stats(*records([(2, 1)]), 2)
    other = request_stats(*records([(3, 3), (3, 0)]), 3)
    both = merge_stats([one, other])
    assert both.num_drafts == 3
    assert both.num_accepted_per_position == (2, 1, 1)
    assert both.num_draft_tokens == 8
