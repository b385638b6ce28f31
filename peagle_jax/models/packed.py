"""Weights that stay packed on the device and are unpacked inside jit: block FP8 and MXFP4.

Both are pytrees whose pieces already lie in the order of the parameter they stand for, so that
unpacking moves nothing and each piece can be sharded along the parameter's own axes. Fields are
arrays, or what stands for them in a mapped tree (shapes, shardings). Reading files: checkpoints/.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

MXFP4_GROUP = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedFp8:
    """A float8_e4m3fn weight with one scale per run of `block` entries along `axis`.

    values: the parameter's shape. scales: the same but ceil(size / block) along `axis`; across the
    other axes scales are stored per entry, so that file blocks may cross heads or be partial.
    """

    values: Any
    scales: Any
    axis: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def dequantize(self, dtype: Any) -> Array:
        """value * scale, multiplied in float32 and then cast to `dtype`."""
        size = self.values.shape[self.axis]
        scales = jnp.repeat(self.scales.astype(jnp.float32), self.block, axis=self.axis)
        scales = jax.lax.slice_in_dim(scales, 0, size, axis=self.axis)
        return (self.values.astype(jnp.float32) * scales).astype(dtype)

    def take(self, index: Array) -> "PackedFp8":
        """Entry `index` of axis 0 (an expert), still packed; `index` must lie inside."""
        return PackedFp8(
            _entry(self.values, index), _entry(self.scales, index), self.axis - 1, self.block
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMxfp4:
    """A weight of 4-bit floats (E2M1) with one power of two per 32 entries along `axis`.

    blocks: uint8, the parameter's shape with `axis` replaced by two axes [size / 32, 16]; byte b
    of group g holds entries 32 g + 2 b (low nibble) and 32 g + 2 b + 1 (high). scales: uint8
    exponents biased by 127, the parameter's shape with size / 32 along `axis`.
    Layout: OCP Microscaling Formats v1.0, as gpt-oss stores it with the axes reordered.
    """

    blocks: Any
    scales: Any
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        head, tail = self.scales.shape[: self.axis], self.scales.shape[self.axis + 1 :]
        return (*head, MXFP4_GROUP * self.scales.shape[self.axis], *tail)

    def dequantize(self, dtype: Any) -> Array:
        """The exact values; all are representable in bfloat16 unless the result is subnormal."""
        low, high = self.blocks & jnp.uint8(15), self.blocks >> jnp.uint8(4)
        values = _e2m1(jnp.stack([low, high], axis=self.axis + 2))
        exponents = jnp.expand_dims(self.scales, (self.axis + 1, self.axis + 2)).astype(jnp.int32)
        # 2 ** -127 is subnormal and devices may flush it: halve the value instead.
        values = values * jnp.where(exponents == 0, jnp.float32(0.5), jnp.float32(1.0))
        powers = jax.lax.bitcast_convert_type(jnp.maximum(exponents, 1) << 23, jnp.float32)
        return (values * powers).astype(dtype).reshape(self.shape)

    def take(self, index: Array) -> "PackedMxfp4":
        """Entry `index` of axis 0 (an expert), still packed; `index` must lie inside."""
        return PackedMxfp4(_entry(self.blocks, index), _entry(self.scales, index), self.axis - 1)


def dense(weight: Array | PackedFp8 | PackedMxfp4, dtype: Any) -> Array:
    """The weight as an array of `dtype`: packed ones unpacked, arrays cast."""
    if isinstance(weight, PackedFp8 | PackedMxfp4):
        return weight.dequantize(dtype)
    return weight.astype(dtype)


def _entry(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis=0, keepdims=False)


def _e2m1(nibbles: Array) -> Array:
    """4-bit floats as float32: sign, two exponent bits, one mantissa bit; 1 is the subnormal 0.5.

    The bits are placed where float32 has them (bias 127 against 1), which needs no table.
    """
    code = nibbles.astype(jnp.int32)
    magnitude = code & 7
    normal = jax.lax.bitcast_convert_type(
        (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22), jnp.float32
    )
    small = jnp.where(magnitude == 1, jnp.float32(0.5), jnp.float32(0.0))
    value = jnp.where(magnitude < 2, small, normal)
    return jnp.where(code >= 8, -value, value)
