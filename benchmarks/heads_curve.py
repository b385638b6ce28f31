"""Acceptance length of SmolLM2's two heads against training tokens and CPU time.

    python -m benchmarks.heads_curve [RUN_FOLDER]

RUN_FOLDER is that of `python -m examples.smollm2.run`: its logs are copied to
benchmarks/results/smollm2_training first. Prints a table, and draws the picture beside the logs.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "smollm2_training"
STYLES = {"p-eagle": ("#0b3c6f", "o", "-"), "eagle3": ("#c8501e", "s", "--")}


def points(records: Sequence[dict[str, Any]], window: int = 10) -> list[dict[str, float]]:
    """For each record: supervised tokens and CPU seconds so far, and the estimated length.

    Training records are averaged over `window` of them, as each is of one sequence alone.
    """
    train = [one for one in records if one["kind"] == "train"]
    found, tokens = [], 0
    for index, one in enumerate(train):
        tokens += one["supervised"]
        if (index + 1) % window == 0:
            part = train[index + 1 - window : index + 1]
            length = sum(r["estimated_acceptance_length"] for r in part) / window
            found.append(
                {
                    "step": one["step"],
                    "tokens": tokens,
                    "cpu_seconds": one["cpu_seconds"],
                    "training": length,
                }
            )
    held_out = {r["step"]: r["estimated_acceptance_length"] for r in records if r not in train}
    for point in found:
        if point["step"] in held_out:
            point["validation"] = held_out[point["step"]]
    return found


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, found in curves.items():
        color, marker, dash = STYLES[name]
        for axis, key in zip(axes, ("tokens", "cpu_seconds"), strict=True):
            axis.plot([p[key] for p in found], [p["training"] for p in found], dash, color=color,
                      label=f"{name}, training rows")  # fmt: skip
            held = [p for p in found if "validation" in p]
            axis.plot([p[key] for p in held], [p["validation"] for p in held], marker, color=color,
                      label=f"{name}, held-out rows")  # fmt: skip
    axes[0].set(xlabel="supervised tokens trained on", ylabel="estimated acceptance length")
    axes[1].set(xlabel="CPU seconds, all included")
    for axis in axes:
        axis.grid(color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 1:
        for name in STYLES:
            shutil.copy(Path(sys.argv[1]) / name / "log.jsonl", RESULTS / f"{name}.jsonl")
    curves = {}
    for name in STYLES:
        lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        curves[name] = points([json.loads(line) for line in lines])
    print(f"{'head':<10}{'step':>6}{'tokens':>10}{'CPU s':>8}{'training':>10}{'held out':>10}")
    for name, found in curves.items():
        for p in found:
            held = f"{p['validation']:.3f}" if "validation" in p else "-"
            print(
                f"{name:<10}{p['step']:>6.0f}{p['tokens']:>10}{p['cpu_seconds']:>8.0f}"
                f"{p['training']:>10.3f}{held:>10}"
            )
    draw(curves, RESULTS / "curve.png")


if __name__ == "__main__":
    main()
