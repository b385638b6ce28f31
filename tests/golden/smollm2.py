"""SmolLM2 against a reference run: tokenizer cases, prompt ids, hidden states, greedy tokens.

The layout is that of tests/data/smollm2.md. Greedy decoding here is a plain loop over the target,
independent of the package's decoding.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.checkpoints.embedded import resolve_model
from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.cache import init_cache
from peagle_jax.models.target import Target
from peagle_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.golden.report import Case

TAPS = (2, 15, 27)
HIDDEN_LIMIT = 1e-4  # of the largest component of the eight that are stored
GAP_LIMIT = 1e-3  # absolute, on the gap between the best two logits
_BUCKET = 64


def check_file(file: str, model: str, num_prompts: int | None = None) -> Iterator[Case]:
    """Every tokenizer case, then every prompt (or the first `num_prompts`)."""
    reference = json.loads(Path(file).read_text())
    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    for index, case in enumerate(reference["tokenizer_cases"]):
        yield check_tokenizer_case(tokenizer, f"tokenizer {index}", case)
    graph, state = nnx.split(load_target(path, dtype=jnp.float32))
    for prompt in reference["prompts"][:num_prompts]:
        yield check_prompt(tokenizer, graph, state, prompt)


def check_tokenizer_case(tokenizer: Tokenizer, name: str, case: dict) -> Case:
    """Ids of one text."""
    found = tokenizer.encode(case["text"], add_special_tokens=False)
    return Case(name=name, errors={"different ids": (_differences(found, case["ids"]), 0)})


def check_prompt(tokenizer: Tokenizer, graph, state, prompt: dict) -> Case:
    """Chat text, ids, hidden states at the last prompt row, greedy tokens and top-2 gaps."""
    message = [{"role": "user", "content": prompt["prompt"]}]
    text = tokenizer.render_chat(message)
    ids = tokenizer.encode(text, add_special_tokens=False)
    greedy, gaps, hidden = greedy_tokens(
        graph, state, prompt["token_ids"], len(prompt["greedy_ids"])
    )
    errors = {
        "different text": (float(text != prompt["chat_text"]), 0),
        "different ids": (_differences(ids, prompt["token_ids"]), 0),
        "different greedy tokens": (_differences(greedy, prompt["greedy_ids"]), 0),
        "top-2 gap": (float(np.abs(gaps - np.asarray(prompt["top2_gap"])).max()), GAP_LIMIT),
        "hidden": (_hidden_error(hidden, prompt), HIDDEN_LIMIT),
    }
    return Case(name=f"{prompt['id']} ({len(prompt['token_ids'])} tokens)", errors=errors)


def greedy_tokens(
    graph, state, prompt: list[int], count: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """`count` greedy tokens, the top-2 gap at each, and the taps of the last prompt row."""
    config = nnx.merge(graph, state).config
    length = -(-len(prompt) // _BUCKET) * _BUCKET
    cache = init_cache(
        config.layers,
        batch_size=1,
        num_slots=length + count,
        max_new_rows=length,
        dtype=jnp.float32,
    )
    padded = jnp.asarray([prompt + [0] * (length - len(prompt))], jnp.int32)
    tokens, gaps, taps = _generate(graph, state, padded, jnp.int32(len(prompt)), cache, count)
    return np.asarray(tokens).tolist(), np.asarray(gaps), np.asarray(taps)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _generate(graph, state, padded, length, cache, count):
    target: Target = nnx.merge(graph, state)
    rows = jnp.arange(padded.shape[1], dtype=jnp.int32)[None, :]
    out = target(padded, jnp.where(rows < length, rows, -1), cache, taps=TAPS)
    last = jax.lax.dynamic_slice_in_dim(out.hidden, length - 1, 1, axis=1)[0, 0]
    taps = jax.lax.dynamic_slice_in_dim(out.taps, length - 1, 1, axis=1)[0, 0]

    def step(carry, _):
        logits, position, cache = carry
        (best, second), (token, _) = jax.lax.top_k(logits, 2)
        out = target(token[None, None], position[None, None], cache)
        carry = (target.logits(out.hidden[0, 0]), position + 1, out.cache)
        return carry, (token, best - second)

    start = (target.logits(last), length, out.cache)
    _, (tokens, gaps) = jax.lax.scan(step, start, length=count)
    return tokens, gaps, taps.reshape(len(TAPS), -1)


def _hidden_error(hidden: np.ndarray, prompt: dict) -> float:
    worst = 0.0
    for tap, found in zip(TAPS, hidden, strict=True):
        norm = prompt["hidden_l2"][str(tap)]
        first = np.asarray(prompt["hidden_first8"][str(tap)])
        worst = max(worst, abs(float(np.linalg.norm(found)) - norm) / norm)
        worst = max(worst, float(np.abs(found[:8] - first).max()) / float(np.abs(found).max()))
    return worst


def _differences(found: list[int], expected: list[int]) -> int:
    shared = sum(a != b for a, b in zip(found, expected, strict=False))
    return shared + abs(len(found) - len(expected))
