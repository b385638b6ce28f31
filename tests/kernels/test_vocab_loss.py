"""The vocabulary loss against dense float64: every loss, chunking, policy and layout."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import launch
from pallas_kernels.launch import Launch
from pallas_kernels.vocab_loss import LOSSES, target_argmax, vocab_loss
from pallas_kernels.vocab_loss.losses import Statistics
from tests.kernels import vocab_oracle
from tests.kernels.closeness import tolerance
from tests.kernels.counting import count_accesses

R, H, HT, V, VD = 21, 24, 40, 157, 61
VALUES = ("loss_sum", "weight_sum", "row_losses", "acceptance")
CHOICES = ("agreement", "target_argmax", "in_draft_vocabulary")


@pytest.fixture(autouse=True)
def small_tiles():
    """Tiles that divide neither rows, nor vocabulary, nor hidden sizes."""
    with contextlib.ExitStack() as stack:
        for kernel, columns in (("statistics", 16), ("derivative", 32)):
            blocks = {"rows": 16, "columns": columns, "depth": 16}
            entry = Launch(num_warps=4, num_stages=1, blocks=blocks)
            stack.enter_context(launch.override(f"vocab_loss_{kernel}", entry))
        yield


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
    loss="kl", cap=None, outside="renormalise", chunks=(None, None), trainable=True,
    transposed=False, implementation="reference",
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


def _compare(found, gradients, expected, weights, trainable=True, dtype=np.float32, allow=None):
    """Within the tolerance of a sum over the target's vocabulary.

    `allow`: what to multiply the tolerance of a quantity by, where the question is ill-conditioned.
    """
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
        bound = tolerance(value, V, dtype) * (allow(name, value) if allow else 1.0)
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64), value, rtol=0, atol=bound, err_msg=name
        )


def _cases(quick: dict[str, tuple[str, ...]], names) -> list:
    """(implementation, name) of all names; those not quick are slow: interpreting compiles long."""
    return [
        pytest.param(
            implementation,
            name,
            marks=() if name in quick[implementation] else pytest.mark.slow,
            id=f"{implementation}-{name}",
        )
        for implementation in quick
        for name in names
    ]


QUICK_LOSSES = {"reference": tuple(LOSSES), "interpret": ("kl", "lk_hybrid")}


@pytest.mark.parametrize("implementation, loss", _cases(QUICK_LOSSES, LOSSES))
def test_losses_and_gradients(implementation, loss):
    """In chunks that divide neither rows nor vocabulary."""
    arrays = _arrays()
    found, gradients = _run(
        *arrays, loss=loss, cap=6.0, chunks=(8, 48), implementation=implementation
    )
    expected = vocab_oracle.evaluate(*arrays, loss=loss, cap=6.0)
    assert 0 < expected["agreement"].mean() < 1
    assert 0 < expected["in_draft_vocabulary"].mean() < 1
    _compare(found, gradients, expected, arrays[5])


OPTIONS = {
    "drop": dict(outside="drop"),
    "drop_tv": dict(outside="drop", loss="tv", chunks=(5, 7)),
    "tied_layout": dict(transposed=True, chunks=(64, 20)),
    "frozen": dict(trainable=False, chunks=(1, 61)),
    "same_vocabulary": dict(pruned=False, cap=30.0, chunks=(16, 50)),
    "one_row": dict(rows=1),
}
QUICK_OPTIONS = {
    "reference": ("drop", "tied_layout", "frozen", "same_vocabulary", "one_row"),
    "interpret": ("tied_layout", "same_vocabulary"),
}


@pytest.mark.parametrize("implementation, name", _cases(QUICK_OPTIONS, OPTIONS))
def test_options(implementation, name):
    option = dict(OPTIONS[name])
    arrays = _arrays(7, pruned=option.pop("pruned", True), rows=option.pop("rows", R))
    found, gradients = _run(*arrays, implementation=implementation, **option)
    told = {key: option[key] for key in ("loss", "cap", "outside") if key in option}
    expected = vocab_oracle.evaluate(*arrays, **{"loss": "kl", **told})
    _compare(found, gradients, expected, arrays[5], option.get("trainable", True))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 8.0]),
    used=st.floats(0.0, 1.0),
    shift=st.sampled_from([-60.0, 0.0, 60.0]),
)
def test_any_values(seed, scale, used, shift):
    """The interpreted kernel on drawn logits: flat, peaked, far from zero, few or no rows used."""
    arrays = list(_arrays(seed))
    rng = np.random.default_rng(seed)
    arrays[0] = arrays[0] * np.float32(scale)
    # A constant on all draft logits: softmax does not see it, running maxima must not either.
    arrays[0][:, 0] = 1.0
    arrays[1][0] = shift
    arrays[5] = np.where(rng.random(R) < used, arrays[5], 0.0).astype(np.float32)
    found, gradients = _run(*arrays, loss="kl", cap=6.0, chunks=(8, 48), implementation="interpret")
    expected = vocab_oracle.evaluate(*arrays, loss="kl", cap=6.0)
    # Equal draft logits agree or not by rounding alone.
    expected["agreement"] = np.asarray(found.agreement) if scale < 1 else expected["agreement"]

    def allow(name, value):
        # float32 holds a logit of 60 to 4e-6, which is the relative error of exp of it. In d_hidden
        # the shift's head row adds up to nothing, each term 60 times a probability's error.
        factor = max(1.0, expected["largest_logit"] / 8)
        if name == "d_hidden" and shift:
            factor *= 3.0 * np.max(expected["d_hidden_terms"]) / max(np.max(np.abs(value)), 1e-6)
        return factor

    _compare(found, gradients, expected, arrays[5], allow=allow)


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
)
def test_bfloat16(implementation):
    arrays = [
        x.astype(jnp.bfloat16) if np.issubdtype(x.dtype, np.floating) and x.ndim == 2 else x
        for x in _arrays(8)
    ]
    found, gradients = _run(*arrays, loss="kl", chunks=(8, 48), implementation=implementation)
    expected = vocab_oracle.evaluate(*arrays, loss="kl")
    _compare(found, gradients, expected, arrays[5], dtype=jnp.bfloat16)


def test_values_without_gradient_are_the_same():
    arrays = _arrays(3)
    with_gradient, _ = _run(*arrays, cap=6.0, chunks=(8, 48))
    alone = functools.partial(vocab_loss, target_soft_cap=6.0, row_chunk=8, vocab_chunk=48)
    alone = jax.jit(alone)(*arrays)
    for name in VALUES + CHOICES:
        np.testing.assert_allclose(
            getattr(alone, name), getattr(with_gradient, name), rtol=1e-6, err_msg=name
        )


def test_precomputed_argmax_and_selected_head():
    arrays = _arrays(4)

    @jax.jit
    def both(h, w_draft, g, w_target, ids, weights):
        best = target_argmax(g, w_target, row_chunk=8, vocab_chunk=50)
        whole = vocab_loss(h, w_draft, g, w_target, ids, weights)
        selected = vocab_loss(
            h, w_draft, g, w_target[:, ids], ids, weights,
            target_argmax=best, target_head_selected=True,
        )  # fmt: skip
        return best, whole, selected

    best, whole, selected = both(*arrays)
    expected = (arrays[2].astype(np.float64) @ arrays[3]).argmax(1)
    np.testing.assert_array_equal(best, expected)
    for name in VALUES:
        np.testing.assert_allclose(getattr(whole, name), getattr(selected, name), rtol=1e-6)
    used = arrays[5] != 0
    for name in CHOICES:
        np.testing.assert_array_equal(
            getattr(whole, name)[used], getattr(selected, name)[used], err_msg=name
        )


def test_unused_rows_may_hold_anything():
    arrays = _arrays(5)
    h, g, weights = arrays[0].copy(), arrays[2].copy(), arrays[5]
    h[weights == 0], g[weights == 0] = np.nan, np.inf
    options = {"cap": 6.0, "chunks": (8, 48)}
    clean, clean_gradients = _run(*arrays, **options)
    dirty, dirty_gradients = _run(h, arrays[1], g, *arrays[3:], **options)
    for name in VALUES:
        np.testing.assert_array_equal(getattr(clean, name), getattr(dirty, name), err_msg=name)
    for a, b in zip(clean_gradients, dirty_gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_row_counts():
    arrays = _arrays(6)[:5] + (np.zeros(R, np.float32),)
    found, gradients = _run(*arrays, cap=6.0, chunks=(8, 48))
    assert float(found.loss_sum) == 0 and float(found.weight_sum) == 0
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_the_kernels_write_every_element_once():
    """And nothing else: no element is left poisoned, none is hit outside."""
    arrays = _arrays()
    rows, columns = 24, 48  # three chunks of 8 rows; two of 48 columns, the second moved back

    def run(*arrays):
        return _run.__wrapped__(*arrays, chunks=(8, columns), implementation="interpret")

    _, counts = count_accesses(run, *arrays)
    stored = {label: count for (kind, label), count in counts.items() if kind == "store"}
    assert stored.pop("dz") == rows * columns * 2
    # One number per row, chunk of columns and block of 32 of them.
    assert stored.pop("acceptance") == rows * 2 * 2
    # The 61 columns are four blocks of 16, each a split of its own.
    assert stored == dict.fromkeys(Statistics._fields, rows * 4)


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
