"""The shift: which token, state, label and weight share a row."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from train.alignment import PADDING, document_positions, drafter_rows, shift_rows

DRAWS = json.loads((Path(__file__).parents[1] / "data" / "peagle_draws.json").read_text())


def packed(documents):
    tokens = np.concatenate([d["tokens"] for d in documents]).astype(np.int32)
    mask = np.concatenate([d["loss_mask"] for d in documents]).astype(bool)
    ids = np.concatenate([np.full(len(d["tokens"]), i) for i, d in enumerate(documents)])
    return jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(ids, jnp.int32)


def test_E3_the_loss_mask_is_shifted_with_the_ids():
    tokens, mask, documents = shift_rows(
        jnp.int32([1, 2, 3, 4, 5]), jnp.array([0, 0, 1, 1, 1], bool), jnp.zeros(5, jnp.int32)
    )
    assert tokens.tolist() == [2, 3, 4, 5, 0]
    assert mask.tolist() == [False, True, True, True, False]
    assert int(mask.sum()) == 3
    assert documents.tolist() == [0, 0, 0, 0, PADDING]


def test_E4_triples_of_state_input_and_label():
    """State p, token p + 1 and the target's argmax at p + 1; for a sharp target, token p + 2.

    `last_hidden[i]` is the one-hot of token i + 1, as if the target always knew the next token.
    """
    ids = np.array([7, 3, 5, 1, 6])
    taps = jnp.arange(5, dtype=jnp.float32)[:, None] * jnp.ones((1, 2), jnp.float32)
    last = np.zeros((5, 8), np.float32)
    last[np.arange(4), ids[1:]] = 1
    rows = drafter_rows(
        jnp.int32(ids), taps, jnp.asarray(last), jnp.ones(5, bool), jnp.zeros(5, jnp.int32)
    )
    triples = [
        (int(rows.taps[p, 0]), int(rows.tokens[p]), int(rows.last_hidden[p].argmax()))
        for p in range(3)
    ]
    assert triples == [(0, 3, 5), (1, 5, 1), (2, 1, 6)]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4]
    # Depth d of anchor a takes the label of row a + d: the token d places on.
    labels = [int(rows.last_hidden[0 + depth].argmax()) for depth in range(3)]
    assert labels == [5, 1, 6]


@pytest.mark.parametrize("case", DRAWS)
def test_packed_documents_give_the_public_library_rows(case):
    """There each document is shifted alone and loses its last slot, then all are concatenated."""
    given = DRAWS[case]
    tokens, mask, documents = map(np.asarray, shift_rows(*packed(given["documents"])))
    kept = documents != PADDING
    rows = int(kept.sum())
    np.testing.assert_array_equal(tokens[kept], given["tokens"][:rows])
    np.testing.assert_array_equal(mask[kept], np.array(given["loss_mask"][:rows], bool))
    np.testing.assert_array_equal(documents[kept], given["document_ids"][:rows])
    assert set(given["document_ids"][rows:]) <= {PADDING}
    assert not mask[~kept].any()


def test_rows_of_packed_documents_never_take_the_next_document():
    tokens, mask, documents = shift_rows(
        jnp.int32([1, 2, 3, 4, 5, 0]),
        jnp.array([0, 1, 1, 1, 1, 0], bool),
        jnp.int32([0, 0, 1, 1, 1, PADDING]),
    )
    assert tokens.tolist() == [2, 0, 4, 5, 0, 0]
    assert mask.tolist() == [True, False, True, True, False, False]
    assert documents.tolist() == [0, PADDING, 1, 1, PADDING, PADDING]


def test_positions_restart_with_each_document():
    positions = document_positions(jnp.int32([0, 0, 0, 1, 2, 2, PADDING]))
    assert positions.tolist() == [0, 1, 2, 0, 0, 1, 0]
