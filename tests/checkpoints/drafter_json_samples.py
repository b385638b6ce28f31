"""config.json of small drafters, as the public writers spell it, and a target that they fit."""

from typing import Any

from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig


def small_target(num_layers: int = 8, **changes: Any) -> TargetConfig:
    layer = LayerConfig(num_heads=2, num_kv_heads=1, head_dim=6, rope=RopeConfig())
    settings: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 32,
        "hidden_size": 12,
        "intermediate_size": 20,
        "layers": (layer,) * num_layers,
        "max_positions": 64,
        "norm_eps": 1e-5,
        "norm_cast": "before_weight",
        "eos_token_ids": (2, 5),
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    return TargetConfig(**(settings | changes))


def decoder(**changes: Any) -> dict[str, Any]:
    """What describes the draft decoder in either layout."""
    return {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
    } | changes


def raw(**changes: Any) -> dict[str, Any]:
    """A P-EAGLE head as Amazon's raw layout has it; a change to None takes the key away."""
    config = decoder() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 20,
        "target_hidden_size": 12,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "ptd_token_id": 31,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def speculators(kind: str = "peagle", *, layer: dict[str, Any] | None = None, **changes: Any):
    """The same head as the speculators library writes it."""
    config = {
        "speculators_model_type": kind,
        "architectures": ["PEagleDraftModel"],
        "transformer_layer_config": decoder(**(layer or {})),
        "draft_vocab_size": 20,
        "target_hidden_size": 12,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": 31,
        "auto_map": {"": "config.Anything"},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    return {key: value for key, value in (config | changes).items() if value is not None}
