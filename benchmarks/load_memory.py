"""Load time and memory: peak resident memory may rise by the arrays, one tensor and 200 MB.

    JAX_PLATFORMS=cpu python -m benchmarks.load_memory [--case NAME ...] [--gigabytes 2]

Each case loads in a process of its own that has imported everything and started the backend. The
rise is that process's peak resident memory (VmHWM, which counts mapped pages) less what it held
before the load. Cases: SmolLM2-135M from its Q4_1 GGUF; a llama of four shards with random
weights, as bfloat16 and widened to float32; a Qwen3-MoE with block FP8, unpacked and kept packed.
Writes load_memory.json and load_memory.svg beside this file; exits 1 when a case is over its limit.

What was tried: a buffer aligned to 64 bytes is taken over by the CPU backend, while one as NumPy
aligns it is copied: making a 200 MB array then held 400 MB until the buffer was freed.
"""

import argparse
import functools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.safetensors_file import LazyTensor, write_safetensors

SLACK_BYTES = 200_000_000
CASES = ("smollm2", "bfloat16", "float32", "fp8", "fp8-packed")

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
_QWEN3_MOE = {
    **_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama's tensors, or of a qwen3_moe's."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    found = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        names = f"model.layers.{index}."
        found |= {
            f"{names}input_layernorm.weight": (hidden,),
            f"{names}post_attention_layernorm.weight": (hidden,),
            f"{names}self_attn.q_proj.weight": (heads * size, hidden),
            f"{names}self_attn.k_proj.weight": (kv * size, hidden),
            f"{names}self_attn.v_proj.weight": (kv * size, hidden),
            f"{names}self_attn.o_proj.weight": (hidden, heads * size),
        }
        stems, width = [f"{names}mlp."], inner
        if config["model_type"] == "qwen3_moe":
            width = config["moe_intermediate_size"]
            stems = [f"{names}mlp.experts.{e}." for e in range(config["num_experts"])]
            found |= {f"{names}self_attn.{letter}_norm.weight": (size,) for letter in "qk"}
            found[f"{names}mlp.gate.weight"] = (config["num_experts"], hidden)
        for stem in stems:
            found |= {
                f"{stem}gate_proj.weight": (width, hidden),
                f"{stem}up_proj.weight": (width, hidden),
                f"{stem}down_proj.weight": (hidden, width),
            }
    return found


@functools.cache
def random_block(dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(dtype)


def random_tensor(shape: tuple[int, ...], dtype: np.dtype) -> LazyTensor:
    """Normal values, one block of a million repeated."""
    block = random_block(dtype)

    def parts() -> Iterator[np.ndarray]:
        left = math.prod(shape)
        while left:
            yield block[:left]
            left -= min(left, block.size)

    return LazyTensor(shape=shape, dtype=np.dtype(dtype), parts=parts)


def write_random(folder: pathlib.Path, config: dict, total_bytes: float, *, fp8: bool) -> None:
    """A checkpoint of about `total_bytes` in four shards, with as many layers as fit."""

    def made(layers: int) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        for name, shape in shapes({**config, "num_hidden_layers": layers}).items():
            packed = fp8 and name.endswith("_proj.weight")
            dtype = ml_dtypes.float8_e4m3fn if packed else ml_dtypes.bfloat16
            found[name] = random_tensor(shape, np.dtype(dtype))
            if packed:
                grid = tuple(-(-n // 128) for n in shape)
                found[f"{name}_scale_inv"] = random_tensor(grid, np.dtype(np.float32))
        return found

    fixed, one = (sum(t.nbytes for t in made(layers).values()) for layers in (0, 1))
    config = {**config, "num_hidden_layers": round((total_bytes - fixed) / (one - fixed))}
    tensors = made(config["num_hidden_layers"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(4):
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        names = list(tensors)[shard::4]
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def resident() -> dict[str, int]:
    """Bytes resident now (VmRSS) and at the peak (VmHWM) of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def measure(path: str, dtype: str, keep_packed: bool) -> dict[str, float]:
    """Load in this process; bytes and seconds. Started by `run` in a fresh process."""
    import jax
    from flax import nnx

    from peagle_jax.checkpoints.load import load_target, plan_checkpoint
    from peagle_jax.checkpoints.planner import PackedPlan

    _, plan = plan_checkpoint(path, keep_packed=keep_packed)
    largest = 0
    for entry in plan.parameters.values():
        for array in (entry.main, entry.scales) if isinstance(entry, PackedPlan) else (entry,):
            for piece in array.pieces:
                width = np.dtype(piece.source.dtype).itemsize
                largest = max(largest, math.prod(piece.source.shape) * width)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    before = resident()["VmRSS"]
    start = time.perf_counter()
    target = load_target(path, dtype=jax.numpy.dtype(dtype), keep_packed=keep_packed)
    seconds = time.perf_counter() - start
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(target)))
    rise = resident()["VmHWM"] - before
    return {"seconds": seconds, "arrays": arrays, "largest": largest, "rise": rise}


def run(path: pathlib.Path, dtype: str, *, keep_packed: bool = False) -> dict[str, float]:
    """`measure` in a fresh process, with the limit added."""
    flags = [str(path), dtype, *(["--keep-packed"] if keep_packed else [])]
    command = [sys.executable, "-m", "benchmarks.load_memory", "--measure", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    return {**row, "limit": row["arrays"] + row["largest"] + SLACK_BYTES}


def run_cases(names: list[str], gigabytes: float) -> dict[str, dict[str, float]]:
    """All asked-for cases; random checkpoints are written once and removed."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        dense, moe = pathlib.Path(folder, "llama"), pathlib.Path(folder, "qwen3_moe")
        if {"bfloat16", "float32"} & set(names):
            write_random(dense, _LLAMA, gigabytes * 1e9, fp8=False)
        if {"fp8", "fp8-packed"} & set(names):
            write_random(moe, _QWEN3_MOE, gigabytes * 1e9, fp8=True)
        for name in names:
            if name == "smollm2":
                from peagle_jax.checkpoints.embedded import resolve_model

                rows[name] = run(resolve_model("smollm2-135m"), "float32")
            elif name.startswith("fp8"):
                rows[name] = run(moe, "bfloat16", keep_packed=name == "fp8-packed")
            else:
                rows[name] = run(dense, name)
            print(_line(name, rows[name]), flush=True)
    return rows


def _line(name: str, row: dict[str, float]) -> str:
    sizes = "  ".join(
        f"{key} {row[key] / 1e6:8.0f} MB" for key in ("arrays", "largest", "rise", "limit")
    )
    verdict = "ok" if row["rise"] <= row["limit"] else "OVER"
    return f"{name:12}{sizes}  {row['seconds']:6.1f} s  {verdict}"


def draw(rows: dict[str, dict[str, float]], file: pathlib.Path) -> None:
    """Bars of the rise beside the arrays' own bytes, and the limit as a mark."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    places = np.arange(len(rows))
    for shift, key in ((-0.2, "arrays"), (0.2, "rise")):
        axes.bar(places + shift, [row[key] / 1e9 for row in rows.values()], 0.38, label=key)
    limits = [row["limit"] / 1e9 for row in rows.values()]
    axes.plot(places, limits, "k_", markersize=40, label="limit")
    axes.set(xticks=places, xticklabels=list(rows), ylabel="GB", title="Peak memory of a load")
    axes.legend()
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the random checkpoints")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--keep-packed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure, options.keep_packed)))
        return 0
    rows = run_cases(options.case or list(CASES), options.gigabytes)
    if not options.case:
        from benchmarks.report import environment, write_json

        here = pathlib.Path(__file__)
        write_json(here.with_suffix(".json"), {"environment": environment(), "cases": rows})
        draw(rows, here.with_suffix(".svg"))
    return int(any(row["rise"] > row["limit"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
