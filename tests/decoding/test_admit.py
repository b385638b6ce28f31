"""Rows of a running batch that are refilled: nothing of the old request is left in any cache.

Not only outputs but drafts are compared, as a drafter that remembers the request before it still
gives the right text, only more slowly.
"""

import numpy as np
import pytest

from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from tests.decoding.tiny import AUTOREGRESSIVE, PARALLEL, TARGETS, make_drafter, make_target

# The seeds of the heads are such that some of their drafts are accepted.
CASES = {"p-eagle, rings": ("gpt_oss", PARALLEL, 9), "eagle3": ("llama", AUTOREGRESSIVE, 1)}
ROWS, CHUNK = 3, 4
OLD = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8]]
NEW = [[6, 6, 2, 6, 0, 7, 0, 1, 5], [1, 1]]


def params(tokens):
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def record(state, row, prompt):
    """Everything that tells how a row was decoded."""
    output = slice(len(prompt), int(state.committed[row]))
    arrays = (state.tokens, state.draft_depth, state.round_drafts)
    return [np.asarray(array)[row, output].tolist() for array in arrays], int(state.num_rounds[row])


@pytest.mark.parametrize(("family", "config", "seed"), CASES.values(), ids=CASES)
def test_a_refilled_row_drafts_as_if_alone_and_its_neighbour_goes_on(family, config, seed):
    fn = make_generate_fn(
        make_target(TARGETS[family]),
        make_drafter(config, seed),
        cache_length=64,
        num_speculative_tokens=3,
        max_prefill_chunk=CHUNK,
        eos_token_ids=(),
    )

    def decode(state):
        state = fn.compiled.prefill(fn.params, state, chunk=CHUNK)
        return fn.compiled.step(fn.params, state, np.int32(100))

    def alone(prompt, tokens):
        return record(decode(fn.init([prompt], [params(tokens)], batch_size=ROWS)), 0, prompt)

    expected = [alone(OLD[1], 50), alone(NEW[0], 40), alone(NEW[1], 30)]
    state = fn.init(OLD, [params(20), params(50), params(25)])
    state = fn.compiled.prefill(fn.params, state, chunk=CHUNK)
    while not np.asarray(state.finished)[[0, 2]].all():
        state = fn.compiled.step(fn.params, state, np.int32(1))
    assert not bool(state.finished[1])
    state = decode(fn.admit(state, [2, 0], NEW, [params(40), params(30)]))
    found = [record(state, 1, OLD[1]), record(state, 2, NEW[0]), record(state, 0, NEW[1])]
    assert found == expected
    assert any(depth for (_, depths, _), _ in found for depth in depths), "no draft was accepted"
    assert fn.compiled.step._cache_size() == fn.compiled.admit._cache_size() == 1


def test_rows_are_checked():
    fn = make_generate_fn(make_target(TARGETS["llama"]), cache_length=64, eos_token_ids=())
    state = fn.init(OLD, [params(2)] * ROWS)
    for rows in ([0], [1, 1], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="must be 2 different rows of a batch of 3"):
            fn.admit(state, rows, NEW, [params(2)] * 2)
