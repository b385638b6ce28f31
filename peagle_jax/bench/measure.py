"""Methods x K x concurrency in one process, taken in turns, so that a slow minute hits all alike.

At concurrency 1 the turns change with every prompt, else with every block of prompts (all of them
where nothing else is asked for); who goes first moves on from one to the next. What runs is a
session (session.py, peers.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from peagle_jax.bench.session import Record, Request, Run


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison: a method and its K (None where it drafts nothing)."""

    method: str
    k: int | None

    def __str__(self) -> str:
        return self.method if self.k is None else f"{self.method} K={self.k}"


@dataclasses.dataclass
class Measurement:
    """What an arm gave at one concurrency, so far.

    Attributes:
      turns: for each turn that it went through to its end, the records and the seconds up to there.
    """

    arm: Arm
    concurrency: int
    warm_up_s: float = 0.0
    seconds: float = 0.0
    records: list[Record] = dataclasses.field(default_factory=list)
    turns: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def add(self, run: Run, *, whole: bool = True) -> None:
        """whole: False for what an interrupted turn had given."""
        self.records += run.records
        self.seconds += run.seconds
        if whole:
            self.turns.append((len(self.records), self.seconds))

    def up_to(self, turns: int) -> "Measurement":
        """The same after its first `turns` turns."""
        count, seconds = self.turns[turns - 1]
        return dataclasses.replace(
            self, records=self.records[:count], seconds=seconds, turns=self.turns[:turns]
        )


class AnySession(Protocol):
    """What a session offers here: compile untimed, then serve requests, timed."""

    def warm_up(self, requests: Sequence[Request]) -> float: ...

    def run(self, requests: Sequence[Request]) -> Run: ...

    @property
    def unfinished(self) -> Run | None: ...


MakeSession = Callable[[Arm, int], Any]
"""Makes an arm's session at a concurrency; None where the arm cannot run at it."""


def measure(
    arms: Sequence[Arm],
    make_session: MakeSession,
    requests: Sequence[Request],
    *,
    concurrency: Sequence[int],
    repeats: int = 1,
    block: int | None = None,
) -> Iterator[list[Measurement]]:
    """Run everything; after each turn of one arm, all measurements so far.

    block: requests of a turn above concurrency 1; None is all. Rows run empty at the end of each,
    so a block is a whole number of batches, or long.
    At every yield the finished arms of a turn hold the same prompts. What an interrupted or failed
    turn had given is yielded too; then its exception is raised.
    """
    finished: list[Measurement] = []
    for rows in concurrency:
        current = {arm: Measurement(arm, rows) for arm in arms}
        for _ in _turns(current, make_session, requests, rows, repeats, block):
            yield finished + [one for one in current.values() if one.records]
        finished += [one for one in current.values() if one.records]


def _turns(
    current: dict[Arm, Measurement],
    make_session: MakeSession,
    requests: Sequence[Request],
    rows: int,
    repeats: int,
    block: int | None,
) -> Iterator[None]:
    """At one concurrency: every block of prompts by every arm; yields after each."""
    size = 1 if rows == 1 else block or len(requests)
    blocks = [requests[at : at + size] for at in range(0, len(requests), size)]
    order, sessions = list(current), {}
    for turn, part in enumerate(blocks * repeats):
        first = turn % len(order)
        for arm in order[first:] + order[:first]:
            session = sessions.pop(arm, None)
            if session is None:
                session = make_session(arm, rows)
                if session is None:
                    continue
                current[arm].warm_up_s += session.warm_up(requests)
            try:
                run = session.run(part)
            except BaseException:
                if session.unfinished is not None and session.unfinished.records:
                    current[arm].add(session.unfinished, whole=False)
                    yield
                raise
            current[arm].add(run)
            # Many rows have large caches: one session at a time, where it has only one turn.
            if len(blocks) > 1:
                sessions[arm] = session
            yield


def same_turns(measurements: Sequence[Measurement]) -> list[Measurement]:
    """All arms after as many turns as each of them has gone through; none if one has not begun.

    An interrupted run is cut to the same prompts of every arm so that another can go on behind it.
    """
    turns = min((len(one.turns) for one in measurements), default=0)
    return [one.up_to(turns) for one in measurements] if turns else []
