"""Tiny targets and drafters of every family, random in every weight."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.models.config import DrafterConfig, LayerConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target

VOCAB = 40
HIDDEN = 16
MAX_POSITIONS = 256
MASK_TOKEN = VOCAB - 1
ROPE = RopeConfig()
LAYER = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE)


def tiny_target(family: str, layers: tuple[LayerConfig, ...], **fields) -> TargetConfig:
    base = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        max_positions=MAX_POSITIONS,
        norm_eps=1e-5,
        norm_cast="before_weight",
    )
    return TargetConfig(family=family, layers=layers, **{**base, **fields})


_MOE = MoEConfig(
    num_experts=4, num_experts_per_token=2, intermediate_size=16, router_order="softmax_topk"
)
_OSS_MOE = dataclasses.replace(
    _MOE, router_order="topk_softmax", router_bias=True, expert_bias=True
)
_YARN = RopeConfig(kind="yarn", factor=4.0, original_max_positions=64, truncate=False)

TARGETS: dict[str, TargetConfig] = {
    "llama": tiny_target(
        "llama",
        (dataclasses.replace(LAYER, rope=RopeConfig(theta=500.0)),) * 2,
        tied_embeddings=True,
    ),
    "qwen3": tiny_target("qwen3", (LAYER,) * 2, qk_norm=True),
    "qwen3_moe": tiny_target(
        "qwen3_moe", (dataclasses.replace(LAYER, moe=_MOE),) * 2, qk_norm=True
    ),
    "gpt_oss": tiny_target(
        "gpt_oss",
        tuple(
            dataclasses.replace(LAYER, window=window, moe=_OSS_MOE, rope=_YARN)
            for window in (4, None)
        ),
        attention_bias=True,
        attention_sinks=True,
        swiglu_limit=7.0,
        norm_cast="after_weight",
        activation="clamped_swiglu",
    ),
    "gemma4": tiny_target(
        "gemma4",
        (
            dataclasses.replace(LAYER, window=5),
            dataclasses.replace(
                LAYER,
                head_dim=16,
                num_kv_heads=1,
                value_from_key=True,
                rope=RopeConfig(kind="proportional", rotary_fraction=0.5),
            ),
        ),
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scalar=True,
        embedding_scale=4.0,
        final_soft_cap=8.0,
        norm_cast="after_weight",
        activation="gelu_tanh",
        tied_embeddings=True,
    ),
}


def drafter_config(**fields) -> DrafterConfig:
    """A parallel drafter for any of the targets, with fewer ids than they have."""
    base = dict(
        vocab_size=VOCAB,
        draft_vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=24,
        target_hidden_size=HIDDEN,
        layers=(LAYER,) * 2,
        taps=(0, 1, 2),
        max_positions=MAX_POSITIONS,
        mask_token_id=MASK_TOKEN,
    )
    return DrafterConfig(**{**base, **fields})


PARALLEL = drafter_config()
AUTOREGRESSIVE = drafter_config(
    layers=(LAYER,), parallel_drafting=False, mask_token_id=None, norm_output=True
)


def numpy_source(seed: int, vocab_size: int):
    """Random values from NumPy, nothing to compile; every norm, bias, sink and scalar counts."""

    def make(name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        generator = np.random.default_rng([seed, *name.encode()])
        noise = generator.standard_normal(shape).astype(np.float32)
        last = name.rsplit(".", 1)[-1]
        if last == "d2t":
            kept = np.sort(generator.permutation(vocab_size)[: shape[0]])
            return jnp.asarray(kept - np.arange(shape[0]), jnp.int32)
        if last.endswith("norm") or last in ("fc_norms", "layer_scalar"):
            value = 1.0 + 0.2 * noise
        elif last.endswith("bias"):
            value = 0.3 * noise
        elif last in ("sinks", "mask_hidden", "embedding"):
            value = noise
        else:
            value = noise * np.float32(np.prod(shape[: 2 if last == "o" else 1]) ** -0.5)
        return jnp.asarray(value.astype(np.float32)).astype(dtype)

    return make


def make_target(config: TargetConfig, seed: int = 0) -> Target:
    return Target(config, source=numpy_source(seed, config.vocab_size))


def make_drafter(config: DrafterConfig = PARALLEL, seed: int = 1) -> Drafter:
    return Drafter(config, source=numpy_source(seed, config.vocab_size))


def new_values(state: nnx.State, seed: int) -> nnx.State:
    """Other random values for the parameters of a module, without building it again."""
    make = numpy_source(seed, VOCAB)
    flat = [
        (path, leaf.replace(make(".".join(map(str, path)), leaf.shape, leaf.dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)
