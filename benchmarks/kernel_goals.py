"""What the kernels are to show on an H200, and whether measured rows show it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """One claim about every row of a kernel that it applies to.

    Attributes:
      claim: what is to hold, in words.
      kernel: the operation.
      applies: row -> whether the claim is about it.
      figure: row -> the measured number; None where the row lacks it.
      holds: comparison of figure and bound.
      bound: the number that the claim names.
    """

    claim: str
    kernel: str
    applies: Callable[[dict], bool]
    figure: Callable[[dict], float | None]
    holds: Callable[[float, float], bool]
    bound: float


def _times_reference(row: dict) -> float | None:
    if "reference_seconds" not in row:
        return None
    return row["reference_seconds"] / row["seconds"]


GOALS = (
    Goal(
        claim="share of copy bandwidth where at least 256 MB move",
        kernel="fill_hidden",
        applies=lambda row: row["moved_bytes"] >= 256e6,
        figure=lambda row: row["of_copy_bandwidth"],
        holds=operator.ge,
        bound=0.85,
    ),
    Goal(
        claim="launches",
        kernel="expand_batch",
        applies=lambda row: True,
        figure=lambda row: row["launches"],
        holds=operator.le,
        bound=1,
    ),
    Goal(
        claim="microseconds at 64 requests",
        kernel="expand_batch",
        applies=lambda row: row["shape"] == "decode-64-k7",
        figure=lambda row: row["seconds"] * 1e6,
        holds=operator.le,
        bound=10,
    ),
    Goal(
        claim="times faster than the unfused operations under jit",
        kernel="expand_batch",
        applies=lambda row: row["shape"] == "decode-64-k7",
        figure=_times_reference,
        holds=operator.ge,
        bound=4,
    ),
    Goal(
        claim="share of copy bandwidth at 64 x 8k and 1 x 128k keys",
        kernel="short_query_attention",
        applies=lambda row: row["shape"].endswith(("64x8k", "1x128k")),
        figure=lambda row: row["of_copy_bandwidth"],
        holds=operator.ge,
        bound=0.70,
    ),
    Goal(
        claim="share of the bf16 matrix rate forward at N = 8,192",
        kernel="rollout_attention",
        applies=lambda row: row["shape"].endswith("/rollouts"),
        figure=lambda row: row["of_matrix_rate"],
        holds=operator.ge,
        bound=0.50,
    ),
)


def judge(rows: list[dict]) -> list[dict]:
    """Each goal against each row that it is about; `met` is None where there is no figure."""
    found = []
    for goal in GOALS:
        for row in rows:
            if row["kernel"] != goal.kernel or not goal.applies(row):
                continue
            figure = goal.figure(row)
            found.append(
                {
                    "kernel": goal.kernel,
                    "shape": row["shape"],
                    "claim": goal.claim,
                    "figure": figure,
                    "bound": goal.bound,
                    "at_least": goal.holds is operator.ge,
                    "met": None if figure is None else goal.holds(figure, goal.bound),
                }
            )
    return found


def to_text(judged: list[dict]) -> str:
    """One line per goal and shape: figure, bound, met or missed."""
    lines = []
    for goal in judged:
        figure = "no figure" if goal["figure"] is None else f"{goal['figure']:.3g}"
        word = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        sign = ">=" if goal["at_least"] else "<="
        lines.append(
            f"{word:<12} {goal['kernel']:<22} {goal['shape']:<30} {figure:>9} "
            f"({sign} {goal['bound']:g}) {goal['claim']}"
        )
    return "\n".join(lines)
