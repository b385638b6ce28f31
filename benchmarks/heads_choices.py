"""What each choice behind SmolLM2's P-EAGLE head gains: its recipe with one thing changed.

    python -m benchmarks.heads_choices FOLDER [--only NAME ...] [--seconds 180]

FOLDER holds the rows and states of `python -m examples.smollm2.run FOLDER --only rows,states`.
Every variant has the same CPU seconds of training (its number of steps follows from its cost for
each step, tried out first); the figure is the estimated acceptance length on the held-out rows at
the end. Runs whose log is there are not repeated. Writes benchmarks/results/heads_choices.json.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from benchmarks.report import environment, write_json
from examples.smollm2.run import HERE

OUTPUT = pathlib.Path(__file__).parent / "results" / "heads_choices.json"
ONE_DEPTH = HERE / "p-eagle-1.toml"
ALL_DEPTHS = ["objective.num_depths=12", "objective.ratio=0.6"]
VARIANTS = {
    "as shipped, all depths from the start": ALL_DEPTHS,
    "one depth for half of the time, then all": [],
    "new weights, not the target's layers": [*ALL_DEPTHS, "drafter.start=new"],
    "one layer, not four": [*ALL_DEPTHS, "drafter.num_layers=1"],
    "whole embedding table learned": [*ALL_DEPTHS, "train.embedding=table"],
    "head learned": [*ALL_DEPTHS, "train.head=true"],
    "whole vocabulary drafted": [
        *ALL_DEPTHS, "drafter.draft_vocab_size=none", "drafter.vocabulary=none",
    ],
}  # fmt: skip
"""What differs from p-eagle-1.toml."""
TRIED = 4  # steps of a trial, the first of which compiles


def fit(folder: pathlib.Path, run: str, steps: int, changes: list[str]) -> list[dict[str, Any]]:
    """One run of `steps`, in FOLDER/choices; the records of its log."""
    output = folder / "choices" / run
    log = output / "log.jsonl"
    if not (output / "done").is_file():
        fixed = [
            f"train.steps={steps}",
            f"output.folder={output}",
            f"output.validate_every={steps}",
            "output.save_every=0",
            "output.picture=false",
            "optimizer.final_ratio=0.0",
        ]
        settings = [part for change in (*fixed, *changes) for part in ("--set", change)]
        command = [sys.executable, "-m", "train.cli", "fit", str(ONE_DEPTH), "--resume", *settings]
        environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        subprocess.run(command, cwd=folder, env=environ, check=True)
        (output / "done").touch()
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def steps_within(folder: pathlib.Path, run: str, seconds: float, changes: list[str]) -> int:
    """Steps that `seconds` of CPU time hold, by a trial of a few, compilation left out."""
    records = [r for r in fit(folder, f"{run}-trial", TRIED, changes) if r["kind"] == "train"]
    each = (records[-1]["cpu_seconds"] - records[0]["cpu_seconds"]) / (len(records) - 1)
    return max(1, round(seconds / each))


def measure(folder: pathlib.Path, name: str, seconds: float) -> dict[str, Any]:
    """Train one variant; what it cost and reached."""
    run = name.replace(" ", "-").replace(",", "")
    changes, spent = VARIANTS[name], 0.0
    if not changes:
        first = fit(folder, f"{run}-1", steps_within(folder, run, seconds / 2, []), [])
        head = folder / "choices" / f"{run}-head"
        if not head.is_dir():
            source = str(folder / "choices" / f"{run}-1")
            export = [sys.executable, "-m", "train.cli", "export", source, str(head)]
            subprocess.run([*export, "--dtype", "float32"], cwd=folder, check=True)
        of_head = ["num_layers", "mask_token_id", "draft_vocab_size", "vocabulary"]
        changes = [
            *ALL_DEPTHS, "drafter.start=head", f"drafter.path={head}",
            *(f"drafter.{key}=none" for key in of_head[1:]),
        ]  # fmt: skip
        spent, seconds = _training_seconds(first), seconds / 2
    steps = steps_within(folder, f"{run}-2" if spent else run, seconds, changes)
    records = fit(folder, run, steps, changes)
    validation = [r for r in records if r["kind"] == "validation"][-1]
    return {
        "variant": name,
        "steps": steps,
        "training_cpu_seconds": round(spent + _training_seconds(records), 1),
        "supervised_tokens": sum(r["supervised"] for r in records if r["kind"] == "train"),
        "estimated_acceptance_length": validation["estimated_acceptance_length"],
        "accuracy": validation["accuracy"],
    }


def _training_seconds(records: list[dict[str, Any]]) -> float:
    """CPU seconds between the first step's end and the last one's: no compilation."""
    steps = [r["cpu_seconds"] for r in records if r["kind"] == "train"]
    return steps[-1] - steps[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=180)
    args = parser.parse_args()
    folder = args.folder.resolve()
    content = json.loads(OUTPUT.read_text()) if OUTPUT.is_file() else {"results": {}}
    for name in args.only:
        found = measure(folder, name, args.seconds)
        content["environment"] = environment()
        content["results"][name] = found
        write_json(OUTPUT, content)
        length = found["estimated_acceptance_length"]
        print(f"{name:<45}{length:6.3f}  {found['training_cpu_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
