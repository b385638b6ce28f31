"""The config.json and the tokenizer files of a converted target."""

import json
from pathlib import Path
from typing import Any

from peagle_jax.checkpoints.hf_config import read_config
from peagle_jax.models.config import RopeConfig, TargetConfig


def converted_config(
    source: Path, config: TargetConfig, *, config_file: str, dtype: str
) -> dict[str, Any]:
    """What describes the unpacked text model: the source's own config, or one made from GGUF."""
    if source.suffix == ".gguf":
        return _llama_config(config, dtype)
    raw = dict(read_config(source, config_file=config_file).raw)
    if raw["model_type"] == "gemma4":
        tied = {"tie_word_embeddings": config.tied_embeddings}
        raw = {**raw["text_config"], **tied, "architectures": ["Gemma4ForCausalLM"]}
        raw["model_type"] = "gemma4_text"
    raw.pop("quantization_config", None)
    raw.pop("torch_dtype", None)
    return {**raw, "dtype": dtype}


def _llama_config(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """In the older dialect, which transformers 4 and 5 and vLLM all read."""
    layer = config.layers[0]
    ends = config.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": config.attention_bias,
        "bos_token_id": config.bos_token_id,
        "dtype": dtype,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": config.mlp_bias,
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": layer.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": _rope_scaling(layer.rope),
        "rope_theta": layer.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The rope kinds that GGUF files of this architecture can hold."""
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    return scaling


def write_gguf_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json, its config, chat template and generation config from a GGUF's metadata.

    The pre-tokenizer rule that the GGUF names goes into tokenizer.json, so that transformers cuts
    text as the model was trained with.
    """
    from tokenizers import Tokenizer, processors

    from peagle_jax.text.gguf_tokenizer import load_gguf_tokenizer

    tokenizer = load_gguf_tokenizer(source)
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names["pad_token"] = tokenizer.pad_id
    special = {name: backend.id_to_token(i) for name, i in names.items() if i is not None}
    if tokenizer.encode("") == [tokenizer.bos_id]:
        begin = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, tokenizer.bos_id)],
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    generation = {"eos_token_id": sorted(tokenizer.stop_ids)}
    generation |= {
        f"{n}_token_id": i
        for n, i in (("bos", tokenizer.bos_id), ("pad", tokenizer.pad_id))
        if i is not None
    }
    _write_json(folder / "generation_config.json", generation)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
