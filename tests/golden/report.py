"""A case's largest errors beside their limits, and how a run of cases is printed."""

import dataclasses
import json
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`errors` maps what was compared to (largest error, limit), unless there was a `problem`."""

    name: str
    errors: dict[str, tuple[float, float]]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        # Not `error > limit`, which a NaN would pass.
        return self.problem is None and all(error <= limit for error, limit in self.errors.values())

    def line(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        if self.problem is not None:
            return f"{verdict} {self.name}: {self.problem}"
        shown = "  ".join(f"{what} {e:.1e} (limit {m:g})" for what, (e, m) in self.errors.items())
        return f"{verdict} {self.name}: {shown}"

    def as_json(self) -> dict:
        errors = {
            what: {"error": error if math.isfinite(error) else str(error), "limit": limit}
            for what, (error, limit) in self.errors.items()
        }
        return {
            "case": self.name,
            "passed": self.passed,
            "problem": self.problem,
            "errors": errors,
        }


def show(cases: Iterable[Case], *, as_json: bool) -> int:
    """Print each case as it comes (or all as one JSON list); the exit status."""
    done = []
    for case in cases:
        done.append(case)
        if not as_json:
            print(case.line(), flush=True)
    if as_json:
        print(json.dumps([case.as_json() for case in done], indent=1))
    if not done or any(case.problem is not None for case in done):
        return 2
    return 0 if all(case.passed for case in done) else 1
