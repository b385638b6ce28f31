"""Drafter configs of both layouts: what is read, guessed with a warning, and refused."""

import dataclasses

import pytest

from peagle_jax.checkpoints.drafter_config import DrafterWarning, default_taps, drafter_config
from peagle_jax.checkpoints.fields import CheckpointError, Fields
from peagle_jax.models.config import DrafterConfig, RopeConfig
from tests.checkpoints.drafter_json_samples import raw, small_target, speculators

TAPS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def read(content: dict, **options) -> DrafterConfig:
    return drafter_config(Fields(content, "head/config.json"), **options)


def test_both_layouts_describe_the_same_network():
    one, other = read(raw(num_speculative_tokens=4)), read(speculators())
    assert one == other
    assert one.parallel_drafting and one.mask_token_id == 31 and one.num_speculative_tokens == 4


def test_speculators_without_target_width_means_the_draft_s():
    config = read(speculators(target_hidden_size=None))
    assert config.target_hidden_size == config.hidden_size == 16
    fitted = read(raw(target_hidden_size=None), target_config=small_target())
    assert fitted.target_hidden_size == 12


@pytest.mark.parametrize("place", ["top", "eagle_config", "sibling", "inside"])
def test_taps_are_found_wherever_they_stand_D8(place):
    """Top level, eagle_config, beside or inside transformer_layer_config (pitfall D8)."""
    content = {
        "top": raw(),
        "eagle_config": raw(**{TAPS: None}, eagle_config={TAPS: [2, 4, 5]}),
        "sibling": speculators(),
        "inside": speculators(layer={TAPS: [2, 4, 5]}, **{TAPS: None}),
    }[place]
    assert read(content).taps == (2, 4, 5)


def test_absent_taps_are_guessed_with_a_warning_D8():
    with pytest.warns(DrafterWarning, match=rf"{TAPS} is missing, guessed as \[2, 21, 40\]"):
        config = read(raw(**{TAPS: None}), target_config=small_target(43))
    assert config.taps == (2, 21, 40)
    empty = raw(**{TAPS: None}, eagle_config={TAPS: []})
    with pytest.warns(DrafterWarning, match="guessed"):
        assert read(empty, target_config=small_target(8)).taps == (2, 4, 5)
    assert read(raw(**{TAPS: [1, 21, 40]}), target_config=small_target(43)).taps == (1, 21, 40)


@pytest.mark.parametrize(
    "layers, guess", [(4, r"\[2, 2, 1\]"), (5, r"\[2, 2, 2\]"), (6, r"\[2, 3, 3\]")]
)
def test_tiny_targets_need_explicit_taps_D8(layers, guess):
    with pytest.raises(CheckpointError, match=rf"{guess}, not three different.*set {TAPS}"):
        read(raw(**{TAPS: None}), target_config=small_target(layers))
    assert default_taps(7) == (2, 3, 4)


def test_four_taps_widen_the_fusion_D8():
    assert read(raw(**{TAPS: [0, 2, 4, 8]}), target_config=small_target(8)).input_size == 4 * 12


@pytest.mark.parametrize("taps", [[1, 1, 5], [5, 2], [-1, 2], [2, 4.0], "2,4", [True, 2]])
def test_taps_must_be_different_layers_in_order(taps):
    with pytest.raises(CheckpointError, match=f"{TAPS}.*different target layers"):
        read(raw(**{TAPS: taps}))


def test_taps_in_two_places_must_agree():
    with pytest.raises(CheckpointError, match=rf"{TAPS} is .* and eagle_config\.{TAPS} is"):
        read(raw(eagle_config={TAPS: [1, 4, 5]}))


def test_absent_taps_without_a_target_are_an_error():
    with pytest.raises(CheckpointError, match="without the target's config"):
        read(raw(**{TAPS: None}))


@pytest.mark.parametrize(
    "keys",
    [
        {"mask_token_id": 31},
        {"pard_token": 31},
        {"ptd_token_id": 31},
        {"dspark_noise_token_id": 31},
        {"dflash_config": {"mask_token_id": 31}},
        {"mask_token_id": 31, "ptd_token_id": 31},
    ],
    ids=lambda keys: "+".join(keys),
)
def test_every_key_for_the_mask_token_is_read(keys):
    config = read(raw(**({"ptd_token_id": None} | keys)))
    assert config.mask_token_id == 31 and config.parallel_drafting


def test_mask_token_keys_that_disagree_are_an_error():
    with pytest.raises(CheckpointError, match="disagree: {'pard_token': 30, 'ptd_token_id': 31}"):
        read(raw(pard_token=30))


@pytest.mark.parametrize(
    "token, message",
    [
        (2, "eos_token_id"),
        (5, "eos_token_id"),
        (1, "bos_token_id"),
        (0, "pad_token_id"),
        (32, r"outside the drafter's vocabulary \(0\.\.31\)"),
        (-1, "outside the drafter's vocabulary"),
        ("31", "expected a token id"),
    ],
)
def test_mask_token_in_use_or_out_of_range_D18(token, message):
    """eos, pad, bos, an id past the vocabulary, and -1 (pitfall D18)."""
    with pytest.raises(CheckpointError, match=message):
        read(raw(ptd_token_id=token), target_config=small_target())


def test_head_without_mask_token_is_eagle3():
    config = read(raw(ptd_token_id=None))
    assert not config.parallel_drafting and config.mask_token_id is None
    assert not read(speculators("eagle3", mask_token_id=None)).parallel_drafting
    with pytest.raises(CheckpointError, match="needs a mask token.*add ptd_token_id"):
        read(raw(ptd_token_id=None), parallel_drafting=True)
    with pytest.raises(CheckpointError, match="no key names its mask token"):
        read(raw(ptd_token_id=None), tensor_names={"mask_hidden", "fc.weight"})


def test_parallel_drafting_needs_mask_hidden_D6():
    """A P-EAGLE head whose file lacks mask_hidden is refused (pitfall D6)."""
    names = {"fc.weight", "embed_tokens.weight"}
    with pytest.raises(CheckpointError, match="needs the tensor mask_hidden.*parallel_drafting"):
        read(raw(), tensor_names=names)
    assert not read(raw(), tensor_names=names, parallel_drafting=False).parallel_drafting
    with pytest.warns(DrafterWarning, match="mask_hidden is left out"):
        read(raw(), tensor_names=names | {"mask_hidden"}, parallel_drafting=False)


def test_absent_switches_are_false_and_residual_warns_D9():
    """Old files name no norm switches (pitfall D9)."""
    with pytest.warns(DrafterWarning, match="norm_before_residual is missing, taken as false"):
        config = read(raw(norm_before_residual=None))
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert not any(getattr(config, switch) for switch in switches)
    for switch in switches:
        for content in (raw, speculators):
            assert getattr(read(content(**{switch: True})), switch)


@pytest.mark.parametrize(
    "keys, rope",
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
            RopeConfig(
                kind="llama3",
                theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=16,
            ),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(kind="linear", theta=5e5, factor=2.0),
        ),
    ],
    ids=["old", "new", "new-llama3", "old-type-spelling"],
)
def test_rope_in_both_dialects_D11(keys, rope):
    """Theta and scaling are found under either spelling (pitfall D11)."""
    assert {layer.rope for layer in read(raw(**keys)).layers} == {rope}
    inside = {key: value for key, value in keys.items() if value is not None}
    content = speculators()
    layer = content["transformer_layer_config"]
    del layer["rope_theta"]
    layer |= inside
    assert {layer.rope for layer in read(content).layers} == {rope}


def test_rope_by_layer_type_and_zero_theta_D11():
    nested = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    config = read(
        raw(
            rope_theta=None,
            rope_parameters=nested,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
        )
    )
    assert [layer.rope.theta for layer in config.layers] == [1e4, 1e6]
    assert [layer.window for layer in config.layers] == [8, None]
    for keys in ({"rope_theta": 0}, {"rope_theta": None, "rope_parameters": {"rope_theta": 0}}):
        with pytest.raises(CheckpointError, match="rope_theta: expected a number > 0"):
            read(raw(**keys))


@pytest.mark.parametrize(
    "content, windows",
    [
        (raw(sliding_window=8, layer_types=["sliding_attention"] * 2), [8, 8]),
        (raw(sliding_window=8, use_sliding_window=False), [None, None]),
        (raw(layer_types=["full_attention"] * 36), [None, None]),
        (
            raw(model_type="qwen3", architectures=["PeagleQwen3ForCausalLM"], sliding_window=8),
            [None, None],
        ),
        (
            speculators(
                layer={
                    "model_type": "qwen3",
                    "sliding_window": 8,
                    "use_sliding_window": True,
                    "max_window_layers": 1,
                }
            ),
            [None, 8],
        ),
    ],
    ids=["llama", "switched-off", "copied-list", "qwen3-off", "qwen3-on"],
)
def test_windows_are_honoured(content, windows):
    assert [layer.window for layer in read(content).layers] == windows


def test_unclear_or_short_windows_are_refused():
    with pytest.raises(CheckpointError, match="sliding_window: expected null, or layer_types"):
        read(raw(sliding_window=8))
    short = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(CheckpointError, match="window of 5 positions is shorter than the 6 tokens"):
        read(raw(num_depths=6, **short))
    assert read(raw(num_depths=5, **short)).layers[1].window == 5


def test_padded_vocabularies_D2():
    """A draft vocabulary beyond the target's is cut off at the target's (pitfall D2)."""
    target = small_target(vocab_size=30)
    assert read(raw(draft_vocab_size=32), target_config=target).target_vocab_size == 30
    assert read(raw(draft_vocab_size=40), target_config=small_target()).target_vocab_size == 32
    assert read(raw(draft_vocab_size=32), target_config=small_target()).target_vocab_size is None


@pytest.mark.parametrize(
    "changes, target, message",
    [
        ({}, {"num_layers": 4}, r"\[2, 4, 5\] do not fit a target with 4 layers"),
        ({}, {"hidden_size": 16}, "states of width 12, the target's are 16 wide"),
        ({}, {"vocab_size": 64}, "knows 32 tokens, the target can emit 64"),
    ],
)
def test_heads_of_another_target_are_refused(changes, target, message):
    with pytest.raises(CheckpointError, match=message):
        read(raw(**changes), target_config=small_target(**target))


def test_fewer_positions_than_the_target_warn_C1():
    """The rotary angles go on; the user is told both numbers (pitfall C1)."""
    with pytest.warns(DrafterWarning, match="max_position_embeddings: 16 is below the target's 64"):
        config = read(raw(max_position_embeddings=16), target_config=small_target())
    assert config.max_positions == 16


def test_final_state_alone_D19():
    """use_aux_hidden_state false: no taps, input of the target's width (pitfall D19)."""
    content = raw(**{TAPS: None}, eagle_config={"use_aux_hidden_state": False})
    bare = read(content | {"target_hidden_size": 16}, tensor_names={"mask_hidden"})
    assert (bare.taps, bare.use_taps, bare.fuse, bare.input_size) == ((), False, False, 16)
    fused = read(content, tensor_names={"mask_hidden", "fc.weight"})
    assert fused.fuse and fused.input_size == 12
    last = read(raw(**{TAPS: [1, 2, 8]}), target_config=small_target(8))
    assert last.taps == (1, 2, 8)


@pytest.mark.parametrize(
    "content, message",
    [
        (raw(model_type="mistral", architectures=None), "model_type: expected 'llama' or 'qwen3'"),
        (speculators("dflash"), "speculators_model_type: expected 'peagle' or 'eagle3'"),
        (raw(speculators_config={}), "speculators_model_type"),
        (raw(rms_norm_eps=None), "rms_norm_eps.*missing"),
        (raw(hidden_act="relu"), "hidden_act: expected one of silu"),
        (raw(norm_before_fc=True, fc_norm=True), "the two exclude each other"),
        (raw(norm_before_fc="yes"), "norm_before_fc: expected true or false"),
        (raw(logit_scale=0.5), "logit_scale"),
        (raw(eagle_config={"use_last_layernorm": False}), "use_last_layernorm"),
        (raw(num_key_value_heads=3), "num_key_value_heads: expected a divisor"),
        (raw(head_dim=None, num_attention_heads=6), "head_dim: expected a size"),
        (
            raw(layer_types=["full_attention"] * 2 + ["sliding_attention"]),
            "layer_types: expected 2",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused(content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(content)
    assert "head/config.json" in str(caught.value)


def test_embedding_scale_and_style_by_architecture():
    assert read(raw(embedding_scale=2.5)).embedding_scale == 2.5
    qwen = read(raw(architectures=["PeagleQwen3ForCausalLM"], model_type="qwen3"))
    assert qwen.style == "qwen3"
    assert read(raw(model_type="qwen3")).style == "llama"  # as vLLM: the architecture decides
    assert dataclasses.replace(qwen, style="llama") == read(raw())
