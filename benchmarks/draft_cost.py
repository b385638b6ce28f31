"""What drafting K tokens costs over drafting one, P-EAGLE and EAGLE-3 beside each other.

    python -m benchmarks.draft_cost [--context 256] [--repeats 20] [--output FILE.json]

SmolLM2's shapes with random heads of four layers, batch 1, float32 on CPU. A draft is `propose` of
the product: expansion, fill, network, head, argmax. `network` is the same with a draft vocabulary
of 16 ids, whose head costs nothing; `head` is the head's product for K rows and their argmax alone.
All runs of a table alternate in one process, so that their ratios hold on a busy machine.

Goals on CPU with a draft vocabulary of 8,192, for P-EAGLE: K = 7 within 1.6 times K = 1, and K = 11
within 1.6 times K = 3.
"""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report, smollm2_shapes
from peagle_jax.decoding.drafting import NetworkState, RoundView
from peagle_jax.decoding.methods import make_method
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features, make_requests
from peagle_jax.models.products import store_output_major

NUM_DRAFTS = (1, 3, 7, 11, 15)
VOCABULARIES = (16, 8192)


def draft_run(name: str, drafter, num_drafts: int, context: int):
    """A function that drafts once, after a round in which half of the drafts were accepted."""
    method, params = make_method(
        name, smollm2_shapes.TARGET, drafter, num_speculative_tokens=num_drafts
    )
    slots = 2 * context
    state: NetworkState = method.init(1, slots, num_drafts + 1)
    accepted = num_drafts // 2
    state = dataclasses.replace(state, first_position=jnp.array([context - accepted], jnp.int32))
    tokens = np.arange(slots, dtype=np.int32)[None, :] % 1000
    requests = make_requests(
        [tokens[0, :context].tolist()],
        [SamplingParams(max_tokens=None)],
        batch_size=1,
        vocab_size=smollm2_shapes.TARGET.vocab_size,
        context_length=slots,
        eos_token_ids=(),
        num_speculative_tokens=num_drafts,
        features=Features(),
        max_stop_ids=1,
    )
    view = RoundView(
        tokens=jnp.asarray(tokens),
        committed=jnp.array([context + 2], jnp.int32),
        wanted=jnp.array([num_drafts], jnp.int32),
        running=jnp.array([True]),
        num_rounds=jnp.array([1], jnp.int32),
        requests=requests,
    )

    def propose(params, state, view):
        drafts, state = method.propose(params, state, view, Features())
        return drafts.tokens, state

    compiled = jax.jit(propose, donate_argnums=1)
    carry = [state]

    def run():
        found, carry[0] = compiled(params, carry[0], view)
        jax.block_until_ready((found, carry[0]))

    return run


def head_run(drafter, num_rows: int):
    hidden = jnp.ones((1, num_rows, smollm2_shapes.TARGET.hidden_size), jnp.float32)
    compiled = jax.jit(lambda drafter, hidden: jnp.argmax(drafter.logits(hidden), axis=-1))
    return lambda: jax.block_until_ready(compiled(drafter, hidden))


def measure(context: int, repeats: int) -> list[dict]:
    """One row for each method, vocabulary and K; milliseconds and ratios over K = 1."""
    rows = []
    for vocabulary in VOCABULARIES:
        heads = {
            "p-eagle": smollm2_shapes.drafter(vocabulary, parallel=True),
            "eagle3": smollm2_shapes.drafter(vocabulary, parallel=False),
        }
        for head in heads.values():
            store_output_major(head)  # as `peagle_jax.load` does
        runs = {
            (name, count): draft_run(name, head, count, context)
            for name, head in heads.items()
            for count in NUM_DRAFTS
        }
        runs |= {("head", count): head_run(heads["p-eagle"], count) for count in NUM_DRAFTS}
        seconds = report.alternate(runs, repeats)
        for (name, count), values in seconds.items():
            one, three = (report.median(seconds[name, base]) for base in (1, 3))
            rows.append(
                {
                    "part": "network" if vocabulary == 16 and name != "head" else "draft",
                    "method": name,
                    "draft_vocabulary": vocabulary,
                    "num_drafts": count,
                    "milliseconds": 1000 * report.median(values),
                    "ratio_over_one": report.median(values) / one,
                    "ratio_over_three": report.median(values) / three,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = measure(arguments.context, arguments.repeats)
    print(
        f"{'':10}{'method':10}{'draft vocab':>12}{'K':>4}{'ms':>9}{'over K=1':>10}{'over K=3':>10}"
    )
    for row in rows:
        print(
            f"{row['part']:10}{row['method']:10}{row['draft_vocabulary']:12}{row['num_drafts']:4}"
            f"{row['milliseconds']:9.2f}{row['ratio_over_one']:10.2f}"
            f"{row['ratio_over_three']:10.2f}"
        )
    if arguments.output:
        report.write_json(arguments.output, {"environment": report.environment(), "rows": rows})


if __name__ == "__main__":
    main()
