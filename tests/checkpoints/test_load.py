"""Loading targets: every stored form against plain NumPy, on one device and on a mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoints import sources
from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.packed import PackedFp8, PackedMxfp4
from peagle_jax.models.target import Target
from peagle_jax.sharding import make_mesh
from tests.checkpoints import tiny
from tests.tiny_gguf import write_tiny_gguf

GOLDENS = Path(__file__).parent.parent / "data" / "targets"
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 4], "activation_scheme": "dynamic"}


def values(target: Target) -> dict[str, jax.Array]:
    """Parameters by name ("layers.0.qkv"), packed ones unpacked in float32."""
    found = {}
    packed = (PackedFp8, PackedMxfp4)
    for path, leaf in nnx.to_flat_state(nnx.state(target)):
        value = leaf.get_value()
        name = ".".join(map(str, path))
        found[name] = _unpack(value) if isinstance(value, packed) else value
    return found


@jax.jit
def _unpack(value: PackedFp8 | PackedMxfp4) -> jax.Array:
    return value.dequantize(jnp.float32)


def assert_holds(target: Target, expected: dict[str, np.ndarray], dtype=jnp.float32) -> None:
    found = values(target)
    for name, value in expected.items():
        assert found[name].dtype == dtype
        wanted = np.asarray(value).astype(dtype)
        np.testing.assert_array_equal(np.asarray(found[name]), wanted, err_msg=name)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN3], ids=["llama", "qwen3"])
def test_dense_models_of_every_float_dtype(tmp_path, config, stored, num_shards):
    arrays = tiny.tensors(config, stored)
    folder = tiny.write_folder(tmp_path / "m", config, arrays, num_shards=num_shards)
    target = load_target(folder, dtype=jnp.float32)
    expected = tiny.parameters(config, {k: v.astype(np.float32) for k, v in arrays.items()})
    assert_holds(target, expected)
    assert hasattr(target, "head") == (config is tiny.LLAMA)


def test_bfloat16_parameters_are_the_rounded_ones(tmp_path):
    arrays = tiny.tensors(tiny.LLAMA)
    target = load_target(tiny.write_folder(tmp_path, tiny.LLAMA, arrays), dtype=jnp.bfloat16)
    assert_holds(target, tiny.parameters(tiny.LLAMA, arrays), jnp.bfloat16)


def test_default_dtype_on_a_cpu_is_float32(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA, ml_dtypes.bfloat16))
    assert load_target(folder).embedding.get_value().dtype == jnp.float32
    with pytest.raises(ValueError, match="dtype int8: expected float32 or bfloat16"):
        load_target(folder, dtype=jnp.int8)


def fused_qwen(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The grouped layout: gate rows above up rows, all experts in one tensor."""
    fused = {k: v for k, v in arrays.items() if ".experts." not in k}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        one = [{n: arrays[f"{stem}{e}.{n}_proj.weight"] for n in tiny._LETTERS} for e in range(4)]
        fused[f"{stem}gate_up_proj"] = np.stack([np.concatenate([p["gate"], p["up"]]) for p in one])
        fused[f"{stem}down_proj"] = np.stack([p["down"] for p in one])
    return fused


def test_experts_per_tensor_and_grouped_load_alike_D14(tmp_path):
    arrays = tiny.tensors(tiny.QWEN3_MOE)
    expected = tiny.parameters(tiny.QWEN3_MOE, arrays)
    for name, layout in (("each", arrays), ("grouped", fused_qwen(arrays))):
        folder = tiny.write_folder(tmp_path / name, tiny.QWEN3_MOE, layout)
        assert_holds(load_target(folder, dtype=jnp.float32), expected)


def test_experts_in_both_layouts_at_once_are_refused_D14(tmp_path):
    arrays = tiny.tensors(tiny.QWEN3_MOE)
    folder = tiny.write_folder(tmp_path, tiny.QWEN3_MOE, {**arrays, **fused_qwen(arrays)})
    with pytest.raises(ValueError, match="model.safetensors: experts in two layouts"):
        load_target(folder)


@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("scales", [np.float32, ml_dtypes.bfloat16])
def test_block_fp8_is_exact_with_partial_blocks(tmp_path, scales, keep_packed):
    config = {**tiny.QWEN3_MOE, "quantization_config": {**FP8, "weight_block_size": [5, 7]}}
    stored, exact = tiny.fp8_tensors(config, (5, 7), scales)
    folder = tiny.write_folder(tmp_path, config, stored)
    target = load_target(folder, dtype=jnp.float32, keep_packed=keep_packed)
    assert_holds(target, tiny.parameters(config, exact))
    kind = PackedFp8 if keep_packed else jax.Array
    for parameter in (target.layers[0].qkv, target.layers[0].o, target.layers[1].experts_down):
        assert isinstance(parameter.get_value(), kind)


@pytest.mark.parametrize("keep_packed", [False, True])
def test_mxfp4_is_exact(tmp_path, keep_packed):
    stored, exact = tiny.mxfp4_tensors(tiny.GPT_OSS)
    config = {**tiny.GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}
    folder = tiny.write_folder(tmp_path, config, stored)
    target = load_target(folder, dtype=jnp.float32, keep_packed=keep_packed)
    assert_holds(target, tiny.parameters(config, exact))
    kind = PackedMxfp4 if keep_packed else jax.Array
    assert isinstance(target.layers[0].experts_gate_up.get_value(), kind)
    leaves = jax.tree.leaves(target.layers[0].experts_gate_up.get_value())
    # Half a byte per entry and one byte per 32 of them, or four bytes per entry.
    entries = 4 * 32 * 2 * 32
    assert sum(leaf.nbytes for leaf in leaves) == (
        entries * 17 // 32 if keep_packed else 4 * entries
    )


def test_gguf_rows_are_put_back_into_half_split_order(tmp_path):
    path = tmp_path / "m.gguf"
    arrays = write_tiny_gguf(path, tied=False)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    assert_holds(load_target(path, dtype=jnp.float32), tiny.parameters(config, arrays))


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 2, "fsdp": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("form", ["fp8", "fp8-packed", "mxfp4", "mxfp4-packed", "llama", "gguf"])
def test_shards_on_a_mesh_hold_the_same_parameters(tmp_path, form, axes):
    mesh = make_mesh(**axes)
    keep_packed = form.endswith("packed")
    if form == "gguf":
        path = tmp_path / "m.gguf"
        write_tiny_gguf(path)
    elif form.startswith("fp8"):
        config = {**tiny.QWEN3_MOE, "quantization_config": FP8}
        path = tiny.write_folder(tmp_path, config, tiny.fp8_tensors(config, (8, 4))[0])
    elif form.startswith("mxfp4"):
        path = tiny.write_folder(tmp_path, tiny.GPT_OSS, tiny.mxfp4_tensors(tiny.GPT_OSS)[0])
    else:
        path = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    alone = load_target(path, dtype=jnp.float32, keep_packed=keep_packed)
    spread = load_target(path, dtype=jnp.float32, keep_packed=keep_packed, mesh=mesh)
    assert_holds(spread, {name: np.asarray(value) for name, value in values(alone).items()})
    leaves = jax.tree.leaves(nnx.state(spread))
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    whole = sum(leaf.nbytes for leaf in leaves)
    first = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert first < 0.5 * whole  # really spread, not copied to every device


def test_each_shard_reads_only_its_own_bytes(tmp_path, monkeypatch):
    folder = tiny.write_folder(tmp_path, tiny.QWEN3_MOE, tiny.tensors(tiny.QWEN3_MOE))
    seen: list[tuple[str, int]] = []
    read = sources.Stored.read

    def counted(self, index):
        block = read(self, index)
        seen.append((self.name, block.nbytes))
        return block

    monkeypatch.setattr(sources.Stored, "read", counted)
    load_target(folder, dtype=jnp.float32, mesh=make_mesh(expert=4, fsdp=2))
    stored = sum(4 * int(np.prod(shape)) for shape in tiny.shapes(tiny.QWEN3_MOE).values())
    assert sum(size for _, size in seen) == stored
    one = [size for name, size in seen if name.endswith("layers.0.mlp.experts.1.up_proj.weight")]
    assert one == [12 * 16 * 4 // 2] * 2


def test_parameters_do_not_depend_on_the_size_of_the_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 700)
    stored, exact = tiny.mxfp4_tensors(tiny.GPT_OSS)
    folder = tiny.write_folder(tmp_path / "a", tiny.GPT_OSS, stored)
    expected = tiny.parameters(tiny.GPT_OSS, exact)
    assert_holds(load_target(folder, dtype=jnp.float32, mesh=make_mesh(fsdp=8)), expected)
    assert_holds(load_target(folder, dtype=jnp.float32), expected)
    path = tmp_path / "m.gguf"
    arrays = write_tiny_gguf(path)
    config = {**tiny.LLAMA, "hidden_size": 64}
    assert_holds(load_target(path, dtype=jnp.float32), tiny.parameters(config, arrays))


def test_multimodal_checkpoints_load_without_their_vision_part():
    text = load_target(GOLDENS / "gemma4_text", dtype=jnp.float32)
    both = load_target(GOLDENS / "gemma4_mm", dtype=jnp.float32)
    assert both.config == text.config
    assert values(both).keys() == values(text).keys()
    assert not any("vision" in name for name in values(both))


def test_progress_ends_at_all_bytes(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, tiny.tensors(tiny.LLAMA))
    steps: list[tuple[int, int]] = []
    target = load_target(folder, progress=lambda done, total: steps.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(target)))
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_loaded_parameters_may_be_donated_I8(tmp_path):
    """The CPU backend takes the read buffers over; donating them must not touch other arrays."""
    arrays = tiny.tensors(tiny.LLAMA)
    folder = tiny.write_folder(tmp_path, tiny.LLAMA, arrays)
    first, second = (nnx.state(load_target(folder, dtype=jnp.float32)) for _ in range(2))
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + jnp.float32(1), state), donate_argnums=0)
    for before, after in zip(jax.tree.leaves(second), jax.tree.leaves(add(first)), strict=True):
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before) + np.float32(1))
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        add(first)
