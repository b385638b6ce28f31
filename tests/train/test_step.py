"""One training step: bfloat16 computation over float32 parameters, and donated state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.train.training_cases import COD, NUM_ROWS, make_case
from train.objective import make_objective
from train.sampling import count_table
from train.step import init_state, make_step, peagle_gradients

RATE = 1e-4


@functools.cache
def one_step(dtype):
    """Parameters before, and the donated first state, the new one and the metrics of a step."""
    config, learned, frozen, head, rows, _ = make_case()
    cast = {n: v if n == "d2t" else v.astype(dtype) for n, v in frozen.items()}
    objective = make_objective(config, COD, NUM_ROWS, num_chunks=2, train_head=True, dtype=dtype)
    gradients = peagle_gradients(objective, jnp.asarray(count_table(COD, NUM_ROWS)))
    optimizer = optax.adamw(RATE)
    first = init_state(learned, optimizer, jax.random.key(7))
    batch = {
        "tokens": rows.tokens,
        "taps": rows.taps.astype(dtype),
        "last_hidden": rows.last_hidden,
        "loss_mask": rows.loss_mask,
        "document_ids": rows.document_ids,
        "numbers": jnp.arange(len(rows.tokens), dtype=jnp.int32),
    }
    step = make_step(gradients, optimizer)
    state, metrics = step(first, cast, head, jax.tree.map(lambda x: x[None], batch))
    return learned, first, state, metrics


def test_bfloat16_computes_over_float32_parameters_gradients_and_moments():
    learned, _, state, metrics = one_step(jnp.bfloat16)
    _, _, exact, wanted = one_step(jnp.float32)
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state.learned, state.moments))}
    assert kinds == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert int(metrics.sums.count) == int(wanted.sums.count)
    loss, exact_loss = float(metrics.sums.loss), float(wanted.sums.loss)
    # Close to float32 and not equal to it: the computation really is bfloat16.
    assert 0 < abs(loss / exact_loss - 1) < 0.05
    for name, before in learned.items():
        moved = np.asarray(state.learned[name]) - np.asarray(before)
        assert np.abs(moved).max() > 0, name
        # Adam's first moment is 0.1 x the gradient.
        ours, theirs = (np.ravel(s.moments[0].mu[name]) for s in (state, exact))
        cosine = ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs))
        assert cosine > 0.98, f"{name}: {cosine}"


def test_updates_too_small_for_bfloat16_are_kept():
    learned, _, state, _ = one_step(jnp.bfloat16)
    norm, new = np.asarray(learned["norm"]), np.asarray(state.learned["norm"])
    moved = np.abs(new - norm)
    assert moved.max() < 2 * RATE and (moved > RATE / 2).any()
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (norm, new)]
    kept = np.mean(rounded[0] == rounded[1])
    assert kept > 0.5, "most of these updates would be lost in bfloat16"


def test_the_state_is_donated():
    _, first, _, _ = one_step(jnp.float32)
    assert first.learned["norm"].is_deleted() and first.moments[0].mu["norm"].is_deleted()
