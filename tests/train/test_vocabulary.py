"""Token counts and the draft vocabulary's maps."""

import numpy as np
import pytest

from train.data.vocabulary import choose_vocabulary, count_tokens


def test_only_supervised_tokens_count():
    counts = count_tokens(np.int32([3, 1, 3, 2]), np.array([0, 1, 1, 1], bool), 5)
    assert counts.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("token", [-1, 5])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 5"):
        count_tokens(np.int32([1, token]), np.ones(2, bool), 5)


@pytest.mark.parametrize(
    "counts, size, kept",
    [
        ([5, 0, 9, 5, 1], 2, [0, 2]),  # a tie goes to the lower id
        ([0, 0, 9, 0, 0], 3, [0, 1, 2]),  # filled up with the lowest unused ids
        ([1, 2, 3, 4, 5], 3, [2, 3, 4]),  # ascending, not by count
        ([1, 2, 3], 3, [0, 1, 2]),
        ([0, 0, 7, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], 8, [0, 1, 2, 3, 4, 5, 6, 9]),
    ],
)
def test_choice_and_maps_D4(counts, size, kept):
    chosen = choose_vocabulary(np.array(counts), size)
    assert chosen.target_ids.tolist() == kept
    assert (np.arange(size) + chosen.d2t).tolist() == kept and chosen.d2t.dtype == np.int64
    assert np.flatnonzero(chosen.t2d).tolist() == kept and chosen.t2d.shape == (len(counts),)
    assert chosen.coverage == pytest.approx(np.array(counts)[kept].sum() / sum(counts))


@pytest.mark.parametrize("size", [0, 4])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"cannot have {size} entries; the target has 3"):
        choose_vocabulary(np.ones(3, np.int64), size)
