"""config.json of a drafter to write, in both public layouts, so that vLLM reads the same network.

Every switch is written, none left to a reader's default. Rope settings stand in both spellings:
transformers 5 reads `rope_parameters`, older readers `rope_theta` and `rope_scaling`.
"""

from typing import Any, Literal

from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig

Layout = Literal["raw", "speculators"]

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
# The release of speculators whose files this layout was compared with.
_SPECULATORS_VERSION = "0.9.0"
_DEFAULT_TOKENS = 5


def drafter_json(
    config: DrafterConfig,
    layout: Layout,
    *,
    dtype: str,
    verifier: str | None = None,
    verifier_architectures: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The content of config.json. `dtype` is that of the weights, as in "bfloat16".

    verifier: name or path of the target, which vLLM takes from a speculators file.

    Raises ValueError for a network that the layout cannot express.
    """
    if layout not in ("raw", "speculators"):
        raise ValueError(f"layout {layout!r} is unknown; choose 'raw' or 'speculators'")
    if config.embedding_scale is not None:
        raise ValueError("no public layout has an embedding scale; multiply the embedding instead")
    common = {**_head(config), "dtype": dtype, "torch_dtype": dtype, "tie_word_embeddings": False}
    if layout == "raw":
        return {"architectures": [_raw_architecture(config)], **_decoder(config), **common}
    if not config.use_taps:
        raise ValueError("the speculators layout has no head without taps; use layout='raw'")
    kind = "peagle" if config.parallel_drafting else "eagle3"
    return {
        "architectures": ["PEagleDraftModel" if kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "transformer_layer_config": {**_decoder(config), "tie_word_embeddings": False},
        **common,
        "embed_requires_grad": config.own_embedding,
        "speculators_config": _proposal(config, kind, verifier, verifier_architectures),
    }


def _raw_architecture(config: DrafterConfig) -> str:
    if config.style == "llama":
        return "LlamaForCausalLMEagle3"
    return "PeagleQwen3ForCausalLM" if config.parallel_drafting else "Eagle3Qwen3ForCausalLM"


def _head(config: DrafterConfig) -> dict[str, Any]:
    """What makes it a drafter, beside the decoder."""
    head: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "parallel_drafting": config.parallel_drafting,
    }
    if config.use_taps:
        head["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    else:
        head["eagle_config"] = {"use_aux_hidden_state": False}
    if config.mask_token_id is not None:
        head |= {"ptd_token_id": config.mask_token_id, "mask_token_id": config.mask_token_id}
    optional = {
        "num_depths": config.num_depths,
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    return head | {key: value for key, value in optional.items() if value is not None}


def _decoder(config: DrafterConfig) -> dict[str, Any]:
    layer = config.layers[0]
    for other in config.layers[1:]:
        if (other.num_heads, other.num_kv_heads, other.head_dim, other.rope) != (
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.rope,
        ):
            raise ValueError("heads and rope must be the same in every layer to be exported")
    return {
        "model_type": config.style,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        **_rope(layer.rope),
        **_windows(config.style, config.layers),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    scaling = {"rope_type": rope.kind, **_rope_settings(rope)}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def _rope_settings(rope: RopeConfig) -> dict[str, Any]:
    match rope.kind:
        case "default":
            return {}
        case "linear":
            return {"factor": rope.factor}
        case "proportional":
            return {"factor": rope.factor, "partial_rotary_factor": rope.rotary_fraction}
        case "llama3":
            return {
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_positions,
            }
    settings = {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
    }
    if rope.attention_factor is not None:
        settings["attention_factor"] = rope.attention_factor
    return settings


def _windows(style: str, layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise ValueError(f"one window for all sliding layers can be exported, not {windows}")
    if not windows and style == "llama":
        return {}
    kinds = ["full_attention" if x.window is None else "sliding_attention" for x in layers]
    return {
        "layer_types": kinds,
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
    }


def _proposal(
    config: DrafterConfig, kind: str, verifier: str | None, architectures: tuple[str, ...]
) -> dict[str, Any]:
    tokens = config.num_speculative_tokens
    if tokens is None:
        tokens = min(config.num_depths or _DEFAULT_TOKENS, _DEFAULT_TOKENS)
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
    }
