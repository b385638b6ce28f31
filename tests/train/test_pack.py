"""Truncation, bins and the layout of packed sequences."""

import numpy as np
import pytest

from train.data.pack import PADDING, Sample, lay_out, pack_rows, truncate, why_useless


def test_every_row_is_in_one_bin_that_it_fits():
    lengths = np.random.default_rng(0).integers(1, 130, 500)
    packing = pack_rows(lengths, 100, seed=3)
    assert packing.too_long == tuple(np.flatnonzero(lengths > 100))
    rows = sorted(row for b in packing.bins for row in b)
    assert rows == np.flatnonzero(lengths <= 100).tolist()
    assert all(sum(lengths[list(b)]) <= 100 for b in packing.bins)


def test_bins_are_filled_well_and_differ_by_seed_only():
    lengths = np.random.default_rng(1).integers(10, 60, 1000)
    first, again, other = (pack_rows(lengths, 256, seed=s) for s in (1, 1, 2))
    assert first == again != other
    assert lengths.sum() / (256 * len(first.bins)) > 0.95


def test_few_open_bins_still_place_everything():
    packing = pack_rows([5, 5, 5, 9, 1], 10, seed=0, open_bins=1)
    assert sorted(r for b in packing.bins for r in b) == list(range(5))


@pytest.mark.parametrize(
    "mask, reason",
    [
        ([1], "fewer than two tokens"),
        ([1, 0, 0], "no supervised token"),  # the first token is no row's input
        ([0, 0, 0], "no supervised token"),
        ([0, 0, 1], None),
    ],
)
def test_rows_that_teach_nothing(mask, reason):
    assert why_useless(np.zeros(len(mask), np.int32), np.array(mask, bool)) == reason


def test_truncation_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="3 tokens, but a loss mask of 2"):
        truncate([1, 2, 3], [True, True], 2)


def sample(*tokens, width=None):
    states = None
    if width:
        states = np.outer(tokens, np.ones(width)).astype(np.float32)
    return Sample(
        tokens=np.int32(tokens),
        loss_mask=np.array(tokens) % 2 == 1,
        taps=states,
        last_hidden=states,
    )


def test_layout_of_documents_side_by_side():
    out = lay_out([sample(1, 2, 3, width=2), sample(4, 5, width=2)], 7)
    assert out["tokens"].tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert out["loss_mask"].tolist() == [True, False, True, False, True, False, False]
    assert out["document_ids"].tolist() == [0, 0, 0, 1, 1, PADDING, PADDING]
    assert out["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0]
    np.testing.assert_array_equal(out["taps"][:, 1], [1, 2, 3, 4, 5, 0, 0])
    assert "taps" not in lay_out([sample(1, 2)], 4)


def test_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="5 tokens do not fit a sequence of 4"):
        lay_out([sample(1, 2, 3), sample(4, 5)], 4)
