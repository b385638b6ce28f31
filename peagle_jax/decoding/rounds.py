"""One decoding round and one prefill chunk: pure functions from state to state.

Expand and draft, verify, commit. Nothing is copied or rolled back: rejected rows leave stale cache
entries, and each is overwritten before a query can reach its position.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from peagle_jax.decoding.drafting import Method, RoundView
from peagle_jax.decoding.expand import token_at
from peagle_jax.decoding.logits import process_logits
from peagle_jax.decoding.requests import Features
from peagle_jax.decoding.state import DecodeState, commit
from peagle_jax.decoding.verification import Drafts, own_tokens, verify


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """Parameters of the target and of the drafting method (None where it has none)."""

    target: Any
    draft: Any


def decode_round(
    params: Params, state: DecodeState, *, target_graph: Any, method: Method, features: Features
) -> DecodeState:
    """Draft, verify and commit once for every running row; the others stay as they are."""
    requests, running = state.requests, state.running
    target = nnx.merge(target_graph, params.target)
    room = requests.limit - state.committed - 1
    wanted = jnp.minimum(jnp.minimum(requests.num_drafts, method.num_drafts), room)
    view = RoundView(
        tokens=state.tokens,
        committed=state.committed,
        wanted=jnp.where(running, wanted, 0),
        running=running,
        num_rounds=state.num_rounds,
        requests=requests,
    )
    drafts, draft_state = method.propose(params.draft, state.draft, view, features)
    drafts = sanitise(drafts, target.config.vocab_size)

    first_position = state.committed - 1
    newest = token_at(state.tokens, first_position[:, None])
    steps = jnp.arange(method.num_drafts + 1, dtype=first_position.dtype)[None, :]
    real = (steps <= drafts.count[:, None]) & running[:, None]
    output = target(
        jnp.concatenate([newest, drafts.tokens], axis=1),
        jnp.where(real, first_position[:, None] + steps, -1),
        state.target_cache,
        taps=method.taps,
    )
    draft_state = method.observe(params.draft, draft_state, output, first_position, running)

    raw = target.logits(output.hidden)
    logits = process_logits(
        raw,
        requests,
        features,
        history=state.history,
        drafts=drafts.tokens,
        num_output=state.committed - requests.prompt_length,
    )
    verdict = verify(logits, drafts, requests, state.committed, features)
    state = dataclasses.replace(
        state,
        target_cache=output.cache,
        draft=draft_state,
        num_rounds=state.num_rounds + running.astype(state.num_rounds.dtype),
    )
    return commit(state, verdict.tokens, verdict.num_accepted, drafts.count, running, raw)


def sanitise(drafts: Drafts, vocab_size: int) -> Drafts:
    """Cut a row's drafts at the first id outside the vocabulary; unused places hold id 0."""
    steps = jnp.arange(drafts.tokens.shape[1], dtype=drafts.count.dtype)[None, :]
    known = (drafts.tokens >= 0) & (drafts.tokens < vocab_size) & (steps < drafts.count[:, None])
    known = jnp.cumprod(known.astype(jnp.int32), axis=1)
    return dataclasses.replace(
        drafts,
        tokens=jnp.where(known > 0, drafts.tokens, 0),
        count=jnp.sum(known, axis=1, dtype=drafts.count.dtype),
    )


def prefill_chunk(
    params: Params,
    state: DecodeState,
    *,
    chunk: int,
    target_graph: Any,
    method: Method,
    features: Features,
) -> DecodeState:
    """The next `chunk` prompt tokens of every pending row, through target and drafter.

    Both caches are filled: the draft row at position p pairs target state p with the true prompt
    token p + 1, at chunk ends too. A row whose prompt ends here gets its first output token.
    """
    requests, pending = state.requests, state.pending
    target = nnx.merge(target_graph, params.target)
    positions = state.prefilled[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    real = (positions < requests.prompt_length[:, None]) & pending[:, None]
    positions = jnp.where(real, positions, -1)
    is_last = real & (positions == requests.prompt_length[:, None] - 1)
    output = target(
        token_at(state.tokens, positions), positions, state.target_cache, taps=method.taps
    )
    next_tokens = token_at(state.tokens, jnp.where(real & ~is_last, positions + 1, -1))
    draft_state = method.prefill(params.draft, state.draft, next_tokens, output, positions, is_last)
    ends = jnp.any(is_last, axis=1)
    last = jnp.argmax(is_last, axis=1)[:, None, None]
    raw = target.logits(jnp.take_along_axis(output.hidden, last, axis=1))
    none = jnp.zeros((raw.shape[0], 0), jnp.int32)
    logits = process_logits(
        raw,
        requests,
        features,
        history=state.history,
        drafts=none,
        num_output=state.committed - requests.prompt_length,
    )
    tokens: Int[Array, "B 1"] = own_tokens(logits, requests, state.committed, features)
    state = dataclasses.replace(
        state,
        target_cache=output.cache,
        draft=draft_state,
        prefilled=state.prefilled + jnp.sum(real, axis=1, dtype=state.prefilled.dtype),
    )
    zero = jnp.zeros_like(state.committed)
    return commit(state, tokens, zero, zero, ends, raw)
