"""TargetConfig from a Hugging Face config.json, in the older dialect and in that of transformers 5.

Whatever changes the numbers is read or refused with an error that names file, key and value; keys
that do not (training, caching, generation) are ignored. GGUF metadata: gguf_config.py.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from peagle_jax.checkpoints.fields import CheckpointError, Fields, PathLike, read_json
from peagle_jax.checkpoints.rope_config import LAYER_TYPES, rope_config
from peagle_jax.models.config import LayerConfig, MoEConfig, TargetConfig

# Keys of other architectures or variants, and the values under which they change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (0,),
    "kv_lora_rank": (0,),
    "qk_rope_head_dim": (0,),
    "qk_nope_head_dim": (0,),
    "v_head_dim": (0,),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
    "alibi": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "attn_temperature_tuning": (False,),
    "rope_interleave": (False,),
    "qkv_bias": (False,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "n_group": (1,),
    "routed_scaling_factor": (1.0,),
    "scoring_func": ("softmax",),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "use_parallel_residual": (False,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the file packs matrices: FP8 in blocks of [rows, columns], or MXFP4 experts."""

    kind: Literal["fp8", "mxfp4"]
    block_size: tuple[int, int] | None = None


def read_target_config(path: PathLike, *, config_file: str = "config.json") -> TargetConfig:
    """The TargetConfig of a checkpoint folder (its `config_file`), a config.json, or a GGUF file.

    Raises CheckpointError (a ValueError) naming file, key and value for a missing file, an unknown
    model or rope type, a missing size, and every setting that is not supported.
    """
    file = Path(path)
    if file.suffix == ".gguf":
        from peagle_jax.checkpoints.gguf_config import read_gguf_config

        return read_gguf_config(file)
    return target_config(read_config(file, config_file=config_file))


def read_config(path: PathLike, *, config_file: str = "config.json") -> Fields:
    """The raw config.json of a folder, or the JSON file itself."""
    file = Path(path)
    if not file.exists():
        raise CheckpointError(f"{file}: no such file or folder")
    return read_json(file / config_file if file.is_dir() else file)


def target_config(config: Fields) -> TargetConfig:
    """The TargetConfig that a parsed config.json describes; pure, reads no file."""
    model_type = config.text("model_type")
    if model_type not in _FAMILIES:
        config.fail("model_type", f"one of {', '.join(_FAMILIES)}")
    quantization(config)
    return _FAMILIES[model_type](config)


def quantization(config: Fields) -> Quantization | None:
    """What `quantization_config` says, or None; CheckpointError for a scheme not supported."""
    if not config.has("quantization_config"):
        return None
    fields = config.child("quantization_config")
    method = fields.text("quant_method")
    if method == "mxfp4":
        return Quantization(kind="mxfp4")
    if method != "fp8":
        fields.fail("quant_method", "'fp8' or 'mxfp4'")
    fields.only("fmt", ("e4m3", "float8_e4m3fn"), "the only FP8 format read")
    fields.only("activation_scheme", ("dynamic",), "stored activation scales are not read")
    block = fields.raw.get("weight_block_size")
    good = isinstance(block, list) and len(block) == 2
    if not good or not all(type(size) is int and size > 0 for size in block):
        fields.fail("weight_block_size", "[rows, columns]; one scale per matrix is not supported")
    return Quantization(kind="fp8", block_size=(block[0], block[1]))


def _llama(config: Fields) -> TargetConfig:
    config.only("use_qk_norm", (False,), "llama has no query and key norms")
    _only_full_layers(config)
    layers = _uniform_layers(config, _default_head_dim(config), rope_config(config))
    return TargetConfig(
        family="llama",
        layers=layers,
        mlp_bias=config.flag("mlp_bias", False),
        **_common(config, eps=1e-6),
    )


def _qwen3(config: Fields) -> TargetConfig:
    count = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", None) if _uses_window(config) else None
    first = config.integer("max_window_layers", 28, minimum=0)
    usual = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(count)
    ]
    types = _layer_types(config, usual)
    if window is None and "sliding_attention" in types:
        config.fail("sliding_window", "the window of the sliding layers in layer_types")
    rope = rope_config(config)
    head_dim = config.integer("head_dim", 128)
    layers = tuple(
        _layer(config, head_dim, rope, window=window if kind == "sliding_attention" else None)
        for kind in types
    )
    return TargetConfig(family="qwen3", layers=layers, qk_norm=True, **_common(config, eps=1e-6))


def _qwen3_moe(config: Fields) -> TargetConfig:
    config.only("use_qk_norm", (True,), "qwen3_moe always normalises queries and keys")
    config.only("mlp_only_layers", ([],), "dense layers among routed ones are not supported")
    config.only("decoder_sparse_step", (1,), "dense layers among routed ones are not supported")
    window = config.integer("sliding_window") if _uses_window(config) else None
    kind = "full_attention" if window is None else "sliding_attention"
    usual = [kind] * config.integer("num_hidden_layers")
    if _layer_types(config, usual) != usual:
        config.fail("layer_types", f"{kind!r} for every layer")
    experts = MoEConfig(
        intermediate_size=config.integer("moe_intermediate_size"),
        router_order="softmax_topk",
        normalise_top_k=config.flag("norm_topk_prob", False),
        **_expert_counts(config),
    )
    rope = rope_config(config)
    head_dim = config.integer("head_dim", _default_head_dim(config))
    layers = tuple(_layer(config, head_dim, rope, window=window, moe=experts) for _ in usual)
    return TargetConfig(
        family="qwen3_moe", layers=layers, qk_norm=True, **_common(config, eps=1e-6)
    )


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(config: Fields) -> TargetConfig:
    count = config.integer("num_hidden_layers")
    types = _layer_types(config, [LAYER_TYPES[(index + 1) % 2] for index in range(count)])
    window = config.integer("sliding_window", 128)
    rope = rope_config(config, default_theta=150_000.0, defaults=_GPT_OSS_ROPE)
    experts = MoEConfig(
        intermediate_size=config.integer("intermediate_size"),
        router_order="topk_softmax",
        router_bias=True,
        expert_bias=True,
        **_expert_counts(config),
    )
    head_dim = config.integer("head_dim", 64)
    layers = tuple(
        _layer(
            config,
            head_dim,
            rope,
            window=window if kind == "sliding_attention" else None,
            moe=experts,
        )
        for kind in types
    )
    common = _common(config, eps=1e-5, attention_bias=True)
    return TargetConfig(
        family="gpt_oss",
        layers=layers,
        attention_sinks=True,
        swiglu_limit=config.number("swiglu_limit", 7.0),
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
        **{**common, "norm_cast": "after_weight", "activation": "clamped_swiglu"},
    )


def _gemma4(config: Fields) -> TargetConfig:
    """The text part of a multimodal config."""
    text = config.child("text_config")
    if text.has("tie_word_embeddings") and config.has("tie_word_embeddings"):
        tied = (text.flag("tie_word_embeddings"),)
        config.only("tie_word_embeddings", tied, "as in text_config")
    merged = dict(text.raw)
    if config.has("tie_word_embeddings"):
        merged["tie_word_embeddings"] = config.raw["tie_word_embeddings"]
    return _gemma4_text(Fields(merged, text.where, text.prefix))


_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def _gemma4_text(config: Fields) -> TargetConfig:
    config.only("model_type", ("gemma4_text",), "the dense text decoder")
    config.only("enable_moe_block", (False,), "the MoE block of Gemma 4 is not supported")
    config.only("num_kv_shared_layers", (0,), "layers that share keys and values are not supported")
    config.only("use_double_wide_mlp", (False,), "not supported")
    config.only("use_bidirectional_attention", ("vision",), "only causal text attention")
    per_layer_input = "per-layer embeddings are not supported; a missing key means 256"
    if "hidden_size_per_layer_input" not in config.raw:
        config.fail("hidden_size_per_layer_input", f"0 ({per_layer_input})")
    config.only("hidden_size_per_layer_input", (0,), per_layer_input)
    if config.flag("attention_bias", False):
        config.fail("attention_bias", "false (Gemma 4 with attention biases is not supported)")
    count = config.integer("num_hidden_layers")
    usual = [LAYER_TYPES[(index + 1) % 6 != 0] for index in range(count)]
    types = _layer_types(config, [*usual[:-1], "full_attention"])
    if types[-1] != "full_attention":
        config.fail("layer_types", "'full_attention' for the last layer")
    value_from_key = config.flag("attention_k_eq_v", False)
    window = config.integer("sliding_window", 512)
    sizes = _gemma4_sizes(config, types, value_from_key)
    ropes = {
        kind: rope_config(config, kind, defaults=_GEMMA4_ROPE[kind]) for kind in sorted(set(types))
    }
    layers = tuple(
        _layer(
            config,
            head_dim,
            ropes[kind],
            num_kv_heads=kv_heads,
            window=window if kind == "sliding_attention" else None,
            value_from_key=value_from_key and kind == "full_attention",
        )
        for kind, (head_dim, kv_heads) in zip(types, sizes, strict=True)
    )
    common = _common(
        config, eps=1e-6, tied=True, act_key="hidden_activation", act="gelu_pytorch_tanh"
    )
    return TargetConfig(
        family="gemma4",
        layers=layers,
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scalar=True,
        embedding_scale=math.sqrt(common["hidden_size"]),
        final_soft_cap=config.number("final_logit_softcapping", None),
        **{**common, "norm_cast": "after_weight", "activation": "gelu_tanh"},
    )


def _gemma4_sizes(config: Fields, types: list[str], value_from_key: bool) -> list[tuple[int, int]]:
    """Per layer (head_dim, num_kv_heads): `per_layer_config` by index, or the older global keys."""
    usual = (config.integer("head_dim", 256), config.integer("num_key_value_heads"))
    sizes = [usual] * len(types)
    if not config.has("per_layer_config"):
        heads = (
            config.integer("num_global_key_value_heads", usual[1]) if value_from_key else usual[1]
        )
        full = (config.integer("global_head_dim", 512), heads)
        return [full if kind == "full_attention" else usual for kind in types]
    table = config.child("per_layer_config")
    for key in table.raw:
        # Indices are zero-padded once there are ten layers: "05".
        if not key.isdecimal() or int(key) >= len(types):
            table.fail(key, f"a layer index below {len(types)}")
        layer = table.child(key)
        for name in layer.raw:
            if name not in ("head_dim", "num_key_value_heads"):
                layer.fail(name, "only head_dim and num_key_value_heads to differ by layer")
        sizes[int(key)] = (
            layer.integer("head_dim", usual[0]),
            layer.integer("num_key_value_heads", usual[1]),
        )
    return sizes


_FAMILIES: dict[str, Callable[[Fields], TargetConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4_text,
}


def _common(
    config: Fields,
    *,
    eps: float,
    tied: bool = False,
    attention_bias: bool = False,
    act_key: str = "hidden_act",
    act: str = "silu",
) -> dict[str, Any]:
    """The fields that every family reads alike; refuses what none of them supports."""
    for key, neutral in _UNSUPPORTED.items():
        config.only(key, neutral, "not supported for this model type")
    for key in ("hidden_act", "hidden_activation"):
        config.only(
            key, (act, "swish") if act == "silu" else (act,), "the activation of this family"
        )
    if act_key != "hidden_activation":
        config.only("final_logit_softcapping", (), "no soft cap in this family")
    if config.text("model_type") != "gpt_oss":
        config.only("swiglu_limit", (), "no clamp in this family")
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "max_positions": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", eps),
        "norm_cast": "before_weight",
        "attention_bias": config.flag("attention_bias", attention_bias),
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
        "eos_token_ids": _token_ids(config, "eos_token_id"),
        "bos_token_id": config.integer("bos_token_id", None, minimum=0),
        "pad_token_id": _pad_id(config),
    }


def _layer(
    config: Fields,
    head_dim: int,
    rope: Any,
    *,
    num_kv_heads: int | None = None,
    window: int | None = None,
    value_from_key: bool = False,
    moe: MoEConfig | None = None,
) -> LayerConfig:
    heads = config.integer("num_attention_heads")
    kv_heads = num_kv_heads or config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        config.fail("num_attention_heads", f"a multiple of the number of key heads ({kv_heads})")
    if head_dim % 2:
        config.fail("head_dim", "an even number (rotary pairs)")
    return LayerConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        window=window,
        value_from_key=value_from_key,
        moe=moe,
    )


def _uniform_layers(config: Fields, head_dim: int, rope: Any) -> tuple[LayerConfig, ...]:
    layer = _layer(config, config.integer("head_dim", head_dim), rope)
    return (layer,) * config.integer("num_hidden_layers")


def _default_head_dim(config: Fields) -> int:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if not config.has("head_dim") and hidden % heads:
        config.fail("num_attention_heads", f"a divisor of hidden_size ({hidden}), or head_dim set")
    return hidden // heads


def _expert_counts(config: Fields) -> dict[str, int]:
    experts = config.either(("num_local_experts", "num_experts"))
    chosen = config.either(("num_experts_per_tok", "experts_per_token"))
    if chosen > experts:
        config.fail("num_experts_per_tok", f"at most the number of experts ({experts})")
    return {"num_experts": experts, "num_experts_per_token": chosen}


def _uses_window(config: Fields) -> bool:
    return config.flag("use_sliding_window", False)


def _only_full_layers(config: Fields) -> None:
    if not config.has("use_sliding_window") or _uses_window(config):
        config.only("sliding_window", (), "no sliding window in this family")
    usual = ["full_attention"] * config.integer("num_hidden_layers")
    if _layer_types(config, usual) != usual:
        config.fail("layer_types", "'full_attention' for every layer")


def _layer_types(config: Fields, usual: list[str]) -> list[str]:
    """`layer_types`, or the family's usual pattern where the file has none."""
    if not config.has("layer_types"):
        return usual
    types = config.raw["layer_types"]
    if not isinstance(types, list) or len(types) != len(usual):
        config.fail("layer_types", f"a list of num_hidden_layers ({len(usual)}) entries")
    if any(kind not in LAYER_TYPES for kind in types):
        config.fail("layer_types", f"only {' and '.join(LAYER_TYPES)}")
    return types


def _token_ids(config: Fields, key: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    value = config.raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        config.fail(key, "a token id or a list of token ids")
    return tuple(values)


def _pad_id(config: Fields) -> int | None:
    """`pad_token_id`; several published files write -1 for none."""
    return (
        None
        if config.raw.get("pad_token_id") == -1
        else config.integer("pad_token_id", None, minimum=0)
    )
