"""A whole tiny chat model on disk: config, weights and tokenizer, as a user would have it."""

import json
from pathlib import Path

import numpy as np

from peagle_jax.checkpoints.safetensors_file import write_safetensors
from tests.text.hf_folders import byte_level_backend, write_folder

SPECIALS = ("<|start|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 259,
}


def write_tiny_model(folder: Path, seed: int = 0, hidden: int = 24) -> Path:
    """A random llama of five layers with a byte-level tokenizer; returns `folder`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    inner, width = 40, 8
    config = {**CONFIG, "hidden_size": hidden}
    tensors = {"model.embed_tokens.weight": (264, hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (4 * width, hidden),
            f"{name}self_attn.k_proj.weight": (2 * width, hidden),
            f"{name}self_attn.v_proj.weight": (2 * width, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, 4 * width),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }
    arrays = {
        name: (rng.normal(size=shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in tensors.items()
    }
    write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    write_folder(
        folder, byte_level_backend(SPECIALS), template=TEMPLATE, eos_token="<|end|>", config=config
    )
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    return folder
