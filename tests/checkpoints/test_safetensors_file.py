"""The safetensors reader and writer, against the safetensors library and NumPy slicing."""

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.checkpoints import safetensors_file
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.safetensors_file import (
    LazyTensor,
    open_safetensors,
    read_header,
    write_safetensors,
)


def write_by_hand(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_bfloat16_is_read_bit_exact_and_written_as_bfloat16_D16(tmp_path):
    data = struct.pack("<HH", 0x3F80, 0x4049)  # 1.0 and 3.140625
    path = write_by_hand(
        tmp_path / "a.safetensors",
        {"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}},
        data,
    )
    array = open_safetensors(path).read("x")
    assert array.dtype == ml_dtypes.bfloat16
    on_device = jnp.asarray(array)
    assert on_device.dtype == jnp.bfloat16
    assert on_device.astype(jnp.float32).tolist() == [1.0, 3.140625]
    copy = tmp_path / "b.safetensors"
    write_safetensors(copy, {"x": on_device})
    info = read_header(copy)["x"]
    assert (info.dtype, info.nbytes) == (np.dtype(ml_dtypes.bfloat16), 4)
    assert copy.read_bytes()[-4:] == data


def test_int64_stays_int64_without_x64_D16(tmp_path):
    assert not jax.config.jax_enable_x64
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"d2t": np.array([0, 1 << 40], np.int64)})
    array = open_safetensors(path).read("d2t")
    assert array.dtype == np.int64 and array.tolist() == [0, 1 << 40]
    assert read_header(path)["d2t"].dtype == np.int64


def test_files_of_both_writers_are_read_alike(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "f": rng.standard_normal((3, 5)).astype(np.float32),
        "h": rng.standard_normal((7,)).astype(np.float16),
        "b": rng.integers(0, 2, (2, 2)).astype(np.bool_),
        "u": rng.integers(0, 255, (3,)).astype(np.uint8),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bf": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
    }
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_safetensors(ours, arrays, {"format": "pt"})
    safetensors.numpy.save_file(arrays, str(theirs), {"format": "pt"})
    back = safetensors.numpy.load_file(str(ours))
    for name, array in arrays.items():
        assert back[name].tobytes() == array.tobytes()
        for path in (ours, theirs):
            found = open_safetensors(path).read(name)
            assert found.dtype == array.dtype and found.shape == array.shape
            assert found.tobytes() == array.tobytes()
    assert open_safetensors(ours).metadata == open_safetensors(theirs).metadata == {"format": "pt"}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), run=st.sampled_from([1, 40, 1 << 16]))
def test_any_block_of_any_view_equals_numpy(tmp_path_factory, data, run):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=5).map(tuple))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    cuts = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    path = tmp_path_factory.mktemp("blocks") / "a.safetensors"
    write_safetensors(path, {"pad": np.zeros(3, np.uint8), "x": array.reshape(-1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "_MIN_RUN", run)
        found = open_safetensors(path).read("x", cuts, view=shape)
    assert np.array_equal(found, array[cuts])


def test_lazy_tensors_are_written_part_by_part(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    lazy = LazyTensor(shape=(4, 3), dtype=array.dtype, parts=lambda: iter([array[:1], array[1:]]))
    write_safetensors(tmp_path / "a.safetensors", {"x": lazy})
    assert np.array_equal(open_safetensors(tmp_path / "a.safetensors").read("x"), array)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.ones(2, np.float32)})
    before = path.read_bytes()

    def broken():
        yield np.ones(1, np.float32)
        raise RuntimeError("disk on fire")

    bad = LazyTensor(shape=(9,), dtype=np.dtype(np.float32), parts=broken)
    with pytest.raises(RuntimeError, match="on fire"):
        write_safetensors(path, {"x": bad})
    short = LazyTensor(
        shape=(9,), dtype=np.dtype(np.float32), parts=lambda: iter([np.ones(1, np.float32)])
    )
    with pytest.raises(ValueError, match="'x': 4 bytes made, 36 announced"):
        write_safetensors(path, {"x": short})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'x': safetensors has no dtype complex64"):
        write_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.complex64)})


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        pytest.param({"x": F32}, 7, "truncated", id="short-data"),
        pytest.param({"x": F32}, 9, "longer than its header", id="long-data"),
        pytest.param({"x": {**F32, "dtype": "F4"}}, 8, "'x' has dtype 'F4'", id="dtype"),
        pytest.param({"x": {**F32, "shape": [3]}}, 8, "'x': F32 .3. needs 12", id="offsets"),
        pytest.param({"x": {"dtype": "F32"}}, 8, "'x': damaged header", id="entry"),
    ],
)
def test_damaged_files_are_named(tmp_path, header, size, message):
    path = write_by_hand(tmp_path / "bad.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04" * 8, "not a safetensors file"),
        (struct.pack("<Q", 50) + b"{}", "truncated inside its header"),
        (struct.pack("<Q", 2) + b"[}", "the header is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_files_that_are_no_safetensors_are_named(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere.safetensors: no such file"):
        open_safetensors(tmp_path / "nowhere.safetensors")
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match="a.safetensors: tensor 'y' is missing"):
        open_safetensors(path).read("y")
