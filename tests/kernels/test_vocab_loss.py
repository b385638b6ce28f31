"""The vocabulary loss against dense float64: every loss, chunking, policy and layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.vocab_loss import LOSSES, target_argmax, vocab_loss
from tests.kernels import vocab_oracle

IMPLEMENTATIONS = ["reference"]
R, H, HT, V, VD = 21, 24, 40, 157, 61
VALUES = ("loss_sum", "weight_sum", "row_losses", "acceptance")
CHOICES = ("agreement", "target_argmax", "in_draft_vocabulary")


def _arrays(seed=0, *, pruned=True, rows=R):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(V)[:VD]).astype(np.int32)
    # Tied to the target's logits in part, so that argmaxes agree in some rows.
    g = rng.standard_normal((rows, HT)).astype(np.float32)
    w_target = rng.standard_normal((HT, V)).astype(np.float32)
    h = g[:, :H] + 0.5 * rng.standard_normal((rows, H)).astype(np.float32)
    w_draft = w_target[:H, ids if pruned else slice(None)]
    w_draft = w_draft + 0.3 * rng.standard_normal(w_draft.shape).astype(np.float32)
    weights = rng.uniform(0.1, 2.0, rows).astype(np.float32)
    weights[rng.permutation(rows)[: rows // 4]] = 0.0
    return h, w_draft, g, w_target, (ids if pruned else None), weights


@functools.partial(
    jax.jit,
    static_argnames=(
        "loss",
        "cap",
        "outside",
        "chunks",
        "trainable",
        "transposed",
        "implementation",
    ),
)
def _run(
    h, w_draft, g, w_target, ids, weights, *,
    loss, cap=None, outside="renormalise", chunks=(None, None), trainable=True, transposed=False,
    implementation="reference",
):  # fmt: skip
    def of(h, w_draft):
        found = vocab_loss(
            h, w_draft, g, w_target.T if transposed else w_target, ids, weights,
            loss=loss, target_soft_cap=cap, outside=outside, head_trainable=trainable,
            target_head_transposed=transposed, row_chunk=chunks[0], vocab_chunk=chunks[1],
            implementation=implementation,
        )  # fmt: skip
        return 3.0 * found.loss_sum, found

    gradients, found = jax.grad(of, argnums=(0, 1), has_aux=True)(h, w_draft)
    return found, gradients


def _compare(found, gradients, expected, weights, trainable=True, bound=1.0):
    used = weights != 0
    for name in CHOICES:
        np.testing.assert_array_equal(
            np.asarray(getattr(found, name))[used], expected[name][used], err_msg=name
        )
    wanted = {name: expected[name] for name in VALUES}
    wanted["d_hidden"] = 3.0 * expected["d_hidden"]
    wanted["d_head"] = 3.0 * expected["d_head"] * trainable
    got = {name: getattr(found, name) for name in VALUES}
    got["d_hidden"], got["d_head"] = gradients
    for name, value in wanted.items():
        scale = max(1.0, np.max(np.abs(value)))
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64),
            value,
            rtol=0,
            atol=bound * 4e-6 * scale,
            err_msg=name,
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunks", [(None, None), (8, 16)], ids=["whole", "ragged_chunks"])
def test_losses_and_gradients(loss, chunks, implementation):
    arrays = _arrays()
    found, gradients = _run(
        *arrays, loss=loss, cap=6.0, chunks=chunks, implementation=implementation
    )
    expected = vocab_oracle.evaluate(*arrays, loss=loss, cap=6.0)
    assert 0 < expected["agreement"].mean() < 1
    assert 0 < expected["in_draft_vocabulary"].mean() < 1
    _compare(found, gradients, expected, arrays[5])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "option",
    [
        dict(outside="drop"),
        dict(outside="drop", loss="tv", chunks=(5, 7)),
        dict(transposed=True, chunks=(64, 20)),
        dict(trainable=False, chunks=(1, 61)),
        dict(pruned=False, cap=30.0, chunks=(16, 50)),
        dict(rows=1),
    ],
    ids=["drop", "drop_tv", "tied_layout", "frozen", "same_vocabulary", "one_row"],
)
def test_options(option, implementation):
    option = dict(option)
    arrays = _arrays(7, pruned=option.pop("pruned", True), rows=option.pop("rows", R))
    option.setdefault("loss", "kl")
    found, gradients = _run(*arrays, implementation=implementation, **option)
    told = {key: option[key] for key in ("loss", "cap", "outside") if key in option}
    expected = vocab_oracle.evaluate(*arrays, **told)
    _compare(found, gradients, expected, arrays[5], option.get("trainable", True))


def test_values_without_gradient_are_the_same():
    arrays = _arrays(3)
    with_gradient, _ = _run(*arrays, loss="kl", chunks=(8, 16))
    alone = jax.jit(functools.partial(vocab_loss, row_chunk=8, vocab_chunk=16))(*arrays)
    for name in VALUES + CHOICES:
        np.testing.assert_allclose(
            getattr(alone, name), getattr(with_gradient, name), rtol=1e-6, err_msg=name
        )


def test_precomputed_argmax_and_selected_head():
    h, w_draft, g, w_target, ids, weights = map(jnp.asarray, _arrays(4))
    best = target_argmax(g, w_target, row_chunk=8, vocab_chunk=50)
    np.testing.assert_array_equal(
        best, (np.asarray(g, np.float64) @ np.asarray(w_target)).argmax(1)
    )
    whole = vocab_loss(h, w_draft, g, w_target, ids, weights)
    selected = vocab_loss(
        h, w_draft, g, w_target[:, ids], ids, weights,
        target_argmax=best, target_head_selected=True,
    )  # fmt: skip
    for name in VALUES:
        np.testing.assert_allclose(getattr(whole, name), getattr(selected, name), rtol=1e-6)
    used = weights != 0
    for name in CHOICES:
        np.testing.assert_array_equal(
            getattr(whole, name)[used], getattr(selected, name)[used], err_msg=name
        )


def test_unused_rows_may_hold_anything():
    arrays = _arrays(5)
    h, g, weights = arrays[0].copy(), arrays[2].copy(), arrays[5]
    h[weights == 0], g[weights == 0] = np.nan, np.inf
    clean, clean_gradients = _run(*arrays, loss="kl")
    dirty, dirty_gradients = _run(h, arrays[1], g, *arrays[3:], loss="kl")
    for name in VALUES:
        np.testing.assert_array_equal(getattr(clean, name), getattr(dirty, name), err_msg=name)
    for a, b in zip(clean_gradients, dirty_gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_row_counts():
    arrays = _arrays(6)[:5] + (np.zeros(R, np.float32),)
    found, gradients = _run(*arrays, loss="kl")
    assert float(found.loss_sum) == 0 and float(found.weight_sum) == 0
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_no_array_of_rows_times_vocabulary():
    """Temporaries stay far below one [R, Vd] float32 array when chunked; 10,007 is prime."""
    rows, vocab = 2048, 10_007
    shapes = [(rows, 16), (16, vocab), (rows, 16), (16, vocab)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    weights = jax.ShapeDtypeStruct((rows,), jnp.float32)
    lowered = _run.lower(*arrays, None, weights, loss="kl", chunks=(128, 1024), trainable=True)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < rows * vocab * 4 / 8


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(loss="mse"), "choose one of kl"),
        (dict(outside="keep"), "renormalise, drop"),
        (dict(target_head_selected=True), "needs draft_token_ids and target_argmax"),
        (dict(target_head_transposed=True), "wide"),
    ],
    ids=["loss", "outside", "selected", "layout"],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        vocab_loss(*map(jnp.asarray, _arrays()), **change)
