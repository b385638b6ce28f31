"""Every bad value is a ValueError naming its field; feature sets are the smallest that serve."""

import math

import pytest

from peagle_jax.decoding.params import SamplingParams, check_request
from peagle_jax.decoding.requests import Features, make_requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", 1e-40),
        ("draft_temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("stop", ("",)),
        ("stop_token_ids", (-2,)),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("num_speculative_tokens", 32),
        ("num_speculative_tokens", -1),
    ],
)
def test_bad_values_name_their_field_B6(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens():
    with pytest.raises(ValueError, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3, 8], {}, "prompt token 1 is 8, outside the vocabulary of 8"),
        ([-1], {}, "prompt token 0 is -1"),
        ([1], {"logit_bias": {8: 1.0}}, "logit_bias has id 8"),
        ([1], {"stop_token_ids": (9,)}, "stop_token_ids has id 9"),
        ([1] * 12, {"max_tokens": 5}, "prompt of 12 tokens plus max_tokens 5.*context of 16"),
        ([1] * 12, {"max_tokens": None, "min_tokens": 5}, "min_tokens 5.*context of 16"),
        ([1] * 16, {"max_tokens": None}, "the prompt has 16 tokens and the context 16"),
        ([1] * 17, {"max_tokens": 1}, "the prompt has 17 tokens and the context 16"),
    ],
)
def test_bad_requests_name_what_is_wrong(prompt, params, message):
    with pytest.raises(ValueError, match=message):
        check_request(prompt, SamplingParams(**params), vocab_size=8, context_length=16)


def test_limit_is_prompt_and_max_tokens():
    sizes = dict(vocab_size=8, context_length=16)
    assert check_request([1] * 12, SamplingParams(max_tokens=4), **sizes) == 16
    assert check_request([1] * 12, SamplingParams(max_tokens=3), **sizes) == 15
    assert check_request([1] * 15, SamplingParams(max_tokens=None), **sizes) == 16


def build(params, *, features=None, **fields):
    arguments = dict(
        batch_size=2,
        vocab_size=8,
        context_length=16,
        eos_token_ids=(2, 5),
        num_speculative_tokens=3,
        features=Features.of([params]) if features is None else features,
        max_stop_ids=3,
    )
    return make_requests([[1]], [params], **{**arguments, **fields})


def test_rows_without_a_request_are_inert():
    requests = build(SamplingParams(max_tokens=4))
    assert requests.prompt_length.tolist() == [1, 0]
    assert requests.limit.tolist() == [5, 0]
    assert requests.num_drafts.tolist() == [3, 0]


def test_stop_ids_are_a_set_and_bounded():
    params = SamplingParams(stop_token_ids=(7, 5), max_tokens=4)
    assert build(params).stop_ids[0].tolist() == [2, 5, 7]
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True, max_tokens=4)
    assert build(ignoring).stop_ids[0].tolist() == [7, 8, 8]
    with pytest.raises(ValueError, match="request 0: .*max_stop_ids"):
        build(params, max_stop_ids=2)


@pytest.mark.parametrize(
    ("fields", "features"),
    [
        ({}, Features()),
        ({"temperature": 0.5}, Features(sampled=True)),
        ({"rule": "block"}, Features()),
        ({"temperature": 1.0, "rule": "block"}, Features(sampled=True, draft_law=True)),
        ({"min_tokens": 1}, Features(penalties=True)),
        ({"logit_bias": {1: 1.0}}, Features(penalties=True)),
        ({"logprobs": 0}, Features(logprobs=0)),
    ],
)
def test_features_are_the_smallest_that_serve(fields, features):
    params = SamplingParams(max_tokens=4, **fields)
    assert Features.of([params]) == features
    assert features.covers(features)
    if features != Features():
        assert not Features().covers(features)
        with pytest.raises(ValueError, match="built with"):
            build(params, features=Features())
