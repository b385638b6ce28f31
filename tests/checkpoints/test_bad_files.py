"""Damaged and mismatched checkpoints: each is refused by file and key before weights are read."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoints import safetensors_file
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.safetensors_file import write_safetensors
from tests.checkpoints import tiny
from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch):
    """Everything here must be found on configs and headers."""

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(safetensors_file, "_read_block", refuse)


def refused(path, message: str, **options) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(path, dtype=jnp.float32, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_shard(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors: missing shard.*holds 'model")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "model-00002-of-00003.safetensors: missing shard")


def test_shards_without_an_index_load_by_their_numbers(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA), num_shards=3)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(AssertionError, match="a tensor was read"):
        load_target(folder)


def test_truncated_file(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    refused(folder, "model.safetensors: truncated")


def test_index_that_disagrees_with_its_shards(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA), num_shards=2)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    moved = dict(raw["weight_map"])
    name = "model.norm.weight"
    shards = sorted(set(moved.values()))
    moved[name] = shards[shards.index(moved[name]) - 1]
    index.write_text(json.dumps({"weight_map": moved}))
    refused(folder, "tensor 'model.norm.weight' is missing .*places it there")
    del moved[name]
    index.write_text(json.dumps({"weight_map": moved}))
    refused(folder, "tensor 'model.norm.weight' is not in model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {name: "../model.safetensors"}}))
    refused(folder, "weight_map names '../model.safetensors'")


@pytest.mark.parametrize("name", sorted(tiny.shapes(tiny.QWEN3_MOE))[::7])
def test_missing_tensor(tmp_path, name):
    arrays = tiny.tensors(tiny.QWEN3_MOE)
    del arrays[name]
    refused(tiny.write_folder(tmp_path, tiny.QWEN3_MOE, arrays), f"tensor '{name}' is missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.lora_A",
        "visual.blocks.0.weight",
        "model.layers.0.mlp.gate_proj.weight_scale_inv",
    ],
)
def test_unknown_tensor(tmp_path, name):
    arrays = {**tiny.tensors(tiny.LLAMA), name: np.zeros(1, np.float32)}
    refused(tiny.write_folder(tmp_path, tiny.LLAMA, arrays), f"unknown tensor '{name}'")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.vision_tower.x", "vision_tower.y"],
)
def test_tensors_that_text_does_not_use_are_skipped(tmp_path, name):
    arrays = {**tiny.tensors(tiny.LLAMA), name: np.zeros(1, np.float32)}
    with pytest.raises(AssertionError, match="a tensor was read"):
        load_target(tiny.write_folder(tmp_path, tiny.LLAMA, arrays))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 25}, r"embed_tokens.weight': found shape \[24, 16\].*asks for \[25, 16\]"),
        ({"intermediate_size": 21}, "gate_proj.weight': found shape"),
        ({"num_key_value_heads": 1}, "k_proj.weight': found shape"),
        ({"num_hidden_layers": 1}, "unknown tensor 'model.layers.1.input_layernorm.weight'"),
        ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ({"model_type": "qwen3", "head_dim": 4}, "self_attn.q_norm.weight' is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_and_weights_that_disagree(tmp_path, change, message):
    folder = tiny.write_folder(tmp_path, {**tiny.LLAMA, **change}, tiny.tensors(tiny.LLAMA))
    refused(folder, message)


def test_integer_weights(tmp_path):
    arrays = tiny.tensors(tiny.LLAMA)
    arrays["model.norm.weight"] = np.zeros(16, np.int32)
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, arrays)
    refused(folder, "'model.norm.weight': found dtype int32, expected bfloat16")


@pytest.mark.parametrize("keep_packed", [False, True])
def test_fp8_without_block_size_or_scales(tmp_path, keep_packed):
    stored, _ = tiny.fp8_tensors(tiny.QWEN3_MOE, (8, 4))
    folder = tiny.write_folder(tmp_path / "a", tiny.QWEN3_MOE, stored)
    refused(folder, "config.json names no quantization_config", keep_packed=keep_packed)
    config = {
        **tiny.QWEN3_MOE,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 4]},
    }
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    wrong = {**stored, name: np.zeros((1, 1), np.float32)}
    folder = tiny.write_folder(tmp_path / "b", config, wrong)
    refused(folder, f"'{name}': found shape .1, 1.", keep_packed=keep_packed)
    del stored[name]
    folder = tiny.write_folder(tmp_path / "c", config, stored)
    refused(folder, f"'{name}' is missing", keep_packed=keep_packed)


def test_mxfp4_with_other_shapes(tmp_path):
    stored, _ = tiny.mxfp4_tensors(tiny.GPT_OSS)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    wrong = {**stored, name: stored[name][:, :-1]}
    refused(tiny.write_folder(tmp_path / "a", tiny.GPT_OSS, wrong), f"'{name}': found shape")
    wrong = {**stored, name: stored[name].astype(np.int16)}
    folder = tiny.write_folder(tmp_path / "b", tiny.GPT_OSS, wrong)
    refused(folder, f"'{name}': found dtype int16, expected uint8")


def test_folder_without_weights(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "no model.safetensors .*found config.json, pytorch_model.bin")
    refused(tmp_path / "nowhere", "no such file or folder")


def test_copies_below_the_folder_are_not_looked_at(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    (folder / "original").mkdir()
    write_safetensors(folder / "original" / "model.safetensors", {"x": np.zeros(1, np.float32)})
    with pytest.raises(AssertionError, match="a tensor was read"):
        load_target(folder)


def gguf_refused(path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_target(path, dtype=jnp.float32)
    assert str(path) in str(caught.value)


def test_gguf_of_another_architecture(tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, architecture="qwen3")
    gguf_refused(path, "general.architecture is 'qwen3'")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "'llama.expert_count': expected 0 .*found 8"),
        ({"llama.attention.sliding_window": 4}, "'llama.attention.sliding_window'"),
        ({"llama.rope.scaling.type": "longrope"}, "'llama.rope.scaling.factor' is missing"),
        ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count': expected the head size"),
        ({"llama.vocab_size": 9}, "'llama.vocab_size': expected .* found 9"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 1}, "unknown tensor 'blk.1.attn_k.weight'"),
        ({"llama.feed_forward_length": 64}, "'blk.0.ffn_gate.weight': found shape"),
        ({"llama.rope.freq_base": 0.0}, "'llama.rope.freq_base': expected a number > 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gguf_metadata_that_is_not_supported_or_disagrees(tmp_path, metadata, message):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata=metadata)
    gguf_refused(path, message)
