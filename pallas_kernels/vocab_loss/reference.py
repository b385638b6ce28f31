"""The meaning of the vocabulary loss in jnp, in chunks of rows and vocabulary.

For each chunk of rows, with z = h @ W_draft and t = cap(g @ W_target)[draft vocabulary]:

    pass 1 over the vocabulary: running maxima, sums and cross terms of z and t     (Statistics)
    pass 2: acceptance, and (where wanted) dz = derivative by the draft logits,
            d h = dz @ W_draft.T, d W_draft += h.T @ dz

The logits are computed anew in each pass. With the whole vocabulary in one chunk XLA finds the two
passes' products to be the same and computes them once. The row weights are known here, so the
derivative is formed in the forward direction and the backward one only scales it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.vocab_loss.losses import LOSSES, Factors, Statistics, factors, row_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything about a call that is not an array.

    Attributes:
      loss: a name of LOSSES.
      target_soft_cap: cap * tanh(logit / cap) on the target logits, or None.
      target_head_transposed: the target head is [V, Ht] (a tied embedding), not [Ht, V].
      head_trainable: whether the draft head gets a gradient.
      row_chunk, vocab_chunk: rows and draft-vocabulary columns handled at a time.
      needs_acceptance: whether the acceptance is to be computed even where the loss does not need it.
    """

    loss: str
    target_soft_cap: float | None
    target_head_transposed: bool
    head_trainable: bool
    row_chunk: int
    vocab_chunk: int
    needs_acceptance: bool


class Inputs(NamedTuple):
    """The arrays of a call; the rows come in chunks, heads whole.

    Attributes:
      draft_hidden [R, H], draft_head [H, Vd], target_hidden [R, Ht]; target_head [Ht, V] or [V, Ht].
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


def vocab_loss(inputs: Inputs, setting: Setting, *, with_gradient: bool) -> Results:
    """Losses of all rows, row chunk by row chunk."""
    rows, hidden = inputs.draft_hidden.shape
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
        results, d_head = _chunk_of_rows(part, setting, d_head, with_gradient)
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


def _chunk_of_rows(inputs: Inputs, setting: Setting, d_head, with_gradient: bool):
    used = inputs.weights != 0
    # Left-out rows may hold anything, NaN too: they become zeros before they are multiplied.
    inputs = inputs._replace(
        draft_hidden=jnp.where(used[:, None], inputs.draft_hidden, 0),
        target_hidden=jnp.where(used[:, None], inputs.target_hidden, 0),
    )
    stats = _statistics(inputs, setting)
    acceptance, d_hidden = jnp.zeros_like(inputs.weights), None
    if LOSSES[setting.loss] or (setting.needs_acceptance and not with_gradient):
        acceptance, below = _acceptance(inputs, setting, stats)
    else:
        below = jnp.zeros_like(inputs.weights)
    if with_gradient:
        row_factors = factors(setting.loss, acceptance, inputs.weights)
        found, d_hidden, d_head = _gradient(inputs, setting, stats, row_factors, below, d_head)
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


# --- vocabulary chunks -------------------------------------------------------------------------


def chunk_starts(vocab: int, chunk: int) -> tuple[list[int], list[int]]:
    """First column of each chunk, and the first one that is not in the chunk before it.

    All chunks are of one size; the last one is moved back to end with the vocabulary.
    """
    chunk = min(chunk, vocab)
    fresh = list(range(0, vocab, chunk))
    return [min(begin, vocab - chunk) for begin in fresh], fresh


def _over_vocabulary(body, carry, vocab: int, chunk: int):
    """`carry = body(carry, start, fresh)` over the chunks; no loop where there is only one."""
    starts, fresh = chunk_starts(vocab, chunk)
    if len(starts) == 1:
        return body(carry, jnp.int32(0), jnp.int32(0))
    chunks = (jnp.asarray(starts, jnp.int32), jnp.asarray(fresh, jnp.int32))
    return jax.lax.scan(lambda c, x: (body(c, *x), None), carry, chunks)[0]


def target_columns(inputs: Inputs, setting: Setting, start, size: int) -> Array:
    """Target head columns of `size` draft columns from `start`: [Ht, size] or [size, Ht]."""
    axis = 0 if setting.target_head_transposed else 1
    if inputs.draft_token_ids is None:
        return jax.lax.dynamic_slice_in_dim(inputs.target_head, start, size, axis=axis)
    ids = jax.lax.dynamic_slice_in_dim(inputs.draft_token_ids, start, size)
    # Ids lie inside the head (checked where they are made); NaN would betray one that does not.
    return jnp.take(inputs.target_head, ids, axis=axis, mode="fill")


def _logits(inputs: Inputs, setting: Setting, start, size: int):
    """Draft logits, target logits (both float32 [R, size]) and the draft head's columns."""
    head = jax.lax.dynamic_slice_in_dim(inputs.draft_head, start, size, axis=1)
    draft = jnp.dot(inputs.draft_hidden, head, preferred_element_type=jnp.float32)
    target = target_logits(
        inputs.target_hidden, target_columns(inputs, setting, start, size), setting
    )
    return draft, target, head


def target_logits(
    hidden: Float[Array, "R Ht"], columns: Float[Array, "..."], setting: Setting
) -> Float[Array, "R C"]:
    """Soft-capped target logits in float32."""
    contract = ((1,), (1 if setting.target_head_transposed else 0,))
    logits = jax.lax.dot_general(
        hidden, columns, (contract, ((), ())), preferred_element_type=jnp.float32
    )
    if setting.target_soft_cap is None:
        return logits
    cap = jnp.float32(setting.target_soft_cap)
    return cap * jnp.tanh(logits / cap)


def _statistics(inputs: Inputs, setting: Setting) -> Statistics:
    rows, vocab = inputs.draft_hidden.shape[0], inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)
    lowest = jnp.full((rows,), -jnp.inf, jnp.float32)
    zero, first = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
    stats = Statistics(
        draft_top=lowest,
        draft_sum=zero,
        draft_argmax=first,
        target_top=lowest,
        target_sum=zero,
        target_argmax=first,
        cross=zero,
        mean=zero,
        label_logit=zero,
    )

    def body(stats, start, fresh):
        draft, target, _ = _logits(inputs, setting, start, size)
        columns = start + jnp.arange(size, dtype=jnp.int32)
        return merge_chunk(stats, draft, target, columns, (columns >= fresh)[None, :])

    return _over_vocabulary(body, stats, vocab, size)


def merge_chunk(
    stats: Statistics,
    draft: Float[Array, "R C"],
    target: Float[Array, "R C"],
    columns: Int[Array, "C"],
    fresh: Bool[Array, "#R C"],
) -> Statistics:
    """Statistics after the columns that are `fresh`; the others were seen before."""
    draft_fresh = jnp.where(fresh, draft, -jnp.inf)
    target_fresh = jnp.where(fresh, target, -jnp.inf)
    draft_best, target_best = jnp.argmax(draft_fresh, axis=1), jnp.argmax(target_fresh, axis=1)
    draft_high, target_high = jnp.max(draft_fresh, axis=1), jnp.max(target_fresh, axis=1)
    draft_top = jnp.maximum(stats.draft_top, draft_high)
    target_top = jnp.maximum(stats.target_top, target_high)
    draft_weight = jnp.exp(draft_fresh - draft_top[:, None])
    target_weight = jnp.exp(target_fresh - target_top[:, None])
    decay_draft = jnp.exp(stats.draft_top - draft_top)
    decay = jnp.exp(stats.target_top - target_top)
    higher = target_high > stats.target_top
    label = jnp.take_along_axis(draft, target_best[:, None], axis=1)[:, 0]
    return Statistics(
        draft_top=draft_top,
        draft_sum=stats.draft_sum * decay_draft + jnp.sum(draft_weight, axis=1),
        draft_argmax=jnp.where(
            draft_high > stats.draft_top, columns[draft_best], stats.draft_argmax
        ),
        target_top=target_top,
        target_sum=stats.target_sum * decay + jnp.sum(target_weight, axis=1),
        target_argmax=jnp.where(higher, columns[target_best], stats.target_argmax),
        cross=stats.cross * decay + jnp.sum(target_weight * (target - draft), axis=1),
        mean=stats.mean * decay + jnp.sum(target_weight * target, axis=1),
        label_logit=jnp.where(higher, label, stats.label_logit),
    )


def _probabilities(stats: Statistics, draft, target, fresh):
    q = jnp.exp(draft - stats.draft_lse[:, None])
    p = jnp.exp(target - stats.target_lse[:, None])
    return jnp.where(fresh, q, 0.0), jnp.where(fresh, p, 0.0)


def _acceptance(inputs: Inputs, setting: Setting, stats: Statistics):
    """sum min(p, q) and sum of q where q < p, per row."""
    rows, vocab = inputs.draft_hidden.shape[0], inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)

    def body(carry, start, fresh):
        draft, target, _ = _logits(inputs, setting, start, size)
        is_fresh = (start + jnp.arange(size, dtype=jnp.int32) >= fresh)[None, :]
        q, p = _probabilities(stats, draft, target, is_fresh)
        acceptance, below = carry
        return (
            acceptance + jnp.sum(jnp.minimum(p, q), axis=1),
            below + jnp.sum(jnp.where(q < p, q, 0.0), axis=1),
        )

    zero = jnp.zeros((rows,), jnp.float32)
    return _over_vocabulary(body, (zero, zero), vocab, size)


def _gradient(inputs: Inputs, setting: Setting, stats, row_factors: Factors, below, d_head):
    """Acceptance, derivative by the draft hidden states, and d_head with this chunk's share."""
    rows, hidden = inputs.draft_hidden.shape
    vocab = inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)

    def body(carry, start, fresh):
        acceptance, d_hidden, d_head = carry
        draft, target, head = _logits(inputs, setting, start, size)
        columns = start + jnp.arange(size, dtype=jnp.int32)
        q, p = _probabilities(stats, draft, target, (columns >= fresh)[None, :])
        label = (columns[None, :] == stats.target_argmax[:, None]) & (columns >= fresh)[None, :]
        dz = logit_derivative(row_factors, below, q, p, label).astype(head.dtype)
        d_hidden += jnp.dot(dz, head.T, preferred_element_type=jnp.float32)
        if d_head is not None:
            share = jnp.dot(inputs.draft_hidden.T, dz, preferred_element_type=jnp.float32)
            share += jax.lax.dynamic_slice_in_dim(d_head, start, size, axis=1)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, share, start, axis=1)
        return acceptance + jnp.sum(jnp.minimum(p, q), axis=1), d_hidden, d_head

    carry = (jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, hidden), jnp.float32), d_head)
    acceptance, d_hidden, d_head = _over_vocabulary(body, carry, vocab, size)
    return acceptance, d_hidden.astype(inputs.draft_hidden.dtype), d_head


def logit_derivative(row_factors: Factors, below, q, p, label) -> Float[Array, "R C"]:
    """dz of the module `losses`; q, p and label are zero in columns that do not count."""
    dz = row_factors.towards_target[:, None] * (q - p)
    dz += row_factors.towards_label[:, None] * (q - label.astype(jnp.float32))
    return dz + row_factors.acceptance[:, None] * q * ((q < p).astype(jnp.float32) - below[:, None])
