"""TargetConfig from the metadata of a llama-architecture GGUF file.

Every `llama.*` key is read, known to change nothing, or refused. Weights: gguf_weights.py.
"""

from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.gguf_file import GgufFile, open_gguf
from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.rope import inverse_frequencies

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"

_READ = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
_IGNORED = ("rope.scaling.finetuned", "tensor_data_layout")
# Keys of other variants, and the value under which they change nothing.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "attention.causal": True,
    "use_parallel_residual": False,
}
# Llama 3 files give rope's slowing as a factor per pair; the settings they were made from.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}


def read_gguf_config(path: Path) -> TargetConfig:
    """The TargetConfig of a GGUF file.

    Raises CheckpointError or GgufError (both ValueErrors) naming the file and key for another
    architecture, a missing key, and any setting that is not supported.
    """
    return gguf_config(open_gguf(path))


def gguf_config(file: GgufFile) -> TargetConfig:
    """The TargetConfig of an opened GGUF file; the only tensor read is llama 3's rope factors."""
    file.require_architecture(ARCHITECTURE)
    _refuse_unknown(file)
    hidden, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    kv_heads = _integer(file, "attention.head_count_kv", heads)
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(file, key, head_dim) != head_dim:
            _fail(file, key, f"the head size {head_dim}")
    if heads % kv_heads or head_dim % 2:
        _fail(file, "attention.head_count", f"a multiple of {kv_heads} key heads, of even size")
    layer = LayerConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=_rope(file, head_dim)
    )
    vocab = file.tensor("token_embd.weight").shape[0]
    if _integer(file, "vocab_size", vocab) != vocab:
        _fail(file, "vocab_size", f"{vocab}, the rows of token_embd.weight")
    return TargetConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_integer(file, "feed_forward_length"),
        layers=(layer,) * _integer(file, "block_count"),
        max_positions=_integer(file, "context_length"),
        norm_eps=file.require(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float),
        norm_cast="before_weight",
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tuple(
            value
            for value in [file.metadata.get("tokenizer.ggml.eos_token_id")]
            if value is not None
        ),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def _rope(file: GgufFile, head_dim: int) -> RopeConfig:
    theta = _number(file, "rope.freq_base", 10_000.0)
    kind = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    old_linear = _number(file, "rope.scale_linear", 1.0)
    if ROPE_FACTORS in file.tensors:
        if kind != "none" or old_linear != 1.0:
            _fail(file, "rope.scaling.type", f"'none' beside the tensor {ROPE_FACTORS!r}")
        return _llama3(file, theta, head_dim)
    if kind == "none":
        if old_linear == 1.0:
            return RopeConfig(theta=theta)
        return RopeConfig(kind="linear", theta=theta, factor=old_linear)
    factor = file.require(f"{ARCHITECTURE}.rope.scaling.factor", float)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind != "yarn":
        _fail(file, "rope.scaling.type", "'none', 'linear' or 'yarn'")
    original = _integer(file, "rope.scaling.original_context_length")
    return RopeConfig(kind="yarn", theta=theta, factor=factor, original_max_positions=original)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """The llama3 settings whose frequencies the file's factors reproduce, or an error."""
    factors = file.read(ROPE_FACTORS).astype(np.float64).reshape(-1)
    if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: expected {head_dim // 2} factors above zero"
        )
    rope = RopeConfig(kind="llama3", theta=theta, factor=float(factors.max()), **_LLAMA3)
    plain, _ = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    ours, _ = inverse_frequencies(rope, head_dim)
    if not np.allclose(plain / factors, ours, rtol=1e-4, atol=0):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: these factors are not llama 3's (low 1, high "
            "4, original context 8192), the only ones read from GGUF. Use the safetensors folder"
        )
    return rope


def _refuse_unknown(file: GgufFile) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{ARCHITECTURE}.")
        if name == key or name in _READ or name in _IGNORED:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            _fail(file, name, f"{_NEUTRAL.get(name, 'no such key')} (not supported)")


def _integer(file: GgufFile, name: str, default: int | None = None) -> int:
    key = f"{ARCHITECTURE}.{name}"
    if default is not None and key not in file.metadata:
        return default
    value = file.require(key, int)
    if value < 1:
        _fail(file, name, "an integer >= 1")
    return value


def _number(file: GgufFile, name: str, default: float) -> float:
    key = f"{ARCHITECTURE}.{name}"
    value = file.require(key, float) if key in file.metadata else default
    if not (np.isfinite(value) and value > 0):
        _fail(file, name, "a number > 0")
    return value


def _fail(file: GgufFile, name: str, expected: str) -> Any:
    key = f"{ARCHITECTURE}.{name}"
    found = f"{file.metadata[key]!r:.80}" if key in file.metadata else "no such key"
    raise CheckpointError(f"{file.path}: metadata key {key!r}: expected {expected}, found {found}")
