"""`convert_target`: what comes out loads here and in transformers, and says the same."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoints.convert import convert_target
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.safetensors_file import open_safetensors
from peagle_jax.checkpoints.shards import open_shards
from tests.checkpoints import tiny
from tests.tiny_gguf import write_tiny_gguf

GOLDENS = Path(__file__).parent.parent / "data" / "targets"


def assert_same_parameters(first: Path, second: Path) -> None:
    left, right = (nnx.state(load_target(path, dtype=jnp.float32)) for path in (first, second))
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("config_file", ["config.json", "config_hub.json"])
@pytest.mark.parametrize("name", ["gemma4_mm", "gpt_oss_mxfp4", "qwen3_moe_fp8_partial", "llama"])
def test_what_is_written_loads_to_the_same_parameters(tmp_path, name, config_file):
    out = convert_target(GOLDENS / name, tmp_path / "out", config_file=config_file)
    assert_same_parameters(GOLDENS / name, out)
    shards = open_shards(out)
    assert not any(key.endswith(("_blocks", "_scales", "_scale_inv")) for key in shards.files)
    assert not any("vision" in key for key in shards.files)
    kinds = {str(file.info(key).dtype) for key, file in shards.files.items()}
    assert kinds <= {"float32", "bfloat16"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_stored_dtypes_are_kept_unless_one_is_asked_for(tmp_path):
    arrays = tiny.tensors(tiny.LLAMA, ml_dtypes.bfloat16)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float16)
    folder = tiny.write_folder(tmp_path / "in", tiny.LLAMA, arrays)
    kept = open_safetensors(convert_target(folder, tmp_path / "kept") / "model.safetensors")
    for name, array in arrays.items():
        assert kept.read(name).dtype == array.dtype
        assert kept.read(name).tobytes() == array.tobytes()
    wide = convert_target(folder, tmp_path / "wide", dtype="float32")
    file = open_safetensors(wide / "model.safetensors")
    assert {str(info.dtype) for info in file.tensors.values()} == {"float32"}
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ValueError, match="dtype 'int4': expected one of float32, bfloat16"):
        convert_target(folder, tmp_path / "no", dtype="int4")


def test_shards_are_cut_by_size_and_indexed(tmp_path):
    folder = tiny.write_folder(tmp_path / "in", tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    out = convert_target(folder, tmp_path / "out", max_shard_bytes=4000)
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in out.glob("*.safetensors"):
        assert sum(info.nbytes for info in open_safetensors(file).tensors.values()) <= 4000
    assert_same_parameters(folder, out)


def test_experts_are_written_in_the_layout_asked_for_D14(tmp_path):
    arrays = tiny.tensors(tiny.QWEN3_MOE)
    folder = tiny.write_folder(tmp_path / "in", tiny.QWEN3_MOE, arrays)
    fused = convert_target(folder, tmp_path / "fused", fused_experts=True)
    stem = "model.layers.1.mlp.experts."
    file = open_safetensors(fused / "model.safetensors")
    assert not any(".experts.0." in name for name in file.tensors)
    expected = np.stack(
        [
            np.concatenate([arrays[f"{stem}{e}.{n}_proj.weight"] for n in ("gate", "up")])
            for e in range(4)
        ]
    )
    np.testing.assert_array_equal(file.read(f"{stem}gate_up_proj"), expected)
    again = convert_target(fused, tmp_path / "again")
    back = open_safetensors(again / "model.safetensors")
    assert back.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back.read(name), array)
    dense = tiny.write_folder(tmp_path / "dense", tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    with pytest.raises(ValueError, match="fused_experts is for qwen3_moe"):
        convert_target(dense, tmp_path / "no", fused_experts=True)


def test_gguf_gets_hugging_face_names_config_and_tokenizer(tmp_path):
    path = tmp_path / "m.gguf"
    arrays = write_tiny_gguf(path)
    steps: list[tuple[int, int]] = []
    out = convert_target(
        path, tmp_path / "out", progress=lambda done, total: steps.append((done, total))
    )
    file = open_safetensors(out / "model.safetensors")
    assert file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.read(name), array)
    assert load_target(out).config == load_target(path).config
    assert steps[-1][0] == steps[-1][1] == sum(array.nbytes for array in arrays.values())


@pytest.mark.parity
def test_the_gguf_tokenizer_cuts_the_same_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from peagle_jax.text.gguf_tokenizer import load_gguf_tokenizer

    for begin in (False, True):
        path = tmp_path / f"{begin}.gguf"
        write_tiny_gguf(path, metadata={"tokenizer.ggml.add_bos_token": begin})
        out = convert_target(path, tmp_path / f"out-{begin}")
        theirs, ours = transformers.AutoTokenizer.from_pretrained(out), load_gguf_tokenizer(path)
        for text in ("the in\n\n1.", "a  12<|im_end|>", ""):
            assert theirs(text).input_ids == ours.encode(text)
        messages = [{"role": "user", "content": "the  1"}]
        made = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert made == ours.render_chat(messages)
        generation = json.loads((out / "generation_config.json").read_text())
        assert set(generation["eos_token_id"]) == set(ours.stop_ids)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gemma4_mm", "gpt_oss_mxfp4", "qwen3_moe_fp8", "llama"])
def test_transformers_computes_the_golden_logits_from_what_is_written(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    out = convert_target(GOLDENS / name, tmp_path / "out", max_shard_bytes=60_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    expected = open_safetensors(GOLDENS / name / "expected.safetensors")
    with torch.no_grad():
        logits = model(torch.tensor(expected.read("input_ids")).long()).logits.numpy()
    assert np.abs(logits - expected.read("logits")).max() < 1e-4


def test_companions_travel_and_a_full_folder_is_not_touched(tmp_path):
    folder = tiny.write_folder(tmp_path / "in", tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("private")
    out = convert_target(folder, tmp_path / "out")
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    with pytest.raises(CheckpointError, match="out: exists and is not empty"):
        convert_target(folder, out)


def test_a_failed_conversion_leaves_nothing(tmp_path):
    arrays = tiny.tensors(tiny.LLAMA)
    folder = tiny.write_folder(tmp_path / "in", tiny.LLAMA, arrays)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        convert_target(folder, tmp_path / "out", progress=fail)
    assert [file.name for file in tmp_path.iterdir()] == ["in"]
