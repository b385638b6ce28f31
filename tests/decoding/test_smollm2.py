"""A random head on the real SmolLM2: speculative text equals plain text on real weights, and both
equal that of transformers.

By hand the same with more: `python -m tests.decoding.test_smollm2 --prompts 32 --tokens 128`.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import numpy as np

from peagle_jax.checkpoints.load import load_target
from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import Drafter
from tests.decoding.tiny import numpy_source
from tests.smollm2_file import smollm2_gguf

GOLDEN = Path(__file__).parents[1] / "data" / "smollm2.json"
NEAR_TIE = 5e-4


def head_for(target) -> Drafter:
    layer, config = target.config.layers[0], target.config
    return Drafter(
        DrafterConfig(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            target_hidden_size=config.hidden_size,
            layers=(layer,) * 2,
            taps=(2, 15, 27),
            max_positions=config.max_positions,
            mask_token_id=3,
        ),
        source=numpy_source(1, config.vocab_size),
    )


@functools.cache
def golden() -> list[dict]:
    """Prompts and their greedy tokens by transformers, on the same weights."""
    return json.loads(GOLDEN.read_text())["prompts"]


def prompts(count: int) -> list[list[int]]:
    """Prompts of the golden file, then random ids."""
    found = [case["token_ids"] for case in golden()][:count]
    generator = np.random.default_rng(0)
    while len(found) < count:
        found.append(generator.integers(100, 40_000, generator.integers(5, 40)).tolist())
    return found


def compare(num_prompts: int, num_tokens: int, batch: int = 4) -> tuple[int, list[str]]:
    """Tokens compared, and the near-ties that excuse a difference (prompt, step, gap)."""
    target = load_target(smollm2_gguf())
    texts = prompts(num_prompts)
    length = max(map(len, texts)) + num_tokens
    common = dict(cache_length=length, max_prefill_chunk=64)
    plain = make_generate_fn(target, None, "none", features=Features(logprobs=2), **common)
    fn = make_generate_fn(target, head_for(target), num_speculative_tokens=5, **common)
    params, compared, ties = [SamplingParams(max_tokens=num_tokens)] * batch, 0, []
    for start in range(0, num_prompts, batch):
        part = texts[start : start + batch]
        expected = plain.run(part, params[: len(part)], batch_size=batch, chunk=64)
        found = fn.outputs(fn.run(part, params[: len(part)], batch_size=batch, chunk=64))
        top = np.asarray(expected.logprobs.top_values)
        for row, (mine, right) in enumerate(zip(found, plain.outputs(expected), strict=True)):
            compared += len(right)
            if start + row < len(golden()):
                reference = golden()[start + row]["greedy_ids"]
                assert all(a == b for a, b in zip(right, reference, strict=False)), start + row
            if mine == right:
                continue
            step = next(i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b)
            position = len(part[row]) + step
            gap = float(top[row, position, 0] - top[row, position, 1])
            assert gap < NEAR_TIE, f"prompt {start + row} differs at step {step}, gap {gap}"
            ties.append(f"prompt {start + row}, step {step}, gap {gap:.2e}")
    return compared, ties


def test_a_random_head_changes_nothing():
    compared, ties = compare(4, 32)
    assert compared >= 4 * 8 and len(ties) * 5000 <= compared, ties


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    count, excused = compare(arguments.prompts, arguments.tokens)
    print(f"{count} tokens compared, {len(excused)} excused by near-ties: {excused}")
