"""What both implementations of the vocabulary loss share: the arrays, the row chunks, the passes.

For each chunk of rows, with z = h @ W_draft and t = cap(g @ W_target)[draft vocabulary]:

    pass 1 over the vocabulary: running maxima, sums and cross terms of z and t     (Statistics)
    pass 2: acceptance, and (where wanted) dz = derivative by the draft logits,
            d h = dz @ W_draft.T, d W_draft += h.T @ dz

The logits are computed anew in each pass. The row weights are known here, so the derivative is
formed in the forward direction and the backward one only scales it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.vocab_loss.losses import LOSSES, factors, row_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything about a call that is not an array.

    Attributes:
      loss: a name of LOSSES.
      target_soft_cap: cap * tanh(logit / cap) on the target logits, or None.
      target_head_transposed: the target head is [V, Ht] (a tied embedding), not [Ht, V].
      head_trainable: whether the draft head gets a gradient.
      row_chunk, vocab_chunk: rows and draft-vocabulary columns handled at a time; None leaves it to
        the implementation.
      needs_acceptance: whether the acceptance is computed even where the loss does not need it.
    """

    loss: str
    target_soft_cap: float | None
    target_head_transposed: bool
    head_trainable: bool
    row_chunk: int | None
    vocab_chunk: int | None
    needs_acceptance: bool


class Inputs(NamedTuple):
    """The arrays of a call; the rows come in chunks, heads whole.

    Attributes:
      draft_hidden: [R, H]; draft_head: [H, Vd].
      target_hidden: [R, Ht]; target_head: [Ht, V] or [V, Ht].
      draft_token_ids: [Vd] target column of each draft column; None where they are the same.
      weights: [R] float32; rows of weight zero are left out, whatever they hold.
    """

    draft_hidden: Float[Array, "R H"]
    draft_head: Float[Array, "H Vd"]
    target_hidden: Float[Array, "R Ht"]
    target_head: Float[Array, "..."]
    draft_token_ids: Int[Array, "Vd"] | None
    weights: Float[Array, "R"]


class Results(NamedTuple):
    """Per-row results, and the derivatives of sum(weights * losses) where they were asked for.

    `target_argmax` and `draft_argmax` count in the draft vocabulary.
    """

    losses: Float[Array, "R"]
    acceptance: Float[Array, "R"]
    draft_argmax: Int[Array, "R"]
    target_argmax: Int[Array, "R"]
    d_hidden: Float[Array, "R H"] | None
    d_head: Float[Array, "H Vd"] | None


class Passes(NamedTuple):
    """The passes over the vocabulary, which is where reference and kernels differ.

    Attributes:
      statistics: (inputs, setting) -> Statistics.
      acceptance: (inputs, setting, stats) -> sum min(p, q) [R] and sum of q where q < p [R].
      derivative: (inputs, setting, stats, row factors, below, start, fresh, size) -> dz [R, size]
        of the columns from `start`, in the head's dtype and zero before column `fresh`, and
        sum min(p, q) over the same columns.
    """

    statistics: Callable
    acceptance: Callable
    derivative: Callable


def vocab_loss(inputs: Inputs, setting: Setting, passes: Passes, *, with_gradient: bool) -> Results:
    """Losses of all rows, row chunk by row chunk; `setting` names both chunk sizes."""
    rows = inputs.draft_hidden.shape[0]
    chunk = min(setting.row_chunk, rows)
    chunks = -(-rows // chunk)
    by_row = (inputs.draft_hidden, inputs.target_hidden, inputs.weights)
    by_row = jax.tree.map(lambda x: in_chunks(x, chunks, chunk), by_row)
    want_head = with_gradient and setting.head_trainable
    d_head = jnp.zeros(inputs.draft_head.shape, jnp.float32) if want_head else None

    def step(d_head, x):
        draft_hidden, target_hidden, weights = x
        part = inputs._replace(
            draft_hidden=draft_hidden, target_hidden=target_hidden, weights=weights
        )
        results, d_head = _chunk_of_rows(part, setting, passes, d_head, with_gradient)
        return d_head, results

    d_head, results = jax.lax.scan(step, d_head, by_row)
    results = jax.tree.map(lambda x: x.reshape(chunks * chunk, *x.shape[2:])[:rows], results)
    if want_head:
        d_head = d_head.astype(inputs.draft_head.dtype)
    return results._replace(d_head=d_head)


def in_chunks(x: Array, chunks: int, chunk: int) -> Array:
    """Rows cut into [chunks, chunk, ...], padded with zeros at the end (so with weight zero)."""
    pad = [(0, chunks * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(chunks, chunk, *x.shape[1:])


def _chunk_of_rows(inputs: Inputs, setting: Setting, passes: Passes, d_head, with_gradient: bool):
    used = inputs.weights != 0
    # Left-out rows may hold anything, NaN too: they become zeros before they are multiplied.
    inputs = inputs._replace(
        draft_hidden=jnp.where(used[:, None], inputs.draft_hidden, 0),
        target_hidden=jnp.where(used[:, None], inputs.target_hidden, 0),
    )
    stats = passes.statistics(inputs, setting)
    acceptance, d_hidden = jnp.zeros_like(inputs.weights), None
    below = acceptance
    if LOSSES[setting.loss] or (setting.needs_acceptance and not with_gradient):
        acceptance, below = passes.acceptance(inputs, setting, stats)
    if with_gradient:
        row_factors = factors(setting.loss, acceptance, inputs.weights)
        found, d_hidden, d_head = _gradient(
            inputs, setting, passes, stats, row_factors, below, d_head
        )
        acceptance = acceptance if LOSSES[setting.loss] else found
    results = Results(
        losses=jnp.where(used, row_losses(setting.loss, stats, acceptance), 0.0),
        acceptance=jnp.where(used, acceptance, 0.0),
        draft_argmax=stats.draft_argmax,
        target_argmax=stats.target_argmax,
        d_hidden=d_hidden,
        d_head=None,
    )
    return results, d_head


def _gradient(inputs: Inputs, setting: Setting, passes: Passes, stats, row_factors, below, d_head):
    """Acceptance, derivative by the draft hidden states, and d_head with this chunk's share."""
    rows, hidden = inputs.draft_hidden.shape
    vocab = inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)

    def body(carry, start, fresh):
        acceptance, d_hidden, d_head = carry
        dz, found = passes.derivative(
            inputs, setting, stats, row_factors, below, start, fresh, size
        )
        head = jax.lax.dynamic_slice_in_dim(inputs.draft_head, start, size, axis=1)
        d_hidden += jnp.dot(dz, head.T, preferred_element_type=jnp.float32)
        if d_head is not None:
            share = jnp.dot(inputs.draft_hidden.T, dz, preferred_element_type=jnp.float32)
            share += jax.lax.dynamic_slice_in_dim(d_head, start, size, axis=1)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, share, start, axis=1)
        return acceptance + found, d_hidden, d_head

    carry = (jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, hidden), jnp.float32), d_head)
    acceptance, d_hidden, d_head = over_vocabulary(body, carry, vocab, size)
    return acceptance, d_hidden.astype(inputs.draft_hidden.dtype), d_head


def chunk_starts(vocab: int, chunk: int) -> tuple[list[int], list[int]]:
    """First column of each chunk, and the first one that is not in the chunk before it.

    All chunks are of one size; the last one is moved back to end with the vocabulary.
    """
    chunk = min(chunk, vocab)
    fresh = list(range(0, vocab, chunk))
    return [min(begin, vocab - chunk) for begin in fresh], fresh


def over_vocabulary(body, carry, vocab: int, chunk: int):
    """`carry = body(carry, start, fresh)` over the chunks; no loop where there is only one."""
    starts, fresh = chunk_starts(vocab, chunk)
    if len(starts) == 1:
        return body(carry, jnp.int32(0), jnp.int32(0))
    chunks = (jnp.asarray(starts, jnp.int32), jnp.asarray(fresh, jnp.int32))
    return jax.lax.scan(lambda c, x: (body(c, *x), None), carry, chunks)[0]
