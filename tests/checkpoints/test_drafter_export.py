"""What is written for a drafter, judged by independent readers and by reading it back."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from peagle_jax.checkpoints.drafter_config import read_drafter_config
from peagle_jax.checkpoints.drafter_export import convert_drafter, new_folder, save_drafter
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.models.config import LayerConfig, RopeConfig
from tests.checkpoints.test_drafter_files import assert_same
from tests.models.drafter_configs import numpy_drafter, small_drafter

LAYOUTS = ["raw", "speculators"]
YARN = RopeConfig(kind="yarn", theta=1e4, factor=4.0, original_max_positions=16, truncate=False)
LLAMA3 = RopeConfig(
    kind="llama3",
    theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=64,
)


def header(folder) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor, by the safetensors library."""
    with safe_open(folder / "model.safetensors", "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (cut.get_dtype(), cut.get_shape()) for name, cut in slices.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_vllm_needs_is_there_D6(layout, tmp_path):
    """Names, shapes and keys of a 4-layer head of width 16 with three taps (pitfall D6)."""
    config = small_drafter(num_layers=4, target_hidden_size=16, num_depths=6)
    folder = save_drafter(numpy_drafter(config), tmp_path / "head", layout, verifier="a/target")
    found = header(folder)
    first = "midlayer." if layout == "raw" else "layers.0."
    attention = {"q_proj": 24, "k_proj": 12, "v_proj": 12}
    want = {
        "embed_tokens.weight": ("F32", [32, 16]),
        "fc.weight": ("F32", [16, 48]),
        "mask_hidden": ("F32", [1, 1, 48]),
        "norm.weight": ("F32", [16]),
        "lm_head.weight": ("F32", [20, 16]),
        "d2t": ("I64", [20]),
        "t2d": ("BOOL", [32]),
        f"{first}hidden_norm.weight": ("F32", [16]),
    }
    for name, width in [(first, 32), ("layers.1.", 16), ("layers.2.", 16), ("layers.3.", 16)]:
        want |= {
            f"{name}self_attn.{proj}.weight": ("F32", [rows, width])
            for proj, rows in attention.items()
        }
        want |= {
            f"{name}self_attn.o_proj.weight": ("F32", [16, 24]),
            f"{name}mlp.gate_proj.weight": ("F32", [24, 16]),
            f"{name}mlp.up_proj.weight": ("F32", [24, 16]),
            f"{name}mlp.down_proj.weight": ("F32", [16, 24]),
            f"{name}input_layernorm.weight": ("F32", [16]),
            f"{name}post_attention_layernorm.weight": ("F32", [16]),
        }
    assert found == want
    content = json.loads((folder / "config.json").read_text())
    for key, value in {
        "ptd_token_id": 31,
        "mask_token_id": 31,
        "draft_vocab_size": 20,
        "target_hidden_size": 16,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "num_depths": 6,
        "dtype": "float32",
    }.items():
        assert content[key] == value, key
    if layout == "raw":
        assert content["architectures"] == ["LlamaForCausalLMEagle3"]
        assert content["model_type"] == "llama"
    else:
        assert content["architectures"] == ["PEagleDraftModel"]
        assert content["speculators_model_type"] == "peagle"
        proposal = content["speculators_config"]
        assert proposal["verifier"]["name_or_path"] == "a/target"
        assert proposal["proposal_methods"][0]["speculative_tokens"] == 5


FLAGS = [
    {"norm_before_residual": a, "norm_before_fc": b, "fc_norm": c, "norm_output": d}
    for a, b, c, d in itertools.product([False, True], repeat=4)
    if not (b and c)
]


def flag_id(flags: dict[str, bool]) -> str:
    return "+".join(name for name, value in flags.items() if value) or "none"


def flag_drafter(flags: dict[str, bool]):
    return numpy_drafter(small_drafter(num_layers=1, **flags))


@functools.partial(jax.jit, static_argnums=0)
def _two_passes(graph, state, taps):
    drafter = nnx.merge(graph, state)
    tokens = jnp.arange(4, dtype=jnp.int32)[None]
    out = drafter(tokens, drafter.fuse(taps).at[:, 3].set(drafter.fused_mask()[None]), tokens)
    second = drafter(tokens, out.feedback, tokens)
    return jnp.stack([drafter.logits(out.hidden), drafter.logits(second.hidden)])


def logits(drafter) -> np.ndarray:
    taps = np.random.default_rng(0).normal(size=(1, 4, drafter.config.input_size))
    graph, state = nnx.split(drafter)
    return np.asarray(_two_passes(graph, state, jnp.asarray(taps.astype(np.float32))))


@functools.cache
def flag_logits(name: str) -> np.ndarray:
    return logits(flag_drafter(next(flags for flags in FLAGS if flag_id(flags) == name)))


@pytest.mark.parametrize("flags", FLAGS, ids=flag_id)
def test_switches_survive_both_layouts_D9(flags, tmp_path):
    """Every combination, written, read, written in the other layout, read (pitfall D9)."""
    drafter = flag_drafter(flags)
    before = flag_logits(flag_id(flags))
    for layout, other in (LAYOUTS, LAYOUTS[::-1]):
        folder = save_drafter(drafter, tmp_path / layout, layout)
        again = load_drafter(folder)
        assert {name: getattr(again.config, name) for name in flags} == flags
        np.testing.assert_allclose(logits(again), before, atol=1e-6)
        converted = load_drafter(convert_drafter(folder, tmp_path / f"{layout}-to-{other}", other))
        np.testing.assert_allclose(logits(converted), before, atol=1e-6)


@pytest.mark.parametrize("flags", FLAGS[1:], ids=flag_id)
def test_every_switch_changes_the_logits_D9(flags):
    """Turning one switch off again moves the logits (pitfall D9); norm_output the second pass."""
    with_it = flag_logits(flag_id(flags))
    for name in [name for name, value in flags.items() if value]:
        without = flag_logits(flag_id(flags | {name: False}))
        assert np.abs(with_it[1] - without[1]).max() > 1e-3
        assert (np.abs(with_it[0] - without[0]).max() > 1e-3) == (name != "norm_output")


CONFIGS = {
    "full-vocabulary": small_drafter(draft_vocab_size=32),
    "eagle3": small_drafter(parallel_drafting=False, num_layers=1),
    "qwen3-biases": small_drafter(style="qwen3", attention_bias=True, mlp_bias=True),
    "qwen3-eagle3": small_drafter(style="qwen3", parallel_drafting=False),
    "llama3-rope-five-taps": small_drafter(rope=LLAMA3, taps=(1, 2, 3, 4, 8)),
    "yarn": small_drafter(rope=YARN, num_depths=8),
    "linear": small_drafter(rope=RopeConfig(kind="linear", theta=1e4, factor=2.0)),
    "windows": small_drafter(windows=(7, None, 7), num_depths=7),
    "qwen3-windows": small_drafter(style="qwen3", windows=(None, 7)),
    "padded": small_drafter(draft_vocab_size=40, target_vocab_size=32),
    "gelu": small_drafter(activation="gelu_tanh"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_keeps_config_and_every_bit(config, layout, tmp_path):
    config = dataclasses.replace(config, num_speculative_tokens=4)
    drafter = numpy_drafter(config, 1)
    again = load_drafter(save_drafter(drafter, tmp_path / "head", layout))
    assert again.config == config
    assert_same(again, drafter)


def test_raw_head_without_taps(tmp_path):
    for fuse, width in ((True, 12), (False, 16)):
        config = small_drafter(taps=(), use_taps=False, fuse=fuse, target_hidden_size=width)
        drafter = numpy_drafter(config)
        again = load_drafter(save_drafter(drafter, tmp_path / str(fuse)))
        assert again.config == config
        assert_same(again, drafter)
    with pytest.raises(ValueError, match="no head without taps; use layout='raw'"):
        save_drafter(drafter, tmp_path / "other", "speculators")


def test_offsets_and_marks_are_written_D1(tmp_path):
    """Draft ids 0..3 for targets 0, 1, 3, 6: offsets [0, 0, 1, 3], int64 (pitfall D1)."""
    drafter = numpy_drafter(small_drafter(vocab_size=8, draft_vocab_size=4, mask_token_id=7))
    drafter.d2t.set_value(jnp.asarray(np.array([0, 0, 1, 3], np.int32)))
    found = load_file(save_drafter(drafter, tmp_path / "head") / "model.safetensors")
    assert found["d2t"].dtype == np.int64 and found["d2t"].tolist() == [0, 0, 1, 3]
    assert found["t2d"].dtype == np.bool_ and np.flatnonzero(found["t2d"]).tolist() == [0, 1, 3, 6]
    assert load_drafter(tmp_path / "head").kept_ids().tolist() == [0, 1, 3, 6]


def test_full_and_padded_vocabularies_need_no_mapping_D2(tmp_path):
    """No d2t for draft ids that are target ids; the padded rows stay unreachable (pitfall D2)."""
    for size, name in ((8, "full"), (10, "padded")):
        config = small_drafter(
            vocab_size=8,
            draft_vocab_size=size,
            mask_token_id=7,
            target_vocab_size=8 if size > 8 else None,
        )
        folder = save_drafter(numpy_drafter(config), tmp_path / name)
        assert not {"d2t", "t2d"} & set(header(folder))
        again = load_drafter(folder)
        out = again.logits(jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32))
        assert np.isneginf(out[:, 8:]).all() and np.isfinite(out[:, :8]).all()


def test_first_ids_as_draft_vocabulary_keep_their_mapping_D2(tmp_path):
    drafter = numpy_drafter(small_drafter())
    drafter.d2t.set_value(jnp.asarray(np.zeros(20, np.int32)))
    assert "d2t" in header(save_drafter(drafter, tmp_path / "head"))
    assert load_drafter(tmp_path / "head").kept_ids().tolist() == list(range(20))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [RopeConfig(theta=5e5), LLAMA3, YARN], ids=lambda r: r.kind)
@pytest.mark.parametrize("spelling", ["both", "old", "new"])
def test_written_rope_is_read_by_transformers_D11(layout, rope, spelling, tmp_path):
    """The library's own config class finds theta and scaling in either spelling (pitfall D11)."""
    from transformers import LlamaConfig

    folder = save_drafter(numpy_drafter(small_drafter(rope=rope)), tmp_path / "head", layout)
    content = json.loads((folder / "config.json").read_text())
    content = content.get("transformer_layer_config", content)
    if spelling == "old":
        del content["rope_parameters"]
    if spelling == "new":
        del content["rope_scaling"], content["rope_theta"]
    found = LlamaConfig.from_dict(content).rope_parameters
    assert found["rope_type"] == rope.kind and found["rope_theta"] == rope.theta
    if rope.kind != "default":
        assert found["factor"] == rope.factor
        assert found["original_max_position_embeddings"] == rope.original_max_positions


def test_bfloat16_is_kept_bit_by_bit_D16(tmp_path):
    """BF16 comes back as BF16 of the same length, d2t as I64 without 64-bit mode (pitfall D16)."""
    assert not jax.config.jax_enable_x64
    folder = save_drafter(numpy_drafter(small_drafter(), dtype=jnp.bfloat16), tmp_path / "first")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][:2] = np.array([1.0, 3.140625], ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    drafter = load_drafter(folder, dtype=jnp.bfloat16)
    assert drafter.norm.get_value().dtype == jnp.bfloat16
    assert drafter.norm.get_value()[:2].tolist() == [1.0, 3.140625]
    copies = [
        save_drafter(drafter, tmp_path / "second"),
        convert_drafter(folder, tmp_path / "third", "raw"),
    ]
    for copy in copies:
        again = load_file(copy / "model.safetensors")
        assert again.keys() == tensors.keys()
        for name, value in tensors.items():
            assert again[name].dtype == value.dtype and again[name].nbytes == value.nbytes
            np.testing.assert_array_equal(again[name], value)
        assert again["d2t"].dtype == np.int64
        assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"


def test_scale_of_the_embedding_is_written_into_it(tmp_path):
    drafter = numpy_drafter(small_drafter(embedding_scale=4.0))
    again = load_drafter(save_drafter(drafter, tmp_path / "head"))
    assert again.config.embedding_scale is None
    ids = jnp.arange(32, dtype=jnp.int32)
    np.testing.assert_array_equal(again.embed(ids), drafter.embed(ids))


def test_shared_embedding_is_left_to_the_target(tmp_path):
    drafter = numpy_drafter(small_drafter(own_embedding=False))
    folder = save_drafter(drafter, tmp_path / "head")
    assert "embed_tokens.weight" not in header(folder)
    copy = convert_drafter(folder, tmp_path / "copy", "speculators")
    assert "embed_tokens.weight" not in header(copy)
    assert json.loads((copy / "config.json").read_text())["embed_requires_grad"] is False


def test_heads_of_the_library_are_converted(tmp_path):
    from tests.models.test_drafter_goldens import DATA

    source = DATA / "case_b" / "draft"
    raw = convert_drafter(source, tmp_path / "raw", "raw")
    back = convert_drafter(raw, tmp_path / "back", "speculators")
    want, got = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
    assert read_drafter_config(raw) == read_drafter_config(source) == read_drafter_config(back)


def test_nothing_appears_unless_all_is_written(tmp_path):
    drafter = numpy_drafter(small_drafter(num_speculative_tokens=4))
    save_drafter(drafter, tmp_path / "head")
    with pytest.raises(CheckpointError, match="exists already"):
        save_drafter(drafter, tmp_path / "head")
    save_drafter(drafter, tmp_path / "head", "speculators", overwrite=True)
    assert "layers.0.hidden_norm.weight" in header(tmp_path / "head")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "head", overwrite=True) as part:
        (part / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert load_drafter(tmp_path / "head").config == drafter.config
    drafter.norm.set_value(drafter.norm.get_value().at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="norm holds values that are not finite"):
        save_drafter(drafter, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


FOREIGN = {
    "a document": {"thesis.tex": "x"},
    "a head and a document": {"config.json": '{"draft_vocab_size": 8}', "notes.txt": "x"},
    "a head in a subfolder": {"head/config.json": '{"draft_vocab_size": 8}'},
    "a target": {"config.json": '{"vocab_size": 8}', "model.safetensors": "x"},
    "a run": {"run.json": "{}", "checkpoints/last/3/x": "x"},
    "weights alone": {"model.safetensors": "x"},
    "no JSON": {"config.json": "{", "model.safetensors": "x"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_anything_but_a_head_is_never_overwritten(tmp_path, name):
    folder = tmp_path / "out"
    for path, text in FOREIGN[name].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    drafter = numpy_drafter(small_drafter(num_speculative_tokens=4))
    with pytest.raises(CheckpointError, match=r"out: .* not overwritten"):
        save_drafter(drafter, folder, overwrite=True)
    for path, text in FOREIGN[name].items():
        assert (folder / path).read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_no_layout_can_say_is_refused(tmp_path):
    config = small_drafter(windows=(4, 5))
    with pytest.raises(ValueError, match="one window for all sliding layers"):
        save_drafter(numpy_drafter(config), tmp_path / "head")
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope=LLAMA3)
    mixed = dataclasses.replace(config, layers=(config.layers[0], layer))
    with pytest.raises(ValueError, match="the same in every layer"):
        save_drafter(numpy_drafter(mixed), tmp_path / "head")
