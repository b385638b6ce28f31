"""Plain decoding from the definitions: one full pass without a cache, then NumPy token by token.

Takes the product's random numbers (keys and noise) and raw logits of a full pass; logit processing,
choice and stopping are done again here, slowly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.decoding import keys
from peagle_jax.decoding.keys import Purpose
from peagle_jax.decoding.params import SamplingParams


def process(
    raw: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams, eos: tuple
) -> np.ndarray:
    """Processed logits of one step, float64, from the order of the logit rules."""
    logits = raw.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        value = logits[token]
        scale = params.repetition_penalty
        logits[token] = value / scale if value > 0 else value * scale
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        for token in stop_set(params, eos):
            logits[token] = -np.inf
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if params.top_k:
        logits[logits < np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        probabilities = np.exp(logits[order] - logits.max())
        probabilities /= probabilities.sum()
        before = np.concatenate([[0.0], np.cumsum(probabilities)[:-1]])
        logits[order[before >= params.top_p]] = -np.inf
    if params.min_p:
        logits[np.exp(logits - logits.max()) < params.min_p] = -np.inf
    return logits


def stop_set(params: SamplingParams, eos: tuple) -> set[int]:
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))


@functools.cache
def _full_pass(graph):
    def run(values, tokens):
        target = nnx.merge(graph, values)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return target.logits(target(tokens, positions).hidden)

    return jax.jit(run)


def full_logits(target, tokens: np.ndarray) -> np.ndarray:
    """Raw logits [B, S, V] of a causal pass over `tokens` without a cache."""
    return logits_of(*nnx.split(target), tokens)


def logits_of(graph, values, tokens: np.ndarray) -> np.ndarray:
    """The same for the parts of a target."""
    return np.asarray(_full_pass(graph)(values, tokens))


@functools.partial(jax.jit, static_argnames="vocab_size")
def _noise(seeds, positions, vocab_size):
    return keys.gumbel(keys.position_keys(seeds, Purpose.TARGET, positions), vocab_size)


def follow(
    raw: np.ndarray,
    prompts: list[list[int]],
    outputs: list[list[int]],
    params: list[SamplingParams],
    eos: tuple,
) -> tuple[list[int | None], list[list[float]]]:
    """Where each output first departs from plain decoding (None: nowhere), and each step's gap.

    A gap is the distance of the best from the second best. `raw` are full-pass logits of prompt and
    output. An output must also end where it should.
    """
    batch, length, vocab = raw.shape
    seeds = np.zeros((batch, 2), np.uint32)
    seeds[: len(params)] = keys.seed_words([p.seed for p in params])
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    noise = np.asarray(_noise(seeds, positions, vocab), np.float64)
    wrong, gaps = [], []
    for row, (prompt, output, one) in enumerate(zip(prompts, outputs, params, strict=True)):
        first, row_gaps = None, []
        for step, token in enumerate(output):
            position = len(prompt) + step
            logits = process(raw[row, position - 1], prompt, output[:step], one, eos)
            if one.temperature > 0:
                logits = logits + noise[row, position]
            best = np.sort(logits)[::-1]
            row_gaps.append(float(best[0] - best[1]))
            ended = step > one.min_tokens and output[step - 1] in stop_set(one, eos)
            if first is None and (int(np.argmax(logits)) != token or ended):
                first = step
        if first is None and len(output) < one.max_tokens:
            if not output or output[-1] not in stop_set(one, eos):
                first = len(output)
        wrong.append(first)
        gaps.append(row_gaps)
    return wrong, gaps
