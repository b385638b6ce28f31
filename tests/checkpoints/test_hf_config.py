"""Configs in both dialects: what is read, what is the same, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.checkpoints.fields import CheckpointError, Fields
from peagle_jax.checkpoints.hf_config import quantization, read_target_config, target_config
from peagle_jax.models.config import TargetConfig
from peagle_jax.models.rope import inverse_frequencies
from tests.checkpoints import tiny

GOLDENS = sorted((Path(__file__).parent.parent / "data" / "targets").glob("*/"))


def parse(raw: dict) -> TargetConfig:
    return target_config(Fields(raw, "config.json"))


def rope_of(raw: dict):
    return parse(raw).layers[0].rope


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda folder: folder.name)
def test_both_dialects_of_a_checkpoint_give_the_same_config(folder):
    assert read_target_config(folder) == read_target_config(folder, config_file="config_hub.json")


def test_llama_fields():
    config = parse(tiny.LLAMA)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (24, 16, 20)
    layer = config.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 2, 4)
    assert config.eos_token_ids == (3, 5) and config.bos_token_id == 1
    assert not config.tied_embeddings and config.norm_cast == "before_weight"
    assert parse({**tiny.LLAMA, "eos_token_id": 7}).eos_token_ids == (7,)
    assert parse({**tiny.LLAMA, "eos_token_id": None}).eos_token_ids == ()


def test_theta_is_found_wherever_it_stands_D11():
    bare = tiny.without(tiny.LLAMA, "rope_theta")
    inside = {"rope_theta": 500_000.0, "rope_type": "default"}
    old, new = rope_of(tiny.LLAMA), rope_of({**bare, "rope_parameters": inside})
    assert old == new
    both = [inverse_frequencies(rope, 16)[0][1] for rope in (old, new)]
    np.testing.assert_allclose(both, 500_000.0 ** (-2 / 16), rtol=1e-6)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_theta_is_honoured_with_scaling_in_three_spellings_D11():
    bare = tiny.without(tiny.LLAMA, "rope_theta")
    spellings = [
        {**tiny.LLAMA, "rope_scaling": LLAMA3},
        {**bare, "rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}},
        {**tiny.LLAMA, "rope_scaling": {**tiny.without(LLAMA3, "rope_type"), "type": "llama3"}},
    ]
    ropes = [rope_of(raw) for raw in spellings]
    assert ropes[0] == ropes[1] == ropes[2]
    assert (ropes[0].kind, ropes[0].theta, ropes[0].factor) == ("llama3", 500_000.0, 8.0)


def test_theta_by_layer_type_D11():
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 11_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 2e6,
            "partial_rotary_factor": 0.5,
        },
    }
    config = parse({**tiny.GEMMA4, "rope_parameters": ropes})
    assert config.layers[0].rope.theta == 11_000.0 and config.layers[0].window == 4
    full = config.layers[5]
    assert (full.rope.kind, full.rope.theta, full.rope.rotary_fraction) == (
        "proportional",
        2e6,
        0.5,
    )
    assert full.window is None


@pytest.mark.parametrize("theta", [0, 0.0, -1.0, float("nan"), "1e4", True])
def test_a_theta_that_is_no_positive_number_is_refused_D11(theta):
    for raw in (
        {**tiny.LLAMA, "rope_theta": theta},
        {**tiny.without(tiny.LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": theta}},
    ):
        with pytest.raises(CheckpointError, match="rope_theta: expected a number > 0"):
            parse(raw)


def test_yarn_and_windows_of_gpt_oss_in_both_spellings_C9():
    old = parse(tiny.GPT_OSS)
    inside = {**tiny.GPT_OSS["rope_scaling"], "rope_theta": 150_000.0}
    new = parse(
        {**tiny.without(tiny.GPT_OSS, "rope_theta", "rope_scaling"), "rope_parameters": inside}
    )
    assert old == new
    assert [layer.window for layer in old.layers] == [4, None]
    rope = old.layers[0].rope
    assert rope == old.layers[1].rope and (rope.kind, rope.truncate) == ("yarn", False)
    assert inverse_frequencies(rope, 8)[1] == pytest.approx(0.1 * np.log(32) + 1)
    assert old.attention_sinks and old.layers[0].moe.router_order == "topk_softmax"


def test_gemma_sizes_by_layer_and_by_global_keys():
    by_global = parse(tiny.GEMMA4)
    # Ten layers or more: indices are zero-padded.
    by_layer = {f"{i:02d}": {"head_dim": 16, "num_key_value_heads": 1} for i in (5, 11)}
    raw = tiny.without(tiny.GEMMA4, "global_head_dim", "num_global_key_value_heads")
    assert parse({**raw, "per_layer_config": by_layer}) == by_global
    sizes = [(layer.head_dim, layer.num_kv_heads) for layer in by_global.layers]
    assert sizes == ([(8, 2)] * 5 + [(16, 1)]) * 2
    assert [layer.value_from_key for layer in by_global.layers] == ([False] * 5 + [True]) * 2
    assert by_global.embedding_scale == 4.0 and by_global.attention_scale == 1.0


def test_experts_are_counted_under_either_key():
    renamed = {**tiny.without(tiny.QWEN3_MOE, "num_experts"), "num_local_experts": 4}
    assert parse(renamed) == parse(tiny.QWEN3_MOE)
    assert parse(tiny.QWEN3_MOE).layers[0].moe.normalise_top_k
    plain = tiny.without(tiny.QWEN3_MOE, "norm_topk_prob")
    assert not parse(plain).layers[0].moe.normalise_top_k


def test_qwen_windows_start_at_max_window_layers():
    raw = {
        **tiny.QWEN3,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    assert [layer.window for layer in parse(raw).layers] == [None, 8, 8, 8]
    unused = {**raw, "use_sliding_window": False}
    assert all(layer.window is None for layer in parse(unused).layers)


REFUSED = {
    "unknown-model-type": (tiny.LLAMA, {"model_type": "mamba"}, "model_type.*'mamba'"),
    "no-model-type": (tiny.without(tiny.LLAMA, "model_type"), {}, "model_type.*missing"),
    "unknown-rope-type": (
        tiny.LLAMA,
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_scaling.rope_type.*'longrope'",
    ),
    "unknown-old-rope-type": (
        tiny.LLAMA,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.type.*'dynamic'",
    ),
    "unknown-rope-key": (
        tiny.LLAMA,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 3}},
        "rope_scaling.beta",
    ),
    "scaling-without-factor": (
        tiny.LLAMA,
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_scaling.factor.*missing",
    ),
    "two-thetas": (
        tiny.LLAMA,
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "rope_theta",
    ),
    "two-scalings": (
        tiny.LLAMA,
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_scaling",
    ),
    "no-vocab": (tiny.without(tiny.LLAMA, "vocab_size"), {}, "vocab_size.*missing"),
    "size-as-text": (tiny.LLAMA, {"hidden_size": "16"}, "hidden_size.*'16'"),
    "activation": (tiny.LLAMA, {"hidden_act": "relu"}, "hidden_act.*'relu'"),
    "mla": (tiny.LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank.*512"),
    "soft-cap": (tiny.LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "partial-rotary": (tiny.LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "llama-window": (tiny.LLAMA, {"sliding_window": 8}, "sliding_window"),
    "heads": (tiny.LLAMA, {"num_key_value_heads": 3}, "num_attention_heads"),
    "dense-layers": (tiny.QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "sparse-step": (tiny.QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "two-expert-counts": (tiny.QWEN3_MOE, {"num_local_experts": 8}, "num_local_experts"),
    "top-k": (tiny.QWEN3_MOE, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    "layer-types": (tiny.GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
    "layer-kind": (tiny.GPT_OSS, {"layer_types": ["linear_attention"] * 2}, "layer_types"),
    "moe-block": (tiny.GEMMA4, {"enable_moe_block": True}, "enable_moe_block"),
    "kv-sharing": (tiny.GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    "per-layer-input": (tiny.GEMMA4, {"hidden_size_per_layer_input": 8}, "per_layer_input"),
    "no-per-layer-input": (
        tiny.without(tiny.GEMMA4, "hidden_size_per_layer_input"),
        {},
        "hidden_size_per_layer_input.*missing",
    ),
    "bidirectional": (tiny.GEMMA4, {"use_bidirectional_attention": "all"}, "bidirectional"),
    "quantisation": (
        tiny.LLAMA,
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config.quant_method.*'awq'",
    ),
    "fp8-per-tensor": (
        tiny.LLAMA,
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.weight_block_size",
    ),
}


@pytest.mark.parametrize(("raw", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_would_change_the_numbers_are_refused(raw, changes, message):
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        parse({**raw, **changes})


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (tiny.LLAMA, {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 1.0}),
        (tiny.LLAMA, {"rope_scaling": None, "pretraining_tp": 1, "anything_else": 3}),
        (tiny.LLAMA, {"kv_lora_rank": None, "partial_rotary_factor": 1.0, "pad_token_id": -1}),
        (tiny.GEMMA4, {"use_bidirectional_attention": "vision"}),
        (tiny.QWEN3_MOE, {"router_aux_loss_coef": 0.5, "mlp_only_layers": []}),
    ],
)
def test_settings_that_change_nothing_are_ignored(raw, changes):
    assert parse({**raw, **changes}) == parse(raw)


def test_quantization_is_read():
    raw = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 8]}}
    found = quantization(Fields(raw, "config.json"))
    assert found.kind == "fp8" and found.block_size == (4, 8)
    assert quantization(Fields({}, "config.json")) is None


def test_missing_and_damaged_config_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such file or folder"):
        read_target_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not a JSON file"):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json: expected a JSON object"):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert read_target_config(tmp_path) == read_target_config(tmp_path / "config.json")
