"""Plain decoding of SmolLM2-135M: tokens/s here and in transformers, and how near the roof.

    JAX_PLATFORMS=cpu python -m benchmarks.plain_decode [--repeats 5] [--tokens 64]

Same weights (the dequantised Q4_1 file, float32), same threads, greedy, a 32-token prompt, in turns
in one run. A single decode pass has to read every weight once, so the time to read them once,
measured in the same run, is the roof at batch 1. Prefill is inside the times of both sides.
Writes plain_decode.json beside this file.

Needs the extra `parity` (torch). transformers runs with its dynamic cache, and with a static cache
and compilation where that works.

Goals: twice the compiled transformers at batch 1 (met: 40.4 against 17.0 tokens/s); a pass over
eight rows at most 1.5 times one over a single row (missed: 2.5). What was tried for the second,
with the thirty layers' products alone (`benchmarks.layouts`; two cores with AVX2, quiet,
milliseconds for 1, 6 and 8 rows):

    as built: [in, out], qkv and gate/up fused, layers unrolled     19.0   39.9   39.9
    q, k, v, gate and up apart                                      21.7   37.1   40.1
    fused, stored [out, in]                                         14.8   37.9   41.4
    fused, layers scanned (compiles in 0.3 s for 1.2 s)             46.1   52.2   53.6
    panels of 16 columns summed by XLA's loops                         -   26.8   34.5

Scanning loses, since each layer's weights are copied out of the stack. Storing [out, in] would gain
a fifth at one row and nothing at eight; on another machine of the same name it gained 1.4 times at
eight. Panels gain up to a third for a few rows, but take one row or a prompt in another layout, so
that a model would be held twice; they were left out. XLA's options for other product libraries on
CPUs gave nothing (YNNPACK: 42 ms at eight rows) or are not in its build (oneDNN, XNNPACK). PyTorch
takes 46 to 66 ms for the same products at six and eight rows. What came of it: `load` turns the
matrices to [out, in], and 2 to 24 rows are multiplied and summed by XLA's loops over that one
layout (`peagle_jax/models/products.py`, measured by `benchmarks.few_rows`).
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.report import alternate, environment, median, write_json
from peagle_jax.checkpoints.convert import convert_target
from peagle_jax.checkpoints.embedded import resolve_model
from peagle_jax.checkpoints.load import load_target
from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.models.cache import init_cache
from peagle_jax.models.products import store_output_major
from peagle_jax.models.target import Target

THREADS = 2
PROMPT_TOKENS = 32
CACHE_LENGTH = 256


def prompt_ids(batch: int) -> list[list[int]]:
    """Random ids: the time of a dense model does not depend on them."""
    generator = np.random.default_rng(0)
    return generator.integers(100, 40_000, (batch, PROMPT_TOKENS)).tolist()


def ours(target: Target, batch: int, tokens: int):
    """Prefill and the while loop, compiled before."""
    fn = make_generate_fn(target, cache_length=CACHE_LENGTH)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True)] * batch
    prompts = prompt_ids(batch)

    def run():
        state = jax.block_until_ready(fn.run(prompts, params, chunk=PROMPT_TOKENS))
        assert [len(ids) for ids in fn.outputs(state)] == [tokens] * batch

    return run


def peer(folder: str, batch: int, tokens: int, *, static: bool):
    """transformers' generate on the converted weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompt_ids(batch))
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    if static:
        options["cache_implementation"] = "static"

    def run():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **options)
        assert out.shape[1] == PROMPT_TOKENS + tokens

    return run


def read_weights(target: Target):
    """Two ways to read every weight once with the same threads, and the bytes they read."""
    leaves = [leaf for leaf in jax.tree.leaves(nnx.split(target)[1]) if leaf.ndim > 1]
    width = target.config.hidden_size
    matrices = [leaf.reshape(-1, width) for leaf in leaves]
    ones = jnp.ones(width)
    added = jax.jit(lambda arrays: [jnp.sum(array) for array in arrays])
    multiplied = jax.jit(lambda arrays: [array @ ones for array in arrays])
    runs = {
        "read all weights once, sum": lambda: jax.block_until_ready(added(matrices)),
        "read all weights once, product": lambda: jax.block_until_ready(multiplied(matrices)),
    }
    return runs, sum(leaf.nbytes for leaf in leaves)


def one_pass(target: Target, rows: int):
    """One verify pass of `rows` new rows at position 128, head included."""
    graph, params = nnx.split(target)
    cache = init_cache(
        target.config.layers,
        batch_size=1,
        num_slots=CACHE_LENGTH,
        max_new_rows=rows,
        dtype=target.dtype,
    )

    @jax.jit
    def forward(params, cache, tokens, positions):
        model = nnx.merge(graph, params)
        return model.logits(model(tokens, positions, cache).hidden)

    tokens = jnp.ones((1, rows), jnp.int32)
    positions = 128 + jnp.arange(rows, dtype=jnp.int32)[None, :]
    return lambda: jax.block_until_ready(forward(params, cache, tokens, positions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--skip-static", action="store_true", help="no compiled transformers")
    arguments = parser.parse_args()
    tokens = arguments.tokens
    source = resolve_model("smollm2-135m")
    target = load_target(source, dtype=jnp.float32)
    store_output_major(target)  # as `peagle_jax.load` does
    with tempfile.TemporaryDirectory() as folder:
        plain = convert_target(source, pathlib.Path(folder) / "smollm2", dtype="float32")
        runs = {}
        for batch in (1, 8):
            runs[f"peagle-jax, batch {batch}"] = ours(target, batch, tokens)
            runs[f"transformers, batch {batch}"] = peer(str(plain), batch, tokens, static=False)
            if not arguments.skip_static:
                name = f"transformers static compiled, batch {batch}"
                runs[name] = peer(str(plain), batch, tokens, static=True)
        reads, num_bytes = read_weights(target)
        runs |= reads
        runs["one pass over 1 row"] = one_pass(target, 1)
        runs["one pass over 8 rows"] = one_pass(target, 8)
        seconds = {
            name: median(times) for name, times in alternate(runs, arguments.repeats).items()
        }
    rates = {
        name: tokens * int(name.split("batch ")[1]) / value
        for name, value in seconds.items()
        if "batch" in name
    }
    roof = 1 / min(seconds[name] for name in reads)
    results = {
        "seconds": seconds,
        "tokens_per_s": rates,
        "weight_bytes": num_bytes,
        "roof_tokens_per_s_batch_1": roof,
        "fraction_of_roof_batch_1": rates["peagle-jax, batch 1"] / roof,
        "eight_rows_over_one": seconds["one pass over 8 rows"] / seconds["one pass over 1 row"],
    }
    for name, rate in rates.items():
        print(f"{name:<42} {rate:8.1f} tokens/s")
    print(f"{'roof: one read of the weights per token':<42} {roof:8.1f} tokens/s")
    print(f"fraction of the roof at batch 1: {results['fraction_of_roof_batch_1']:.2f}")
    print(f"one pass over 8 rows over one over 1 row: {results['eight_rows_over_one']:.2f}")
    output = pathlib.Path(__file__).with_suffix(".json")
    write_json(output, {"environment": environment(), "results": results})


if __name__ == "__main__":
    main()
