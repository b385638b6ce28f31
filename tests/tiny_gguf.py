"""Write small llama-architecture GGUF files, with their true weights under Hugging Face names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from peagle_jax.text.token_bytes import byte_level_token

MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ Ġ", "Ċ Ċ", "e r", "Ġ a")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_vocabulary(merges: Sequence[str] = MERGES) -> tuple[list[str], list[int], list[str]]:
    """(tokens, token types, merges): three control tokens, the 256 bytes, one token per merge."""
    merges = list(merges)
    tokens = list(CONTROL) + [byte_level_token(bytes([b])) for b in range(256)]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    return tokens, kinds, merges


def tokenizer_metadata(pre: str = "smollm", **changes: object) -> dict[str, object]:
    """Metadata of a tiny byte-level tokenizer, as `GgufFile.metadata` gives it.

    `changes` replace entries by the last part of their key; None removes one.
    """
    tokens, kinds, merges = tiny_vocabulary()
    entries: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 2,
        "add_bos_token": False,
        **changes,
    }
    metadata = {f"tokenizer.ggml.{k}": v for k, v in entries.items() if v is not None}
    return {**metadata, "tokenizer.chat_template": TEMPLATE}


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows to the interleaved order that llama GGUF files have, by explicit index."""
    head_dim = rows.shape[0] // heads
    order = [
        head * head_dim + part * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for part in range(2)
    ]
    return rows[order]


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    context: int = 128,
    tied: bool = True,
    architecture: str = "llama",
    pre: str = "smollm",
    types: Mapping[str, Type] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> dict[str, np.ndarray]:
    """Write a random llama-architecture model with tokenizer to `path`.

    `types` gives the type per tensor-name ending ("attn_q", "ffn_down", ...; "default" for the
    rest); norms are always float32. `metadata` adds or replaces scalar or list entries.

    Returns the weights as a reader must see them, that is after the round trip through their type:
    float32, [out, in], Hugging Face names and row order.
    """
    types = {"default": Type.Q4_1, "token_embd": Type.Q8_0, **(types or {})}
    rng = np.random.default_rng(seed)
    head_dim = hidden // heads
    tokens, kinds, merges = tiny_vocabulary()
    weights: dict[str, np.ndarray] = {}
    writer = gguf.GGUFWriter(path, architecture)

    def add(name: str, hf_name: str, shape: tuple[int, ...], permuted_heads: int = 0) -> None:
        if len(shape) == 1:
            value = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            writer.add_tensor(name, value)
            weights[hf_name] = value
            return
        value = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        kind = types.get(name.split(".")[-2], types["default"])
        packed = gguf.quants.quantize(value, kind)
        # Quantisation works along a row, so it commutes with reordering rows.
        weights[hf_name] = gguf.quants.dequantize(packed, kind)
        if permuted_heads:
            packed = _permute(packed, permuted_heads)
        writer.add_tensor(name, packed, raw_dtype=kind)

    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(len(tokens))
    for key, value in tokenizer_metadata(pre).items():
        _add_value(writer, key, value)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _add_value(writer, key, value)

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), hidden))
    for i in range(layers):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (hidden,))
        q_name, k_name = theirs + "self_attn.q_proj.weight", theirs + "self_attn.k_proj.weight"
        add(ours + "attn_q.weight", q_name, (hidden, hidden), heads)
        add(ours + "attn_k.weight", k_name, (kv_heads * head_dim, hidden), kv_heads)
        v_shape = (kv_heads * head_dim, hidden)
        add(ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", v_shape)
        add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (hidden, hidden))
        add(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", (hidden,))
        add(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", (intermediate, hidden))
        add(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", (intermediate, hidden))
        add(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", (hidden, intermediate))
    add("output_norm.weight", "model.norm.weight", (hidden,))
    if not tied:
        add("output.weight", "lm_head.weight", (len(tokens), hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))
