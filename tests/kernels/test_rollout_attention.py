"""Training attention against brute force: values, gradients, documents, windows, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.document_attention import document_attention
from pallas_kernels.rollout_attention import rollout_attention
from tests.kernels import attention_oracle as oracle

# (batch rows' document lengths, n): packed, with padding, one row, one document to the brim
PACKINGS = {
    "packed": (((23, 40, 9), (70,)), 80),
    "tiny": (((1,), (1, 1)), 3),
    "long": (((150, 33), (201,)), 201),
    "all_padding": (((), (5,)), 16),
}
IMPLEMENTATIONS = ["reference"]


def _arrays(seed, n, rows, heads=4, kv_heads=2, width=16, batch=2):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "q": draw(batch, rows, heads, width),
        "k": draw(batch, n, kv_heads, width),
        "v": draw(batch, n, kv_heads, width),
        "own_k": draw(batch, rows, kv_heads, width),
        "own_v": draw(batch, rows, kv_heads, width),
        "d_out": draw(batch, rows, heads, width),
    }


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def _document(q, k, v, d_out, ids, window, implementation):
    def run(q, k, v):
        return document_attention(
            q, k, v, ids, scale=0.3, window=window, implementation=implementation
        )

    out, pull = jax.vjp(run, q, k, v)
    return out, pull(d_out)


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def _rollout(arrays, anchors, depths, valid, ids, window, implementation):
    def run(q, k, v, own_k, own_v):
        return rollout_attention(
            q, k, v, own_k, own_v, anchors, depths, valid, ids,
            scale=0.3, window=window, implementation=implementation,
        )  # fmt: skip

    inputs = [arrays[name] for name in ("q", "k", "v", "own_k", "own_v")]
    out, pull = jax.vjp(run, *inputs)
    return out, pull(arrays["d_out"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", PACKINGS)
def test_document_attention(name, window, implementation):
    lengths, n = PACKINGS[name]
    ids = oracle.draw_packing(0, n=n, lengths=lengths, num_depths=1, capacity=1).document_ids
    x = _arrays(1, n, n)
    out, gradients = _document(
        x["q"], x["k"], x["v"], x["d_out"], ids, window=window, implementation=implementation
    )
    allowed = oracle.document_mask(ids, window)
    expected, _, _ = oracle.attention(x["q"], x["k"], x["v"], allowed, 0.3)
    oracle.assert_close(out, expected, np.float32, n, "output")
    assert np.all(np.asarray(out)[ids < 0] == 0)
    wanted = oracle.attention_gradients(x["q"], x["k"], x["v"], allowed, 0.3, x["d_out"])
    for what, found, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        oracle.assert_close(found, expected, np.float32, n, what)
        assert np.all(np.asarray(found)[ids < 0] == 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", PACKINGS)
def test_rollout_attention(name, window, implementation):
    lengths, n = PACKINGS[name]
    rows = 2 * n + 3
    packing = oracle.draw_packing(2, n=n, lengths=lengths, num_depths=8, capacity=rows)
    x = _arrays(3, n, rows)
    out, gradients = _rollout(
        x,
        packing.anchors,
        packing.depths,
        packing.valid,
        packing.document_ids,
        window=window,
        implementation=implementation,
    )
    allowed = oracle.rollout_mask(packing, window)
    keys = np.concatenate([x["k"], x["own_k"]], 1)
    values = np.concatenate([x["v"], x["own_v"]], 1)
    expected, _, _ = oracle.attention(x["q"], keys, values, allowed, 0.3)
    oracle.assert_close(out, expected, np.float32, n, "output")
    assert np.all(np.asarray(out)[~packing.valid] == 0)
    dq, dk, dv = oracle.attention_gradients(x["q"], keys, values, allowed, 0.3, x["d_out"])
    wanted = {"dq": dq, "dk": dk[:, :n], "dv": dv[:, :n], "d own k": dk[:, n:]}
    wanted["d own v"] = dv[:, n:]
    for (what, expected), found in zip(wanted.items(), gradients, strict=True):
        oracle.assert_close(found, expected, np.float32, n, what)


def test_padding_content_is_never_read():
    lengths, n = PACKINGS["packed"]
    packing = oracle.draw_packing(4, n=n, lengths=lengths, num_depths=4, capacity=150)
    x = _arrays(5, n, 150)
    call = functools.partial(
        _rollout, anchors=packing.anchors, depths=packing.depths, valid=packing.valid,
        ids=packing.document_ids, window=None, implementation="reference",
    )  # fmt: skip
    clean = call(x)
    dirty = {key: value.copy() for key, value in x.items()}
    for key in ("q", "own_k", "own_v"):
        dirty[key][~packing.valid] = 1e30
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(call(dirty)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_is_linear_in_rows():
    """Temporary memory of the gradient doubles, not quadruples, with twice the rows."""

    def temporaries(n):
        shape = jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, n), jnp.int32)
        lowered = _document.lower(
            shape, shape, shape, shape, ids, window=None, implementation="reference"
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.3 * temporaries(2048)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(window=0), "window=0"),
        (dict(heads=3), "do not divide"),
        (dict(dtype=jnp.bfloat16), "cast"),
    ],
    ids=["window", "heads", "dtype"],
)
def test_errors(change, message):
    q = jnp.zeros((1, 4, change.get("heads", 4), 8))
    k = jnp.zeros((1, 4, 2, 8), change.get("dtype", jnp.float32))
    ids = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=message):
        document_attention(q, k, k, ids, scale=1.0, window=change.get("window"))
