"""Parts of a `peagle bench` run as one report.

    python -m benchmarks.heads_evidence OUTPUT PART PART ... [--acceptance-only]

Parts of other prompts (made one after the other with --skip) must have the same settings, machine,
methods and K. Counts are summed, rates follow from the sums; percentiles of times cannot be, and
are left out. Of an interrupted part that counts which every method has answered.
Parts of the same prompts with other methods or K are put side by side, each row with the speed-up
over plain decoding of its own run. With --acceptance-only what the clock gave is left out, as it
must be where other work ran beside the benchmark. Writes results.json, table.md and the pictures
into OUTPUT.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle_jax.bench.report import write_report
from peagle_jax.bench.results import MAX_EXCUSED_SHARE

_SUMMED = (
    "num_requests", "num_output_tokens", "seconds", "warm_up_s", "num_drafts", "num_draft_tokens",
    "num_accepted_tokens",
)  # fmt: skip
_MACHINE = ("dtype", "platform", "processor", "cores", "devices")
_OF_THE_PROMPTS = ("num_prompts", "num_prompt_tokens", "prompts", "skipped")
_OF_THE_ARMS = ("methods", "num_speculative_tokens", "concurrency", "drafters", "heads")
_OF_THE_CLOCK = (
    "output_tokens_per_s", "requests_per_s", "seconds", "warm_up_s", "speedup_over_plain",
    "time_to_first_token_ms", "time_per_output_token_ms", "end_to_end_ms",
)  # fmt: skip
_OF_SPEED_ALONE = ("repeats", "rounds_per_step", "refill", "by_length", "block", "warm_up")


def whole_prompts(report: dict[str, Any]) -> dict[str, Any]:
    """The report with what all of its methods have answered, and the settings of that alone.

    Raises:
        ValueError: it was interrupted, and its methods have answered different prompts.
    """
    settings = report["settings"]
    if report["complete"]:
        return report
    if "common" in report:
        found = dict(report["common"])
        rows = found.pop("results")
    else:  # an older report
        counts = {row["num_requests"] for row in report["results"]}
        if len(counts) > 1 or settings.get("repeats", 1) > 1:
            raise ValueError(
                f"an interrupted part (skipped: {settings['skipped']}) has other prompts of each "
                "method"
            )
        rows, found = report["results"], {"num_prompts": counts.pop(), "num_prompt_tokens": None}
    if "prompts" in settings:
        found["prompts"] = settings["prompts"][: found["num_prompts"]]
    kept = {name: value for name, value in report.items() if name != "common"}
    return {**kept, "results": rows, "settings": settings | found}


def merge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several over different prompts of one data set.

    Raises:
        ValueError: the parts differ in machine, settings or arms, or share prompts.
    """
    reports = sorted(map(whole_prompts, reports), key=lambda one: one["settings"]["skipped"])
    first = reports[0]
    _check_same(reports, apart_from=_OF_THE_PROMPTS)
    arms = [_arm(row) for row in first["results"]]
    if any([_arm(row) for row in one["results"]] != arms for one in reports):
        raise ValueError("the parts have different methods, K, concurrency or data sets")
    for one, other in itertools.combinations(reports, 2):
        _check_apart(one["settings"], other["settings"])
    rows = [_merged([one["results"][at] for one in reports]) for at in range(len(arms))]
    plain = {row["concurrency"]: row for row in rows if row["method"] == "none"}
    for row in rows:
        base = plain.get(row["concurrency"])
        if base is not None and row["num_requests"] == base["num_requests"]:
            rate = base["output_tokens_per_s"]
            row["speedup_over_plain"] = row["output_tokens_per_s"] / rate
        else:
            row["speedup_over_plain"] = None
    settings = [one["settings"] for one in reports]
    whole = {
        name: _sum([one[name] for one in settings]) for name in ("num_prompts", "num_prompt_tokens")
    }
    if all("prompts" in one for one in settings):
        whole["prompts"] = [name for one in settings for name in one["prompts"]]
    # What an interrupted part lacks is in the next one, if that begins where it ends.
    goes_on = [
        a["settings"]["skipped"] + a["settings"]["num_prompts"] == b["settings"]["skipped"]
        for a, b in itertools.pairwise(reports)
    ]
    ends = zip(reports, [*goes_on, False], strict=True)
    return {
        **first,
        "complete": all(one["complete"] or followed for one, followed in ends),
        "results": rows,
        "settings": settings[0] | whole,
        "parts": _parts(reports),
    }


def same_prompts(reports: Sequence[dict[str, Any]]) -> bool:
    """Whether all reports are of the same requests, and not of one data set's parts."""
    return all(
        one["settings"].get(name) == reports[0]["settings"].get(name)
        for one in reports
        for name in ("num_prompts", "num_prompt_tokens", "skipped")
    )


def join(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several with other arms over the same prompts; plain decoding counts once.

    Raises:
        ValueError: the parts differ in machine, prompts or in what is asked of the target, plain
            decoding gave other texts in one of them, or an arm is there twice.
    """
    reports = [whole_prompts(one) for one in reports]
    _check_same(reports, apart_from=(*_OF_THE_ARMS, *_OF_SPEED_ALONE))
    if len({row["dataset"] for one in reports for row in one["results"]}) > 1:
        raise ValueError("the parts differ in dataset")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in reports:
        for row in one["results"]:
            seen = rows.get(_arm(row))
            if seen is not None and row["method"] != "none":
                raise ValueError(f"{row['method']} at K = {row['k']} is in two parts")
            if seen is not None and seen["outputs_sha256"] != row["outputs_sha256"]:
                raise ValueError("plain decoding gave other texts in another part")
            rows.setdefault(_arm(row), row)
    heads: dict[str, Any] = {}
    for one in reports:
        for method, head in one["settings"].get("heads", {}).items():
            if heads.setdefault(method, head) != head:
                raise ValueError(f"the parts have different heads of {method}")
    settings = [one["settings"] for one in reports]
    of_all = {
        name: list(dict.fromkeys(x for one in settings for x in one[name]))
        for name in ("methods", "num_speculative_tokens", "concurrency")
        if all(name in one for one in settings)
    }
    return {
        **reports[0],
        "complete": all(one["complete"] for one in reports),
        "results": list(rows.values()),
        "settings": settings[0] | of_all | ({"heads": heads} if heads else {}),
        "parts": _parts(reports),
    }


def without_clock(report: dict[str, Any]) -> dict[str, Any]:
    """The report without what a clock gave; plain decoding, which drafts nothing, stands once."""
    rows = [row | dict.fromkeys(_OF_THE_CLOCK) for row in report["results"]]
    plain = [row for row in rows if row["method"] == "none"]
    drafted = [row for row in rows if row["method"] != "none"]
    drafted.sort(key=lambda row: (row["method"], row["k"]))
    return {**report, "clock": "left out", "results": [*plain[:1], *drafted]}


def _parts(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"revision": one["environment"].get("revision"), **one["settings"]} for one in reports]


def _check_same(reports: Sequence[dict[str, Any]], *, apart_from: Sequence[str]) -> None:
    """The machine, and the settings that both have: older reports lack some."""
    first = reports[0]
    for other in reports[1:]:
        for name in _MACHINE:
            if other["environment"].get(name) != first["environment"].get(name):
                raise ValueError(f"the parts differ in {name}")
        mine, theirs = first["settings"], other["settings"]
        for name in mine.keys() & theirs.keys() - set(apart_from):
            if mine[name] != theirs[name]:
                raise ValueError(f"the parts differ in {name}: {mine[name]} and {theirs[name]}")


def _check_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    """By name where both tell the names, else by the places in the data set."""
    if "prompts" in one and "prompts" in other:
        shared = sorted(set(one["prompts"]) & set(other["prompts"]))
        if shared:
            raise ValueError(f"the parts share {len(shared)} prompts, such as {shared[0]}")
        return
    (start, count), (again, more) = ((x["skipped"], x["num_prompts"]) for x in (one, other))
    if start < again + more and again < start + count:
        raise ValueError(
            f"the parts share prompts: {start} to {start + count} and {again} to {again + more}"
        )


def _arm(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("method", "k", "concurrency", "dataset"))


def _sum(values: Sequence[Any]) -> Any:
    """None where one of them is not known."""
    return None if None in values else sum(values)


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done: dict[str, Any] = dict(rows[0])
    done |= {name: _sum([row[name] for row in rows]) for name in _SUMMED}
    drafts = done["num_drafts"]
    done["output_tokens_per_s"] = done["num_output_tokens"] / done["seconds"]
    done["requests_per_s"] = done["num_requests"] / done["seconds"]
    if drafts is None:
        done["acceptance_length"] = None
    else:
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
    done["passes_per_token"] = None
    later = [row["num_output_tokens"] - row["num_requests"] for row in rows]
    if all(row["passes_per_token"] is not None for row in rows):
        passes = sum(r["passes_per_token"] * n for r, n in zip(rows, later, strict=True))
        done["passes_per_token"] = passes / sum(later)
    for name in ("time_to_first_token_ms", "time_per_output_token_ms", "end_to_end_ms"):
        done[name] = None
    done["outputs_sha256"] = [row["outputs_sha256"] for row in rows]
    if "against_plain" in rows[0]:
        done["against_plain"] = _against_plain([row["against_plain"] for row in rows])
    return done


def _against_plain(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {
        name: sum(one.get(name, 0) for one in found)
        for name in ("num_requests", "num_tokens", "num_excused", "num_unexcused", "num_not_judged")
    }
    allowed = max(1, sums["num_tokens"] * MAX_EXCUSED_SHARE)
    lossless: bool | None = not sums["num_unexcused"] and sums["num_excused"] <= allowed
    if lossless and sums["num_not_judged"]:
        lossless = None
    differences = [one for part in found for one in part["differences"]]
    return {**sums, "lossless": lossless, "differences": differences}


def _read(part: Path) -> dict[str, Any]:
    report = json.loads((part / "results.json").read_text(encoding="utf-8"))
    if not isinstance(report, dict) or not {"environment", "results", "settings"} <= set(report):
        raise ValueError("results.json is of something else")
    return report


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("parts", type=Path, nargs="+", help="folders of `peagle bench --output`")
    parser.add_argument("--acceptance-only", action="store_true", help="without times and rates")
    arguments = parser.parse_args(words)
    if len(arguments.parts) < 2 and not arguments.acceptance_only:
        parser.error("give at least two parts")
    if arguments.output.resolve() in {part.resolve() for part in arguments.parts}:
        parser.error(f"{arguments.output} is a part, and would be lost; choose another output")
    reports = []
    for part in arguments.parts:
        try:
            reports.append(_read(part))
        except (OSError, ValueError) as error:
            parser.error(f"{part} has no results of `peagle bench`: {error}")
    try:
        report = (join if same_prompts(reports) else merge)(reports)
        if arguments.acceptance_only:
            report = without_clock(report)
    except ValueError as error:
        parser.error(str(error))
    for path in write_report(arguments.output, report, pictures=True):
        print(path)


if __name__ == "__main__":
    main()
