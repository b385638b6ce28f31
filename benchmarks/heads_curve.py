"""Acceptance length of SmolLM2's two heads against training tokens and CPU time.

    python -m benchmarks.heads_curve [RUN_FOLDER]

RUN_FOLDER is that of `python -m examples.smollm2.run`: its logs are copied to
benchmarks/results/smollm2_training first. Prints a table, and draws the picture beside the logs.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.smollm2.run import FITS

RESULTS = Path(__file__).parent / "results" / "smollm2_training"
STYLES = {"p-eagle": ("#0b3c6f", "o", "-"), "eagle3": ("#c8501e", "s", "--")}


def points(runs: Sequence[Sequence[dict[str, Any]]], window: int = 25) -> list[dict[str, float]]:
    """Points over runs that follow each other: tokens and CPU seconds so far, estimated lengths.

    Training records are averaged over `window` of them, as each is of one sequence alone.
    """
    found: list[dict[str, float]] = []
    steps, tokens, seconds = 0, 0, 0.0
    for records in runs:
        lengths: list[float] = []
        for one in records:
            length = one["estimated_acceptance_length"]
            spent = seconds + one["cpu_seconds"]
            if one["kind"] == "train":
                tokens += one["supervised"]
                lengths.append(length)
                key, value = "training", sum(lengths[-window:]) / window
                if len(lengths) % window:
                    continue
            else:
                key, value = "validation", length
            step = steps + one["step"]
            found.append({"step": step, "tokens": tokens, "cpu_seconds": spent, key: value})
        steps += records[-1]["step"]
        seconds += records[-1]["cpu_seconds"]
    return found


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, found in curves.items():
        color, marker, dash = STYLES[name]
        for axis, key, unit in zip(axes, ("tokens", "cpu_seconds"), (1000, 60), strict=True):
            kinds = (("training", dash, "training"), ("validation", marker, "held-out"))
            for kind, style, rows in kinds:
                seen = [p for p in found if kind in p]
                places, values = [p[key] / unit for p in seen], [p[kind] for p in seen]
                axis.plot(places, values, style, color=color, label=f"{name}, {rows} rows")
    axes[0].set(
        xlabel="supervised tokens trained on [thousands]", ylabel="estimated acceptance length"
    )
    axes[1].set(xlabel="CPU minutes, all included")
    for axis in axes:
        axis.grid(color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_folder", type=Path, nargs="?", help="take the logs from there first")
    folder = parser.parse_args().run_folder
    if folder is not None:
        names = list(itertools.chain.from_iterable(FITS.values()))
        missing = [name for name in names if not (folder / name / "log.jsonl").is_file()]
        if missing:
            parser.error(f"{folder} has no log.jsonl of {', '.join(missing)}")
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(folder / name / "log.jsonl", RESULTS / f"{name}.jsonl")
    curves = {}
    for name, runs in FITS.items():
        logs = [(RESULTS / f"{run}.jsonl").read_text(encoding="utf-8") for run in runs]
        curves[name] = points([[json.loads(line) for line in log.splitlines()] for log in logs])
    print(f"{'head':<10}{'step':>6}{'tokens':>10}{'CPU s':>8}{'training':>10}{'held out':>10}")
    for name, found in curves.items():
        for p in found:
            seen, held = (f"{p[k]:.3f}" if k in p else "-" for k in ("training", "validation"))
            print(
                f"{name:<10}{p['step']:>6}{p['tokens']:>10}{p['cpu_seconds']:>8.0f}"
                f"{seen:>10}{held:>10}"
            )
    draw(curves, RESULTS / "curve.png")


if __name__ == "__main__":
    main()
