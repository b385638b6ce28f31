"""What becomes of every kernel on every GPU: registers, spills and shared memory, by ptxas.

Needs the extra `cuda12` and jax 0.10, no GPU. `python -m benchmarks.kernels_compiled` writes
`benchmarks/kernels_compiled.md`; with `--json` it prints a list of objects instead. With
`--kernels` or `--devices` the page keeps its other rows.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import jax

from benchmarks.kernel_cases import select_cases
from pallas_kernels import ahead_of_time
from pallas_kernels.devices import DEVICES

OUTPUT = pathlib.Path(__file__).with_suffix(".md")

# Kernels that may spill, with the reason; (kernel in the program, device) -> sentence.
SPILL_REASONS: dict[tuple[str, str], str] = {}

HEADER = """# Kernels compiled for GPUs

Written by `python -m benchmarks.kernels_compiled` with jax {jax}: every kernel at the real shapes
of the supported targets and their heads, compiled by Triton and ptxas on a machine without a GPU.
Registers per thread, spilled bytes per thread, shared memory per block. Speed needs a GPU:
`python -m benchmarks.kernels`.

{summary}

| operation | shape | kernel | GPU | registers | spill bytes | shared memory, bytes | warps | grid |
|---|---|---|---|---:|---:|---:|---:|---|
"""


def compile_all(kernels: list[str] | None, devices: list[str]) -> list[dict]:
    """One object per kernel, shape and device."""
    rows = []
    for case in select_cases(kernels):
        for device in devices:
            started = time.perf_counter()
            figures = ahead_of_time.kernel_figures(case.call(None), device, *case.abstract)
            for figure in figures:
                rows.append(
                    {
                        "operation": case.kernel,
                        "kernel": figure.kernel,
                        "device": device,
                        "shape": case.shape,
                        "registers": figure.registers,
                        "spill_bytes": figure.spill_bytes,
                        "shared_memory_bytes": figure.shared_memory_bytes,
                        "num_warps": figure.num_warps,
                        "grid": list(figure.grid),
                    }
                )
            seconds = time.perf_counter() - started
            print(f"{case.kernel} {case.shape} {device}: {seconds:.1f} s", file=sys.stderr)
    return rows


def read_page(path: pathlib.Path) -> list[dict]:
    """The rows of a page that `to_markdown` wrote; none where there is no page yet."""
    if not path.exists():
        return []
    names = ("operation", "shape", "kernel", "device")
    numbers = ("registers", "spill_bytes", "shared_memory_bytes", "num_warps")
    rows = []
    for line in path.read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| operation"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row = dict(zip(names, cells, strict=False))
        row |= {name: int(cell) for name, cell in zip(numbers, cells[4:8], strict=True)}
        rows.append({**row, "grid": [int(size) for size in cells[8].split(" x ")]})
    return rows


def merge(kept: list[dict], fresh: list[dict]) -> list[dict]:
    """Fresh rows in place of those of the same operation and device, in the order of the cases."""
    replaced = {(row["operation"], row["device"]) for row in fresh}
    rows = [row for row in kept if (row["operation"], row["device"]) not in replaced] + fresh
    order = {
        (case.kernel, case.shape, device): position
        for position, (case, device) in enumerate(
            (case, device) for case in select_cases(None) for device in DEVICES
        )
    }
    # Rows of shapes that are no more are left out.
    known = [row for row in rows if _case_of(row) in order]
    return sorted(known, key=lambda row: order[_case_of(row)])


def _case_of(row: dict) -> tuple[str, str, str]:
    return row["operation"], row["shape"], row["device"]


def to_markdown(rows: list[dict]) -> str:
    """The table of the committed page."""
    spilling = [row for row in rows if row["spill_bytes"]]
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    summary = f"{len(rows)} compilations for {devices}; {len(spilling)} spill registers."
    for kernel, device in dict.fromkeys((row["kernel"], row["device"]) for row in spilling):
        reason = SPILL_REASONS.get((kernel, device), "no reason is known")
        summary += f"\n\n`{kernel}` spills on {device}: {reason}."
    text = HEADER.format(jax=jax.__version__, summary=summary)
    for row in rows:
        grid = " x ".join(map(str, row["grid"]))
        text += (
            f"| {row['operation']} | {row['shape']} | {row['kernel']} | {row['device']} "
            f"| {row['registers']} | {row['spill_bytes']} | {row['shared_memory_bytes']} "
            f"| {row['num_warps']} | {grid} |\n"
        )
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_compiled", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print the figures, write no page")
    parser.add_argument("--kernels", nargs="+", help="operations (all by default)")
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="the page to write")
    options = parser.parse_args(arguments)
    # Programs are compiled for GPUs that are described, not for one that may be here.
    jax.config.update("jax_platforms", "cpu")
    reason = ahead_of_time.figures_unavailable_reason()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        rows = compile_all(options.kernels, options.devices)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        rows = merge(read_page(options.output), rows)
        options.output.write_text(to_markdown(rows))
        print(f"wrote {options.output}")
    unexplained = [
        row
        for row in rows
        if row["spill_bytes"] and (row["kernel"], row["device"]) not in SPILL_REASONS
    ]
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
