"""Tiny checkpoints written by hand: configs of every family and the tensors that belong to them.

Names and shapes are listed here anew, not taken from the code under test.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.safetensors_file import write_safetensors

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "eos_token_id": [3, 5],
    "bos_token_id": 1,
}

QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}

QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}

GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

FAMILIES = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "gemma4": GEMMA4,
}


def without(config: dict[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    """A copy of `config` without `keys` and with `changes`."""
    return {**{k: v for k, v in config.items() if k not in keys}, **changes}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a llama, qwen3, qwen3_moe or plain gpt_oss checkpoint."""
    hidden, vocab, inner = (
        config["hidden_size"],
        config["vocab_size"],
        config["intermediate_size"],
    )
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    family = config["model_type"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        names = f"model.layers.{index}."
        found |= {
            f"{names}input_layernorm.weight": (hidden,),
            f"{names}post_attention_layernorm.weight": (hidden,),
            f"{names}self_attn.q_proj.weight": (heads * size, hidden),
            f"{names}self_attn.k_proj.weight": (kv * size, hidden),
            f"{names}self_attn.v_proj.weight": (kv * size, hidden),
            f"{names}self_attn.o_proj.weight": (hidden, heads * size),
        }
        if family.startswith("qwen3"):
            found[f"{names}self_attn.q_norm.weight"] = (size,)
            found[f"{names}self_attn.k_norm.weight"] = (size,)
        if family in ("llama", "qwen3"):
            found |= {
                f"{names}mlp.gate_proj.weight": (inner, hidden),
                f"{names}mlp.up_proj.weight": (inner, hidden),
                f"{names}mlp.down_proj.weight": (hidden, inner),
            }
        if family == "qwen3_moe":
            experts, inner = config["num_experts"], config["moe_intermediate_size"]
            found[f"{names}mlp.gate.weight"] = (experts, hidden)
            for expert in range(experts):
                found |= {
                    f"{names}mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                    f"{names}mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                    f"{names}mlp.experts.{expert}.down_proj.weight": (hidden, inner),
                }
        if family == "gpt_oss":
            experts = config["num_local_experts"]
            found |= {
                f"{names}self_attn.q_proj.bias": (heads * size,),
                f"{names}self_attn.k_proj.bias": (kv * size,),
                f"{names}self_attn.v_proj.bias": (kv * size,),
                f"{names}self_attn.o_proj.bias": (hidden,),
                f"{names}self_attn.sinks": (heads,),
                f"{names}mlp.router.weight": (experts, hidden),
                f"{names}mlp.router.bias": (experts,),
                f"{names}mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
                f"{names}mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
                f"{names}mlp.experts.down_proj": (experts, inner, hidden),
                f"{names}mlp.experts.down_proj_bias": (experts, hidden),
            }
    return found


def tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random values for `shapes(config)`, the same for the same config."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes(config).items()
    }


def write_folder(
    folder: Path, config: dict[str, Any], arrays: dict[str, np.ndarray], *, num_shards: int = 1
) -> Path:
    """A checkpoint folder: config.json and the arrays in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
        return folder
    names, table = sorted(arrays), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        write_safetensors(folder / file, {name: arrays[name] for name in mine})
        table |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fp8_tensors(
    config: dict[str, Any], block: tuple[int, int], scale_dtype: Any = np.float32
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(stored, exact): projections as FP8 with scales per block, and what they stand for."""
    rng = np.random.default_rng(1)
    stored, exact = {}, {}
    for name, array in tensors(config, ml_dtypes.bfloat16).items():
        if not name.endswith("_proj.weight"):
            stored[name], exact[name] = array, array.astype(np.float32)
            continue
        rows, columns = array.shape
        values = array.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        scales = rng.uniform(0.5, 2.0, grid).astype(scale_dtype)
        stored |= {name: values, f"{name}_scale_inv": scales}
        exact[name] = np.empty(array.shape, np.float32)
        for row in range(rows):
            for column in range(columns):
                scale = scales[row // block[0], column // block[1]]
                exact[name][row, column] = np.float32(values[row, column]) * np.float32(scale)
    return stored, exact


def mxfp4_tensors(
    config: dict[str, Any],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(stored, exact): gpt-oss experts as MXFP4, and the input-major matrices they stand for."""
    rng = np.random.default_rng(2)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    stored, exact = {}, {}
    for name, array in tensors(config).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name], exact[name] = array, array
            continue
        experts, inputs, outputs = array.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 128, (experts, outputs, inputs // 32), np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = np.empty(array.shape, np.float32)
        for e, o, i in np.ndindex(experts, outputs, inputs):
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            nibble = byte >> 4 if i % 2 else byte & 15
            exact[name][e, i, o] = table[nibble] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    return stored, exact


def parameters(config: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of the model from plain tensors, entry by entry in plain loops."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    size, group = config.get("head_dim", hidden // heads), heads // kv
    made = {"embedding": arrays["model.embed_tokens.weight"], "norm": arrays["model.norm.weight"]}
    if "lm_head.weight" in arrays:
        made["head"] = arrays["lm_head.weight"].T
    for index in range(config["num_hidden_layers"]):
        names, ours = f"model.layers.{index}.", f"layers.{index}."
        q, k, v, o = (arrays[f"{names}self_attn.{n}_proj.weight"] for n in "qkvo")
        qkv = np.empty((hidden, kv, group + 2, size), q.dtype)
        out = np.empty((kv, group, size, hidden), o.dtype)
        for head, d in np.ndindex(kv, size):
            for g in range(group):
                row = (head * group + g) * size + d
                qkv[:, head, g, d], out[head, g, d] = q[row], o[:, row]
            qkv[:, head, group, d] = k[head * size + d]
            qkv[:, head, group + 1, d] = v[head * size + d]
        made |= {f"{ours}qkv": qkv, f"{ours}o": out}
        made[f"{ours}attention_norm"] = arrays[f"{names}input_layernorm.weight"]
        made[f"{ours}mlp_norm"] = arrays[f"{names}post_attention_layernorm.weight"]
        made |= _mlp_parameters(config, arrays, f"{names}mlp.", ours)
    return made


def _mlp_parameters(
    config: dict[str, Any], arrays: dict[str, np.ndarray], names: str, ours: str
) -> dict[str, np.ndarray]:
    if config["model_type"] == "gpt_oss":
        fused, down = (arrays[f"{names}experts.{n}_proj"] for n in ("gate_up", "down"))
        gate_up = np.stack([fused[:, :, 0::2], fused[:, :, 1::2]], axis=2)
        return {f"{ours}experts_gate_up": gate_up, f"{ours}experts_down": down}
    if config["model_type"] == "qwen3_moe":
        gate_up, down = [], []
        for expert in range(config["num_experts"]):
            part = {n: arrays[f"{names}experts.{expert}.{n}_proj.weight"] for n in _LETTERS}
            gate_up.append(np.stack([part["gate"].T, part["up"].T], axis=1))
            down.append(part["down"].T)
        return {
            f"{ours}experts_gate_up": np.stack(gate_up),
            f"{ours}experts_down": np.stack(down),
            f"{ours}router": arrays[f"{names}gate.weight"].T,
        }
    part = {n: arrays[f"{names}{n}_proj.weight"] for n in _LETTERS}
    gate_up = np.stack([part["gate"].T, part["up"].T], axis=1)
    return {f"{ours}gate_up": gate_up, f"{ours}down": part["down"].T}


_LETTERS = ("gate", "up", "down")
