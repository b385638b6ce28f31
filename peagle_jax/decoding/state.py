"""The state of a decoding batch: every array of the loop, with its shape and meaning.

The loop is a pure function from this state to itself. One row is one request; a row beyond the
requests of the batch is finished from the start. Fields carry their types as comments: in a mapped
tree (of shapes, of shardings) they hold what stands for the arrays.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decoding.logits import (
    History,
    count_tokens,
    log_probabilities,
    top_log_probabilities,
)
from peagle_jax.decoding.requests import Features, Requests, is_stop
from peagle_jax.models.cache import KVCache, LayerCache


class FinishReason(enum.IntEnum):
    """Why a request ended. RUNNING: it has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the raw logits, by the position of the token; 0 before the output.

    of_token: of the token itself. top_values, top_ids: the N most likely, largest first.
    """

    of_token: Any  # Float[Array, "B S"]
    top_values: Any  # Float[Array, "B S N"]
    top_ids: Any  # Int[Array, "B S N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a round reads and writes.

    Attributes:
      requests: what each row asks for; never written by the loop.
      tokens: prompt, then output; 0 after the committed ones.
      committed: how many tokens are committed. The newest one, at committed - 1, has not been
        through the target yet (once the prompt has).
      prefilled: prompt tokens whose keys and values are in the caches.
      finished: the row writes nothing any more and its outputs do not change.
      finish_reason: a FinishReason.
      target_cache: a KVCache with keys and values of positions 0..committed - 2, and stale ones
        above, which no query reaches before they are overwritten.
      draft: whatever the drafting method carries (cache and verified rows of a network).
      draft_depth: for each output token 0 where it is the target's own, i where it is an accepted
        i-th draft of its round. Statistics and coloured text are read from here.
      round_drafts: for each output token how many drafts its round had.
      num_rounds: rounds in which the row took part.
      history: ids seen so far, in programs with penalties.
      logprobs: in programs with log-probabilities.
    """

    requests: Requests
    tokens: Any  # Int[Array, "B S"]
    committed: Any  # Int[Array, "B"]
    prefilled: Any  # Int[Array, "B"]
    finished: Any  # Bool[Array, "B"]
    finish_reason: Any  # Int[Array, "B"]
    target_cache: Any
    draft: Any
    draft_depth: Any  # Int8[Array, "B S"]
    round_drafts: Any  # Int8[Array, "B S"]
    num_rounds: Any  # Int[Array, "B"]
    history: Any  # History | None
    logprobs: Any  # Logprobs | None

    @property
    def running(self) -> Bool[Array, "B"]:
        """Rows that a round decodes: prompt in the caches, not finished."""
        return ~self.finished & (self.prefilled >= self.requests.prompt_length)

    @property
    def pending(self) -> Bool[Array, "B"]:
        """Rows whose prompt is not in the caches yet."""
        return ~self.finished & (self.prefilled < self.requests.prompt_length)


def init_state(
    requests: Requests,
    prompt_tokens: Int[Array, "B S"],
    target_cache: KVCache | tuple[()],
    draft: Any,
    *,
    vocab_size: int,
    features: Features,
) -> DecodeState:
    """The state before prefill. Caches may be used ones: stale entries are never read."""
    batch, slots = prompt_tokens.shape
    history = None
    if features.penalties:
        is_prompt = jnp.arange(slots)[None, :] < requests.prompt_length[:, None]
        none = jnp.zeros((batch, vocab_size), jnp.int32)
        history = History(count_tokens(none, prompt_tokens, is_prompt) > 0, none)
    logprobs = None
    if features.logprobs is not None:
        count = features.logprobs
        logprobs = Logprobs(
            jnp.zeros((batch, slots), jnp.float32),
            jnp.zeros((batch, slots, count), jnp.float32),
            jnp.zeros((batch, slots, count), jnp.int32),
        )
    return DecodeState(
        requests=requests,
        tokens=prompt_tokens,
        committed=requests.prompt_length + 0,
        prefilled=jnp.zeros(batch, jnp.int32),
        finished=requests.prompt_length == 0,
        finish_reason=jnp.zeros(batch, jnp.int32),
        target_cache=target_cache,
        draft=draft,
        draft_depth=jnp.zeros((batch, slots), jnp.int8),
        round_drafts=jnp.zeros((batch, slots), jnp.int8),
        num_rounds=jnp.zeros(batch, jnp.int32),
        history=history,
        logprobs=logprobs,
    )


def admit(
    state: DecodeState,
    requests: Requests,
    tokens: Int[Array, "B S"],
    rows: Bool[Array, "B"],
    *,
    features: Features,
) -> DecodeState:
    """The state with new requests in `rows`, whose prompts are then pending; others keep running.

    The caches stay where they are: stale entries of the rows are never read, once a ring has
    forgotten which positions its slots hold.
    """

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(rows, tuple(range(1, old.ndim))), new, old)

    vocab_size = 0 if state.history is None else state.history.in_prompt.shape[1]
    fresh = init_state(requests, tokens, (), (), vocab_size=vocab_size, features=features)
    kept = dataclasses.replace(state, target_cache=(), draft=())
    return dataclasses.replace(
        jax.tree.map(pick, fresh, kept),
        target_cache=_forget(state.target_cache, rows),
        draft=_forget(state.draft, rows),
    )


def _forget(tree: Any, rows: Bool[Array, "B"]) -> Any:
    """Every ring in `tree` without what it holds for `rows`."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, LayerCache) or leaf.positions is None:
            return leaf
        return dataclasses.replace(leaf, positions=jnp.where(rows[:, None], -1, leaf.positions))

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, LayerCache))


def commit(
    state: DecodeState,
    tokens: Int[Array, "B R"],
    num_accepted: Int[Array, "B"],
    num_drafts: Int[Array, "B"],
    active: Bool[Array, "B"],
    raw_logits: Float[Array, "B R V"],
) -> DecodeState:
    """Append a round's tokens to the active rows, judged one by one.

    `tokens` up to index `num_accepted` are the round's output. The first that is a stop id (once
    `min_tokens` are out) or that fills the limit ends the request, and nothing after it is kept.
    """
    requests, slots = state.requests, state.tokens.shape[1]
    steps = jnp.arange(tokens.shape[1], dtype=state.committed.dtype)[None, :]
    positions = state.committed[:, None] + steps
    offered = (steps <= num_accepted[:, None]) & active[:, None]
    num_before = positions - requests.prompt_length[:, None]
    stops = is_stop(requests, tokens) & (num_before >= requests.min_tokens[:, None]) & offered
    fills = (positions + 1 >= requests.limit[:, None]) & offered
    ends = (stops | fills).astype(jnp.int32)
    ended_before = jnp.cumsum(ends, axis=1) > ends
    kept = offered & ~ended_before
    stopped = jnp.any(stops & kept, axis=1)
    filled = jnp.any(fills & kept, axis=1)

    rows = jnp.arange(tokens.shape[0])[:, None]
    index = jnp.where(kept, positions, slots)

    def put(old: Array, new: Array) -> Array:
        return old.at[rows, index].set(new.astype(old.dtype), mode="drop")

    depth = jnp.where(steps < num_accepted[:, None], steps + 1, 0)
    history, logprobs = state.history, state.logprobs
    if history is not None:
        history = History(history.in_prompt, count_tokens(history.in_output, tokens, kept))
    if logprobs is not None:
        safe = jnp.where(kept, tokens, 0)
        values, ids = top_log_probabilities(raw_logits, logprobs.top_ids.shape[-1])
        logprobs = Logprobs(
            put(logprobs.of_token, log_probabilities(raw_logits, safe)),
            put(logprobs.top_values, values),
            put(logprobs.top_ids, ids),
        )
    reason = jnp.where(
        stopped,
        int(FinishReason.STOP),
        jnp.where(filled, int(FinishReason.LENGTH), state.finish_reason),
    )
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, tokens),
        committed=state.committed + jnp.sum(kept, axis=1, dtype=state.committed.dtype),
        finished=state.finished | stopped | filled,
        finish_reason=reason,
        draft_depth=put(state.draft_depth, depth),
        round_drafts=put(state.round_drafts, jnp.broadcast_to(num_drafts[:, None], tokens.shape)),
        history=history,
        logprobs=logprobs,
    )


def finish(state: DecodeState, rows: Bool[Array, "B"]) -> DecodeState:
    """End these rows now, as if by a stop: a stop string found by the host, a cancelled request."""
    ends = rows & ~state.finished
    return dataclasses.replace(
        state,
        finished=state.finished | rows,
        finish_reason=jnp.where(ends, int(FinishReason.STOP), state.finish_reason),
    )
