"""Parts of a `peagle bench` run as one report.

    python -m benchmarks.heads_evidence OUTPUT PART PART ...

Parts of other prompts (made one after the other with --skip) must have the same methods and K.
Counts are summed, rates follow from the sums; percentiles of times cannot be, and are left out.
Parts of the same prompts with other methods or K are put side by side, each row with the speed-up
over plain decoding of its own run. Writes results.json, table.md and the pictures into OUTPUT.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle_jax.bench.report import write_report
from peagle_jax.bench.results import MAX_EXCUSED_SHARE

_SUMMED = (
    "num_requests", "num_output_tokens", "seconds", "warm_up_s", "num_drafts", "num_draft_tokens",
    "num_accepted_tokens",
)  # fmt: skip


def merge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several over different prompts of one data set.

    Raises:
        ValueError: the parts differ in dtype or cores, or have other arms.
    """
    first = reports[0]
    for other in reports[1:]:
        for name in ("dtype", "cores"):
            if other["environment"].get(name) != first["environment"].get(name):
                raise ValueError(f"the parts differ in {name}")
    arms = [_arm(row) for row in first["results"]]
    if any([_arm(row) for row in one["results"]] != arms for one in reports):
        raise ValueError("the parts have different methods, K or concurrency")
    rows = [_merged([one["results"][at] for one in reports]) for at in range(len(arms))]
    plain = {row["concurrency"]: row for row in rows if row["method"] == "none"}
    for row in rows:
        base = plain.get(row["concurrency"])
        if base is not None:
            rate = base["output_tokens_per_s"]
            row["speedup_over_plain"] = row["output_tokens_per_s"] / rate
    return {
        **first,
        "complete": all(one["complete"] for one in reports),
        "results": rows,
        "parts": [
            {"revision": one["environment"].get("revision"), **one["settings"]} for one in reports
        ],
    }


def same_prompts(reports: Sequence[dict[str, Any]]) -> bool:
    """Whether all reports are of the same requests, and not of one data set's parts."""
    names = ("num_prompts", "num_prompt_tokens", "skipped", "max_tokens", "temperature", "seed")
    return all(
        one["settings"][name] == reports[0]["settings"][name] for one in reports for name in names
    )


def join(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several with other arms over the same prompts; plain decoding counts once.

    Raises:
        ValueError: plain decoding gave other texts in one of them, or an arm is there twice.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in reports:
        for row in one["results"]:
            seen = rows.get(_arm(row))
            if seen is not None and row["method"] != "none":
                raise ValueError(f"{row['method']} at K = {row['k']} is in two parts")
            if seen is not None and seen["outputs_sha256"] != row["outputs_sha256"]:
                raise ValueError("plain decoding gave other texts in another part")
            rows.setdefault(_arm(row), row)
    complete = all(one["complete"] for one in reports)
    parts = [{"revision": one["environment"].get("revision"), **one["settings"]} for one in reports]
    return {**reports[0], "complete": complete, "results": list(rows.values()), "parts": parts}


def _arm(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("method", "k", "concurrency", "dataset"))


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done: dict[str, Any] = dict(rows[0])
    done |= {name: sum(row[name] for row in rows) for name in _SUMMED}
    drafts = done["num_drafts"]
    done["output_tokens_per_s"] = done["num_output_tokens"] / done["seconds"]
    done["requests_per_s"] = done["num_requests"] / done["seconds"]
    done["acceptance_length"] = 1 + done["num_accepted_tokens"] / drafts if drafts else 1.0
    drafted = done["num_draft_tokens"]
    done["acceptance_rate"] = done["num_accepted_tokens"] / drafted if drafted else None
    done["acceptance_rate_per_position"] = None
    if drafts:
        parts = [(row["num_drafts"], row["acceptance_rate_per_position"] or ()) for row in rows]
        width = max(len(rates) for _, rates in parts)
        done["acceptance_rate_per_position"] = [
            sum(count * rates[at] for count, rates in parts if at < len(rates)) / drafts
            for at in range(width)
        ]
    if all(row["passes_per_token"] is not None for row in rows):
        later = [row["num_output_tokens"] - row["num_requests"] for row in rows]
        passes = sum(r["passes_per_token"] * n for r, n in zip(rows, later, strict=True))
        done["passes_per_token"] = passes / sum(later)
    for name in ("time_to_first_token_ms", "time_per_output_token_ms", "end_to_end_ms"):
        done[name] = None
    done["outputs_sha256"] = [row["outputs_sha256"] for row in rows]
    if "against_plain" in rows[0]:
        found = [row["against_plain"] for row in rows]
        sums = {
            name: sum(one[name] for one in found)
            for name in ("num_requests", "num_tokens", "num_excused", "num_unexcused")
        }
        allowed = max(1, sums["num_tokens"] * MAX_EXCUSED_SHARE)
        lossless = not sums["num_unexcused"] and sums["num_excused"] <= allowed
        differences = [one for part in found for one in part["differences"]]
        done["against_plain"] = {**sums, "lossless": lossless, "differences": differences}
    return done


def main() -> None:
    output, *parts = map(Path, sys.argv[1:])
    reports = [json.loads((part / "results.json").read_text(encoding="utf-8")) for part in parts]
    combine = join if same_prompts(reports) else merge
    for path in write_report(output, combine(reports), pictures=True):
        print(path)


if __name__ == "__main__":
    main()
