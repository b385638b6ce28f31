"""Training attention against brute force: values, gradients, documents, windows, padding, work."""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import launch, memory
from pallas_kernels.document_attention import document_attention
from pallas_kernels.interval_attention import intervals, schedule, triton
from pallas_kernels.launch import Launch
from pallas_kernels.rollout_attention import rollout_attention
from tests.kernels import attention_oracle as oracle

SCALE = 0.3
# One static shape; which documents and rollouts it holds is data. Neither is a multiple of a block.
N, M = 80, 163
# Document lengths of the two batch rows: packed, with padding, one row each, full, nothing at all.
PACKINGS = {
    "packed": ((23, 40, 9), (70,)),
    "short": ((1,) * 30, (2, 1, 1, 50)),
    "full": ((80,), (33, 47)),
    "nothing": ((), (5,)),
}
KERNELS = ("forward", "d_query", "d_keys")


@pytest.fixture(autouse=True)
def small_tiles():
    """Tiles small enough that every packing has several, of two sizes; same for all programs."""
    with contextlib.ExitStack() as stack:
        for kernel, rows, keys in zip(KERNELS, (32, 16, 16), (16, 16, 32), strict=True):
            entry = Launch(num_warps=4, num_stages=1, blocks={"rows": rows, "keys": keys})
            stack.enter_context(launch.override(f"interval_attention_{kernel}", entry))
        yield


def make_arrays(seed, n=N, rows=M, dtype=np.float32, heads=4, kv_heads=2, width=24, batch=2):
    rng = np.random.default_rng(seed)
    lengths = {"q": rows, "k": n, "v": n, "own_k": rows, "own_v": rows, "d_out": rows}
    return {
        name: rng.standard_normal(
            (batch, length, heads if name in ("q", "d_out") else kv_heads, width)
        ).astype(dtype)
        for name, length in lengths.items()
    }


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def run_documents(arrays, ids, *, window, implementation):
    def run(q, k, v):
        return document_attention(
            q, k, v, ids, scale=SCALE, window=window, implementation=implementation
        )

    out, pull = jax.vjp(run, arrays["q"], arrays["k"], arrays["v"])
    return out, pull(arrays["d_out"])


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def run_rollouts(arrays, anchors, depths, valid, ids, *, window, implementation):
    def run(*inputs):
        return rollout_attention(
            *inputs,
            anchors,
            depths,
            valid,
            ids,
            scale=SCALE,
            window=window,
            implementation=implementation,
        )

    inputs = [arrays[name] for name in ("q", "k", "v", "own_k", "own_v")]
    out, pull = jax.vjp(run, *inputs)
    return out, pull(arrays["d_out"])


def check_documents(arrays, ids, out, gradients, window, dtype=np.float32):
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    allowed = oracle.document_mask(ids, window)
    expected, _, _ = oracle.attention(q, k, v, allowed, SCALE)
    oracle.assert_close(out, expected, dtype, N, "output")
    assert not np.asarray(out)[ids < 0].any()
    wanted = oracle.attention_gradients(q, k, v, allowed, SCALE, arrays["d_out"])
    for what, found, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        oracle.assert_close(found, expected, dtype, N, what)
        assert not np.asarray(found)[ids < 0].any(), what


def check_rollouts(arrays, packing, out, gradients, window, dtype=np.float32):
    n = packing.document_ids.shape[1]
    allowed = oracle.rollout_mask(packing, window)
    keys = np.concatenate([arrays["k"], arrays["own_k"]], 1)
    values = np.concatenate([arrays["v"], arrays["own_v"]], 1)
    expected, _, _ = oracle.attention(arrays["q"], keys, values, allowed, SCALE)
    oracle.assert_close(out, expected, dtype, n, "output")
    assert not np.asarray(out)[~packing.valid].any()
    dq, dk, dv = oracle.attention_gradients(
        arrays["q"], keys, values, allowed, SCALE, arrays["d_out"]
    )
    wanted = {"dq": dq, "dk": dk[:, :n], "dv": dv[:, :n], "own dk": dk[:, n:], "own dv": dv[:, n:]}
    for (what, expected), found in zip(wanted.items(), gradients, strict=True):
        oracle.assert_close(found, expected, dtype, n, what)
    for index in (0, 3, 4):
        assert not np.asarray(gradients[index])[~packing.valid].any(), index


def rollouts(arrays, packing, **options):
    return run_rollouts(
        arrays, packing.anchors, packing.depths, packing.valid, packing.document_ids, **options
    )


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_documents(implementation, window):
    for seed, lengths in enumerate(PACKINGS.values()):
        packing = oracle.draw_packing(seed, n=N, lengths=lengths, num_depths=1, capacity=1)
        arrays = make_arrays(seed, rows=N)
        found = run_documents(
            arrays, packing.document_ids, window=window, implementation=implementation
        )
        check_documents(arrays, packing.document_ids, *found, window)


@pytest.mark.parametrize("window", [None, 5])
def test_rollouts(implementation, window):
    for seed, lengths in enumerate(PACKINGS.values()):
        packing = oracle.draw_packing(seed, n=N, lengths=lengths, num_depths=8, capacity=M)
        arrays = make_arrays(seed)
        found = rollouts(arrays, packing, window=window, implementation=implementation)
        check_rollouts(arrays, packing, *found, window)


def test_who_sees_whom_in_the_published_example_A6(implementation):
    """Values are one-hot in their element and all scores are equal: an output is what was seen."""
    anchors = [0, 1, 2, 3, 4, 5, 0, 1, 3, 4, 0, 3, 0]
    depths = [0] * 6 + [1] * 4 + [2] * 2 + [3]
    # Mask rows sorted by anchor, a rollout kept whole.
    order = sorted(range(6, 13), key=lambda element: (anchors[element], depths[element]))
    ids = np.full((2, N), -1, np.int32)
    ids[0, :6] = 0
    packing = oracle.Packing(
        ids, np.zeros((2, M), np.int32), np.zeros((2, M), np.int32), np.zeros((2, M), bool)
    )
    of_real, of_masked = (
        {name: np.zeros_like(array) for name, array in make_arrays(0, rows=rows).items()}
        for rows in (N, M)
    )
    for arrays in (of_real, of_masked):
        arrays["v"][0, range(6), :, range(6)] = 1
    for row, element in enumerate(order):
        packing.anchors[0, row], packing.depths[0, row] = anchors[element], depths[element]
        packing.valid[0, row] = True
        of_masked["own_v"][0, row, :, element] = 1
    options = {"window": None, "implementation": implementation}
    real, _ = run_documents(of_real, ids, **options)
    masked, _ = rollouts(of_masked, packing, **options)
    sees = {}
    for element, out in [*enumerate(real[0, :6]), *zip(order, masked[0], strict=False)]:
        for head in np.asarray(out):
            sees[element] = set(np.flatnonzero(head).tolist())
            share = [1 / len(sees[element])] * len(sees[element])
            np.testing.assert_allclose(head[sorted(sees[element])], share, rtol=1e-6)
    assert sum(map(len, sees.values())) == 50
    assert sees[9] == {0, 1, 2, 3, 4, 9}
    assert sees[11] == {0, 1, 2, 3, 8, 11}
    assert sees[12] == {0, 6, 10, 12}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 40), max_size=12),
    keep=st.floats(0.0, 1.0),
    skip=st.floats(0.0, 0.95),
    num_depths=st.integers(2, 20),
)
def test_any_packing(seed, lengths, keep, skip, num_depths):
    """The interpreted kernel on drawn documents and rollouts; no new program per draw."""
    fitting = [size for size, end in zip(lengths, np.cumsum(lengths), strict=True) if end <= N]
    packing = oracle.draw_packing(
        seed,
        n=N,
        lengths=(tuple(fitting), tuple(reversed(fitting))),
        num_depths=num_depths,
        capacity=M,
        keep=keep,
        skip=skip,
    )
    arrays = make_arrays(seed)
    found = rollouts(arrays, packing, window=5, implementation="interpret")
    check_rollouts(arrays, packing, *found, 5)


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
)
def test_bfloat16(implementation):
    packing = oracle.draw_packing(
        3, n=N, lengths=PACKINGS["packed"], num_depths=8, capacity=M, keep=0.9
    )
    arrays = make_arrays(3, dtype=jnp.bfloat16, heads=2, kv_heads=1, width=16, batch=2)
    found = rollouts(arrays, packing, window=None, implementation=implementation)
    check_rollouts(arrays, packing, *found, None, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_one_row(implementation):
    one = np.ones((2, 1), np.int32)
    packing = oracle.Packing(np.array([[0], [-1]]), 0 * one, one, np.array([[True], [False]]))
    arrays = make_arrays(1, n=1, rows=1)
    found = rollouts(arrays, packing, window=None, implementation=implementation)
    check_rollouts(arrays, packing, *found, None)


def test_padding_rows_are_never_read(implementation):
    """Mask rows of any content in the queries, and another document's keys, change nothing."""
    packing = oracle.draw_packing(4, n=N, lengths=PACKINGS["packed"], num_depths=8, capacity=M)
    arrays = make_arrays(5)
    dirty = {name: array.copy() for name, array in arrays.items()}
    for name in ("q", "own_k", "own_v", "d_out"):
        dirty[name][~packing.valid] = 1e15
    options = {"window": None, "implementation": implementation}
    for clean, found in zip(
        jax.tree.leaves(rollouts(arrays, packing, **options)),
        jax.tree.leaves(rollouts(dirty, packing, **options)),
        strict=True,
    ):
        np.testing.assert_array_equal(clean, found)


def test_documents_do_not_mix(implementation):
    """Perturbing one document leaves every other's outputs and gradients bit-identical."""
    packing = oracle.draw_packing(6, n=N, lengths=PACKINGS["packed"], num_depths=8, capacity=M)
    arrays = make_arrays(7)
    changed = {name: array.copy() for name, array in arrays.items()}
    first = slice(0, 23)
    of_first = packing.valid[0] & (packing.anchors[0] < 23)
    for name in ("k", "v"):
        changed[name][0, first] += 1
    for name in ("q", "own_k", "own_v", "d_out"):
        changed[name][0, of_first] += 1
    options = {"window": None, "implementation": implementation}
    before = rollouts(arrays, packing, **options)
    after = rollouts(changed, packing, **options)
    others = [~of_first, ~of_first, np.arange(N) >= 23, np.arange(N) >= 23, ~of_first, ~of_first]
    for left, right, keep in zip(
        jax.tree.leaves(before), jax.tree.leaves(after), others, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(left)[0, keep], np.asarray(right)[0, keep])
        np.testing.assert_array_equal(left[1], right[1])


def test_memory_is_linear_in_rows():
    """Temporary memory of the gradient doubles, not quadruples, with twice the rows."""

    def temporaries(n):
        shape = jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32)
        arrays = dict.fromkeys(("q", "k", "v", "d_out"), shape)
        ids = jax.ShapeDtypeStruct((1, n), jnp.int32)
        lowered = run_documents.lower(arrays, ids, window=None, implementation="reference")
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


# --- counted work -------------------------------------------------------------------------------

# Two batch rows each: documents' lengths, share of each without rollouts (a prompt), window.
WORKLOADS = {
    "one_document": (((1024,), (700,)), 0.0, None),
    "packed": (((300, 150, 400, 90), (512, 512)), 0.0, None),
    "prompts": (((500, 524), (200, 100, 300, 250, 174)), 0.7, None),
    "window": (((1024,), (400, 600)), 0.0, 128),
    "prompts_window": (((350, 250, 300), (124, 800)), 0.8, 64),
}


def _needed(allowed, tile, block):
    """(tile of rows, block of keys) pairs with an allowed pair, from the dense mask [M, S]."""
    rows, keys = allowed.shape
    padded = np.zeros((-(-rows // tile) * tile, -(-keys // block) * block), bool)
    padded[:rows, :keys] = allowed
    return padded.reshape(-1, tile, padded.shape[1] // block, block).any((1, 3)).sum()


def _visits(function, *arguments):
    """Result of an interpreted kernel; how often it loaded each operand, and elements stored."""
    visits = collections.Counter()

    def observe(kind, label, elements):
        visits[kind, label] += elements if kind == "store" else 1

    with memory.observing(observe):
        result = jax.block_until_ready(jax.jit(lambda *values: function(*values))(*arguments))
        jax.effects_barrier()
    return result, visits


@functools.partial(jax.jit, static_argnames="window")
def _rollout_intervals(*rows, window):
    return intervals.rollout_intervals(*rows, window)


def _intervals(packing, window):
    rows = (packing.anchors, packing.depths, packing.valid, packing.document_ids)
    return _rollout_intervals(*rows, window=window)


@pytest.fixture
def packed_workload(request):
    lengths, skip, window = WORKLOADS[request.param]
    rows = 3000
    packing = oracle.draw_packing(
        11, n=1024, lengths=lengths, num_depths=8, capacity=rows, keep=0.7, skip=skip
    )
    return packing, oracle.rollout_mask(packing, window), window


@pytest.mark.parametrize("packed_workload", WORKLOADS, indirect=True)
def test_scheduled_blocks(packed_workload):
    """The schedules at the launch table's tiles: at most 1.15 times the blocks that are needed, and
    every block that is."""
    packing, allowed, window = packed_workload
    n = packing.document_ids.shape[1]
    visible = _intervals(packing, window)
    prefix, own = allowed[..., :n], allowed[..., n:]
    for tile, block in ((128, 64), (64, 32)):
        found = _schedules(visible, n=n, tile=tile, block=block)
        forward, *backward = (np.asarray(work) for work in found)
        spans = np.maximum(forward[..., 1::2] - forward[..., ::2], 0).sum()
        needed = [sum(_needed(m, tile, block) for m in part) for part in (prefix, own)]
        assert sum(needed) <= spans <= 1.15 * sum(needed), (tile, block, spans, needed)
        for work, least in zip(backward, needed, strict=True):
            spans = np.sum(work[..., 1] - work[..., 0])
            assert least <= spans <= 1.15 * least, (tile, block, spans, least)


@functools.partial(jax.jit, static_argnames=("n", "tile", "block"))
def _schedules(visible, *, n, tile, block):
    cut = {"tile": tile, "block": block}
    rows = visible[0].shape[1]
    return (
        schedule.tile_schedule(*visible, **cut),
        schedule.block_schedule(*visible[:2], keys=n, **cut),
        schedule.block_schedule(*visible[2:], keys=rows, **cut),
    )


@pytest.mark.parametrize("packed_workload", ["packed"], indirect=True)
def test_visited_blocks(packed_workload):
    """What the interpreted kernels load agrees with the dense mask, forward and backward."""
    packing, allowed, window = packed_workload
    n, rows = packing.document_ids.shape[1], packing.anchors.shape[1]
    visible = _intervals(packing, window)
    x = make_arrays(0, n=n, rows=rows, heads=1, kv_heads=1, width=16)
    x = jax.tree.map(jnp.asarray, x)
    own = (x["own_k"], x["own_v"], *visible[2:])
    arguments = (x["q"], x["k"], x["v"], *visible[:2], own)
    prefix, own_part = allowed[..., :n], allowed[..., n:]
    with contextlib.ExitStack() as stack:
        for kernel in KERNELS:
            entry = Launch(num_warps=4, num_stages=1, blocks={"rows": 128, "keys": 64})
            stack.enter_context(launch.override(f"interval_attention_{kernel}", entry))
        forward = functools.partial(triton.forward, scale=SCALE, interpret=True)
        (out, lse), visits = _visits(forward, *arguments)
        for label, part in (("k", prefix), ("own_k", own_part)):
            needed = sum(_needed(m, 128, 64) for m in part)
            assert needed <= visits["load", label] <= 1.15 * needed, label
        # Every element of every output once and nothing else: none is left poisoned, none is hit
        # outside. (3,000 rows are no multiple of a tile.)
        assert (visits["store", "out"], visits["store", "lse"]) == (out.size, lse.size)
        backward = functools.partial(triton.backward, scale=SCALE, interpret=True)
        _, visits = _visits(backward, *arguments, out, lse, x["d_out"], jnp.zeros_like(lse))
        # Queries: once per tile in dQ, then once per visited pair in the two kernels of dK and dV.
        tiles = 2 * -(-rows // 128)
        needed = sum(_needed(m, 128, 64) for part in (prefix, own_part) for m in part)
        assert needed <= visits["load", "q"] - tiles <= 1.15 * needed
        assert visits["store", "d_q"] == x["q"].size
        for name in ("k", "v"):
            assert visits["store", f"d_{name}"] == x[name].size + x[f"own_{name}"].size
