"""The small functions that layers are made of: norm and activation; no parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from peagle_jax.models.config import NormCast
from peagle_jax.models.parameters import weight


def activate(
    gate: Float[Array, "*rows I"], up: Float[Array, "*rows I"], options: Any
) -> Float[Array, "*rows I"]:
    """What an MLP does between its two products; `options` has the fields of LayerOptions.

    `clamped_swiglu` (gpt-oss): gate is bounded above only, up on both sides and shifted by one.
    """
    match options.activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clamped_swiglu":
            limit = jnp.asarray(options.swiglu_limit, gate.dtype)
            alpha = jnp.asarray(options.swiglu_alpha, gate.dtype)
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            return (up + jnp.asarray(1, up.dtype)) * gate * jax.nn.sigmoid(alpha * gate)
    raise ValueError(f"unknown activation {options.activation!r}")


def norm(x: Float[Array, "*rows D"], scale: nnx.Param, options: Any) -> Float[Array, "*rows D"]:
    """`rms_norm` with the model's epsilon and cast order."""
    return rms_norm(x, weight(scale, jnp.float32), options.norm_eps, options.norm_cast)


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"] | None,
    eps: float,
    cast: NormCast,
) -> Float[Array, "*rows D"]:
    """x / rms(x) * scale, in float32; `cast` says when to return to x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean + jnp.float32(eps))
    if scale is None:
        return wide.astype(x.dtype)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    if cast == "before_weight":
        return wide.astype(x.dtype) * scale.astype(x.dtype)
    return (wide * scale).astype(x.dtype)
