"""`short_query_attention`: a float64 oracle, stale and poisoned slots, splits, meshes, compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelSharding, launch, short_query_attention
from pallas_kernels.short_query_attention.triton import short_query_attention_triton
from tests.kernels.counting import count_accesses


def oracle(query, keys, values, query_positions, key_positions, *, scale, window, sinks, soft_cap):
    """Row by row in float64: keys and values [B, S, KV, D], key_positions [B, S], -1 for none."""
    query, keys, values = (np.asarray(array, np.float64) for array in (query, keys, values))
    group = query.shape[2] // keys.shape[2]
    out = np.zeros_like(query)
    for batch, row, head in np.ndindex(query.shape[:3]):
        position, held = query_positions[batch, row], key_positions[batch]
        seen = (held >= 0) & (held <= position)
        if window is not None:
            seen &= held > position - window
        if not seen.any():
            continue
        scores = keys[batch, seen, head // group] @ query[batch, row, head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if sinks is not None:
            scores = np.append(scores, float(sinks[head]))
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: int(seen.sum())]
        out[batch, row, head] = weights @ values[batch, seen, head // group]
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Static shape of one program; positions, lengths and values are data."""

    requests: int = 2
    rows: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    slots: int = 150
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    cache: str = "contiguous"  # or "paged", "ring", "limited"
    splits: int | None = None
    dtype: str = "float32"


CASES = {
    "contiguous": Case(),
    "one row, wide head": Case(rows=1, heads=3, kv_heads=3, head_dim=80),
    "window, sinks, cap": Case(window=9, sinks=True, soft_cap=3.0, splits=3),
    "paged": Case(cache="paged", sinks=True, splits=2),
    "ring": Case(cache="ring", window=60, sinks=True, heads=8, kv_heads=1),
    "limited": Case(cache="limited", rows=33, requests=1, slots=300),
    "64 rows, 512 wide, window of 1": Case(
        requests=1, rows=64, heads=2, kv_heads=1, head_dim=512, slots=70, window=1
    ),
    "bfloat16": Case(dtype="bfloat16", heads=6, head_dim=32, sinks=True),
}


@functools.cache
def program(case: Case, implementation: str):
    keywords = {"window": case.window, "soft_cap": case.soft_cap, "scale": 0.3}

    def attend(query, keys, values, positions, table, held, limit, sinks):
        if implementation == "interpret":
            # The public function chooses the splits by the device; here the case does.
            return short_query_attention_triton(
                query,
                keys,
                values,
                positions,
                table,
                held,
                limit,
                sinks,
                splits=case.splits or 1,
                interpret=True,
                **keywords,
            )
        return short_query_attention(
            query,
            keys,
            values,
            positions,
            block_table=table,
            key_positions=held,
            num_valid=limit,
            sinks=sinks,
            implementation=implementation,
            **keywords,
        )

    return jax.jit(attend)


def make_arguments(case: Case, seed: int, longest: int):
    """Arguments of `program` and of the oracle; unreadable slots are poisoned with NaN."""
    generator = np.random.default_rng(seed)
    shape = (case.requests, case.rows, case.heads, case.head_dim)
    cache = (case.requests, case.slots, case.kv_heads, case.head_dim)
    query = (2 * generator.normal(size=shape)).astype(case.dtype)
    keys = generator.normal(size=cache).astype(case.dtype)
    values = generator.normal(size=cache).astype(case.dtype)
    sinks = generator.normal(size=case.heads).astype(case.dtype) if case.sinks else None
    ring = case.cache == "ring"
    last = generator.integers(0, 3 * case.slots if ring else case.slots, (case.requests, 1))
    last = np.minimum(last, longest)
    positions = last - np.arange(case.rows)[::-1]
    positions = np.where(generator.random(positions.shape) < 0.2, -1, np.maximum(positions, -1))
    if seed % 5 == 0:
        positions[0] = -1

    slot = np.broadcast_to(np.arange(case.slots), cache[:2])
    held = slot
    if ring:
        # Slot s holds the largest position at most last that is s modulo the slots, or none.
        held = last - (last - slot) % case.slots
        held = np.where(held >= 0, held, -1)
    limit = None
    if case.cache == "limited":
        limit = generator.integers(0, case.slots + 1, case.requests)
        held = np.where(slot < limit[:, None], held, -1)
    readable = (held >= 0) & (held <= positions.max(axis=1, keepdims=True))
    poison = np.where(readable[..., None, None], 1.0, np.nan).astype(case.dtype)
    poisoned = keys * poison, values * poison
    table = None
    if case.cache == "paged":
        size, pages = 5, case.slots // 5
        table = generator.permutation(case.requests * pages).reshape(case.requests, pages)
        scattered = []
        for array in poisoned:
            flat = np.empty((case.requests * pages, size, *cache[2:]), array.dtype)
            flat[table.reshape(-1)] = array.reshape(flat.shape)
            scattered.append(flat)
        poisoned = scattered
        # What no row may see need not be in the table at all.
        unused = ~readable.reshape(case.requests, pages, size).any(axis=2)
        table = np.where(unused, generator.choice([-1, 10**6], table.shape), table)

    def optional(array, wanted=True, dtype=jnp.int32):
        return jnp.asarray(array, dtype) if wanted and array is not None else None

    arguments = (
        jnp.asarray(query),
        *map(jnp.asarray, poisoned),
        jnp.asarray(positions, jnp.int32),
        optional(table),
        optional(held, ring),
        optional(limit),
        optional(sinks, dtype=case.dtype),
    )
    expected = oracle(
        query,
        keys,
        values,
        positions,
        held,
        scale=0.3,
        window=case.window,
        sinks=sinks,
        soft_cap=case.soft_cap,
    )
    return arguments, expected


def tolerance(case: Case, expected) -> float:
    """2e-6 of the largest output, growing with the square root of the reduction; 1e-2 in bf16."""
    if case.dtype == "bfloat16":
        return 1e-2 * max(np.abs(expected).max(), 1e-6)
    return 2e-6 * max((case.slots / 64) ** 0.5, 1) * max(np.abs(expected).max(), 1e-6)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16), longest=st.sampled_from([0, 40, 10**6]))
def test_equals_the_oracle(name, seed, longest):
    case = CASES[name]
    arguments, expected = make_arguments(case, seed, longest)
    for implementation in ("reference", "interpret"):
        found = np.asarray(program(case, implementation)(*arguments), np.float64)
        error = np.abs(found - expected).max()
        assert error <= tolerance(case, expected), f"{implementation}: {error:.2e}"


@st.composite
def drawn_cases(draw):
    kv_heads, cache = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["contiguous", "paged", "ring"])),
    )
    slots = draw(st.integers(1, 60)) * 5
    window = draw(st.one_of(st.none(), st.integers(1, slots)))
    return Case(
        requests=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, min(slots, 20))),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 64, 80, 96, 128, 256])),
        slots=slots,
        window=window,
        sinks=draw(st.booleans()),
        soft_cap=draw(st.sampled_from([None, 2.0, 50.0])),
        cache=cache,
        splits=draw(st.integers(1, 4)),
    )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(case=drawn_cases(), seed=st.integers(0, 2**16))
def test_drawn_shapes_equal_the_oracle(case, seed):
    arguments, expected = make_arguments(case, seed, 10**6)
    for implementation in ("reference", "interpret"):
        found = np.asarray(program(case, implementation)(*arguments), np.float64)
        assert np.abs(found - expected).max() <= tolerance(case, expected), implementation


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernel_equals_the_oracle(name):
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    case = CASES[name]
    for seed in range(5):
        arguments, expected = make_arguments(case, seed, 10**6)
        found = np.asarray(program(case, "triton")(*arguments), np.float64)
        assert np.abs(found - expected).max() <= tolerance(case, expected)


def test_padding_rows_are_exactly_zero(implementation):
    case = CASES["window, sinks, cap"]
    arguments, _ = make_arguments(case, 1, 10**6)
    arguments = list(arguments)
    arguments[3] = jnp.full_like(arguments[3], -1)
    assert not np.asarray(program(case, implementation)(*arguments)).any()


def test_long_chunks_go_by_blocks_of_rows():
    """A prefill chunk longer than the reference's row block, against the oracle on sampled rows."""
    case = Case(requests=1, rows=600, heads=2, kv_heads=1, head_dim=16, slots=640, window=300)
    generator = np.random.default_rng(0)
    query = generator.normal(size=(1, 600, 2, 16)).astype(np.float32)
    keys, values = generator.normal(size=(2, 1, 640, 1, 16)).astype(np.float32)
    positions = np.arange(20, 620)[None]
    positions[0, 590:] = -1
    found = program(case, "reference")(
        query, keys, values, jnp.asarray(positions, jnp.int32), None, None, None, None
    )
    rows = [0, 255, 256, 511, 512, 589, 599]
    expected = oracle(
        query[:, rows],
        keys,
        values,
        positions[:, rows],
        np.arange(640)[None],
        scale=0.3,
        window=300,
        sinks=None,
        soft_cap=None,
    )
    assert np.abs(found[:, rows] - expected).max() <= tolerance(case, expected)


def test_gradients():
    """By the public function, against finite differences of the float64 oracle."""
    case = Case(requests=1, rows=2, slots=6, head_dim=4, heads=2, kv_heads=1, sinks=True)
    generator = np.random.default_rng(3)
    query, cotangent = generator.normal(size=(2, 1, 2, 2, 4))
    keys, values = generator.normal(size=(2, 1, 6, 1, 4))
    sinks = generator.normal(size=2)
    positions = jnp.asarray([[2, 4]], jnp.int32)

    def loss(query, keys, values, sinks):
        out = short_query_attention(
            query, keys, values, positions, sinks=sinks, scale=0.3, soft_cap=2.0
        )
        return jnp.sum(out * cotangent.astype(np.float32))

    arrays = [query, keys, values, sinks]
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(
        *(array.astype(np.float32) for array in arrays)
    )

    def exact(query, keys, values, sinks):
        out = oracle(
            query,
            keys,
            values,
            np.asarray(positions),
            np.arange(case.slots)[None],
            scale=0.3,
            window=None,
            sinks=sinks,
            soft_cap=2.0,
        )
        return np.sum(out * cotangent)

    for number, array in enumerate(arrays):
        expected = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            for sign in (1, -1):
                moved = [value.copy() for value in arrays]
                moved[number][index] += sign * 1e-5
                expected[index] += sign * exact(*moved) / 2e-5
        np.testing.assert_allclose(found[number], expected, atol=2e-5)


def test_requests_and_heads_are_split_over_a_mesh_I11():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    case = Case(requests=2, heads=4, kv_heads=2, sinks=True)
    arguments, expected = make_arguments(case, 1, 10**6)
    by_head = NamedSharding(mesh, P("data", None, "tensor"))
    query, keys, values = (jax.device_put(array, by_head) for array in arguments[:3])
    out = jax.jit(
        functools.partial(
            short_query_attention,
            sharding=KernelSharding(mesh=mesh, batch="data", heads="tensor"),
            scale=0.3,
            implementation="interpret",
        )
    )(query, keys, values, arguments[3], sinks=arguments[7])
    assert out.sharding.is_equivalent_to(by_head, 4)
    assert np.abs(out - expected).max() <= tolerance(case, expected)


def test_reads_visible_keys_once():
    """Elements of keys and values loaded, against a count made from the positions alone."""
    case = Case(requests=3, rows=8, heads=16, kv_heads=2, slots=512, window=100)
    arguments, _ = make_arguments(case, 1, 10**6)
    _, counts = count_accesses(program.__wrapped__(case, "interpret"), *arguments)
    needed = 0
    for row in np.asarray(arguments[3]):
        live = row[row >= 0]
        if live.size:
            needed += live.max() + 1 - max(live.min() - case.window + 1, 0)
    # 8 rows x 8 heads of a group share one tile, so no key is loaded twice.
    least = int(needed) * case.kv_heads * case.head_dim
    assert counts["load", "keys"] == counts["load", "values"] == least
    assert counts["store", "out"] == arguments[0].size


@pytest.mark.parametrize("name", launch.all_launches("short_query_attention"))
@pytest.mark.slow
def test_every_tile_of_the_table(name):
    case = CASES["window, sinks, cap"]
    arguments, expected = make_arguments(case, 1, 10**6)
    entry = launch.all_launches("short_query_attention")[name]
    with launch.override("short_query_attention", entry):
        found = program.__wrapped__(case, "interpret")(*arguments)
    assert np.abs(found - expected).max() <= tolerance(case, expected)


def test_reports_what_does_not_fit():
    query, cache = jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 5, 2, 8))
    positions = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="a multiple of the 2 key-value heads, got 3"):
        short_query_attention(query[:, :, :3], cache, cache, positions)
    with pytest.raises(ValueError, match="float32 like the query"):
        short_query_attention(query, cache.astype(jnp.bfloat16), cache, positions)
    with pytest.raises(ValueError, match="a cache of 2 requests"):
        short_query_attention(query, cache[:1], cache[:1], positions)
    with pytest.raises(ValueError, match="window 0"):
        short_query_attention(query, cache, cache, positions, window=0)


def test_heads_that_no_tile_holds():
    """The default runs the reference; the kernel by name says why it cannot."""
    query, cache = jnp.ones((1, 1, 1, 1024)), jnp.ones((1, 2, 1, 1024))
    positions = jnp.zeros((1, 1), jnp.int32)
    np.testing.assert_allclose(short_query_attention(query, cache, cache, positions), query)
    with pytest.raises(NotImplementedError, match="no tile .* holds heads of 1024 float32"):
        short_query_attention(query, cache, cache, positions, implementation="triton")
