"""Which method and K a drafter gets; what cannot work is refused, nothing falls back silently."""

import dataclasses

import pytest

from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.methods import make_method, resolve_num_speculative_tokens
from tests.decoding import programs, tiny

PARALLEL = tiny.PARALLEL
AUTOREGRESSIVE = tiny.AUTOREGRESSIVE


def build(name, config=PARALLEL, **fields):
    drafter = None if config is None else tiny.make_drafter(config)
    return make_method(name, programs.target().config, drafter, **fields)[0]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("p-eagle", None, "needs a drafter"),
        ("eagle3", None, "needs a drafter"),
        ("medusa", PARALLEL, "must be one of p-eagle, eagle3, prompt-lookup, none"),
        ("p-eagle", AUTOREGRESSIVE, "no mask_hidden; use method eagle3"),
        ("eagle3", PARALLEL, "trained for parallel drafting.*or force"),
        ("p-eagle", dataclasses.replace(PARALLEL, target_hidden_size=8), "hidden size 8"),
        (
            "p-eagle",
            dataclasses.replace(PARALLEL, target_vocab_size=12),
            "vocabulary of 12, this target has 40",
        ),
        ("p-eagle", dataclasses.replace(PARALLEL, taps=(0, 1, 9)), "taps layers .*2 layers"),
    ],
)
def test_refusals(name, config, message):
    with pytest.raises(ValueError, match=message):
        build(name, config)


def test_forcing_and_defaults():
    assert type(build("eagle3", force=True)).__name__ == "Eagle3"
    with pytest.raises(ValueError, match="no mask_hidden"):
        build("p-eagle", AUTOREGRESSIVE, force=True)
    assert type(build(None)).__name__ == "PEagle"
    assert type(build(None, AUTOREGRESSIVE)).__name__ == "Eagle3"
    assert type(build(None, None)).__name__ == "NoDrafts"
    assert build("none").num_drafts == 0


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        (None, None, 5),
        (PARALLEL, None, 5),
        (dataclasses.replace(PARALLEL, num_depths=3), None, 3),
        (dataclasses.replace(PARALLEL, num_depths=8), None, 5),
        (dataclasses.replace(PARALLEL, num_depths=8, num_speculative_tokens=7), None, 7),
        (PARALLEL, 31, 31),
    ],
)
def test_number_of_drafts_H1(config, asked, expected):
    assert resolve_num_speculative_tokens(config, asked) == expected


@pytest.mark.parametrize("value", [0, -1, 32, 99])
def test_number_of_drafts_out_of_range_H1(value):
    with pytest.raises(ValueError, match=f"num_speculative_tokens .*1 to 31, got {value}"):
        resolve_num_speculative_tokens(PARALLEL, value)


def test_drafting_beyond_the_trained_depth_warns_once_H1():
    config = dataclasses.replace(PARALLEL, num_depths=8)
    with pytest.warns(UserWarning, match="11 is above the 8 depths") as caught:
        build("p-eagle", config, num_speculative_tokens=11)
    assert len(caught) == 1


def test_a_drafter_with_a_shorter_context_warns_and_names_both_C1():
    drafter = tiny.make_drafter(dataclasses.replace(PARALLEL, max_positions=16))
    with pytest.warns(UserWarning, match="configured for 16 positions and will run to 64"):
        make_generate_fn(programs.target(), drafter, num_speculative_tokens=4, cache_length=64)


def test_context_beyond_the_target_needs_an_override():
    target = programs.target()
    with pytest.raises(ValueError, match="300 is above the 256 positions"):
        make_generate_fn(target, cache_length=300)
    fn = make_generate_fn(target, cache_length=300, allow_longer_context=True)
    assert fn.context_length == 300
    assert make_generate_fn(target, cache_length=300, context_length=256).context_length == 256


def test_windowed_draft_layers_shorter_than_k_are_refused():
    layers = (dataclasses.replace(tiny.LAYER, window=4), tiny.LAYER)
    with pytest.raises(ValueError, match="window of 4"):
        build("p-eagle", dataclasses.replace(PARALLEL, layers=layers), num_speculative_tokens=5)
