"""The EAGLE-3 objective against drafting token by token with the drafter itself."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.models.drafter import init_drafter
from tests.golden import eagle3 as golden_eagle3
from tests.models.drafter_configs import small_drafter
from train.eagle3 import Unroll, step_weights, supervised_rows, unroll_loss
from train.parameters import Trained, build_drafter, parameters_of, split
from train.rows import TargetHead, TrainingRows

STEPS, ROWS = 3, 12
DOCUMENTS = (7, 4)  # and one row of padding


def make_case(**changes):
    config = small_drafter(num_layers=2, parallel_drafting=False, **changes)
    drafter = init_drafter(config, jax.random.key(1))
    learned, frozen = split(config, parameters_of(drafter), Trained(head=True), jnp.float32)
    rng = np.random.default_rng(1)
    ids = np.repeat([0, 1, -1], [*DOCUMENTS, ROWS - sum(DOCUMENTS)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*DOCUMENTS, 1)]).astype(np.int32)
    rows = TrainingRows(
        tokens=jnp.asarray(rng.integers(0, 31, (1, ROWS)), jnp.int32),
        taps=jnp.asarray(rng.standard_normal((1, ROWS, 36)), jnp.float32),
        last_hidden=jnp.asarray(rng.standard_normal((1, ROWS, 12)), jnp.float32),
        loss_mask=jnp.asarray((rng.random((1, ROWS)) < 0.8) & (ids >= 0)),
        document_ids=jnp.asarray(ids)[None],
        positions=jnp.asarray(positions)[None],
    )
    matrix = jnp.asarray(rng.standard_normal((12, 32)), jnp.float32)
    kept = jnp.arange(20, dtype=jnp.int32) + frozen["d2t"]
    return config, learned, frozen, TargetHead(matrix=matrix, of_draft=matrix[:, kept]), rows, kept


def brute_force(config, params, rows, head, kept):
    """Mean loss of each step and hits: every anchor drafts alone, row by row, on its own prefix."""
    drafter = build_drafter(config, params, jnp.float32)
    ids, mask, row_tokens = (
        np.asarray(x)[0] for x in (rows.document_ids, rows.loss_mask, rows.tokens)
    )
    starts = np.array([np.flatnonzero(ids == ids[p])[0] for p in range(ROWS)])
    anchors = np.flatnonzero(ids >= 0)
    # Sequence of an anchor: its document's rows up to it, then one row per step.
    width = max(DOCUMENTS) + STEPS
    at = np.arange(width)[None]
    length = (anchors - starts[anchors] + 1)[:, None]
    real = at < length
    source = np.where(real, starts[anchors][:, None] + at, 0)
    tokens = np.where(real, row_tokens[source], 0)
    fused = jnp.where(jnp.asarray(real)[..., None], drafter.fuse(rows.taps[0])[source], 0.0)
    who = np.arange(len(anchors))
    means, hits = [], np.zeros((STEPS, ROWS), bool)
    for step in range(STEPS):
        end = length[:, 0] - 1 + step
        positions = jnp.asarray(np.where(at <= end[:, None], at, -1), jnp.int32)
        out = drafter(jnp.asarray(tokens, jnp.int32), fused, positions)
        hidden = out.hidden[who, end]
        row = anchors + step
        scored = (row < ROWS) & (ids[np.minimum(row, ROWS - 1)] == ids[anchors])
        row = np.where(scored, row, 0)
        scored &= mask[row]
        full = rows.last_hidden[0][row] @ head.matrix
        target, draft = (jax.nn.log_softmax(x) for x in (full[:, kept], hidden @ params["head"]))
        loss = jnp.sum(jnp.exp(target) * (target - draft), -1)
        means.append(jnp.sum(jnp.where(jnp.asarray(scored), loss, 0.0)) / np.float32(scored.sum()))
        if not isinstance(draft, jax.core.Tracer):
            found = np.asarray(kept)[np.asarray(draft).argmax(-1)] == np.asarray(full).argmax(-1)
            hits[step, anchors] = found & scored
        if step + 1 < STEPS:
            following = np.minimum(anchors + step + 1, ROWS - 1)
            tokens[who, end + 1] = row_tokens[following]
            fused = fused.at[who, end + 1].set(out.feedback[who, end])
    return means, hits


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="llama"),
        pytest.param({"norm_output": True, "style": "qwen3"}, id="qwen3-norm-output",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_loss_and_gradients_equal_drafting_token_by_token(changes):
    config, learned, frozen, head, rows, kept = make_case(**changes)
    unroll = Unroll(config=config, num_steps=STEPS, decay=0.9, train_head=True)
    counts = jnp.stack(
        [jnp.sum(supervised_rows(rows, t)).astype(jnp.float32) for t in range(STEPS)]
    )
    weights = step_weights(unroll, counts)

    def ours(learned):
        total, sums = unroll_loss(unroll, learned, frozen, head, rows, weights)
        return total / sums.count.astype(jnp.float32), sums

    # What the oracle needs of the rows is closed over: its loops read it as numbers.
    def oracle(learned):
        means, _ = brute_force(config, {**frozen, **learned}, rows, head, kept)
        return functools.reduce(
            jnp.add, [mean * jnp.float32(0.9**t) for t, mean in enumerate(means)]
        )

    (loss, sums), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(learned)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(oracle))(learned)
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    for name, value in wanted_grads.items():
        scale = float(jnp.linalg.norm(value))
        assert scale > 0, f"{name} takes no part"
        assert float(jnp.linalg.norm(grads[name] - value)) / scale < 1e-5, name
    _, hits = brute_force(config, {**frozen, **learned}, rows, head, kept)
    np.testing.assert_array_equal(np.asarray(sums.correct), hits.sum(1))
    np.testing.assert_array_equal(np.asarray(sums.total), np.asarray(counts, np.int32))
    joint = np.logical_and.accumulate(hits) & np.asarray(rows.loss_mask)
    np.testing.assert_array_equal(np.asarray(sums.joint_correct), joint.sum(1))


def test_loss_gradients_and_counts_of_the_public_library():
    found = list(golden_eagle3.check(Path(__file__).parents[1] / "data" / "eagle3"))
    for what, difference, allowed in found:
        assert difference <= allowed, what
    assert len(found) > 10
