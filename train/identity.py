"""What a target is known by in files that were made with it: a fingerprint cheap to compute."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16

from peagle_jax.models.target import Target

_PER_ARRAY = 64


def target_fingerprint(target: Target) -> str:
    """16 hexadecimal digits over the sizes and a few weights of every kind.

    Weights count as bfloat16, so that one loaded as float32 here and as bfloat16 there, packed or
    not, is the same target.
    """
    config = target.config
    sizes = [config.family, config.vocab_size, config.hidden_size, config.num_layers]
    seen = hashlib.sha256(json.dumps(sizes).encode())
    sharding = target.norm.get_value().sharding
    whole = None
    if isinstance(sharding, NamedSharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    for part in jax.jit(_some_weights, out_shardings=whole)(target):
        seen.update(np.asarray(part).view(np.uint16).astype("<u2").tobytes())
    return seen.hexdigest()[:16]


def _some_weights(target: Target) -> list[BFloat16[Array, "n"]]:
    last = target.config.num_layers - 1
    layers = [target.layers[index] for index in sorted({0, last // 2, last})]
    parameters = [target.norm, target.embedding]
    for layer in layers:
        parameters += [layer.attention_norm, layer.mlp_norm, layer.qkv, layer.o]
    if not target.config.tied_embeddings:
        parameters.append(target.head)
    return [_some(parameter.get_value()) for parameter in parameters]


def _some(values: Any) -> BFloat16[Array, "n"]:
    """The first values of the first, the middle and the last row; only these are converted."""
    values = values.dequantize(jnp.float32) if hasattr(values, "dequantize") else values
    rows = (0,) if values.ndim == 1 else sorted({0, values.shape[0] // 2, values.shape[0] - 1})
    parts = [(values if values.ndim == 1 else values[row]).reshape(-1) for row in rows]
    return jnp.concatenate([part[:_PER_ARRAY] for part in parts]).astype(jnp.bfloat16)
