"""Timed decoding of a list of requests with a fixed number of rows in flight.

A row whose request is done takes the next one of the list at once; the others keep running. Time
is read only when the device is ready, and compilation happens in `warm_up`, which is not timed.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from peagle_jax.decoding.generate import UNTIL_DONE
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.stats import AcceptanceStats, request_stats

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as ids, what is asked of it, and its name in reports."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What one request gave.

    Attributes:
      prompt, token_ids: its input and output.
      num_rounds: target passes after prefill; None where a peer does not tell.
      acceptance: what was drafted and accepted; None where a peer does not tell.
      first_token_s: seconds from the moment its row was filled until its first token was ready.
      total_s: the same until its last token was ready.
    """

    name: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_rounds: int | None
    acceptance: AcceptanceStats | None
    first_token_s: float
    total_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Records in the order of the requests, and the seconds they took together."""

    records: tuple[Record, ...]
    seconds: float


class Session:
    """One compiled program of `concurrency` rows, warm and ready for requests.

    Holds the decoding state between runs, so a timed run neither compiles nor allocates caches.

    Attributes:
      unfinished: the answers that a run had given when it was interrupted or failed; None after
        one that ended well.
    """

    def __init__(
        self,
        fn: Any,
        concurrency: int,
        *,
        chunk: int,
        rounds_per_step: int = 1,
        refill: int = 1,
        clock: Clock = time.perf_counter,
    ):
        """fn: a GenerateFn. chunk: prompt rows of one prefill pass; longer prompts take several.
        rounds_per_step: rounds between two looks at which rows are done. refill: free rows to wait
        for before they take the next requests; 1 is at once.
        """
        self.fn, self.concurrency, self.chunk = fn, concurrency, chunk
        self.rounds_per_step, self.clock = rounds_per_step, clock
        self.refill = min(refill, concurrency)
        self._state: Any = None
        self.unfinished: Run | None = None

    def warm_up(self, requests: Sequence[Request]) -> float:
        """Compile and run everything once, on at most two tokens of a request; the seconds."""
        started = self.clock()
        # One token needs no decoding step; two may be one more than the context holds.
        first = next((one for one in requests if one.params.max_tokens != 1), requests[0])
        tokens = 1 if first.params.max_tokens == 1 else 2
        params = dataclasses.replace(first.params, max_tokens=tokens, min_tokens=0, ignore_eos=True)
        short = dataclasses.replace(first, params=params)
        self._state = self.fn.init([short.prompt], [params], batch_size=self.concurrency)
        try:
            self.run([short] * self.concurrency)
        finally:
            self.unfinished = None  # answers of a warm-up are none
        return self.clock() - started

    def run(self, requests: Sequence[Request]) -> Run:
        """Serve the requests in order. The session is spent where this is interrupted or fails;
        `unfinished` then holds what was answered."""
        if self._state is None:
            raise RuntimeError("the session is not warm, or was interrupted; call warm_up first")
        records: list[Record | None] = [None] * len(requests)
        started = self.clock()
        try:
            self._serve(requests, records)
        except BaseException:
            self.unfinished = _run(records, self.clock() - started)
            raise
        self.unfinished = None
        return _run(records, self.clock() - started)

    def _serve(self, requests: Sequence[Request], records: list[Record | None]) -> None:
        """Put each request's record into its place as soon as it is there."""
        fn, state, self._state = self.fn, self._state, None
        waiting = collections.deque(range(len(requests)))
        in_flight: dict[int, tuple[int, float, float]] = {}  # row -> request, filled, first token
        while waiting or in_flight:
            free = [row for row in range(self.concurrency) if row not in in_flight]
            rows = free[: len(waiting)]
            # A prefill pass runs all rows of the batch, however few of them are new.
            if len(rows) >= min(self.refill, len(waiting)) > 0:
                filled = self.clock()
                taken = [waiting.popleft() for _ in rows]
                prompts = [requests[index].prompt for index in taken]
                params = [requests[index].params for index in taken]
                state = fn.admit(state, rows, prompts, params)
                state = fn.compiled.prefill(fn.params, state, chunk=self.chunk)
                jax.block_until_ready(state)
                ready = self.clock()
                in_flight |= {
                    row: (index, filled, ready) for row, index in zip(rows, taken, strict=True)
                }
            else:
                rounds = UNTIL_DONE if len(in_flight) == 1 else self.rounds_per_step
                state = fn.compiled.step(fn.params, state, np.int32(rounds))
            finished = np.asarray(jax.block_until_ready(state).finished)
            ended = self.clock()
            done = [row for row in in_flight if finished[row]]
            if not done:
                continue
            host = _read(state)
            for row in done:
                index, filled, ready = in_flight.pop(row)
                records[index] = self._record(
                    requests[index], host, row, first_s=ready - filled, total_s=ended - filled
                )
        self._state = state

    def _record(
        self,
        request: Request,
        host: tuple[np.ndarray, ...],
        row: int,
        *,
        first_s: float,
        total_s: float,
    ) -> Record:
        tokens, depth, drafts, committed, rounds = host
        output = slice(len(request.prompt), int(committed[row]))
        return Record(
            name=request.name,
            prompt=request.prompt,
            token_ids=tuple(tokens[row, output].tolist()),
            num_rounds=int(rounds[row]),
            acceptance=request_stats(
                depth[row, output], drafts[row, output], self.fn.num_speculative_tokens
            ),
            first_token_s=first_s,
            total_s=total_s,
        )


def _run(records: Sequence[Record | None], seconds: float) -> Run:
    return Run(records=tuple(record for record in records if record), seconds=seconds)


def _read(state: Any) -> tuple[np.ndarray, ...]:
    """What a record is made of, on the host."""
    return jax.device_get(
        (
            state.tokens,
            state.draft_depth,
            state.round_drafts,
            state.committed,
            state.num_rounds,
        )
    )
