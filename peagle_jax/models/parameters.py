"""Where a model's arrays come from: a model asks a source for each parameter by name and shape.

The same constructors thus build a model from a checkpoint, from random numbers, or from shapes
alone. Reading checkpoints is not done here.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from peagle_jax.models.products import OutputMajor

# source(name, shape, dtype) gives the value of parameter `name` (as in "layers.3.qkv") with its
# logical shape: an array, a ShapeDtypeStruct, or a packed weight with `dequantize(dtype)`.
Source = Callable[[str, tuple[int, ...], Any], Any]


def abstract_source(name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A source of shapes alone, for sharding, loading and ahead-of-time compilation."""
    del name
    return jax.ShapeDtypeStruct(shape, dtype)


def random_source(key: jax.Array) -> Source:
    """Random values in which no norm, bias, sink or scalar is neutral, so that none can be ignored.

    Matrices are normal with variance 1 / fan-in; vectors that multiply lie around 1, those that
    add around 0. Each value depends on the key and the parameter's name alone.
    """

    def make(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        noise = jax.random.normal(jax.random.fold_in(key, digest), shape, jnp.float32)
        last = name.rsplit(".", 1)[-1]
        if last.endswith("norm") or last in ("fc_norms", "layer_scalar"):
            value = 1.0 + 0.2 * noise
        elif last.endswith("bias"):
            value = 0.3 * noise
        elif last in ("sinks", "mask_hidden", "embedding"):
            value = noise
        else:
            value = noise * jnp.float32(_fan_in(last, shape) ** -0.5)
        return value.astype(dtype)

    return make


def scoped(source: Source, prefix: str) -> Callable[..., nnx.Param]:
    """A maker of parameters whose names start with `prefix`."""

    def parameter(name: str, *shape: int, dtype: Any) -> nnx.Param:
        return nnx.Param(source(prefix + name, shape, dtype))

    return parameter


def weight(parameter: nnx.Param, dtype: Any) -> Array:
    """The parameter as an array of `dtype`; packed weights are unpacked here, inside jit."""
    value = parameter.get_value()
    if hasattr(value, "dequantize"):
        return value.dequantize(dtype)
    return value.astype(dtype)


def matrix(parameter: nnx.Param, dtype: Any) -> Array | OutputMajor:
    """The parameter as `primitives.product` takes it: one stored [out, in] stays so."""
    value = parameter.get_value()
    return value if isinstance(value, OutputMajor) else weight(parameter, dtype)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if name == "o":
        return shape[0] * shape[1] * shape[2]
    if name.startswith("experts"):
        return shape[1]
    return shape[0]
