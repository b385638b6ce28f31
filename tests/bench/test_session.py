"""Timed sessions: the outputs of refilled rows, what the times hold, and what they leave out."""

import types

import numpy as np
import pytest

from peagle_jax.bench.measure import Arm, measure, same_turns
from peagle_jax.bench.results import PLAIN, result_row
from peagle_jax.bench.session import Request, Run, Session
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.engine import Engine
from peagle_jax.testing import ByteTokenizer, count_compilations
from tests.chain_target import chain_target

TEXT = "abcdefgh"


def spelled(start, count):
    return tuple(TEXT.encode()[(start + i) % len(TEXT)] for i in range(count))


def request(index, prompt, tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name=str(index), prompt=tuple(prompt), params=params)


@pytest.fixture(scope="module")
def engine():
    return Engine(chain_target(TEXT), ByteTokenizer())


@pytest.mark.parametrize("method", ["none", "prompt-lookup"])
def test_refilled_rows_give_the_outputs_of_single_requests(engine, method):
    k = None if method == "none" else 3
    fn = engine.generate_fn(cache_length=256, method=method, num_speculative_tokens=k)
    session = Session(fn, 2, chunk=16)
    # Prompts and answers of other lengths in other order; one longer than a prefill chunk, one
    # that ends with its first token.
    shapes = [(3, 9), (20, 2), (1, 14), (8, 1), (2, 5), (11, 7)]
    requests = [request(i, spelled(i, n), tokens) for i, (n, tokens) in enumerate(shapes)]
    session.warm_up(requests)
    with count_compilations() as compilations:
        run = session.run(requests)
        again = session.run(requests[::-1])
    assert compilations.count == 0
    expected = [spelled(i + n, tokens) for i, (n, tokens) in enumerate(shapes)]
    assert [record.token_ids for record in run.records] == expected
    assert [record.token_ids for record in again.records] == expected[::-1]
    for record, (_, tokens) in zip(run.records, shapes, strict=True):
        assert 0 < record.first_token_s <= record.total_s <= run.seconds
        accepted = record.acceptance.num_accepted_tokens
        assert record.num_rounds == tokens - 1 - accepted
    drafted = sum(record.acceptance.num_accepted_tokens for record in run.records)
    assert (drafted > 0) == (method == "prompt-lookup")


class FakeFn:
    """A GenerateFn whose first prefill and first step take 10 s, later ones 1 s and 2 s.

    Calls return at once, as jax's do: the time passes for whoever waits until the state is ready.
    Every step gives each running row one token; a request is done after `max_tokens`.
    """

    num_speculative_tokens = 0
    params = None

    def __init__(self, rows):
        self.now, self.rows = 100.0, rows
        self.compiled = types.SimpleNamespace(prefill=self.prefill, step=self.step)
        self.cold, self.queued = {"prefill", "step"}, 0.0

    def wait(self):
        self.now, self.queued = self.now + self.queued, 0.0

    def clock(self):
        return self.now

    def _takes(self, name, seconds):
        self.queued += 10.0 if name in self.cold else seconds
        self.cold.discard(name)

    def init(self, prompts, params, *, batch_size):
        zeros = np.zeros(batch_size, np.int32)
        grid = np.zeros((batch_size, 64), np.int32)
        state = types.SimpleNamespace(
            tokens=grid.copy(),
            draft_depth=grid.copy(),
            round_drafts=grid.copy(),
            committed=zeros.copy(),
            num_rounds=zeros.copy(),
            limit=zeros.copy(),
            pending=np.zeros(batch_size, bool),
            finished=np.ones(batch_size, bool),
            block_until_ready=self.wait,
        )
        return self.admit(state, [0], prompts, params)

    def admit(self, state, rows, prompts, params):
        for row, prompt, one in zip(rows, prompts, params, strict=True):
            state.committed[row], state.num_rounds[row] = len(prompt), 0
            state.limit[row] = len(prompt) + one.max_tokens
            state.pending[row], state.finished[row] = True, False
        return state

    def prefill(self, params, state, *, chunk):
        self._takes("prefill", 1.0)
        state.committed[state.pending] += 1
        state.finished[state.pending & (state.committed == state.limit)] = True
        state.pending[:] = False
        return state

    def step(self, params, state, rounds):
        while rounds > 0 and not state.finished.all():
            self._takes("step", 2.0)
            running = ~state.finished
            state.committed[running] += 1
            state.num_rounds[running] += 1
            state.finished |= state.committed == state.limit
            rounds -= 1
        return state


def test_compilation_is_in_the_warm_up_and_in_no_figure_H5():
    fn = FakeFn(1)
    session = Session(fn, 1, chunk=16, clock=fn.clock)
    requests = [request(i, (1, 2), 5) for i in range(3)]
    [measurement] = list(measure([PLAIN], lambda *_: session, requests, concurrency=[1]))[-1]
    assert measurement.warm_up_s == 20.0
    assert measurement.seconds == 3 * (1 + 4 * 2)
    row = result_row(measurement, "fake")
    assert row["output_tokens_per_s"] == pytest.approx(15 / 27)
    assert row["time_to_first_token_ms"]["p99"] == pytest.approx(1000)
    assert row["time_per_output_token_ms"]["mean"] == pytest.approx(2000)


def test_refill_waits_for_free_rows_and_serves_all():
    def prefills(refill):
        fn = FakeFn(2)
        calls = []
        real = fn.compiled.prefill
        fn.compiled.prefill = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]
        session = Session(fn, 2, chunk=16, refill=refill, clock=fn.clock)
        requests = [request(i, (1,), 2 + 3 * (i % 2)) for i in range(5)]
        session.warm_up(requests)
        calls.clear()
        done = session.run(requests)
        assert [one.name for one in done.records] == [one.name for one in requests]
        assert [len(one.token_ids) for one in done.records] == [2, 5, 2, 5, 2]
        return len(calls)

    assert prefills(2) == 3  # two, two, and the last one alone
    assert prefills(1) > 3


def test_time_to_first_token_counts_from_the_refill():
    fn = FakeFn(2)
    session = Session(fn, 2, chunk=16, clock=fn.clock)
    requests = [request(0, (1,), 2), request(1, (1,), 4), request(2, (1,), 3)]
    session.warm_up(requests)
    started = fn.now
    run = session.run(requests)
    # Both prompts 1 s; a step of 2 s ends request 0; request 2 enters at 3 s and is ready at 4 s;
    # request 1 has two more steps, and so has request 2.
    assert [record.first_token_s for record in run.records] == [1.0, 1.0, 1.0]
    assert [record.total_s for record in run.records] == [3.0, 8.0, 5.0]
    assert run.seconds == fn.now - started == 8.0


def test_an_interrupted_session_serves_nothing_more():
    fn = FakeFn(1)
    session = Session(fn, 1, chunk=16, clock=fn.clock)
    requests = [request(0, (1,), 5)]
    session.warm_up(requests)

    def interrupted(*_):
        raise KeyboardInterrupt

    step, fn.compiled.step = fn.compiled.step, interrupted
    with pytest.raises(KeyboardInterrupt):
        session.run(requests)
    assert session.unfinished == Run(records=(), seconds=1.0)
    fn.compiled.step = step
    with pytest.raises(RuntimeError, match="call warm_up first"):
        session.run(requests)
    session.warm_up(requests)
    assert len(session.run(requests).records) == 1


def test_an_interrupted_turn_hands_over_what_was_answered():
    fn = FakeFn(2)
    session = Session(fn, 2, chunk=16, clock=fn.clock)
    requests = [request(0, (1,), 2), request(1, (1,), 9), request(2, (1,), 3)]
    step, steps = fn.compiled.step, []

    def some(*args):
        steps.append(1)
        if len(steps) > 4:  # the warm-up's one, and three
            raise KeyboardInterrupt
        return step(*args)

    fn.compiled.step = some
    turns = measure([PLAIN], lambda *_: session, requests, concurrency=[2])
    found = next(turns)
    with pytest.raises(KeyboardInterrupt):
        next(turns)
    assert [one.name for one in found[0].records] == ["0", "2"] and found[0].seconds == 8.0
    assert found[0].turns == [] and same_turns(found) == []


def test_arms_are_cut_to_the_turns_that_all_went_through():
    def make(arm, rows):
        return Session(fn := FakeFn(rows), rows, chunk=16, clock=fn.clock)

    arms = [Arm("none", None), Arm("p-eagle", 3)]
    requests = [request(i, (1,), 3) for i in range(5)]
    turns = measure(arms, make, requests, concurrency=[2], block=2)
    assert same_turns(next(turns)[:1])[0].records  # the first arm alone
    found = [next(turns) for _ in range(2)][-1]
    assert [len(one.records) for one in found] == [2, 4]
    cut = same_turns(found)
    assert [[r.name for r in one.records] for one in cut] == [["0", "1"]] * 2
    assert cut[1].seconds == cut[0].seconds == found[0].seconds < found[1].seconds


def test_a_single_token_needs_no_second_one_to_warm_up():
    fn = FakeFn(1)
    fn.compiled.step = None
    session = Session(fn, 1, chunk=16, clock=fn.clock)
    session.warm_up([request(0, (1,), 1)])
    assert [len(one.token_ids) for one in session.run([request(0, (1,), 1)]).records] == [1]


class Script:
    """A session that notes who ran what."""

    def __init__(self, log, name):
        self.log, self.name, self.unfinished = log, name, None

    def warm_up(self, requests):
        self.log.append(f"warm {self.name}")
        return 1.0

    def run(self, requests):
        self.log.append(f"{self.name}{''.join(one.name for one in requests)}")
        fn = FakeFn(1)
        session = Session(fn, 1, chunk=16, clock=fn.clock)
        session.warm_up(requests)
        return Run(records=session.run(requests).records, seconds=1.0)


def test_arms_take_turns():
    log = []
    arms = [Arm("a", None), Arm("b", 3)]
    requests = [request(i, (1,), 2) for i in range(3)]

    def make(arm, rows):
        if arm.method == "b" and rows > 2:
            return None  # an arm that cannot run so many at once
        return Script(log, arm.method)

    turns = list(measure(arms, make, requests, concurrency=[1, 2, 4], repeats=2))
    assert log[:8] == ["warm a", "a0", "warm b", "b0", "b1", "a1", "a2", "b2"]
    assert log[14:22] == ["warm a", "a012", "warm b", "b012", "warm b", "b012", "warm a", "a012"]
    assert log[22:] == ["warm a", "a012", "warm a", "a012"]
    last = turns[-1]
    assert [(str(one.arm), one.concurrency, len(one.records)) for one in last] == [
        ("a", 1, 6),
        ("b K=3", 1, 6),
        ("a", 2, 6),
        ("b K=3", 2, 6),
        ("a", 4, 6),
    ]
    assert [len(turn) for turn in turns[:3]] == [1, 2, 2]


def test_blocks_take_turns_and_an_interruption_leaves_equal_prompts():
    sessions = []

    def make(arm, rows):
        sessions.append(Session(fn := FakeFn(rows), rows, chunk=16, refill=rows, clock=fn.clock))
        return sessions[-1]

    arms = [Arm("none", None), Arm("p-eagle", 3)]
    requests = [request(i, (1,), 3) for i in range(5)]
    turns, counts = measure(arms, make, requests, concurrency=[2], block=2), []
    for found in turns:  # the measurements grow from turn to turn
        counts.append([len(one.records) for one in found])
    assert counts[1::2] == [[2, 2], [4, 4], [5, 5]]
    assert [one.name for one in found[1].records] == ["0", "1", "2", "3", "4"]
    assert len(sessions) == 2  # warm ones are kept
