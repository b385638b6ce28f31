"""Rows of figures as a table for the terminal and for Markdown, and the report's files.

Pictures: pictures.py.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

PICTURES = ("throughput", "acceptance", "speedup")
HEADER = (
    *("method", "K", "rows", "requests", "tokens/s", "x plain", "accept length"),
    *("passes/token", "TTFT ms p50", "p99", "ms/token p50", "p99", "= plain"),
)


def content(environment: Mapping[str, Any], rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """The report as JSON values: environment and results first, then what else was given."""
    return {"environment": dict(environment), "results": [dict(row) for row in rows], **more}


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; - where there is no such figure."""
    first, each = row["time_to_first_token_ms"] or {}, row["time_per_output_token_ms"] or {}
    drafted = bool(row["num_drafts"])
    return (
        row["method"],
        "-" if row["k"] is None else str(row["k"]),
        str(row["concurrency"]),
        str(row["num_requests"]),
        _number(row["output_tokens_per_s"], 1),
        _number(row.get("speedup_over_plain"), 2),
        _number(row["acceptance_length"] if drafted else None, 2),
        _number(row["passes_per_token"], 2),
        _number(first.get("p50"), 0),
        _number(first.get("p99"), 0),
        _number(each.get("p50"), 1),
        _number(each.get("p99"), 1),
        equality(row),
    )


def equality(row: Row) -> str:
    """Whether the outputs are those of plain decoding, in a word or two."""
    found = row.get("against_plain")
    if found is None:
        return "-"
    if not found["differences"]:
        return "yes"
    if found["lossless"] is None:
        return f"{len(found['differences'])} differ, not judged"
    excused, unexcused = found["num_excused"], found["num_unexcused"]
    counts = [f"{unexcused} differ"] if unexcused else []
    counts += [f"{excused} near-tie{'s' if excused > 1 else ''}"] if excused else []
    return ("yes, " if found["lossless"] else "NO: ") + ", ".join(counts)


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    out = []
    for line in (header, *lines):
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        out.append("  ".join([first, *others]).rstrip())
    return "\n".join(out)


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The same for a README."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def write_report(folder: Path, report: Mapping[str, Any], *, pictures: bool) -> list[Path]:
    """results.json and table.md in `folder`, and with `pictures` the pictures; what was written.

    Pictures of an earlier report that are not drawn anew are removed. Each file is replaced as a
    whole, so that whoever interrupts finds the last complete one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [cells(row) for row in report["results"]]
    texts = {
        "results.json": json.dumps(report, indent=1) + "\n",
        "table.md": markdown_table(HEADER, lines) + "\n",
    }
    written = [_replace(folder / name, text) for name, text in texts.items()]
    drawn: dict[str, str] = {}
    if pictures:
        from peagle_jax.bench.pictures import draw

        drawn = draw(report)
    for name in PICTURES:
        if name in drawn:
            written.append(_replace(folder / f"{name}.svg", drawn[name]))
        else:
            (folder / f"{name}.svg").unlink(missing_ok=True)
    return written


def probe(folder: Path) -> None:
    """Make `folder` and write into it once. Raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".{uuid.uuid4().hex[:8]}.partial"
    try:
        file.touch()
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def check_free(folder: Path, report: Mapping[str, Any]) -> None:
    """Raises ValueError where `folder` holds the results of a run with other settings or dtype."""
    file = folder / "results.json"
    if not file.exists():
        return
    asked = _identity(report)
    try:
        held = _identity(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        held = {}
    other = sorted(name for name in asked if name not in held or asked[name] != held[name])
    if other:
        raise ValueError(
            f"{folder} holds the results of another run (it differs in {', '.join(other)}); choose "
            "another folder, or delete this one"
        )


def _identity(report: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for one run to stand in another's place, as JSON gives it back."""
    asked = {"dtype": report["environment"]["dtype"], **report["settings"]}
    return json.loads(json.dumps(asked))


def _replace(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
