"""Each kernel against its reference and the nearest library kernels, as a share of the ceiling.

On a GPU: `python -m benchmarks.kernels` prints a table and what became of the goals, writes
`benchmarks/kernels.json` and a picture; copy bandwidth and matrix rate are measured in the same
run. `--tune KERNEL` searches launch parameters and prints rows for `pallas_kernels/launch.py`.
Without a GPU the same script interprets tiny shapes and compares values, libraries' too, so that it
cannot rot; its times say nothing about speed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_goals, kernel_timing, kernel_tuning
from benchmarks.kernel_cases import Case, Work, select_cases
from benchmarks.report import environment, write_json
from pallas_kernels import ahead_of_time, launch
from pallas_kernels.devices import Device, find_device

OUTPUT = pathlib.Path(__file__).with_suffix(".json")
# Interpreted kernels and libraries against the reference at tiny shapes: integers are equal, floats
# close (bfloat16), so what is larger is a fault.
LARGEST_DIFFERENCE = 2e-2


def to_numpy(leaf) -> np.ndarray:
    """float64 of an array of jax or torch."""
    return np.asarray(leaf.float().numpy() if hasattr(leaf, "numpy") else leaf, np.float64)


def largest_difference(left, right) -> float:
    """The largest |left - right| of all leaves, as a fraction of the leaf's largest |right|."""
    worst = 0.0
    for found, expected in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        found, expected = to_numpy(found), to_numpy(expected)
        scale = max(np.abs(expected).max(initial=0.0), 1e-30)
        worst = max(worst, float(np.abs(found - expected).max(initial=0.0) / scale))
    return worst


def refusal(run: Callable[[], dict], name: str) -> dict:
    """What `run` gives, or the reason of `name` for refusing: a library may in any way."""
    try:
        return run()
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return {f"{name}_refused": reason}


def run_tiny(case: Case) -> dict:
    """Interpreted kernel and libraries against reference, small; wall time of the second call."""
    tiny = case.tiny
    arguments = tiny.make(0)
    seconds, results = {}, {}
    for implementation in ("interpret", "reference"):
        program = jax.jit(tiny.call(implementation))
        jax.block_until_ready(program(*arguments))
        started = time.perf_counter()
        results[implementation] = jax.block_until_ready(program(*arguments))
        seconds[implementation] = time.perf_counter() - started
    row = {
        "kernel": case.kernel,
        "shape": tiny.shape,
        "mode": "interpreted",
        "difference": largest_difference(results["interpret"], results["reference"]),
        "interpreted_seconds": seconds["interpret"],
        "reference_seconds": seconds["reference"],
    }
    for name, library in tiny.libraries.items():

        def compare(library=library, name=name):
            found = library.call(*arguments)() if library.torch else library.call(*arguments)
            if library.same is None:
                return {}
            expected = library.same(results["reference"])
            return {f"{name}_difference": largest_difference(found, expected)}

        row |= refusal(compare, name)
    return row


def run_on_gpu(case: Case, ceilings: dict[str, float], device: Device) -> dict:
    """Seconds of kernel, reference and libraries, and the kernel's share of the ceilings."""
    sets = kernel_timing.argument_sets(case.make, 4 * device.l2_bytes, device.memory_bytes // 8)
    kernel = case.call("triton")
    seconds = {"kernel": kernel_timing.time_call(kernel, sets)}
    contenders = {"reference": case.call("reference")}
    contenders |= {name: library.call for name, library in case.libraries.items()}
    refused = {}
    for name, function in contenders.items():
        library = case.libraries.get(name)
        time_it = kernel_timing.time_torch if library and library.torch else kernel_timing.time_call
        found = refusal(lambda: {name: time_it(function, sets)}, name)  # noqa: B023  run at once
        (seconds if name in found else refused).update(found)
    compiled = jax.jit(kernel).lower(*sets[0]).compile()
    row = {
        "kernel": case.kernel,
        "shape": case.shape,
        "mode": "gpu",
        "bound": case.bound,
        "launches": ahead_of_time.count_launches(compiled.as_text()),
        **shares(case.work(sets[0]), seconds, ceilings),
        **refused,
    }
    if "reference" in seconds:
        expected = jax.jit(case.call("reference"))(*sets[0])
        row["difference"] = largest_difference(compiled(*sets[0]), expected)
    return row


def shares(work: Work, seconds: dict[str, float], ceilings: dict[str, float]) -> dict:
    """Rates that follow from the work of a call and its seconds, and their share of the ceilings.

    `seconds` holds the kernel's under "kernel" and those of contenders under their names.
    """
    others = {f"{name}_seconds": value for name, value in seconds.items() if name != "kernel"}
    bandwidth, rate = (amount / seconds["kernel"] for amount in (work.moved_bytes, work.flops))
    return {
        "seconds": seconds["kernel"],
        **others,
        "moved_bytes": work.moved_bytes,
        "flops": work.flops,
        "bytes_per_second": bandwidth,
        "flops_per_second": rate,
        "of_copy_bandwidth": bandwidth / ceilings["copy_bandwidth"],
        "of_matrix_rate": rate / ceilings["matrix_rate"],
    }


def print_tiny(rows: list[dict]) -> None:
    print("no NVIDIA GPU: kernels interpreted at tiny shapes; these times are not speeds")
    print(f"{'kernel':<24} {'difference':>11} {'interpreted':>12} {'reference':>11}  libraries")
    for row in rows:
        libraries = [
            f"{key.removesuffix('_difference')} {value:.1e}"
            for key, value in row.items()
            if key.endswith("_difference")
        ]
        print(
            f"{row['kernel']:<24} {row['difference']:>11.1e} "
            f"{row['interpreted_seconds'] * 1e3:>9.1f} ms {row['reference_seconds'] * 1e3:>8.1f} ms"
            f"  {', '.join(libraries)}"
        )
    for line in refusals(rows):
        print(line)


def refusals(rows: list[dict]) -> list[str]:
    """Why libraries were left out, once per kernel and reason."""
    lines = [
        f"{row['kernel']}: {key.removesuffix('_refused')} left out: {reason}"
        for row in rows
        for key, reason in row.items()
        if key.endswith("_refused")
    ]
    return list(dict.fromkeys(lines))


def to_table(rows: list[dict], ceilings: dict[str, float]) -> str:
    """Microseconds, times as fast as reference and libraries, and share of the ceiling."""
    names = ("reference", "jax.nn", "tokamax", "torch")
    lines = [
        f"ceilings: copy {ceilings['copy_bandwidth'] / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings['matrix_rate'] / 1e12:.0f} TFLOP/s",
        f"{'kernel':<22} {'shape':<34} {'us':>9} "
        + " ".join(f"{'x ' + name:>11}" for name in names)
        + "  share of ceiling",
    ]
    for row in rows:
        against = [
            f"{row[f'{name}_seconds'] / row['seconds']:.2f}" if f"{name}_seconds" in row else "-"
            for name in names
        ]
        share = {
            "bandwidth": f"{row['of_copy_bandwidth']:.0%} of copy bandwidth",
            "matrix": f"{row['of_matrix_rate']:.0%} of the bf16 matrix rate",
            "latency": "latency",
        }[row["bound"]]
        lines.append(
            f"{row['kernel']:<22} {row['shape']:<34} {row['seconds'] * 1e6:>9.1f} "
            + " ".join(f"{number:>11}" for number in against)
            + f"  {share}"
        )
    return "\n".join(lines)


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--kernels", nargs="+", help="operations (all by default)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON to write (GPU: kernels.json)")
    parser.add_argument(
        "--tune",
        metavar="KERNEL",
        nargs="+",
        choices=list(launch.TABLE),
        help="search launch parameters (without a GPU: trace the candidates): "
        + ", ".join(launch.TABLE),
    )
    options = parser.parse_args(arguments)
    try:
        cases = select_cases(options.kernels)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = None
    if jax.default_backend() == "gpu":
        device = find_device(jax.devices()[0].device_kind)
        if device is None:
            print(f"error: no table entry for {jax.devices()[0].device_kind}", file=sys.stderr)
            return 1
    if options.tune:
        for kernel in options.tune:
            for line in kernel_tuning.tune(kernel, device):
                print(line, flush=True)
        return 0
    if device is None:
        return main_tiny(cases, options.output)
    ceilings = {
        "copy_bandwidth": kernel_timing.measure_copy_bandwidth(1024),
        "matrix_rate": kernel_timing.measure_matrix_rate(8192, jnp.bfloat16),
    }
    rows = []
    for case in cases:
        rows.append(run_on_gpu(case, ceilings, device))
        print(f"{case.kernel} {case.shape}: {rows[-1]['seconds'] * 1e6:.1f} us", file=sys.stderr)
    goals = kernel_goals.judge(rows)
    print(to_table(rows, ceilings))
    print("\n".join(refusals(rows)))
    print(f"\ngoals (stated for an H200; this is {device.kind}):\n{kernel_goals.to_text(goals)}")
    output = options.output or OUTPUT
    content = {"environment": environment(), "ceilings": ceilings, "goals": goals, "rows": rows}
    write_json(output, content)
    draw(rows, output.with_suffix(".png"))
    return 0


def main_tiny(cases: list[Case], output: pathlib.Path | None) -> int:
    """Everything interpreted and small; 1 where a value differs."""
    # One of all cases with the same tiny twin.
    tiny = {(case.kernel, id(case.tiny)): case for case in cases}
    rows = [run_tiny(case) for case in tiny.values()]
    print_tiny(rows)
    if output:
        write_json(output, {"environment": environment(), "rows": rows})
    differences = [v for row in rows for k, v in row.items() if k.endswith("difference")]
    return 1 if any(value > LARGEST_DIFFERENCE for value in differences) else 0


if __name__ == "__main__":
    sys.exit(main())
