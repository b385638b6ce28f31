"""What a run tells: JSON lines, TensorBoard, a progress bar, and a picture of the curves.

Only the first process writes. A resumed run drops the lines of steps that it will do again, so that
the log of an interrupted run is that of an undisturbed one.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train.losses import Sums

LOG_NAME = "log.jsonl"


def describe(sums: Sums) -> dict[str, Any]:
    """Loss, accuracy per depth, joint acceptance per depth, estimated acceptance length.

    The estimate is 1 + the sum over depths of the share of rollouts right up to there: the
    target's own token, and each draft that would be accepted by greedy decoding.
    """
    host = {name: np.asarray(value) for name, value in sums._asdict().items()}
    joint = _share(host["joint_correct"], host["joint_total"])
    return {
        "loss": float(host["loss"]) / max(1, int(host["count"])),
        "elements": int(host["count"]),
        "supervised": int(host["total"][0]),
        "accuracy": _share(host["correct"], host["total"]),
        "joint_acceptance": joint,
        "estimated_acceptance_length": 1.0 + sum(joint),
    }


def _share(hits: np.ndarray, total: np.ndarray) -> list[float]:
    return [int(h) / int(t) if t else 0.0 for h, t in zip(hits, total, strict=True)]


class Log:
    """Writes the records of a run into its folder; a context manager."""

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int,
        first_step: int = 0,
        enabled: bool = True,
        tensorboard: bool = False,
    ):
        """first_step: steps done already. enabled: False in all processes but one.

        Raises:
            ValueError: TensorBoard was asked for and tensorboardX is not installed.
        """
        self._folder, self._total, self._enabled = Path(folder), total_steps, enabled
        self._console = Console(stderr=True)
        self._started, self._first, self._tokens = time.perf_counter(), first_step, 0
        self._earlier: Mapping[str, Any] = {}
        self._board: Any = None
        self._bar: Any = None
        if not enabled:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / LOG_NAME
        keep = [r for r in read_log(self._folder) if r["step"] <= first_step]
        self._path.write_text("".join(json.dumps(r) + "\n" for r in keep), encoding="utf-8")
        self._earlier = keep[-1] if keep else {}
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise ValueError(
                    "output.tensorboard needs tensorboardX (pip install tensorboardX)."
                ) from None
            self._board = SummaryWriter(str(self._folder / "tensorboard"))

    def __enter__(self) -> "Log":
        if self._enabled and self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._first, text="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()

    def count(self, tokens: int) -> None:
        """Tokens of a step that was started."""
        self._tokens += tokens

    def write(self, step: int, values: Mapping[str, Any], *, kind: str = "train") -> None:
        """One record of step `step`, kind "train" or "validation".

        Beside the values: `tokens`, slots of all training batches so far, and `cpu_seconds` that
        this process used since it began, each with what a resumed run had before.
        """
        if not self._enabled:
            return
        spent = {
            "tokens": self._tokens + self._earlier.get("tokens", 0),
            "cpu_seconds": round(time.process_time() + self._earlier.get("cpu_seconds", 0.0), 2),
        }
        record = {"step": step, "kind": kind, **values, **spent}
        with self._path.open("a", encoding="utf-8") as file:
            # A bare NaN is no JSON: what is not finite must have stopped the run before.
            file.write(json.dumps(record, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in values.items():
                parts = enumerate(value) if isinstance(value, list) else [("", value)]
                for index, part in parts:
                    label = f"{kind}/{name}/{index}" if index != "" else f"{kind}/{name}"
                    self._board.add_scalar(label, part, step)
        rate = self._tokens / max(1e-9, time.perf_counter() - self._started)
        accuracy = " ".join(f"{share:.2f}" for share in values.get("accuracy", []))
        text = (
            f"{kind} loss {values['loss']:.4f}  accuracy {accuracy}  "
            f"AL {values['estimated_acceptance_length']:.2f}  {rate:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        else:
            left = self._seconds_left(step)
            self._console.print(f"step {step}/{self._total}  {text}{left}", highlight=False)

    def _seconds_left(self, step: int) -> str:
        done = step - self._first
        if done < 1 or step >= self._total:
            return ""
        left = (time.perf_counter() - self._started) / done * (self._total - step)
        return f"  {math.ceil(left / 60)} min left"


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run; a last line cut short by a kill is left out."""
    path = Path(folder) / LOG_NAME
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def draw_curves(folder: str | Path) -> Path | None:
    """`curves.png` of a run's log: loss, accuracy per depth, estimated acceptance length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_log(folder)
    train = [r for r in records if r["kind"] == "train"]
    if not train:
        return None
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    for kind, style in (("train", "-"), ("validation", "o--")):
        own = [r for r in records if r["kind"] == kind]
        steps = [r["step"] for r in own]
        axes[0].plot(steps, [r["loss"] for r in own], style, label=kind)
        lengths = [r["estimated_acceptance_length"] for r in own]
        axes[2].plot(steps, lengths, style, label=kind)
    steps = [r["step"] for r in train]
    for depth in range(len(train[0]["accuracy"])):
        axes[1].plot(steps, [r["accuracy"][depth] for r in train], label=f"depth {depth}")
    for axis, title in zip(axes, ("loss", "accuracy", "estimated acceptance length"), strict=True):
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=8)
    path = Path(folder) / "curves.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
