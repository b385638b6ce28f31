"""Passes of few rows through SmolLM2 on a CPU: matrices as loaded, and turned to [out, in].

    JAX_PLATFORMS=cpu python -m benchmarks.few_rows [--repeats 11]

One process, both in turns, 100 tokens of context. A verify pass of K drafts for B requests has
B x (K + 1) rows. Expected before it was measured: at 6 and 8 rows about half of the time, as the
turned matrices are read once and not rearranged; at one row no loss. Writes results/few_rows.json.
"""

import argparse
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.report import alternate, environment, median, write_json
from peagle_jax.checkpoints.embedded import resolve_model
from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.cache import KVCache, init_cache
from peagle_jax.models.products import store_output_major
from peagle_jax.models.target import Target

CONTEXT, SLOTS = 100, 256
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 6), (1, 8), (1, 12), (2, 6), (4, 6), (8, 1), (16, 1), (32, 1))
"""Requests and rows of each."""


def passes(target: Target, batch: int, rows: int) -> Any:
    """A function that runs one pass and its argmax, the cache going round."""
    graph, params = nnx.split(target)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        model = nnx.merge(graph, params)
        tokens = jnp.ones((batch, rows), jnp.int32)
        positions = jnp.broadcast_to(CONTEXT + jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        out = model(tokens, positions, cache)
        return jnp.argmax(model.logits(out.hidden), axis=-1), out.cache

    layers = target.config.layers
    held = [
        init_cache(layers, batch_size=batch, num_slots=SLOTS, max_new_rows=rows, dtype=jnp.float32)
    ]

    def once() -> None:
        tokens, held[0] = run(params, held[0])
        jax.block_until_ready(tokens)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    path = resolve_model("smollm2-135m")
    loaded, turned = load_target(path), load_target(path)
    store_output_major(turned)
    found = []
    for batch, rows in SHAPES:
        runs = {
            "as loaded": passes(loaded, batch, rows),
            "turned": passes(turned, batch, rows),
        }
        times = {name: 1e3 * median(s) for name, s in alternate(runs, args.repeats).items()}
        ratio = times["as loaded"] / times["turned"]
        found.append({"requests": batch, "rows_each": rows, "milliseconds": times, "gain": ratio})
        print(
            f"{batch:>3} x {rows:<3} as loaded {times['as loaded']:7.1f} ms"
            f"   turned {times['turned']:7.1f} ms   {ratio:.2f} times",
            flush=True,
        )
    one = found[0]["milliseconds"]["turned"]
    eight = next(r for r in found if (r["requests"], r["rows_each"]) == (1, 8))
    over_one = eight["milliseconds"]["turned"] / one
    print(f"eight rows over one: {over_one:.2f}")
    output = pathlib.Path(__file__).parent / "results" / "few_rows.json"
    write_json(
        output, {"environment": environment(), "rows": found, "eight_over_one": float(over_one)}
    )


if __name__ == "__main__":
    main()
