"""What every benchmark shares: the environment line, alternating timed runs, and atomic JSON."""

import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def environment() -> dict[str, Any]:
    """Machine, versions, revision and command behind a figure, as plain JSON values."""

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def revision() -> str | None:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or None

    packages = ("jax", "jaxlib", "flax", "numpy", "transformers", "torch")
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
        "revision": revision(),
        "command": shlex.join([pathlib.Path(sys.executable).name, *sys.orig_argv[1:]]),
    }


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
