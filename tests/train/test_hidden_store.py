"""The store of hidden states: round trip, resumption, and what is refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from peagle_jax.checkpoints.safetensors_file import open_safetensors, write_safetensors
from train.data.hidden_store import HiddenWriter, StoreInfo, open_store

INFO = StoreInfo(target="toy", tap_layers=(2, 4, 7), hidden_size=4, dtype="float32")


def sample(seed, rows=5, info=INFO):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if info.dtype == "bfloat16" else info.dtype)
    return {
        "tokens": rng.integers(0, 50, rows).astype(np.int32),
        "loss_mask": rng.random(rows) < 0.5,
        "taps": rng.normal(size=(rows, info.taps_width)).astype(dtype),
        "last_hidden": rng.normal(size=(rows, info.hidden_size)).astype(dtype),
    }


def fill(folder, names, **options):
    with HiddenWriter(folder, INFO, **options) as writer:
        for name in names:
            writer.add(name, **sample(int(name), rows=3 + int(name)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_is_read_bit_for_bit(tmp_path, dtype):
    info = dataclasses.replace(INFO, dtype=dtype)
    with HiddenWriter(tmp_path, info, shard_rows=8) as writer:
        for i in range(5):
            writer.add(f"s{i}", **sample(i, 3 + i, info))
    store = open_store(tmp_path)
    assert store.info == info and len(store) == 5 and store.lengths.tolist() == [3, 4, 5, 6, 7]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    for i in range(5):
        read, wrote = dataclasses.asdict(store[i]), sample(i, 3 + i, info)
        for tensor in wrote:
            assert read[tensor].dtype == wrote[tensor].dtype
            assert read[tensor].tobytes() == wrote[tensor].tobytes()
    store.verify()


def test_the_targets_tokens_are_kept_where_the_store_has_them(tmp_path):
    info = dataclasses.replace(INFO, target_tokens=True)
    tokens = np.arange(5, dtype=np.int32)
    with HiddenWriter(tmp_path / "with", info) as writer:
        writer.add("s", **sample(0), target_tokens=tokens)
        with pytest.raises(ValueError, match="sample 't': the store needs target_tokens"):
            writer.add("t", **sample(1))
        with pytest.raises(ValueError, match=r"target_tokens has shape \[4\], expected \[5\]"):
            writer.add("u", **sample(1), target_tokens=tokens[1:])
    store = open_store(tmp_path / "with")
    assert store[0].target_tokens.tolist() == tokens.tolist()
    with HiddenWriter(tmp_path / "without", INFO) as writer:
        with pytest.raises(ValueError, match="sample 's': the store has no target_tokens"):
            writer.add("s", **sample(0), target_tokens=tokens)
        writer.add("s", **sample(0))
    assert open_store(tmp_path / "without")[0].target_tokens is None


def test_a_killed_capture_goes_on_where_its_last_shard_ended(tmp_path):
    with pytest.raises(RuntimeError), HiddenWriter(tmp_path, INFO, shard_rows=1) as writer:
        writer.add("0", **sample(0))
        raise RuntimeError("killed")
    (tmp_path / ".p0-00001.safetensors.ab.part").write_bytes(b"half")
    with HiddenWriter(tmp_path, INFO) as writer:
        assert writer.written == {"0"}
        writer.add("1", **sample(1))
    assert open_store(tmp_path).names == ("0", "1")


def test_order_does_not_depend_on_the_writers(tmp_path):
    fill(tmp_path / "one", "0123")
    fill(tmp_path / "two", "31", prefix="p0")
    fill(tmp_path / "two", "20", prefix="p1")
    one, two = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    assert one.names == two.names and one.digest == two.digest


def damaged(name, change):
    """A written store whose one shard is written again with `change` applied to its tensors."""

    def make(folder):
        with HiddenWriter(folder, INFO) as writer:
            writer.add("good", **sample(0))
            writer.add("bad", **sample(1))
        (path,) = folder.glob("*.safetensors")
        shard = open_safetensors(path)
        tensors = {tensor: shard.read(tensor) for tensor in shard.tensors}
        tensors[name] = change(tensors[name])
        write_safetensors(path, tensors, shard.metadata)
        return open_store(folder)

    return make


def with_value(row, value):
    def change(states):
        states = states.copy()
        states[row, 1] = value
        return states

    return change


@pytest.mark.parametrize(
    "make, message",
    [
        (damaged("taps", with_value(7, np.nan)), "taps is not finite in row 2"),
        (damaged("last_hidden", with_value(5, np.inf)), "last_hidden is not finite in row 0"),
        (damaged("taps", lambda t: t[:-1]), r"taps has shape \[9, 12\], rows 5 to 10 are needed"),
        (damaged("taps", lambda t: t[:, :-1]), r"taps has shape \[5, 11\], expected \[5, 12\]"),
        (
            damaged("last_hidden", lambda t: t.astype(np.float16)),
            "last_hidden is float16, expected float32",
        ),
        (damaged("taps", with_value(7, 3.0)), "checksum differs"),
        (damaged("tokens", lambda t: t + 1), "checksum differs"),
    ],
)
def test_E18_damaged_states_are_refused_on_read_naming_the_sample(tmp_path, make, message):
    store = make(tmp_path)
    with pytest.raises(ValueError, match=f"sample 'bad': {message}"):
        store.read("bad")
    with pytest.raises(ValueError, match="sample '(bad|good)'"):
        store.verify()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"taps": with_value(1, np.nan)(sample(0)["taps"])}, "taps is not finite in row 1"),
        ({"last_hidden": sample(0)["last_hidden"][:-1]}, r"shape \[4, 4\], expected \[5, 4\]"),
        ({"taps": sample(0)["taps"][:, :8]}, r"shape \[5, 8\], expected \[5, 12\]"),
        ({"loss_mask": np.ones(4, bool)}, r"loss_mask has shape \[4\]"),
        ({"taps": sample(0)["taps"].astype(np.float64)}, "float64, expected float32"),
    ],
)
def test_E18_bad_states_are_refused_on_write_naming_the_sample(tmp_path, change, message):
    with HiddenWriter(tmp_path, INFO) as writer:
        with pytest.raises(ValueError, match=f"sample 'x': .*{message}"):
            writer.add("x", **{**sample(0), **change})
        writer.add("y", **sample(1))
    assert open_store(tmp_path).names == ("y",)


def test_names_descriptions_and_files_must_agree(tmp_path):
    fill(tmp_path, "01")
    with HiddenWriter(tmp_path, INFO) as writer:
        with pytest.raises(ValueError, match="sample '1' is in the store already"):
            writer.add("1", **sample(1))
    with pytest.raises(ValueError, match="use another folder"):
        HiddenWriter(tmp_path, dataclasses.replace(INFO, tap_layers=(2, 3, 5)))
    (shard,) = tmp_path.glob("*.safetensors")
    (tmp_path / "copy.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(ValueError, match="sample '0' is also in"):
        open_store(tmp_path)
    write_safetensors(tmp_path / "copy.safetensors", {"x": np.zeros(2)})
    with pytest.raises(ValueError, match="not a shard of hidden states"):
        open_store(tmp_path)
    with pytest.raises(ValueError, match="no .*shard"):
        open_store(tmp_path / "empty")
