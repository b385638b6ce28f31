"""Small drafter configs for tests, in which every size differs from its neighbours."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig
from peagle_jax.models.drafter import Drafter


def small_drafter(
    *,
    num_layers: int = 2,
    rope: RopeConfig | None = None,
    head_dim: int = 6,
    windows: tuple[int | None, ...] | None = None,
    **changes: Any,
) -> DrafterConfig:
    """A drafter of hidden 16 for a target of hidden 12; `changes` go to DrafterConfig."""
    layer = LayerConfig(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, rope=rope or RopeConfig(theta=100.0)
    )
    windows = windows or (None,) * num_layers
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "draft_vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "target_hidden_size": 12,
        "layers": tuple(dataclasses.replace(layer, window=window) for window in windows),
        "taps": (2, 4, 5),
        "max_positions": 64,
        "mask_token_id": 31,
    }
    settings |= changes
    if not settings.get("parallel_drafting", True):
        settings["mask_token_id"] = None
    return DrafterConfig(**settings)


def numpy_source(seed: int = 0):
    """Random parameters without a compilation: normal matrices, vectors around one."""

    def make(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        value = rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2)
        if name.endswith("norm") or name == "fc_norms":
            value += 1.0
        return jnp.asarray(value.astype(jnp.dtype(dtype)))

    return make


def numpy_drafter(config: DrafterConfig, seed: int = 0, dtype: Any = jnp.float32) -> Drafter:
    """A random drafter whose draft vocabulary is a random subset of the target's."""
    values, size = numpy_source(seed), config.draft_vocab_size

    def source(name: str, shape: tuple[int, ...], kind: Any) -> jax.Array:
        if name != "d2t":
            return values(name, shape, kind)
        if size >= config.vocab_size:
            return jnp.asarray(np.zeros(size, np.int32))
        chosen = np.random.default_rng(seed).permutation(config.vocab_size)[:size]
        return jnp.asarray((np.sort(chosen) - np.arange(size)).astype(np.int32))

    return Drafter(config, dtype=dtype, source=source)
