"""Rotary position embedding: frequencies of every kind used here, and the half-split rotation.

Angles come from the positions themselves, not from a table, so any position works and none can be
clamped to a table's last row.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair [head_dim / 2], float32, and the factor on cos and sin.

    Raises ValueError for an odd head size or a kind that lacks a field it needs.
    """
    if head_dim % 2:
        raise ValueError(f"rope needs an even head_dim, found {head_dim}")
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.kind:
        case "default":
            return base.astype(np.float32), 1.0
        case "linear":
            return (base / rope.factor).astype(np.float32), 1.0
        case "llama3":
            return _llama3(base, rope).astype(np.float32), 1.0
        case "yarn":
            return _yarn(base, rope).astype(np.float32), _yarn_attention_factor(rope)
        case "proportional":
            return _proportional(base, rope).astype(np.float32), 1.0
    raise ValueError(f"unknown rope kind {rope.kind!r}")


def rotation(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of each pair's angle, float32, the attention factor included."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None, :]
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def rotate(
    x: Float[Array, "B T *heads D"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
) -> Float[Array, "B T *heads D"]:
    """Rotate pair (i, i + D/2) of each head by its angle, in the dtype of `x`."""
    between = tuple(range(2, x.ndim - 1))
    cos = jnp.expand_dims(cos, between).astype(x.dtype)
    sin = jnp.expand_dims(sin, between).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _original_max_positions(rope: RopeConfig) -> int:
    if rope.original_max_positions is None:
        raise ValueError(
            f"rope kind {rope.kind!r} needs original_max_position_embeddings, found none"
        )
    return rope.original_max_positions


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    original = _original_max_positions(rope)
    turns = original * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that turn often are kept, slow ones stretched."""
    original, pairs = _original_max_positions(rope), len(base)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:  # as the public code does, so that the ramp has a slope
        high += 0.001
    ramp = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _proportional(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """The fastest `rotary_fraction` of the pairs turn; the exponent still runs over all of them."""
    turning = int(rope.rotary_fraction * len(base))
    return np.where(np.arange(len(base)) < turning, base / rope.factor, 0.0)
