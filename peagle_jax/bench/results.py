"""From records to the rows of a report: rates, percentiles, acceptance, equality with plain."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from peagle_jax.bench.measure import Arm, Measurement
from peagle_jax.bench.session import Record
from peagle_jax.decoding.stats import merge_stats

PERCENTILES = (50, 90, 95, 99)
NEAR_TIE = 5e-4  # gap of plain decoding's two best logits that excuses another one, in float32
MAX_EXCUSED_SHARE = 1 / 5000
PLAIN = Arm("none", None)

Gap = Callable[[Sequence[int]], float]
"""The difference of the target's two largest logits after a sequence of ids."""


def result_row(measurement: Measurement, dataset: str) -> dict[str, Any]:
    """The figures of one arm at one concurrency; JSON values.

    Throughput counts every output token over the wall time of the runs, prefill included. Time per
    output token is that after the first, of requests with two tokens or more. Warm-up, which holds
    the compilation, is in none of them.
    """
    records, seconds = measurement.records, measurement.seconds
    tokens = sum(len(record.token_ids) for record in records)
    rounds = [record.num_rounds for record in records]
    later = tokens - len(records)
    known = later > 0 and None not in rounds
    drafted = [record.acceptance for record in records]
    acceptance = merge_stats(one for one in drafted if one is not None).as_dict()
    if None in drafted:
        acceptance = dict.fromkeys(acceptance)
    return {
        "method": measurement.arm.method,
        "k": measurement.arm.k,
        "concurrency": measurement.concurrency,
        "dataset": dataset,
        "num_requests": len(records),
        "num_output_tokens": tokens,
        "seconds": seconds,
        "warm_up_s": measurement.warm_up_s,
        "output_tokens_per_s": tokens / seconds if seconds > 0 else None,
        "requests_per_s": len(records) / seconds if seconds > 0 else None,
        **acceptance,
        "passes_per_token": sum(rounds) / later if known else None,
        "time_to_first_token_ms": _spread([1e3 * one.first_token_s for one in records]),
        "time_per_output_token_ms": _spread(
            [1e3 * per_token for one in records if (per_token := time_per_token(one)) is not None]
        ),
        "end_to_end_ms": _spread([1e3 * one.total_s for one in records]),
        "outputs_sha256": outputs_digest(records),
    }


def outputs_digest(records: Sequence[Record]) -> str:
    """sha256 of the outputs by prompt: two runs with one digest gave the same tokens."""
    outputs = sorted({(record.name, record.token_ids) for record in records})
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def time_per_token(record: Record) -> float | None:
    """Seconds per output token after the first; None where there is no second one."""
    later = len(record.token_ids) - 1
    return (record.total_s - record.first_token_s) / later if later > 0 else None


def near_tie_bound(dtype: str, temperature: float) -> float | None:
    """What excuses another token; None where no bound is known: sampling, and other dtypes."""
    return NEAR_TIE if dtype == "float32" and not temperature else None


def rows(
    measurements: Sequence[Measurement],
    dataset: str,
    gap: Gap | None,
    bound: float | None = NEAR_TIE,
) -> list[dict]:
    """A row for each measurement, with its speed-up over plain and its equality with it.

    The speed-up is None where the two did not answer the same requests (an interrupted run).
    gap, bound: as in `against_plain`.
    """
    plain = {one.concurrency: one for one in measurements if one.arm == PLAIN}
    table = []
    for one in measurements:
        row = result_row(one, dataset)
        base = plain.get(one.concurrency)
        row["speedup_over_plain"] = None
        if base is not None:
            rate = result_row(base, dataset)["output_tokens_per_s"]
            if _names(one) == _names(base) and rate and row["output_tokens_per_s"]:
                row["speedup_over_plain"] = row["output_tokens_per_s"] / rate
            row["against_plain"] = against_plain(one.records, base.records, gap, bound)
        table.append(row)
    return table


def _names(measurement: Measurement) -> list[str]:
    return sorted(record.name for record in measurement.records)


def against_plain(
    records: Sequence[Record],
    plain: Sequence[Record],
    gap: Gap | None,
    bound: float | None = NEAR_TIE,
) -> dict[str, Any]:
    """Where outputs leave those of plain decoding, and whether near-ties excuse it.

    Each request counts once, at its first other token: what follows is another text. Without `gap`
    (not yet computed, or sampling) or `bound` (a dtype with none) differences are not judged, and
    `lossless` is None where there are some.
    """
    expected: Mapping[str, Record] = {record.name: record for record in plain}
    compared = [record for record in records if record.name in expected]
    differences, tokens = [], 0
    for record in compared:
        truth = expected[record.name]
        step = first_difference(record.token_ids, truth.token_ids)
        tokens += len(truth.token_ids) if step is None else step + 1
        if step is not None:
            differences.append(
                {
                    "prompt": record.name,
                    "step": step,
                    "gap": None if gap is None else gap([*truth.prompt, *truth.token_ids[:step]]),
                }
            )
    judged = gap is not None and bound is not None
    excused = sum(one["gap"] < bound for one in differences) if judged else 0
    unexcused = len(differences) - excused if judged else 0
    few = excused <= max(1, tokens * MAX_EXCUSED_SHARE)
    return {
        "num_requests": len(compared),
        "num_tokens": tokens,
        "num_excused": excused,
        "num_unexcused": unexcused,
        "num_not_judged": 0 if judged else len(differences),
        "lossless": (unexcused == 0 and few) if judged or not differences else None,
        "differences": differences,
    }


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two outputs differ, one of them ending included."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{name}": float(value) for name, value in zip(PERCENTILES, points, strict=True)},
    }
