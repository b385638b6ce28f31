"""From raw logits to what a token is drawn from: one function for plain, verify and bonus rows.

Order: bias, penalties, token minimum, temperature, top-k, top-p, min-p. Every row of a block has
its own history: row i sees the committed tokens and drafts 0..i-1, which is what plain decoding
would have seen there, since row i only matters when these drafts are accepted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decoding.requests import Features, Requests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Which ids a request has seen. in_prompt: at all; in_output: how often."""

    in_prompt: Any  # Bool[Array, "B V"]
    in_output: Any  # Int[Array, "B V"]


def count_tokens(
    counts: Int[Array, "B V"], tokens: Int[Array, "B N"], real: Bool[Array, "B N"]
) -> Int[Array, "B V"]:
    """`counts` plus the tokens that are real; the others fall outside and drop."""
    rows = jnp.arange(counts.shape[0])[:, None]
    index = jnp.where(real, tokens, counts.shape[1])
    return counts.at[rows, index].add(jnp.ones((), counts.dtype), mode="drop")


def block_counts(counts: Int[Array, "B V"], drafts: Int[Array, "B K"]) -> Int[Array, "B R V"]:
    """Output counts as each of the R = K + 1 rows sees them: row i adds drafts 0..i-1."""
    batch, num_drafts = drafts.shape
    added = jnp.zeros((batch, num_drafts + 1, counts.shape[1]), counts.dtype)
    rows = jnp.arange(batch)[:, None]
    steps = jnp.arange(1, num_drafts + 1)[None, :]
    added = added.at[rows, steps, drafts].add(jnp.ones((), counts.dtype), mode="drop")
    return counts[:, None, :] + jnp.cumsum(added, axis=1, dtype=counts.dtype)


def process_logits(
    raw: Float[Array, "B R V"],
    requests: Requests,
    features: Features,
    *,
    history: History | None,
    drafts: Int[Array, "B K"],
    num_output: Int[Array, "B"],
) -> Float[Array, "B R V"]:
    """Logits whose softmax each row's token is drawn from; -inf where a token cannot be drawn.

    Args:
      raw: float32 logits of the target.
      history: committed tokens; needed with `features.penalties`.
      drafts: the K = R - 1 drafts that stand between the rows.
      num_output: output tokens already committed, before row 0's.
    """
    logits = raw
    if features.penalties:
        counts = block_counts(history.in_output, drafts)
        logits = logits + requests.bias[:, None, :]
        logits = penalise(logits, requests, in_prompt=history.in_prompt, in_output=counts)
        before = num_output[:, None] + jnp.arange(raw.shape[1], dtype=num_output.dtype)[None, :]
        logits = forbid_stops(logits, requests, before)
    if features.sampled:
        logits = _sampling_filters(logits, requests)
    return logits


def penalise(
    logits: Float[Array, "B R V"],
    requests: Requests,
    *,
    in_prompt: Bool[Array, "B V"],
    in_output: Int[Array, "B R V"],
) -> Float[Array, "B R V"]:
    """Repetition over prompt and output; presence and frequency over the output alone."""

    def per_row(values: Float[Array, "B"]) -> Float[Array, "B 1 1"]:
        return values[:, None, None]

    seen = in_prompt[:, None, :] | (in_output > 0)
    repetition = per_row(requests.repetition_penalty)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - per_row(requests.frequency_penalty) * in_output.astype(jnp.float32)
    return logits - per_row(requests.presence_penalty) * (in_output > 0).astype(jnp.float32)


def forbid_stops(
    logits: Float[Array, "B R V"], requests: Requests, num_before: Int[Array, "B R"]
) -> Float[Array, "B R V"]:
    """-inf for the stop ids in rows that have fewer than `min_tokens` output tokens before them."""
    batch, num_rows, vocab = logits.shape
    ids = jnp.where(
        (num_before < requests.min_tokens[:, None])[:, :, None],
        requests.stop_ids[:, None, :],
        vocab,
    )
    rows = jnp.arange(batch)[:, None, None]
    columns = jnp.arange(num_rows)[None, :, None]
    return logits.at[rows, columns, ids].set(-jnp.inf, mode="drop")


def _sampling_filters(logits: Float[Array, "B R V"], requests: Requests) -> Float[Array, "B R V"]:
    """Temperature, top-k, top-p, min-p. Greedy rows keep their order (temperature 1, no filter)."""
    greedy = requests.temperature <= 0
    temperature = jnp.where(greedy, jnp.float32(1), requests.temperature)
    # The largest logit becomes 0, so that no temperature overflows.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / temperature[:, None, None]
    top_k = jnp.where(greedy, 0, requests.top_k)
    top_p = jnp.where(greedy, jnp.float32(1), requests.top_p)
    min_p = jnp.where(greedy, jnp.float32(0), requests.min_p)
    # Sorting the vocabulary is the only costly step: skipped while no request of the batch asks.
    logits = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: keep_top(logits, top_k[:, None], top_p[:, None]),
        lambda: logits,
    )
    return keep_min_p(logits, min_p[:, None])


def keep_top(
    logits: Float[Array, "B R V"], top_k: Int[Array, "B 1"], top_p: Float[Array, "B 1"]
) -> Float[Array, "B R V"]:
    """Top-k, all ties with the k-th kept; then top-p over what is left, the crossing token kept.

    Among equal logits at the top-p border the lower ids stay: the same as a stable sort.
    """
    vocab = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    k_index = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    k_least = jnp.take_along_axis(ordered, k_index[:, :, None], axis=-1)
    ordered = jnp.where(ordered >= k_least, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    num_kept = jnp.sum(before < top_p[:, :, None], axis=-1, keepdims=True, dtype=jnp.int32)
    num_kept = jnp.where(top_p[:, :, None] >= 1, vocab, jnp.maximum(num_kept, 1))
    p_least = jnp.take_along_axis(ordered, num_kept - 1, axis=-1)
    least = jnp.maximum(k_least, p_least)
    above = logits > least
    tied = logits == least
    num_tied = num_kept - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    keep = above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= num_tied))
    return jnp.where(keep, logits, -jnp.inf)


def keep_min_p(logits: Float[Array, "B R V"], min_p: Float[Array, "B 1"]) -> Float[Array, "B R V"]:
    """Drop tokens less likely than `min_p` times the most likely one."""
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, :, None]
    return jnp.where(logits >= least, logits, -jnp.inf)


def log_probabilities(raw: Float[Array, "B R V"], tokens: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Log-probability of each row's token under the raw logits."""
    chosen = jnp.take_along_axis(raw, tokens[:, :, None], axis=-1)[:, :, 0]
    return chosen - jax.nn.logsumexp(raw, axis=-1)


def top_log_probabilities(
    raw: Float[Array, "B R V"], count: int
) -> tuple[Float[Array, "B R N"], Int[Array, "B R N"]]:
    """The `count` largest log-probabilities of each row and their ids, largest first."""
    values, ids = jax.lax.top_k(raw, count)
    return values - jax.nn.logsumexp(raw, axis=-1, keepdims=True), ids
