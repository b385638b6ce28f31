"""Heads written by the public library speculators, and the draft logits it computed with them.

Each sampled element (anchor a, depth d) is drafted as at serving: the real rows of its document up
to a, then mask rows, under a plain causal mask by position. See tests/data/peagle/*/README.md.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from peagle_jax.checkpoints.drafter_files import load_drafter
from tests.models import drafter_oracle

DATA = Path(__file__).parent.parent / "data" / "peagle"
CASES = ["case_a", "case_b", "case_c", "case_c2"]
K = 4


def load(case: str):
    folder = DATA / case
    arrays = load_file(folder / "inputs.safetensors") | load_file(folder / "expected.safetensors")
    return load_drafter(folder / "draft", dtype=jnp.float32), arrays


@pytest.mark.parametrize("case", CASES)
def test_one_pass_drafts_equal_the_library_s_logits(case):
    drafter, arrays = load(case)
    documents, tokens = arrays["document_ids"][0], arrays["input_ids"][0]
    anchors = np.flatnonzero(documents >= 0)
    tokens, real, positions = serve_layout(drafter, tokens, documents, anchors)
    graph, state = nnx.split(drafter)
    logits = np.asarray(
        draft(graph, state, tokens, jnp.asarray(arrays["hidden_states"][0]), real, positions)
    )
    row = {anchor: index for index, anchor in enumerate(anchors)}
    compared = 0
    for element, (anchor, depth) in enumerate(
        zip(arrays["anchor_pos"], arrays["depth"], strict=True)
    ):
        if arrays["compare_mask"][element]:
            got = logits[row[anchor], anchor + depth]
            np.testing.assert_allclose(got, arrays["draft_logits"][element], atol=1e-4)
            compared += 1
    assert compared >= 58 - 6


def serve_layout(drafter, tokens, documents, anchors):
    """Rows [anchors, n + K - 1]: row p at position p; -1 where nothing is fed."""
    width = len(tokens) + K - 1
    row, anchor = np.arange(width)[None, :], anchors[:, None]
    padded = np.append(documents, np.full(K - 1, -1))
    real = (row <= anchor) & (padded[None, :] == documents[anchors][:, None])
    mask = (row > anchor) & (row < anchor + K)
    positions = np.where(real | mask, row, -1)
    fed = np.where(real, np.append(tokens, np.zeros(K - 1))[None, :], drafter.config.mask_token_id)
    return jnp.asarray(fed, jnp.int32), jnp.asarray(real), jnp.asarray(positions, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def draft(graph, state, tokens, taps, real, positions):
    drafter = nnx.merge(graph, state)
    rows = jnp.pad(drafter.fuse(taps), [(0, K - 1), (0, 0)])
    fused = jnp.where(real[:, :, None], rows[None], drafter.fused_mask()[None, None, :])
    return drafter.logits(drafter(tokens, fused, positions).hidden)


@pytest.mark.parametrize("case", CASES)
def test_oracle_equals_the_library_under_its_own_mask(case):
    """The float64 derivation, fed the library's dense mask, so that both oracles agree."""
    drafter, arrays = load(case)
    tensors = load_file(DATA / case / "draft" / "model.safetensors")
    config, keep = drafter.config, arrays["compare_mask"]
    rows = (arrays["anchor_pos"] + arrays["depth"])[keep]
    real = (arrays["depth"] == 0)[keep]
    taps = np.where(
        real[:, None], arrays["hidden_states"][0][rows], tensors["mask_hidden"].reshape(1, -1)
    )
    out = drafter_oracle.forward(
        tensors,
        config,
        np.where(real, arrays["input_ids"][0][rows], config.mask_token_id),
        drafter_oracle.fuse(tensors, config, taps),
        rows,
        arrays["attention_allowed"][keep][:, keep],
    )
    np.testing.assert_allclose(out.logits, arrays["draft_logits"][keep], atol=2e-5)


def test_draft_vocabulary_of_case_b():
    drafter, _ = load("case_b")
    marks = load_file(DATA / "case_b" / "draft" / "model.safetensors")["t2d"]
    np.testing.assert_array_equal(drafter.kept_ids(), np.flatnonzero(marks))
    assert drafter.config.norm_before_residual and drafter.config.mask_token_id == 77
