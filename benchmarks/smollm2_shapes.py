"""Configs with SmolLM2-135M's shapes and random weights, for benchmarks that need no checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target

LAYER = LayerConfig(num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeConfig(theta=100_000.0))
TARGET = TargetConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    layers=(LAYER,) * 30,
    max_positions=8192,
    norm_eps=1e-5,
    norm_cast="before_weight",
    tied_embeddings=True,
)


def random_weights(name: str, shape: tuple[int, ...], dtype) -> jax.Array:
    """Small normal numbers; integer parameters (d2t) zero."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.zeros(shape, dtype)
    generator = np.random.default_rng(len(name) + sum(shape))
    return jnp.asarray(0.02 * generator.standard_normal(shape, np.float32)).astype(dtype)


def target(num_layers: int = 30) -> Target:
    config = dataclasses.replace(TARGET, layers=TARGET.layers[:num_layers])
    return Target(config, source=random_weights)


def drafter(draft_vocab_size: int, *, parallel: bool, num_layers: int = 4) -> Drafter:
    """A head for SmolLM2: P-EAGLE with four layers (the paper's), or EAGLE-3."""
    config = DrafterConfig(
        vocab_size=TARGET.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=TARGET.hidden_size,
        intermediate_size=TARGET.intermediate_size,
        target_hidden_size=TARGET.hidden_size,
        layers=(LAYER,) * num_layers,
        taps=(2, 15, 27),
        max_positions=TARGET.max_positions,
        mask_token_id=3 if parallel else None,
        parallel_drafting=parallel,
    )
    return Drafter(config, source=random_weights)
