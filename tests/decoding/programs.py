"""Programs that several tests share, since compiling is what costs."""

import dataclasses
import functools

import numpy as np

from peagle_jax.decoding.generate import UNTIL_DONE, GenerateFn, make_generate_fn
from peagle_jax.decoding.methods import make_method
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.decoding.rounds import Params
from tests.decoding import tiny
from tests.decoding.drafters import Behaviour, Mixed, MixedParams

CACHE_LENGTH = 48
CHUNK = 8
EVERYTHING = Features(sampled=True, penalties=True)


@functools.cache
def target():
    """A llama whose texts vary from token to token, so that a wrong place shows as a wrong token: a
    head of its own (a random model with a tied one repeats itself), and a seed chosen for it."""
    config = dataclasses.replace(tiny.TARGETS["llama"], tied_embeddings=False)
    return tiny.make_target(config, seed=576)


@functools.cache
def plain(features: Features = EVERYTHING, context_length: int = CACHE_LENGTH) -> GenerateFn:
    return make_generate_fn(
        target(),
        None,
        "none",
        cache_length=CACHE_LENGTH,
        context_length=context_length,
        features=features,
        max_prefill_chunk=CHUNK,
        eos_token_ids=(),
    )


@functools.cache
def scripted(
    num_drafts: int,
    features: Features = EVERYTHING,
    context_length: int = CACHE_LENGTH,
    network: bool = False,
) -> GenerateFn:
    """A program whose drafts are told; with `network`, a P-EAGLE head runs beside (choice 0)."""
    parts, params = (), ()
    if network:
        part, values = make_method(
            "p-eagle", target().config, tiny.make_drafter(), num_speculative_tokens=num_drafts
        )
        parts, params = (part,), (values,)
    return make_generate_fn(
        target(),
        None,
        Mixed(parts, num_drafts, tiny.VOCAB),
        cache_length=CACHE_LENGTH,
        context_length=context_length,
        features=features,
        max_prefill_chunk=CHUNK,
        eos_token_ids=(),
        method_params=params,
    )


def run_plain(prompts, params, *, features=EVERYTHING, batch_size=5, **fields):
    fn = plain(features, **fields)
    state = fn.run(prompts, params, batch_size=batch_size, chunk=CHUNK)
    return fn.outputs(state), state


def start(fn: GenerateFn, prompts, params, truth, behaviour, *, batch_size=5):
    """Prefilled state and the parameters for a scripted program."""
    batch = batch_size or len(prompts)
    mixed = MixedParams(
        fn.params.draft,
        np.zeros(batch, np.int32),
        np.full(batch, int(behaviour), np.int32),
        np.asarray(truth),
    )
    values = Params(fn.params.target, mixed)
    state = fn.init(prompts, params, batch_size=batch_size)
    return values, fn.compiled.prefill(values, state, chunk=CHUNK)


def run_scripted(fn: GenerateFn, prompts, params, truth, behaviour, **fields):
    values, state = start(fn, prompts, params, truth, behaviour, **fields)
    state = fn.compiled.step(values, state, np.int32(UNTIL_DONE))
    return fn.outputs(state), state


def compare(prompts, params, *, num_drafts=8, behaviours=tuple(Behaviour)[1:], **fields):
    """Plain output and state, after checking that every behaviour gives the same."""
    expected, state = run_plain(prompts, params, **fields)
    for behaviour in behaviours:
        fn = scripted(num_drafts, **fields)
        found, other = run_scripted(fn, prompts, params, state.tokens, behaviour)
        assert found == expected, behaviour
        np.testing.assert_array_equal(found_reason(other), found_reason(state))
    return expected, state


def found_reason(state):
    return np.asarray(state.finish_reason)


def sampling(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, **fields})
