"""When a request ends: judged token by token inside the accepted block, as plain decoding does."""

import dataclasses

import numpy as np
import pytest

from peagle_jax.decoding.state import FinishReason
from tests.decoding import programs
from tests.decoding.drafters import Behaviour
from tests.decoding.programs import sampling

PROMPT = [3, 1, 4, 1, 5]


def truth():
    return programs.run_plain([PROMPT], [sampling()])[0][0]


@pytest.mark.parametrize("more", [(), (2,)], ids=["one id", "list"])
def test_stop_at_every_offset_of_a_block_B1(more):
    """An always agreeing drafter at K = 4: the stop falls on each offset of its first block."""
    tokens = truth()
    assert len(set(tokens[:6])) == 6 and not set(tokens[:6]) & set(more), "one place for each id"
    params = [
        sampling(stop_token_ids=(tokens[1 + offset], *more), num_speculative_tokens=4)
        for offset in range(5)
    ]
    found, state = programs.compare([PROMPT] * 5, params)
    assert found == [tokens[: 2 + offset] for offset in range(5)]
    assert programs.found_reason(state).tolist() == [FinishReason.STOP] * 5


def ending(fn, ids):
    """The same program for a model whose end tokens are `ids`."""
    other = dataclasses.replace(fn, eos_token_ids=ids)
    other.__dict__["compiled"] = fn.compiled
    return other


@pytest.mark.parametrize("more", [(), (2,)], ids=["one id", "list"])
def test_end_token_at_every_offset_of_a_block_B1(more):
    """The same for the model's own end tokens, which a request may ignore."""
    tokens = truth()
    params = [sampling(num_speculative_tokens=4), sampling(ignore_eos=True)]
    whole = programs.run_plain([PROMPT], [sampling()])[1].tokens[0]
    told = np.tile(whole, (5, 1))
    for offset in range(5):
        ends = (tokens[1 + offset], *more)
        plain = ending(programs.plain(), ends)
        state = plain.run([PROMPT] * 2, params, batch_size=5, chunk=programs.CHUNK)
        fn = ending(programs.scripted(8), ends)
        found, other = programs.run_scripted(fn, [PROMPT] * 2, params, told, Behaviour.AGREES)
        assert found == plain.outputs(state) == [tokens[: 2 + offset], tokens]
        for one in (state, other):
            reasons = programs.found_reason(one)[:2].tolist()
            assert reasons == [FinishReason.STOP, FinishReason.LENGTH]


def test_min_tokens_blocks_every_row_exactly_B10():
    """The target's argmax is the end id at every position."""
    params = [
        sampling(stop_token_ids=(2,), logit_bias={2: 100.0}, min_tokens=count)
        for count in (3, 0, 1, 7, 20)
    ]
    found, state = programs.compare([PROMPT] * 5, params)
    for output, one in zip(found, params, strict=True):
        length = min(one.min_tokens + 1, 20)
        assert len(output) == length
        assert 2 not in output[: one.min_tokens]
        assert output[-1] == 2 or one.min_tokens == 20
    assert programs.found_reason(state)[4] == FinishReason.LENGTH


def test_the_context_is_filled_to_its_last_token_C4():
    """Context 16 counts stored tokens: a prompt of 15 leaves one, with and without speculation."""
    prompts = [[1] * length for length in (15, 15, 14, 14, 9)]
    counts = (None, 1, None, 1, None)  # of drafts: the program's 8, or one
    params = [sampling(max_tokens=None, num_speculative_tokens=count) for count in counts]
    found, state = programs.compare(prompts, params, context_length=16)
    assert [len(output) for output in found] == [1, 1, 2, 2, 7]
    assert np.all(programs.found_reason(state) == FinishReason.LENGTH)
    fn = programs.scripted(8, context_length=16)
    with pytest.raises(ValueError, match="15 tokens plus max_tokens 5 is above the context of 16"):
        fn.requests(prompts[:1], [sampling(max_tokens=5)])
    with pytest.raises(ValueError, match="17 tokens and the context 16"):
        fn.requests([[1] * 17], [sampling(max_tokens=None)])


def test_batch_1_and_2_agree_and_the_loop_ends_C11():
    one, state = programs.run_plain([PROMPT], [sampling()], batch_size=1)
    two, _ = programs.run_plain([PROMPT] * 2, [sampling()] * 2)
    assert two == one * 2
    assert state.tokens.shape == (1, programs.CACHE_LENGTH)
    assert bool(state.finished.all()) and len(one[0]) == 20


def test_rows_without_a_request_stay_empty():
    _, state = programs.run_plain([PROMPT], [sampling()])
    assert not np.asarray(state.tokens)[1:].any()
    assert not np.asarray(state.num_rounds)[1:].any()


def test_a_finished_row_writes_nothing():
    """The row is done after one token; twenty rounds of its neighbour leave it as it was."""
    params = [sampling(max_tokens=1), sampling()]
    _, state = programs.run_plain([PROMPT, PROMPT], params)
    fn = programs.scripted(8)
    values, before = programs.start(fn, [PROMPT, PROMPT], params, state.tokens, Behaviour.ERRS)

    def row(state):
        layer = state.target_cache.layers[0]
        return [np.array(x[0]) for x in (state.tokens, layer.keys, layer.values, state.committed)]

    old = row(before)
    after = fn.compiled.step(values, before, np.int32(30))
    for left, right in zip(old, row(after), strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(after.num_rounds[0]) == 0 and int(after.num_rounds[1]) == 19
