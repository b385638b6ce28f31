"""Each kernel against its reference and the nearest library kernel, as a fraction of the ceiling.

On a GPU: `python -m benchmarks.kernels` prints a table, writes `benchmarks/kernels.json` and a
picture; copy bandwidth and matrix rate are measured in the same run. `--tune KERNEL` tries launch
parameters and prints rows for `pallas_kernels/launch.py`. Without a GPU the same script interprets
tiny shapes and compares values, so that it cannot rot; its times say nothing about speed.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_timing
from benchmarks.kernel_cases import Case, select_cases
from benchmarks.report import environment, write_json
from pallas_kernels import launch
from pallas_kernels.devices import find_device

OUTPUT = pathlib.Path(__file__).with_suffix(".json")


def largest_difference(left, right) -> float:
    """The largest |left - right| of all leaves, as a fraction of the leaf's largest |right|."""
    worst = 0.0
    for found, expected in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        found, expected = (np.asarray(array, np.float64) for array in (found, expected))
        scale = max(np.abs(expected).max(initial=0.0), 1e-30)
        worst = max(worst, float(np.abs(found - expected).max(initial=0.0) / scale))
    return worst


def run_tiny(case: Case) -> dict:
    """Interpreted kernel against reference, small; wall time of the second call."""
    tiny = case.tiny
    arguments = tiny.make(0)
    seconds, results = {}, {}
    for implementation in ("interpret", "reference"):
        program = jax.jit(tiny.call(implementation))
        jax.block_until_ready(program(*arguments))
        started = time.perf_counter()
        results[implementation] = jax.block_until_ready(program(*arguments))
        seconds[implementation] = time.perf_counter() - started
    return {
        "kernel": case.kernel,
        "shape": tiny.shape,
        "mode": "interpreted",
        "difference": largest_difference(results["interpret"], results["reference"]),
        "interpreted_seconds": seconds["interpret"],
        "reference_seconds": seconds["reference"],
    }


def run_on_gpu(case: Case, ceilings: dict[str, float], memory_bytes: int, l2_bytes: int) -> dict:
    """Seconds of kernel, reference and libraries, and the kernel's share of the ceiling."""
    sets = kernel_timing.argument_sets(case.make, 4 * l2_bytes, memory_bytes // 4)
    row = {"kernel": case.kernel, "shape": case.shape, "mode": "gpu", "bound": case.bound}
    row["seconds"] = kernel_timing.time_call(case.call("triton"), sets)
    contenders = {"reference": case.call("reference"), **case.libraries}
    for name, function in contenders.items():
        try:
            row[f"{name}_seconds"] = kernel_timing.time_call(function, sets)
        except Exception as error:  # a library may refuse a shape in any way: say so, and go on
            row[f"{name}_refused"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    row["bytes_per_second"] = case.moved_bytes / row["seconds"]
    row["flops_per_second"] = case.flops / row["seconds"]
    row["of_copy_bandwidth"] = row["bytes_per_second"] / ceilings["copy_bandwidth"]
    row["of_matrix_rate"] = row["flops_per_second"] / ceilings["matrix_rate"]
    row["goal"] = case.goal
    found = jax.jit(case.call("triton"))(*sets[0])
    if "reference_seconds" in row:
        row["difference"] = largest_difference(found, jax.jit(case.call("reference"))(*sets[0]))
    return row


def print_tiny(rows: list[dict]) -> None:
    print("no NVIDIA GPU: kernels interpreted at tiny shapes; these times are not speeds")
    print(f"{'kernel':<24} {'difference':>11} {'interpreted':>12} {'reference':>11}")
    for row in rows:
        print(
            f"{row['kernel']:<24} {row['difference']:>11.1e} "
            f"{row['interpreted_seconds'] * 1e3:>9.1f} ms {row['reference_seconds'] * 1e3:>8.1f} ms"
        )


def print_table(rows: list[dict], ceilings: dict[str, float]) -> None:
    print(
        f"ceilings: copy {ceilings['copy_bandwidth'] / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings['matrix_rate'] / 1e12:.0f} TFLOP/s"
    )
    print(f"{'kernel':<22} {'shape':<34} {'us':>9} {'x ref':>6} {'x lib':>6}  share of ceiling")
    for row in rows:
        against = [
            f"{row[f'{name}_seconds'] / row['seconds']:.2f}" if f"{name}_seconds" in row else "-"
            for name in ("reference", "cuDNN")
        ]
        share = {
            "bandwidth": f"{row['of_copy_bandwidth']:.0%} of copy bandwidth",
            "matrix": f"{row['of_matrix_rate']:.0%} of the bf16 matrix rate",
            "latency": "latency",
        }[row["bound"]]
        print(
            f"{row['kernel']:<22} {row['shape']:<34} {row['seconds'] * 1e6:>9.1f} "
            f"{against[0]:>6} {against[1]:>6}  {share}"
        )


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Share of the ceiling of each kernel and shape, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = {"bandwidth": "of_copy_bandwidth", "matrix": "of_matrix_rate"}
    shown = [row for row in rows if row["bound"] in shares]
    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(shown) + 1), layout="constrained")
    axes.barh(
        [f"{row['kernel']}  {row['shape']}" for row in shown],
        [row[shares[row["bound"]]] for row in shown],
    )
    axes.invert_yaxis()
    axes.set_xlabel("share of the measured ceiling (copy bandwidth or bf16 matrix rate)")
    figure.savefig(path)
    pyplot.close(figure)


def tune(kernel: str, cases: list[Case], memory_bytes: int, l2_bytes: int, device: str) -> None:
    """Try launches around the table's for the shapes of `kernel`; print the best of each class."""
    entries = launch.all_launches(kernel)
    warps, stages = (1, 2, 4, 8), (1, 2, 3, 4)
    for name, entry in entries.items():
        choices = [(size // 2, size, size * 2) for size in entry.blocks.values()]
        best: dict[str, tuple[float, launch.Launch]] = {}
        for num_warps, num_stages, *sizes in itertools.product(warps, stages, *choices):
            if min(sizes) < 1:
                continue
            blocks = dict(zip(entry.blocks, sizes, strict=True))
            candidate = launch.Launch(num_warps=num_warps, num_stages=num_stages, blocks=blocks)
            for case in cases:
                sets = kernel_timing.argument_sets(case.make, 4 * l2_bytes, memory_bytes // 4)
                try:
                    with launch.override(kernel, candidate):
                        seconds = kernel_timing.time_call(case.call("triton"), sets)
                except Exception:  # does not fit this GPU: not a candidate
                    continue
                if case.shape not in best or seconds < best[case.shape][0]:
                    best[case.shape] = (seconds, candidate)
        for shape, (seconds, winner) in best.items():
            print(f"{kernel} {name} {shape} {device}: {seconds * 1e6:.1f} us {winner}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--kernels", nargs="+", help="operations (all by default)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON to write (GPU: kernels.json)")
    parser.add_argument("--tune", metavar="KERNEL", help="try launch parameters (needs a GPU)")
    options = parser.parse_args(arguments)
    try:
        cases = select_cases([options.tune] if options.tune else options.kernels)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if jax.default_backend() != "gpu":
        if options.tune:
            print("error: --tune needs an NVIDIA GPU", file=sys.stderr)
            return 1
        tiny = {(case.kernel, case.tiny.call): case for case in cases if case.tiny}
        rows = [run_tiny(case) for case in tiny.values()]
        print_tiny(rows)
        if options.output:
            write_json(options.output, {"environment": environment(), "rows": rows})
        # Integers are equal, floats close: whatever is larger is a fault.
        return 1 if any(row["difference"] > 2e-2 for row in rows) else 0

    device = find_device(jax.devices()[0].device_kind)
    if device is None:
        print(f"error: no table entry for {jax.devices()[0].device_kind}", file=sys.stderr)
        return 1
    if options.tune:
        tune(options.tune, cases, device.memory_bytes, device.l2_bytes, device.name)
        return 0
    ceilings = {
        "copy_bandwidth": kernel_timing.measure_copy_bandwidth(1024),
        "matrix_rate": kernel_timing.measure_matrix_rate(8192, jnp.bfloat16),
    }
    rows = []
    for case in cases:
        rows.append(run_on_gpu(case, ceilings, device.memory_bytes, device.l2_bytes))
        print(f"{case.kernel} {case.shape}: {rows[-1]['seconds'] * 1e6:.1f} us", file=sys.stderr)
    print_table(rows, ceilings)
    output = options.output or OUTPUT
    write_json(output, {"environment": environment(), "ceilings": ceilings, "rows": rows})
    draw(rows, output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
