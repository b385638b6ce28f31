"""`fill_hidden`: a NumPy oracle, poison, gradients, counted work, meshes, compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelSharding, fill_hidden, fill_hidden_tile, launch
from pallas_kernels.fill_hidden import shapes
from tests.kernels.counting import count_accesses, total

# rows of the target, draft rows, hidden size: none a multiple of a block, a single row, one column.
SIZES = [(13, 21, 40), (1, 1, 1), (5, 9, 130)]


def oracle(hidden, mask_hidden, source, is_mask):
    out = np.zeros((len(source), hidden.shape[1]), hidden.dtype)
    for row, (old, masked) in enumerate(zip(source, is_mask, strict=True)):
        if masked:
            out[row] = mask_hidden
        elif 0 <= old < len(hidden):
            out[row] = hidden[old]
    return out


@functools.cache
def program(implementation: str):
    return jax.jit(functools.partial(fill_hidden, implementation=implementation))


@pytest.mark.parametrize("size", SIZES, ids=str)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16), masks=st.sampled_from([0.0, 0.5, 1.0]))
def test_equals_the_oracle_I5(size, seed, masks):
    check(size, seed, masks)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 700)),
    seed=st.integers(0, 2**16),
)
def test_drawn_shapes_equal_the_oracle(size, seed):
    check(size, seed, 0.4)


def check(size, seed, masks):
    rows, draft_rows, width = size
    generator = np.random.default_rng(seed)
    hidden = generator.normal(size=(rows, width)).astype(np.float32)
    mask_hidden = generator.normal(size=width).astype(np.float32)
    source = generator.integers(-2, rows + 2, draft_rows).astype(np.int32)
    source[generator.random(draft_rows) < 0.1] = np.iinfo(np.int32).min
    is_mask = generator.random(draft_rows) < masks
    # Rows that no draft row takes hold poison.
    unused = np.setdiff1d(np.arange(rows), source[~is_mask])
    expected = oracle(hidden, mask_hidden, source, is_mask)
    hidden[unused] = np.nan
    for implementation in ("reference", "interpret"):
        found = program(implementation)(hidden, mask_hidden, source, is_mask)
        np.testing.assert_array_equal(found, expected, implementation)


@pytest.mark.parametrize("name", launch.all_launches("fill_hidden"))
def test_every_tile_of_the_table(name):
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(7, 1100)).astype(jnp.bfloat16)
    source = generator.integers(-1, 7, 11).astype(np.int32)
    is_mask = generator.random(11) < 0.4
    with launch.override("fill_hidden", launch.all_launches("fill_hidden")[name]):
        found = jax.jit(functools.partial(fill_hidden, implementation="interpret"))(
            hidden, hidden[3], source, is_mask
        )
    np.testing.assert_array_equal(found, oracle(hidden, hidden[3], source, is_mask))


def test_gradients(implementation):
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(4, 6)).astype(np.float32)
    source = jnp.asarray([2, 2, -1, 0, 9], jnp.int32)
    is_mask = jnp.asarray([False, False, False, True, False])
    weights = generator.normal(size=(5, 6)).astype(np.float32)

    def loss(hidden, mask_hidden):
        rows = fill_hidden(hidden, mask_hidden, source, is_mask, implementation=implementation)
        return jnp.sum(rows * weights)

    of_hidden, of_mask = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, hidden[0])
    expected = np.zeros_like(hidden)
    expected[2] = weights[0] + weights[1]
    np.testing.assert_allclose(of_hidden, expected, rtol=1e-6)
    np.testing.assert_array_equal(of_mask, weights[3])


def test_tile_keeps_the_batch_sharded_I11():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = NamedSharding(mesh, P("data"))
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(4, 3, 10)).astype(np.float32)
    source = generator.integers(-1, 4, (4, 5)).astype(np.int32)
    is_mask = generator.random((4, 5)) < 0.3
    filled = jax.jit(
        functools.partial(
            fill_hidden_tile,
            sharding=KernelSharding(mesh=mesh, batch="data"),
            implementation="interpret",
        )
    )(
        jax.device_put(hidden, batch),
        hidden[0, 0],
        jax.device_put(source, batch),
        jax.device_put(is_mask, batch),
    )
    assert filled.sharding.is_equivalent_to(batch, 3)
    for request in range(4):
        expected = oracle(hidden[request], hidden[0, 0], source[request], is_mask[request])
        np.testing.assert_array_equal(filled[request], expected)


def test_moves_little_more_than_it_must():
    """A decode size: elements moved against a count made from the inputs alone."""
    shape = shapes.Shape(name="decode", requests=16, rows=8, drafts=7, hidden_size=720)
    arguments = shapes.random_arguments(shape, 0)

    def fill(*arrays):
        return fill_hidden(*arrays, implementation="interpret")

    filled, counts = count_accesses(fill, *arguments)
    assert counts["store", "out"] == filled.size, "each output element is stored exactly once"
    source, is_mask = (np.asarray(array) for array in arguments[2:])
    copied = int(np.sum((source >= 0) & ~is_mask))
    # The mask row once, each copied row, each row's source and flag; and what is written.
    least = (1 + copied) * shape.hidden_size + 2 * len(source) + filled.size
    assert total(counts) <= 1.25 * least


def test_reports_what_does_not_fit():
    hidden = jnp.zeros((2, 4))
    with pytest.raises(ValueError, match="mask_hidden is bfloat16, hidden is float32"):
        fill_hidden(hidden, jnp.zeros(4, jnp.bfloat16), jnp.zeros(3, int), jnp.zeros(3, bool))
    with pytest.raises(ValueError, match=r"source_rows must be integer \[any\], got int32 \[0\]"):
        fill_hidden(hidden, jnp.zeros(4), jnp.zeros(0, int), jnp.zeros(0, bool))
