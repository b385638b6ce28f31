"""Training: memory of a step on GPUs that are not there, and rows per second on this CPU.

    python -m benchmarks.training memory [--rows 2048 8192 32768 131072] [--node]
    python -m benchmarks.training speed --library PYTHON    (a Python that has `speculators`)

`memory` compiles the product's step for one H200 (and, with --node, for eight over the sequence
axis) and needs jax[cuda12], no GPU. `speed` runs the product and the public PyTorch library one
after the other on the same drafter, batch and draw. Figures go to benchmarks/results/.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from benchmarks.report import environment, median, write_json

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS = (2_048, 8_192, 32_768, 131_072)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory", help="peak memory of a step, compiled only")
    memory.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    memory.add_argument("--modes", nargs="+", default=["structured", "algorithm-1", "dense"])
    memory.add_argument("--node", action="store_true", help="one million rows on eight GPUs")
    memory.add_argument("--device", default="h200")
    speed = commands.add_parser("speed", help="rows/s against the public library, on this CPU")
    speed.add_argument("--library", help="Python executable that can import speculators")
    speed.add_argument(
        "--size", choices=("tiny", "smollm2", "smollm2-1k"), nargs="+", default=["tiny"]
    )
    speed.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    return measure_memory(args) if args.command == "memory" else measure_speed(args)


def measure_memory(args: argparse.Namespace) -> int:
    """Compile, print a table, and add the figures to those of earlier calls."""
    # Compiling for GPUs needs none, and none is looked for; read when jax is imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks.training_memory import dense_memory, describe, step_memory

    path = RESULTS / "training_memory.json"
    content = json.loads(path.read_text()) if path.is_file() else {"figures": {}}
    content["environment"] = environment()
    cases = [(mode, rows, 1) for rows in args.rows for mode in args.modes]
    if args.node:
        cases.append(("structured", 1_048_576, 8))
    print(f"{'mode':<14}{'rows':>10} {'GPUs':>5}   arguments, temporaries, peak [GiB per GPU]")
    for mode, rows, gpus in cases:
        started = time.perf_counter()
        if mode == "dense":
            found = dense_memory(rows, args.device)
        elif mode == "algorithm-1":
            found = step_memory(rows, partition=mode, num_chunks=8, device=args.device)
        else:
            found = step_memory(rows, sequence=gpus, device=args.device)
        seconds = round(time.perf_counter() - started)
        print(f"{mode:<14}{rows:>10} {gpus:>5}   {describe(found)}   ({seconds} s)", flush=True)
        key = f"{args.device} x {gpus}, {mode}, {rows} rows"
        content["figures"][key] = found.as_dict()
        write_json(path, content)
    return 0


def measure_speed(args: argparse.Namespace) -> int:
    """Rows (sampled elements) per second, forward and backward, ours and the library's."""
    folder = pathlib.Path(__file__).parent
    path = RESULTS / "training_speed.json"
    content = json.loads(path.read_text()) if path.is_file() else {"figures": {}}
    found = content["figures"]
    for size in args.size:
        own: dict[str, list[float]] = {"peagle-jax": [], "speculators": []}
        # -P: the files beside the script must not hide packages of the same names.
        script = ["-P", str(folder / "training_speed.py")]
        runs = {"peagle-jax": [sys.executable, *script, "ours"]}
        if args.library:
            runs["speculators"] = [args.library, *script, "library"]
        for name, command in runs.items():
            done = subprocess.run(
                [*command, size, str(args.repeats)],
                stdout=subprocess.PIPE, text=True, check=True, cwd=folder.parent,
            )  # fmt: skip
            own[name] = json.loads(done.stdout.splitlines()[-1])
        found[size] = {name: median(rates) for name, rates in own.items() if rates}
        print(size, {name: f"{rate:,.0f} rows/s" for name, rate in found[size].items()})
        write_json(path, content | {"environment": environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
