"""Drafter files: strict reading, what a target may lend, and every name the public has for them."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from peagle_jax.sharding import make_mesh
from tests.checkpoints.drafter_json_samples import small_target
from tests.models.drafter_configs import numpy_drafter, numpy_source, small_drafter

CONFIG = small_drafter(norm_before_residual=True)
FULL = small_drafter(draft_vocab_size=32, target_hidden_size=16)


def parameters(drafter: Drafter) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(drafter))
    return {".".join(map(str, path)): np.asarray(value.get_value()) for path, value in flat}


def numpy_target(*, dtype=jnp.float32, **changes) -> Target:
    config = small_target(hidden_size=16, **changes)
    return Target(config, dtype=dtype, source=numpy_source(1))


def assert_same(one: Drafter, other: Drafter):
    left, right = parameters(one), parameters(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A head with a draft vocabulary, and one for the full vocabulary, as raw folders."""
    root = tmp_path_factory.mktemp("heads")
    drafters = {}
    for name, config in {"small": CONFIG, "full": FULL}.items():
        drafters[name] = numpy_drafter(config)
        save_drafter(drafters[name], root / name)
    return root, drafters


@pytest.fixture
def head(heads, tmp_path):
    """A copy of one of the heads with tensors or config keys changed; None takes one away."""

    def make(name: str = "small", rename=None, config=None, **tensors):
        folder = tmp_path / "head"
        shutil.copytree(heads[0] / name, folder)
        found = load_file(folder / "model.safetensors")
        for key, value in tensors.items():
            found[key.replace("__", ".")] = value
        found = {key: value for key, value in found.items() if value is not None}
        if rename is not None:
            found = {rename(key): value for key, value in found.items()}
        save_file(found, folder / "model.safetensors")
        content = json.loads((folder / "config.json").read_text()) | (config or {})
        content = {key: value for key, value in content.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name if name in ("d2t", "lm_head.weight") else "model." + name,
        lambda name: "model." + name.replace("midlayer.", "layers.0."),
    ],
    ids=["midlayer", "layers.0", "model.midlayer", "model.layers.0"],
)
def test_tensor_names_of_every_writer(heads, head, rename):
    assert_same(load_drafter(head(rename=rename)), heads[1]["small"])


def test_leftovers_of_training_are_ignored(heads, head):
    extra = {
        "verifier_lm_head__weight": np.zeros((2, 2), np.float32),
        "verifier_norm__weight": np.zeros(2, np.float32),
        "midlayer__self_attn__rotary_emb__inv_freq": np.zeros(3, np.float32),
    }
    assert_same(load_drafter(head(**extra)), heads[1]["small"])


def test_shards_with_an_index(heads, head):
    folder = head()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + (len(name) % 2)}-of-00002.safetensors" for name in tensors}
    for shard in set(where.values()):
        save_file({n: v for n, v in tensors.items() if where[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same(load_drafter(folder), heads[1]["small"])


@pytest.mark.parametrize("shape", [(36,), (1, 36), (3, 12)])
def test_mask_hidden_of_any_shape_with_the_right_size(heads, head, shape):
    value = parameters(heads[1]["small"])["mask_hidden"].reshape(shape)
    assert_same(load_drafter(head(mask_hidden=value)), heads[1]["small"])


def test_missing_mask_hidden_D6(head):
    """Import of a parallel-drafting head without mask_hidden raises (pitfall D6)."""
    with pytest.raises(CheckpointError, match="mask_hidden.*parallel_drafting=False"):
        load_drafter(head(mask_hidden=None))


def test_p_eagle_head_for_eagle3_drafting(heads, head):
    with pytest.warns(UserWarning, match="mask_hidden is left out"):
        drafter = load_drafter(head(), parallel_drafting=False)
    assert not drafter.config.parallel_drafting and not hasattr(drafter, "mask_hidden")


@pytest.mark.parametrize(
    "name",
    ["midlayer.input_layernorm.weight", "norm.weight", "fc.weight", "layers.1.mlp.up_proj.weight"],
)
def test_any_missing_tensor_is_named_D13(head, name):
    """No tensor but embedding and head may be missing (pitfall D13)."""
    plain = name.replace("midlayer", "layers.0")
    with pytest.raises(CheckpointError, match=rf"model.safetensors: tensors are missing: {plain}"):
        load_drafter(head(**{name.replace(".", "__"): None}))


def test_unexpected_tensors_are_named_D13(head):
    """A tensor that the config has no place for is an error (pitfall D13)."""
    extra = {"midlayer__self_attn__q_norm__weight": np.ones(6, np.float32)}
    with pytest.raises(CheckpointError, match="without a place: midlayer.self_attn.q_norm.weight"):
        load_drafter(head(**extra))


def test_embedding_comes_from_a_target_of_the_same_shape_D13(heads, head):
    """Missing embed_tokens: the target's where shapes match, else an error (pitfall D13)."""
    folder = head("full", embed_tokens__weight=None)
    target = numpy_target()
    drafter = load_drafter(folder, target=target)
    assert not drafter.config.own_embedding
    assert drafter.embedding.get_value() is target.embedding.get_value()
    with pytest.raises(CheckpointError, match="embed_tokens.weight is missing; pass target="):
        load_drafter(folder)
    other = numpy_target(vocab_size=24)
    with pytest.raises(CheckpointError, match=r"embedding \[24, 16\] has not the shape \[32, 16\]"):
        load_drafter(folder, target=other)


def test_embedding_of_a_scaling_target_is_borrowed_raw_D19(head):
    """Gemma multiplies its embedding; a drafter takes the rows as they are unless its config says
    otherwise."""
    target, ids = numpy_target(embedding_scale=4.0), jnp.arange(32, dtype=jnp.int32)
    rows = np.asarray(target.embedding.get_value())
    folder = head("full", embed_tokens__weight=None)
    np.testing.assert_array_equal(load_drafter(folder, target=target).embed(ids), rows)
    config = json.loads((folder / "config.json").read_text()) | {"embedding_scale": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(load_drafter(folder, target=target).embed(ids), 4 * rows)


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_borrowed_for_the_full_vocabulary_only_D13(heads, head, tied):
    """Missing lm_head: the target's for the full vocabulary, else an error (pitfall D13)."""
    target = numpy_target(tied_embeddings=tied)
    drafter = load_drafter(head("full", lm_head__weight=None), target=target)
    want = target.embedding.get_value().T if tied else target.head.get_value()
    np.testing.assert_array_equal(drafter.head.get_value(), want)


def test_head_of_a_draft_vocabulary_must_be_there_D13(head):
    folder = head(lm_head__weight=None)
    with pytest.raises(CheckpointError, match="lm_head.weight is missing.*draft_vocab_size is 20"):
        load_drafter(folder, target=Target(small_target()))


def test_head_tied_to_the_draft_embedding_is_refused(head):
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_drafter(head("full", lm_head__weight=None, config={"tie_word_embeddings": True}))


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            {"mask_hidden": np.zeros(35, np.float32)},
            r"'mask_hidden' has shape \[35\].*target_hidden",
        ),
        (
            {"fc__weight": np.zeros((16, 24), np.float32)},
            r"'fc.weight' has shape \[16, 24\], .* asks for \[16, 36\] \(from hidden_size, target",
        ),
        (
            {"midlayer__self_attn__q_proj__weight": np.zeros((24, 16), np.float32)},
            r"'midlayer.self_attn.q_proj.weight' has shape \[24, 16\], .* asks for \[24, 32\]",
        ),
        (
            {"lm_head__weight": np.zeros((32, 16), np.float32)},
            r"'lm_head.weight' has shape \[32, 16\].*from draft_vocab_size",
        ),
        ({"norm__weight": np.zeros(16, np.int8)}, "'norm.weight' has dtype int8"),
        (
            {"d2t": None},
            "d2t is missing, but draft_vocab_size 20 is less than the vocabulary of 32",
        ),
        ({"d2t": np.zeros(19, np.int64)}, r"d2t is int64 \[19\], expected integers \[20\]"),
        ({"d2t": np.full(20, 30, np.int64)}, "d2t maps draft id 2 to 32, outside"),
        ({"d2t": -np.arange(20)}, "d2t maps two draft ids to one target id"),
        ({"d2t": np.zeros(20, np.int64)}, "d2t and t2d disagree"),
        ({"t2d": np.zeros(20, np.int64)}, "t2d is int64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_tensors_are_named_with_file_and_key(head, tensors, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_drafter(head(**tensors))
    assert "model.safetensors: tensor" in str(caught.value)


def test_absolute_ids_in_place_of_offsets_are_refused_D1(head):
    """arange as offsets would double every id (pitfall D1)."""
    with pytest.raises(CheckpointError, match="d2t maps draft id 16 to 32.*d2t holds offsets"):
        load_drafter(head(d2t=np.arange(20)))


def test_two_names_for_one_tensor_are_refused(head):
    extra = {"layers__0__input_layernorm__weight": np.ones(16, np.float32)}
    with pytest.raises(CheckpointError, match="model.safetensors: tensors .* mean the same"):
        load_drafter(head(**extra))


def test_a_target_model_is_recognised(head):
    def rename(name: str) -> str:
        return "model." + name.replace("midlayer.", "layers.0.")

    gone = {name: None for name in ("fc__weight", "midlayer__hidden_norm__weight", "mask_hidden")}
    folder = head(
        "full",
        rename=rename,
        config={"ptd_token_id": None, "mask_token_id": None, "parallel_drafting": None},
        **gone,
    )
    with pytest.raises(CheckpointError, match="looks like a target model, not a drafter"):
        load_drafter(folder)


def test_dtype_follows_the_target_and_can_be_set(heads):
    folder = heads[0] / "full"
    assert load_drafter(folder).dtype == jnp.float32
    assert load_drafter(folder, dtype=jnp.bfloat16).head.get_value().dtype == jnp.bfloat16
    target = numpy_target(dtype=jnp.bfloat16)
    assert load_drafter(folder, target=target).dtype == jnp.bfloat16


def test_mesh_gives_the_same_parameters_in_pieces(heads):
    mesh = make_mesh(fsdp=2, tensor=2, data=2)
    drafter = load_drafter(heads[0] / "small", mesh=mesh)
    assert_same(drafter, heads[1]["small"])
    qkv = drafter.layers[0].qkv.get_value()
    assert qkv.sharding.shard_shape(qkv.shape) == (16, 1, 4, 6)


def test_target_config_is_checked_and_mask_row_kept(heads):
    target = small_target(num_layers=8)
    assert load_drafter(heads[0] / "small", target_config=target).config == CONFIG
    with pytest.raises(CheckpointError, match="do not fit a target with 3 layers"):
        load_drafter(
            heads[0] / "small", target_config=dataclasses.replace(target, layers=target.layers[:3])
        )
