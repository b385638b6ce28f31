"""What the speculative loop adds to its verify passes.

    python -m benchmarks.loop_overhead [--layers 30] [--tokens 128] [--output FILE.json]

SmolLM2's shapes with random weights, batch 1, K = 7, float32 on CPU. The drafter is replaced by
tokens computed beforehand by plain decoding, so every draft is accepted and drafting is free. The
ideal is K + 1 tokens for each verify pass (target over K + 1 rows, head, argmax) timed alone. What
is missing to 100% is the loop: rows, checks, commit, records. Aim: above 85%.
"""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import report, smollm2_shapes
from peagle_jax.decoding.drafting import NoDrafts
from peagle_jax.decoding.expand import token_at
from peagle_jax.decoding.generate import UNTIL_DONE, GenerateFn, make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.rounds import Params
from peagle_jax.decoding.verification import Drafts

K = 7
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@dataclasses.dataclass(frozen=True)
class Precomputed(NoDrafts):
    """Drafts read from a table of the right tokens, which is the method's parameter [B, S]."""

    num_drafts: int = K

    def propose(self, params, state, view, features):
        steps = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        return Drafts(token_at(params, view.committed[:, None] + steps), view.wanted), state


def loop_run(fn: GenerateFn, params: Params, num_tokens: int):
    """A function that decodes from a prefilled state; prefill is not timed by `alternate`."""
    sampling = SamplingParams(max_tokens=num_tokens)
    ready = fn.compiled.prefill(params, fn.init([PROMPT], [sampling]), chunk=len(PROMPT))

    def run():
        state = jax.tree.map(jnp.copy, ready)
        return jax.block_until_ready(fn.compiled.step(params, state, np.int32(UNTIL_DONE)))

    def copy_only():
        jax.block_until_ready(jax.tree.map(jnp.copy, ready))

    return run, copy_only


def verify_run(fn: GenerateFn, position: int):
    """A function that runs one verify pass over K + 1 rows at a position, and nothing else."""
    requests, tokens = fn.requests([PROMPT], [SamplingParams(max_tokens=2)])
    cache = fn.compiled.empty(requests, tokens).target_cache

    def verify(params, cache, tokens, positions):
        target = nnx.merge(fn.target_graph, params)
        output = target(tokens, positions, cache)
        return jnp.argmax(target.logits(output.hidden), axis=-1), output.cache

    compiled = jax.jit(verify, donate_argnums=1)
    rows = jnp.arange(K + 1, dtype=jnp.int32)[None, :]
    carry = [cache]

    def run():
        found, carry[0] = compiled(fn.params.target, carry[0], rows, rows + position)
        jax.block_until_ready((found, carry[0]))

    return run


def measure(num_layers: int, num_tokens: int, repeats: int) -> dict:
    target = smollm2_shapes.target(num_layers)
    length = len(PROMPT) + num_tokens
    common = dict(
        cache_length=length, max_prefill_chunk=len(PROMPT), eos_token_ids=(), max_stop_ids=1
    )
    plain = make_generate_fn(target, None, "none", **common)
    truth = plain.run([PROMPT], [SamplingParams(max_tokens=num_tokens)], chunk=len(PROMPT)).tokens
    fn = make_generate_fn(target, None, Precomputed(), method_params=truth, **common)
    loop, copy = loop_run(fn, fn.params, num_tokens)
    state = loop()
    if not bool(jnp.all(state.tokens == truth)):
        raise RuntimeError("the speculative loop's tokens are not those of plain decoding")
    rounds = int(state.num_rounds[0])
    runs = {"loop": loop, "copy": copy, "verify": verify_run(fn, length // 2)}
    seconds = {name: report.median(s) for name, s in report.alternate(runs, repeats).items()}
    loop_seconds = seconds["loop"] - seconds["copy"]
    tokens_per_second = (num_tokens - 1) / loop_seconds
    ideal = (num_tokens - 1) / rounds / seconds["verify"]
    return {
        "layers": num_layers,
        "num_drafts": K,
        "tokens": num_tokens,
        "rounds": rounds,
        "verify_milliseconds": 1000 * seconds["verify"],
        "round_milliseconds": 1000 * loop_seconds / rounds,
        "tokens_per_second": tokens_per_second,
        "ideal_tokens_per_second": ideal,
        "share_of_ideal": tokens_per_second / ideal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    found = measure(arguments.layers, arguments.tokens, arguments.repeats)
    for name, value in found.items():
        print(f"{name:26}{value:10.2f}")
    if arguments.output:
        report.write_json(arguments.output, {"environment": report.environment(), **found})


if __name__ == "__main__":
    main()
