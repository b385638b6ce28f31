"""The drafter again, in NumPy float64 on the tensors of a file (torch layout), row by row.

Written from the description of the network, not from the code under test: heads are sliced one by
one, attention is a loop over queries, rotation multiplies complex numbers.
"""

import dataclasses

import numpy as np

from peagle_jax.models.config import DrafterConfig, RopeConfig

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class OracleOutput:
    fused: np.ndarray
    hidden: np.ndarray
    feedback: np.ndarray
    logits: np.ndarray


def fuse(tensors: Tensors, config: DrafterConfig, taps: np.ndarray) -> np.ndarray:
    x = taps.astype(np.float64)
    if config.norm_before_fc:
        x = _norm(x, tensors["input_norm.weight"], config.norm_eps)
    if config.fc_norm:
        width = config.target_hidden_size
        for i in range(x.shape[-1] // width):
            part = slice(i * width, (i + 1) * width)
            x[..., part] = _norm(x[..., part], tensors[f"fc_norm.{i}.weight"], config.norm_eps)
    return x @ tensors["fc.weight"].T if "fc.weight" in tensors else x


def forward(
    tensors: Tensors,
    config: DrafterConfig,
    tokens: np.ndarray,
    fused: np.ndarray,
    positions: np.ndarray,
    allowed: np.ndarray | None = None,
) -> OracleOutput:
    """Rows [T] of one sequence; `allowed` [T, T] replaces the causal mask (and the window)."""
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    embedded = tensors["embed_tokens.weight"][tokens] * (config.embedding_scale or 1.0)
    x = fused.astype(np.float64)
    for index, layer in enumerate(config.layers):
        name = f"layers.{index}."
        normed = _norm(x, tensors.get(name + "hidden_norm.weight", np.ones(1)), config.norm_eps)
        first = embedded if index == 0 else x
        read = _norm(first, tensors[name + "input_layernorm.weight"], config.norm_eps)
        if index == 0:
            read = np.concatenate([read, normed], axis=-1)
            x = normed if config.norm_before_residual else x
        mask = allowed
        if mask is None:
            mask = positions[None, :] <= positions[:, None]
            if layer.window is not None:
                mask &= positions[None, :] > positions[:, None] - layer.window
        x = x + _attention(tensors, name + "self_attn.", config, layer, read, positions, mask)
        read = _norm(x, tensors[name + "post_attention_layernorm.weight"], config.norm_eps)
        x = x + _mlp(tensors, name + "mlp.", read)
    hidden = _norm(x, tensors["norm.weight"], config.norm_eps)
    feedback = hidden if config.norm_output else x
    return OracleOutput(fused, hidden, feedback, hidden @ tensors["lm_head.weight"].T)


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale.astype(np.float64)


def _linear(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0.0)


def _mlp(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(tensors, name + "gate_proj", x)
    up = _linear(tensors, name + "up_proj", x)
    return _linear(tensors, name + "down_proj", gate / (1 + np.exp(-gate)) * up)


def _attention(tensors, name, config, layer, x, positions, mask) -> np.ndarray:
    size, share = layer.head_dim, layer.num_heads // layer.num_kv_heads
    query, key, value = (_linear(tensors, f"{name}{part}_proj", x) for part in "qkv")
    outputs = []
    for head in range(layer.num_heads):
        q = query[:, head * size : (head + 1) * size]
        of = slice(head // share * size, (head // share + 1) * size)
        k, v = key[:, of], value[:, of]
        if config.style == "qwen3":
            q = _norm(q, tensors[name + "q_norm.weight"], config.norm_eps)
            k = _norm(k, tensors[name + "k_norm.weight"], config.norm_eps)
        q, k = (_rotate(part, positions, layer.rope) for part in (q, k))
        rows = []
        for i in range(len(q)):
            seen = np.flatnonzero(mask[i])
            scores = np.exp(k[seen] @ q[i] / np.sqrt(size))
            rows.append(scores @ v[seen] / scores.sum())
        outputs.append(np.stack(rows))
    return _linear(tensors, name + "o_proj", np.concatenate(outputs, axis=-1))


def _rotate(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    half = x.shape[-1] // 2
    speeds = np.array([rope.theta ** (-2 * i / (2 * half)) for i in range(half)])
    if rope.kind == "linear":
        speeds = speeds / rope.factor
    elif rope.kind == "llama3":
        speeds = np.array([_llama3(speed, rope) for speed in speeds])
    elif rope.kind != "default":
        raise NotImplementedError(rope.kind)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * positions[:, None] * speeds)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _llama3(speed: float, rope: RopeConfig) -> float:
    length, wave = rope.original_max_positions, 2 * np.pi / speed
    if wave < length / rope.high_freq_factor:
        return speed
    if wave > length / rope.low_freq_factor:
        return speed / rope.factor
    share = (length / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - share) * speed / rope.factor + share * speed
