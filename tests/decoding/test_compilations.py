"""How many programs are compiled, and what donation means for a state."""

import dataclasses

import jax
import numpy as np
import pytest

from peagle_jax.decoding.generate import UNTIL_DONE, make_generate_fn, prompt_bucket
from peagle_jax.decoding.rounds import Params
from tests.decoding import programs, tiny
from tests.decoding.drafters import Behaviour, Mixed, MixedParams
from tests.decoding.programs import sampling


@dataclasses.dataclass(frozen=True)
class Counting(Mixed):
    """Counts its traces: a trace is the only time that Python runs."""

    traces: dict = dataclasses.field(default_factory=dict, hash=False, compare=False)

    def propose(self, *args):
        self.traces["step"] = self.traces.get("step", 0) + 1
        return super().propose(*args)

    def prefill(self, *args):
        self.traces["prefill"] = self.traces.get("prefill", 0) + 1
        return super().prefill(*args)


def test_one_program_per_bucket_and_none_after_I9():
    """Prompts of 5, 6, 7, 9 and 17 tokens, every number of drafts, whatever is accepted."""
    method = Counting((), 4, tiny.VOCAB)
    fn = make_generate_fn(
        programs.target(), None, method, cache_length=48, eos_token_ids=(), max_prefill_chunk=32
    )
    truth = np.zeros((1, 48), np.int32)

    def run(length, count, behaviour):
        values = Params(
            fn.params.target,
            MixedParams((), np.zeros(1, np.int32), np.full(1, int(behaviour), np.int32), truth),
        )
        params = [sampling(max_tokens=length, num_speculative_tokens=count)]
        state = fn.init([[1] * length], params)
        chunk = prompt_bucket(length, fn.max_prefill_chunk, smallest=8)
        state = fn.compiled.prefill(values, state, chunk=chunk)
        return fn.compiled.step(values, state, np.int32(UNTIL_DONE))

    for length in (5, 9, 17):
        run(length, 4, Behaviour.ERRS)
    warm = dict(method.traces)
    programs_built = fn.compiled.prefill._cache_size(), fn.compiled.step._cache_size()
    assert programs_built == (3, 1)
    for length, count, behaviour in ((5, 0, 3), (6, 1, 3), (7, 2, 4), (9, 3, 1), (17, 4, 2)):
        run(length, count, behaviour)
    assert method.traces == warm
    assert programs_built == (fn.compiled.prefill._cache_size(), fn.compiled.step._cache_size())


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 16), (16, 16), (17, 32), (100, 128), (513, 512), (9000, 512)]
)
def test_prompt_buckets(length, bucket):
    assert prompt_bucket(length, 512) == bucket


@pytest.mark.parametrize(("batch", "bucket"), [(1, 512), (8, 256), (64, 32), (1000, 16)])
def test_prompt_buckets_of_large_batches_are_smaller(batch, bucket):
    assert prompt_bucket(400, 512, batch=batch) == bucket


def test_a_donated_state_is_gone_and_a_new_one_is_not_I8():
    fn = programs.plain()
    first = fn.init([[1, 2]], [sampling()], batch_size=5)
    second = fn.init([[1, 2]], [sampling()], batch_size=5)
    done = fn.compiled.prefill(fn.params, first, chunk=programs.CHUNK)
    assert first.tokens.is_deleted() and not second.tokens.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        fn.compiled.prefill(fn.params, first, chunk=programs.CHUNK)
    again = fn.compiled.prefill(fn.params, second, chunk=programs.CHUNK)
    np.testing.assert_array_equal(done.tokens, again.tokens)


def test_states_of_the_same_requests_share_no_array_I8():
    """Requests already on the device, used for two states: donating one leaves the other."""
    fn = programs.plain()
    requests = jax.device_put(fn.requests([[1, 2]], [sampling()], batch_size=5))
    states = [fn.compiled.empty(*requests), fn.empty_state(*requests), fn.compiled.empty(*requests)]
    outputs = []
    for state in states:
        state = fn.compiled.prefill(fn.params, state, chunk=programs.CHUNK)
        outputs += fn.outputs(fn.compiled.step(fn.params, state, np.int32(UNTIL_DONE)))
    assert outputs == programs.run_plain([[1, 2]], [sampling()])[0] * 3


def test_a_chunk_larger_than_the_program_allows_is_refused():
    fn = programs.plain()
    state = fn.init([[1, 2]], [sampling()], batch_size=5)
    with pytest.raises(ValueError, match="from 1 to max_prefill_chunk 8, got 16"):
        fn.prefill(fn.params, state, chunk=16)


def test_rows_admitted_behind_a_step_build_no_second_program_I8():
    made = programs.plain()
    params = jax.device_put(made.params, jax.devices()[0])  # bound to a device, as loaded ones are
    fn = dataclasses.replace(made, params=params)
    state = fn.init([[1, 2]], [sampling()], batch_size=2)
    for _ in range(3):
        state = fn.admit(state, [0], [[3, 4]], [sampling()])
        state = fn.compiled.prefill(params, state, chunk=4)
        state = fn.compiled.step(params, state, np.int32(UNTIL_DONE))
    built = (fn.compiled.admit, fn.compiled.prefill, fn.compiled.step)
    assert [program._cache_size() for program in built] == [1, 1, 1]
