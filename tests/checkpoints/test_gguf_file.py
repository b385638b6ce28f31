"""GGUF reading against the gguf package itself, and damaged files."""

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from peagle_jax.checkpoints.gguf_file import GgufError, open_gguf, unpermute_rotary_rows
from tests.smollm2_file import smollm2_gguf
from tests.tiny_gguf import write_tiny_gguf

# Every type the gguf package can dequantise (0.17 on); the two lists are compared below.
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
READ_ONLY = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *(["NVFP4"] if "NVFP4" in Type.__members__ else []),  # newer than gguf 0.17
)


def write_packed(path, name, kind, packed, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_equals_the_gguf_package(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, metadata={"peagle.flag": True, "peagle.scale": 0.25, "peagle.n": [3, -4]})
    expected = {
        key: field.contents()
        for key, field in gguf.GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }
    found = open_gguf(path).metadata
    assert found == expected
    assert found["peagle.flag"] is True and found["peagle.n"] == [3, -4]


@pytest.mark.parametrize("quantised", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_tiny_model_reads_back_in_hugging_face_order(tmp_path, quantised):
    path = tmp_path / "tiny.gguf"
    weights = write_tiny_gguf(path, types={"default": Type[quantised]}, tied=False)
    file = open_gguf(path)
    assert file.tensors["blk.0.attn_q.weight"].type == Type[quantised]
    read = {
        "model.layers.0.self_attn.q_proj.weight": unpermute_rotary_rows(
            file.read("blk.0.attn_q.weight"), 4
        ),
        "model.layers.1.self_attn.k_proj.weight": unpermute_rotary_rows(
            file.read("blk.1.attn_k.weight"), 2
        ),
        "model.layers.1.mlp.down_proj.weight": file.read("blk.1.ffn_down.weight"),
        "model.embed_tokens.weight": file.read("token_embd.weight"),
        "lm_head.weight": file.read("output.weight"),
        "model.norm.weight": file.read("output_norm.weight"),
    }
    for name, value in read.items():
        assert value.dtype == np.float32 and value.flags.writeable
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


@pytest.mark.parametrize("kind", [Type[name] for name in (*WRITABLE, *READ_ONLY)], ids=str)
def test_every_type_equals_the_gguf_package(tmp_path, kind):
    rng = np.random.default_rng(7)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # 21 rows: no power of two, so that regrouping the blocks has to be right.
    packed = rng.integers(0, 256, (21, 768 // block * block_bytes), dtype=np.uint8)
    if kind == Type.F32:
        packed = packed.view(np.float32)
    elif kind == Type.F16:
        packed = packed.view(np.float16)
    path = tmp_path / "one.gguf"
    write_packed(path, "t", kind, packed)
    with np.errstate(all="ignore"):  # random bits make infinities and NaN, which must agree too
        (stored,) = gguf.GGUFReader(path).tensors
        expected = gguf.quants.dequantize(stored.data, kind)
        file = open_gguf(path)
        np.testing.assert_array_equal(file.read("t"), expected)
        np.testing.assert_array_equal(file.read("t", start=5, stop=9), expected[5:9])
        assert file.read("t", start=3, stop=3).shape == (0, 768)


def test_the_table_of_types_is_complete():
    from gguf.quants import _type_traits

    listed = {Type[name] for name in (*WRITABLE, *READ_ONLY)}
    assert set(_type_traits) == listed - {Type.F32, Type.F16}


def test_slabs_join(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    weights = write_tiny_gguf(path)
    monkeypatch.setattr("peagle_jax.checkpoints.gguf_file._SLAB", 700)
    read = open_gguf(path).read("token_embd.weight")
    np.testing.assert_array_equal(read, weights["model.embed_tokens.weight"])


def test_unpermuting_keeps_attention_scores():
    """Neighbour-pair RoPE on GGUF rows scores as half-split RoPE on the reordered rows does."""
    rng = np.random.default_rng(3)
    heads, head_dim, hidden, position = 2, 8, 6, 5
    wq, wk = rng.normal(size=(2, heads * head_dim, hidden)).astype(np.float32)
    x, y = rng.normal(size=(2, hidden))
    angles = position * 10_000.0 ** (-np.arange(head_dim // 2) * 2 / head_dim)

    def neighbours(rows):
        pairs = rows.reshape(heads, -1, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads, head_dim)

    def halves(rows):
        low, high = np.split(rows.reshape(heads, head_dim), 2, axis=-1)
        turned = (low + 1j * high) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    stored = (neighbours(wq @ x) * (wk @ y).reshape(heads, -1)).sum(-1)
    reordered_q, reordered_k = (unpermute_rotary_rows(w, heads) for w in (wq, wk))
    ours = (halves(reordered_q @ x) * (reordered_k @ y).reshape(heads, -1)).sum(-1)
    np.testing.assert_allclose(ours, stored, rtol=1e-5)
    with pytest.raises(ValueError, match="16 rows are not 3 heads"):
        unpermute_rotary_rows(wq, 3)


def test_truncated_anywhere_is_an_error(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 20, 100, 3000, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf.*(truncated|not a GGUF)"):
            open_gguf(cut)
    open_gguf(path)


def test_truncation_names_key_and_tensor(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"tokenizer.ggml.merges") + 60])
    with pytest.raises(GgufError, match="tokenizer.ggml.merges"):
        open_gguf(path)
    path.write_bytes(whole[:-200])
    with pytest.raises(GgufError, match=r"tensor \'output_norm\.weight\' ends at.*truncated"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGML" + struct.pack("<I", 3), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 8, "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown metadata type 99.*'k'"),
    ],
    ids=["magic", "version", "endian", "huge string", "metadata type"],
)
def test_damaged_heads(tmp_path, start, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(start + b"\0" * 64)
    with pytest.raises(GgufError, match=message):
        open_gguf(path)


def test_unsupported_contents(tmp_path):
    path = tmp_path / "other.gguf"
    write_packed(path, "ints", Type.I32, np.arange(8, dtype=np.int32), architecture="mamba")
    file = open_gguf(path)
    with pytest.raises(GgufError, match=r"other\.gguf.*general\.architecture is 'mamba'.*'llama'"):
        file.require_architecture("llama")
    with pytest.raises(GgufError, match=r"other\.gguf: tensor 'ints' has type I32"):
        file.read("ints")
    with pytest.raises(GgufError, match=r"tensor 'absent' is missing"):
        file.read("absent")
    with pytest.raises(GgufError, match=r"'llama\.block_count' is missing"):
        file.require("llama.block_count", int)
    with pytest.raises(GgufError, match=r"'general.architecture' is 'mamba'; expected int"):
        file.require("general.architecture", int)
    with pytest.raises(IndexError, match="has 8 rows, not 2:9"):
        file.read("ints", start=2, stop=9)


def test_a_split_model_is_refused(tmp_path):
    path = tmp_path / "part.gguf"
    write_tiny_gguf(path, metadata={"split.count": 3})
    with pytest.raises(GgufError, match="split.count is 3"):
        open_gguf(path)


def test_unknown_tensor_type_number(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_packed(path, "tensor_name", Type.F32, np.ones((2, 32), np.float32))
    data = bytearray(path.read_bytes())
    place = data.index(b"tensor_name") + len("tensor_name") + 4 + 2 * 8
    assert data[place] == 0  # F32
    data[place] = 250
    path.write_bytes(bytes(data))
    with pytest.raises(GgufError, match="'tensor_name' has the unknown type number 250"):
        open_gguf(path)


def test_smollm2_reads_within_little_memory():
    """All tensors one by one: the peak rises by the largest (113 MB) and little more."""
    path = smollm2_gguf()
    script = f"""
import resource
from pathlib import Path
from peagle_jax.checkpoints.gguf_file import open_gguf
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
file = open_gguf({str(path)!r})
total = sum(file.read(name).size for name in file.tensors)
assert total == 134_515_008, total
print((peak() - before) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 113 + 50
