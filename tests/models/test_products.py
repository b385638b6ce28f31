"""Products of few rows, and models whose matrices are stored [out, in], against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.models import products
from peagle_jax.models.cache import init_cache
from peagle_jax.models.parameters import weight
from peagle_jax.models.products import OutputMajor, product, store_output_major
from peagle_jax.models.target import init_target
from tests.decoding.tiny import TARGETS, make_target

ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 24, 25, 40)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("contracted", [1, 3])
def test_both_layouts_equal_float64(rows, contracted):
    inputs = (48,) if contracted == 1 else (2, 3, 8)
    x, matrix = numbers(rows, *inputs, seed=1), numbers(*inputs, 5, 7, seed=2)
    turned = OutputMajor(jnp.asarray(matrix.reshape(48, 35).T), matrix.shape)
    expected = np.tensordot(x.astype(np.float64), matrix.astype(np.float64), contracted)
    for stored in (jnp.asarray(matrix), turned):
        found = jax.jit(product, static_argnums=2)(jnp.asarray(x), stored, contracted)
        assert found.shape == (rows, 5, 7) and found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_row_has_the_same_bits_beside_two_to_seven_others():
    x, matrix = numbers(8, 96), OutputMajor(jnp.asarray(numbers(70, 96)), (96, 70))
    run = jax.jit(product, static_argnums=2)
    expected = np.asarray(run(jnp.asarray(x), matrix, 1))
    for rows in range(3, 8):
        np.testing.assert_array_equal(run(jnp.asarray(x[:rows]), matrix, 1), expected[:rows])


def test_two_rows_of_a_matrix_too_large_for_caches(monkeypatch):
    monkeypatch.setattr(products, "CACHED", 0)
    x, matrix = numbers(2, 96), numbers(70, 96)
    found = product(jnp.asarray(x), OutputMajor(jnp.asarray(matrix), (96, 70)), 1)
    np.testing.assert_allclose(found, x.astype(np.float64) @ matrix.T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 6, 30])
def test_the_result_has_the_dtype_asked_for(rows):
    x = jnp.asarray(numbers(rows, 32), jnp.bfloat16)
    matrix = OutputMajor(jnp.asarray(numbers(24, 32), jnp.bfloat16), (32, 24))
    assert product(x, matrix, 1).dtype == jnp.bfloat16
    wide = product(x, matrix, 1, dtype=jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(matrix.values, np.float64).T
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-4)


def test_a_gpu_gets_a_product():
    x, matrix = jnp.zeros((6, 32)), OutputMajor(jnp.zeros((24, 32)), (32, 24))
    traced = jax.jit(product, static_argnums=2).trace(x, matrix, 1)
    on_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "dot_general" in on_gpu and "stablehlo.reduce" not in on_gpu
    assert "dot_general" not in on_cpu and "stablehlo.reduce" in on_cpu


@pytest.mark.parametrize("family", TARGETS)
def test_a_turned_target_gives_the_same_numbers(family):
    """Prompt and verify rows of two requests: 34, 12 and 2 rows of a pass."""
    config = TARGETS[family]
    plain, turned = make_target(config), make_target(config)
    store_output_major(turned)
    held = [
        parameter.get_value()
        for _, parameter in nnx.iter_graph(turned)
        if isinstance(parameter, nnx.Param)
    ]
    assert any(isinstance(value, OutputMajor) for value in held)
    caches = [
        init_cache(config.layers, batch_size=2, num_slots=32, max_new_rows=17, dtype=jnp.float32)
        for _ in range(2)
    ]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    for first, end in ((0, 17), (17, 23), (23, 24)):
        positions = np.broadcast_to(np.arange(first, end, dtype=np.int32), (2, end - first))
        found = []
        for at, target in enumerate((plain, turned)):
            out = target(jnp.asarray(tokens[:, first:end]), jnp.asarray(positions), caches[at])
            caches[at] = out.cache
            found.append(np.asarray(target.logits(out.hidden)))
        scale = np.abs(found[0]).max()
        np.testing.assert_allclose(found[1], found[0], rtol=0, atol=3e-6 * scale)


def test_turning_keeps_the_values_and_leaves_other_dtypes():
    config = TARGETS[next(iter(TARGETS))]
    plain, turned = make_target(config), make_target(config)
    store_output_major(turned)
    for name in ("qkv", "o", "gate_up", "down"):
        before, after = (getattr(model.layers[0], name) for model in (plain, turned))
        assert isinstance(after.get_value(), OutputMajor)
        np.testing.assert_array_equal(weight(before, jnp.float32), weight(after, jnp.float32))
    half = init_target(config, jax.random.key(0), jnp.bfloat16)
    store_output_major(half)
    assert isinstance(half.layers[0].qkv.get_value(), jax.Array)
