"""Packed weights against tables and loops; reading them from files is tested in test_load.py."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle_jax.models.packed import PackedFp8, PackedMxfp4, dense

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_mxfp4_holds_every_nibble_and_every_scale_exactly():
    """All 256 bytes in one group order, scales from subnormal to the largest that stays finite."""
    scales = np.arange(0, 253, dtype=np.uint8)
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(len(scales), axis=0)
    weight = PackedMxfp4(
        jnp.asarray(blocks.transpose(0, 2, 1)[:, None]),
        jnp.asarray(np.repeat(scales[:, None, None], 16, axis=2)),
        1,
    )
    assert weight.shape == (253, 32, 16)
    exact = np.empty(weight.shape, np.float64)
    for scale, column, row in np.ndindex(253, 16, 16):
        byte = int(blocks[scale, column, row])
        exact[scale, 2 * row, column] = E2M1[byte & 15] * 2.0 ** (int(scale) - 127)
        exact[scale, 2 * row + 1, column] = E2M1[byte >> 4] * 2.0 ** (int(scale) - 127)
    unpack = jax.jit(lambda w, dtype: w.dequantize(dtype), static_argnums=1)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = np.asarray(unpack(weight, dtype)).astype(np.float64)
        normal = np.abs(exact) >= 2.0**-126  # devices may flush what is smaller
        assert np.array_equal(found[normal], exact[normal])
        assert np.array_equal(found[exact == 0], exact[exact == 0])


@pytest.mark.parametrize(("axis", "block"), [(0, 4), (1, 3), (2, 5)])
def test_fp8_scales_cover_partial_blocks(axis, block):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 7, 8)).astype(ml_dtypes.float8_e4m3fn)
    grid = list(values.shape)
    grid[axis] = -(-grid[axis] // block)
    scales = rng.uniform(0.5, 2, grid).astype(np.float32)
    exact = np.empty(values.shape, np.float32)
    for index in np.ndindex(*values.shape):
        at = list(index)
        at[axis] //= block
        exact[index] = np.float32(values[index]) * scales[tuple(at)]
    weight = PackedFp8(jnp.asarray(values), jnp.asarray(scales), axis, block)
    assert weight.shape == values.shape
    np.testing.assert_array_equal(np.asarray(dense(weight, jnp.float32)), exact)
    if axis:
        one = weight.take(jnp.int32(2))
        np.testing.assert_array_equal(np.asarray(one.dequantize(jnp.float32)), exact[2])


def test_an_expert_is_cut_before_it_is_unpacked():
    rng = np.random.default_rng(0)
    blocks = jnp.asarray(rng.integers(0, 256, (3, 2, 16, 5), np.uint8))
    scales = jnp.asarray(rng.integers(100, 130, (3, 2, 5), np.uint8))
    weight = PackedMxfp4(blocks, scales, 1)
    one = jax.jit(lambda w, i: w.take(i).dequantize(jnp.float32))(weight, jnp.int32(1))
    np.testing.assert_array_equal(one, weight.dequantize(jnp.float32)[1])
    text = jax.jit(lambda w, i: w.take(i).dequantize(jnp.float32)).lower(weight, jnp.int32(1))
    assert "tensor<3x64x5xf32>" not in text.as_text()


def test_dense_casts_plain_arrays():
    assert dense(jnp.ones(3, jnp.float32), jnp.bfloat16).dtype == jnp.bfloat16


def test_packed_weights_map_like_any_tree():
    weight = PackedFp8(jnp.zeros((4, 2), jnp.float8_e4m3fn), jnp.ones((2, 2)), 0, 2)
    shapes = jax.tree.map(lambda leaf: leaf.shape, weight)
    assert (shapes.values, shapes.scales, shapes.axis, shapes.block) == ((4, 2), (2, 2), 0, 2)
    assert jax.eval_shape(lambda w: w.dequantize(jnp.float32), weight).shape == (4, 2)
