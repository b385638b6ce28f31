"""What every benchmark shares: the environment line, alternating timed runs, and atomic JSON."""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from peagle_jax.bench.environment import environment

__all__ = ["alternate", "environment", "median", "write_json"]


def alternate(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns so that a slow minute of the machine hits all of them.

    Every run is called once before, untimed; each must block until its work is done.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def median(seconds: list[float]) -> float:
    """The middle value: one disturbed repeat does not move it."""
    return statistics.median(seconds)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Write to a temporary name, then rename, so that an interrupted run leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
