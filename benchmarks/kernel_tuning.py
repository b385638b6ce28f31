"""Search for launch parameters of one kernel, from the table's entry to the best of its neighbours.

A neighbour differs in one number, halved or doubled (stages: one more or less). The search goes on
from the best neighbour until none is faster by a hundredth.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator

import jax

from benchmarks import kernel_timing
from benchmarks.kernel_cases import Case, all_cases, stand_in
from pallas_kernels import launch
from pallas_kernels.devices import Device
from pallas_kernels.launch import Launch

MOST_WARPS, MOST_STAGES = 16, 5
# A search goes on only for what is clearly faster.
GAIN = 0.99

# One number per case, seconds; None where the launch does not run.
Measure = Callable[[Launch], list[float] | None]


def cases_of(kernel: str, shape_class: str) -> list[Case]:
    """The cases that are timed for an entry of the launch table.

    Of all that read it, those that run the fewest other kernels; a stand-in where none does.
    """
    readers = [case for case in all_cases() if case.launches.get(kernel) == shape_class]
    if not readers:
        return [stand_in(kernel, shape_class)]
    fewest = min(len(case.launches) for case in readers)
    return [case for case in readers if len(case.launches) == fewest]


def neighbours(entry: Launch) -> Iterator[Launch]:
    """Launches that differ from `entry` in one number."""
    for warps in (entry.num_warps // 2, entry.num_warps * 2):
        if 1 <= warps <= MOST_WARPS:
            yield dataclasses.replace(entry, num_warps=warps)
    for stages in (entry.num_stages - 1, entry.num_stages + 1):
        if 1 <= stages <= MOST_STAGES:
            yield dataclasses.replace(entry, num_stages=stages)
    for name, size in entry.blocks.items():
        for changed in (size // 2, size * 2):
            if changed >= 1:
                yield dataclasses.replace(entry, blocks={**entry.blocks, name: changed})


def climb(start: Launch, measure: Measure) -> tuple[Launch, float]:
    """The best launch found, and its time as a share of the start's (geometric mean of cases)."""
    first = measure(start)

    def share(found: list[float] | None) -> float:
        if found is None:
            return math.inf
        if first is None:
            return math.exp(sum(map(math.log, found)) / len(found))
        logs = [math.log(after / before) for after, before in zip(found, first, strict=True)]
        return math.exp(sum(logs) / len(logs))

    best, lowest = start, share(first)
    tried = {str(start)}
    while True:
        fresh = [entry for entry in neighbours(best) if str(entry) not in tried]
        tried |= {str(entry) for entry in fresh}
        shares = [share(measure(entry)) for entry in fresh]
        if not shares or min(shares) >= lowest * GAIN:
            return best, lowest
        lowest = min(shares)
        best = fresh[shares.index(lowest)]


def timing(kernel: str, cases: list[Case], device: Device) -> Measure:
    """Times the cases on the GPU at hand."""
    # What the arguments may take together, so that all cases fit at once.
    share = device.memory_bytes // (4 * len(cases))
    sets = [kernel_timing.argument_sets(case.make, 4 * device.l2_bytes, share) for case in cases]

    def measure(entry: Launch) -> list[float] | None:
        try:
            with launch.override(kernel, entry):
                return [
                    kernel_timing.time_call(case.call("triton"), arguments)
                    for case, arguments in zip(cases, sets, strict=True)
                ]
        except Exception:  # too much shared memory, a block Triton refuses: not a candidate
            return None

    return measure


def tracing(kernel: str, cases: list[Case]) -> Measure:
    """Traces the cases instead, for machines without a GPU; every launch is as fast as any."""

    def measure(entry: Launch) -> list[float]:
        with launch.override(kernel, entry), launch.recording() as read:
            for case in cases:
                jax.make_jaxpr(case.call("triton"))(*case.abstract)
        if kernel not in {name for name, _ in read}:
            raise RuntimeError(f"the cases of {kernel} do not read its launch parameters")
        return [1.0] * len(cases)

    return measure


def tune(kernel: str, device: Device | None) -> Iterator[str]:
    """Lines that say the best row of every entry of `kernel` for `device`; traced without one."""
    for shape_class, rows in launch.TABLE[kernel].items():
        name = device.name if device else "any"
        start = rows.get(name, rows["any"])
        cases = cases_of(kernel, shape_class)
        measure = timing(kernel, cases, device) if device else tracing(kernel, cases)
        best, share = climb(start, measure)
        blocks = json.dumps(dict(best.blocks))
        verdict = f"{share:.3f} of the table's time" if device else "traced, not timed"
        yield f"{kernel} {shape_class}: {', '.join(case.shape for case in cases)}"
        yield (
            f'    "{name}": Launch(num_warps={best.num_warps}, num_stages={best.num_stages}, '
            f"blocks={blocks}),  # {verdict}"
        )
