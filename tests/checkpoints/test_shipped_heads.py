"""Packed heads: what is kept exactly, how far int8 moves the rest, and what is refused."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax import cli
from peagle_jax.checkpoints import shipped_heads
from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.safetensors_file import open_safetensors, write_safetensors
from peagle_jax.checkpoints.shipped_heads import (
    CONFIG,
    KEY,
    WEIGHTS,
    find_shipped_head,
    is_packed_head,
    load_shipped_head,
    pack_head,
    quantise,
)
from peagle_jax.loading import find_drafter
from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from tests.models.drafter_configs import numpy_source, small_drafter

MASK = 30
LAYER = LayerConfig(num_heads=2, num_kv_heads=1, head_dim=8, rope=RopeConfig())
TARGET = TargetConfig(
    family="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    layers=(LAYER,) * 5,
    max_positions=64,
    norm_eps=1e-5,
    norm_cast="before_weight",
)
CONFIG_OF = {
    "p-eagle": small_drafter(
        target_hidden_size=16, taps=(1, 2, 3), mask_token_id=MASK, num_depths=4
    ),
    "eagle3": small_drafter(
        num_layers=1, target_hidden_size=16, taps=(1, 2, 3), parallel_drafting=False
    ),
}


def make_target(seed=0, *, tied=False, dtype=jnp.float32):
    config = dataclasses.replace(TARGET, tied_embeddings=tied)
    return Target(config, dtype=dtype, source=numpy_source(seed))


def make_drafter(target, method="p-eagle", *, kept=None, mask_row=True, **arrays):
    """A drafter with the target's embedding and head rows, except for the mask row."""
    config, values = CONFIG_OF[method], numpy_source(9)
    kept = np.arange(3, 23) if kept is None else kept
    embedding = np.array(target.embedding.get_value())
    columns = embedding.T if target.config.tied_embeddings else np.array(target.head.get_value())
    if method == "p-eagle" and mask_row:
        embedding[MASK] = 7 * np.arange(16)
    taken = {"embedding": embedding, "head": columns[:, kept], **arrays}

    def source(name, shape, dtype):
        if name == "d2t":
            return jnp.asarray(kept - np.arange(len(kept)), jnp.int32)
        return jnp.asarray(taken[name], dtype) if name in taken else values(name, shape, dtype)

    return Drafter(config, source=source)


def flat(drafter):
    state = nnx.to_flat_state(nnx.state(drafter))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in state}


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("method", CONFIG_OF)
def test_a_packed_head_comes_back_with_int8_matrices(tmp_path, method, tied):
    target = make_target(tied=tied)
    drafter = make_drafter(target, method)
    folder = pack_head(drafter, target, tmp_path / "head", card="# Card")
    assert (folder / "README.md").read_text() == "# Card"
    loaded = load_shipped_head(folder, target)
    assert loaded.config == drafter.config
    before, after = flat(drafter), flat(loaded)
    assert before.keys() == after.keys()
    moved = 0
    for name, value in before.items():
        if value.ndim == 1 or name in ("embedding", "head"):
            np.testing.assert_array_equal(after[name], value, err_msg=name)
            continue
        # Channels of qkv are its outputs (all but the first axis), of o its last axis.
        inputs = (0, 1, 2) if name.endswith(".o") else (0,)
        bound = np.abs(value).max(axis=inputs, keepdims=True) / 254
        assert (np.abs(after[name] - value) <= bound * 1.0001).all(), name
        moved += int((after[name] != value).sum())
    assert moved > 100  # it really went through int8


def test_bytes_are_one_per_matrix_weight(tmp_path):
    target = make_target()
    drafter = make_drafter(target)
    file = open_safetensors(pack_head(drafter, target, tmp_path / "head") / WEIGHTS)
    int8 = sum(info.nbytes for info in file.tensors.values() if info.dtype == np.int8)
    matrices = sum(
        value.size
        for name, value in flat(drafter).items()
        if value.ndim > 1 and name not in ("embedding", "head")
    )
    assert int8 == matrices
    assert file.info("embedding_rows").shape == (1, 16)


def test_quantise_against_exact_arithmetic():
    matrix = np.array([[1.27, -0.5, 0.004, 0.0], [0, 0, 0, 0], [-3, 3, 1, 2]], np.float32)
    values, scale = quantise(matrix)
    np.testing.assert_array_equal(values[0], [127, -50, 0, 0])
    np.testing.assert_array_equal(values[1], [0, 0, 0, 0])
    np.testing.assert_array_equal(values[2], [-127, 127, 42, 85])
    assert scale[1] == 1 and scale.dtype == np.float32


@pytest.mark.parametrize("layout", ["raw", "speculators"])
def test_an_export_of_a_packed_head_is_whole(tmp_path, layout):
    target = make_target()
    loaded = load_shipped_head(pack_head(make_drafter(target), target, tmp_path / "head"), target)
    save_drafter(loaded, tmp_path / layout, layout)
    again = load_drafter(tmp_path / layout, target_config=target.config)
    for name, value in flat(loaded).items():
        np.testing.assert_array_equal(flat(again)[name], value, err_msg=name)


def test_the_command_line_makes_a_packed_head_whole(packed, tmp_path, monkeypatch, capsys):
    target, folder = packed
    monkeypatch.setattr("peagle_jax.loading.find_target", lambda name: folder)
    monkeypatch.setattr("peagle_jax.checkpoints.load.load_target", lambda *args, **kwargs: target)
    flags = ["convert", str(folder), str(tmp_path / "whole"), "--layout", "speculators"]
    assert cli.main(flags) == 0
    assert "drafter" in capsys.readouterr().out
    content = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert content["speculators_config"]["verifier"]["name_or_path"] == "smollm2-135m"
    again = flat(load_drafter(tmp_path / "whole", target_config=target.config))
    for name, value in flat(load_shipped_head(folder, target)).items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_a_target_in_bfloat16_takes_the_same_head(tmp_path):
    folder = pack_head(make_drafter(make_target()), make_target(), tmp_path / "head")
    loaded = load_shipped_head(folder, make_target(dtype=jnp.bfloat16))
    assert loaded.dtype == jnp.bfloat16 and loaded.head.get_value().dtype == jnp.bfloat16


def test_an_embedding_of_the_target_stays_the_targets(tmp_path):
    target = make_target()
    folder = pack_head(make_drafter(target, mask_row=False), target, tmp_path / "head")
    loaded = load_shipped_head(folder, target)
    np.testing.assert_array_equal(loaded.embedding.get_value(), target.embedding.get_value())


REFUSED = {
    "head": ({"head": np.ones((16, 20))}, "columns are not the target's"),
    "not finite": ({"norm": np.full(16, np.nan)}, "norm holds values that are not finite"),
}


@pytest.mark.parametrize(("arrays", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_packed_is_named_and_leaves_nothing(tmp_path, arrays, message):
    target = make_target()
    with pytest.raises(ValueError, match=message):
        pack_head(make_drafter(target, **arrays), target, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_trained_embedding_is_not_packed(tmp_path, monkeypatch):
    target = make_target()
    monkeypatch.setattr(shipped_heads, "MAX_OWN_ROWS", 3)
    table = np.asarray(target.embedding.get_value()) + 1
    with pytest.raises(ValueError, match="32 embedding rows are not the target's, at most 3"):
        pack_head(make_drafter(target, embedding=table), target, tmp_path / "head")


def test_another_target_is_refused(tmp_path):
    target = make_target()
    folder = pack_head(make_drafter(target), target, tmp_path / "head")
    with pytest.raises(CheckpointError, match="trained for smollm2-135m.*are others"):
        load_shipped_head(folder, make_target(seed=1))


@pytest.fixture
def packed(tmp_path):
    target = make_target()
    return target, pack_head(make_drafter(target), target, tmp_path / "head")


def rewrite(folder, change):
    """Another file with a checksum of its own: a head that was packed wrong."""
    file = open_safetensors(folder / WEIGHTS)
    tensors = {name: file.read(name) for name in file.tensors}
    change(tensors)
    write_safetensors(folder / WEIGHTS, tensors)
    content = json.loads((folder / CONFIG).read_text())
    content[KEY]["sha256"] = file_sha256(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(content))


DAMAGED = {
    "missing": (lambda t: t.pop("fc.weight.scale"), "missing .*fc.weight.scale"),
    "extra": (lambda t: t.update(more=np.zeros(3)), "without a place .*more"),
    "shape": (
        lambda t: t.update({"norm.weight": np.zeros(15, np.float32)}),
        "norm.weight.*float32 .15., expected float32 .16.",
    ),
    "dtype": (
        lambda t: t.update({"fc.weight": t["fc.weight"].astype(np.int16)}),
        "fc.weight.*int16",
    ),
    "ids": (lambda t: t.update(kept_ids=t["kept_ids"] * 0), "kept_ids must be different"),
    "row": (
        lambda t: t.update(embedding_row_ids=np.array([99], np.int32)),
        "embedding_row_ids has an id outside",
    ),
    "scalar row": (
        lambda t: t.update(embedding_row_ids=np.array(3, np.int32)),
        "embedding_row_ids.*expected one dimension",
    ),
    "rows": (
        lambda t: t.update(embedding_rows=t["embedding_rows"][:, :15]),
        "embedding_rows.*expected float32",
    ),
    "row not finite": (
        lambda t: t.update(embedding_rows=t["embedding_rows"] * np.float32(np.nan)),
        "embedding_rows.*not finite",
    ),
    "scale": (
        lambda t: t.update({"fc.weight.scale": t["fc.weight.scale"] * np.float32(np.nan)}),
        "fc.weight.scale.*not finite",
    ),
    "scale of 0": (
        lambda t: t.update({"fc.weight.scale": t["fc.weight.scale"] * 0}),
        "fc.weight.scale.*not above 0",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(packed, change, message):
    target, folder = packed
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_shipped_head(folder, target)


def test_one_altered_byte_is_noticed(packed):
    target, folder = packed
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match="not the one that was packed.*install the package"):
        load_shipped_head(folder, target)


@pytest.mark.parametrize("name", shipped_heads.shipped_heads())
def test_the_shipped_heads_are_those_that_were_packed(name):
    folder = shipped_heads.heads_folder() / name
    packed = json.loads((folder / CONFIG).read_text())[KEY]
    assert packed["sha256"] == file_sha256(folder / WEIGHTS)


def test_a_newer_format_is_refused(packed):
    target, folder = packed
    content = json.loads((folder / CONFIG).read_text())
    content[KEY]["format"] = 2
    (folder / CONFIG).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="format"):
        load_shipped_head(folder, target)


def test_heads_are_found_by_target_and_method(packed, tmp_path, monkeypatch):
    target, folder = packed
    heads = tmp_path / "heads"
    monkeypatch.setattr(shipped_heads, "heads_folder", lambda: heads)
    monkeypatch.setattr("peagle_jax.loading.heads_folder", lambda: heads)
    assert find_shipped_head("smollm2-135m") is None and shipped_heads.shipped_heads() == ()
    assert find_drafter("smollm2-135m", tmp_path, "auto") is None
    with pytest.raises(CheckpointError, match="no head of that name .*it has: none"):
        load_shipped_head("smollm2-135m-p-eagle", target)
    for method in ("p-eagle", "eagle3"):
        shutil.copytree(folder, heads / f"smollm2-135m-{method}")
    assert find_shipped_head("smollm2-135m") == heads / "smollm2-135m-p-eagle"
    assert find_drafter("smollm2-135m", tmp_path, "auto", method="eagle3").name.endswith("eagle3")
    named = find_drafter("elsewhere", tmp_path, "smollm2-135m-p-eagle")
    assert named == heads / "smollm2-135m-p-eagle" and is_packed_head(named)
    assert find_shipped_head("smollm2-135m", "prompt-lookup") is None
    assert find_shipped_head("other") is None
    assert load_shipped_head("smollm2-135m-p-eagle", target).config.parallel_drafting


def test_the_shipped_heads_stay_under_24_mib():
    files = [file for file in shipped_heads.heads_folder().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 24 * 2**20
