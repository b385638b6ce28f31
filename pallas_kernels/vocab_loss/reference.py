"""The passes of the vocabulary loss in jnp: what runs on CPU and what the kernels are tested by.

With the whole vocabulary in one chunk XLA finds the passes' products to be the same and computes
them once: loss and gradient then cost three products with a head of this size (four with a trained
one).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.vocab_loss import chunks
from pallas_kernels.vocab_loss.chunks import Inputs, Passes, Results, Setting
from pallas_kernels.vocab_loss.losses import (
    Factors,
    Statistics,
    logit_derivative,
    merge_block,
    no_statistics,
    probabilities,
)

# Float32 logits of a default chunk, draft or target: 64 MiB.
CHUNK_ELEMENTS = 1 << 24


def vocab_loss(inputs: Inputs, setting: Setting, *, with_gradient: bool) -> Results:
    """See `chunks.vocab_loss`."""
    rows, vocab = inputs.draft_hidden.shape[0], inputs.draft_head.shape[1]
    setting = with_chunks(setting, rows, vocab)
    passes = Passes(statistics=_statistics, acceptance=_acceptance, derivative=_derivative)
    return chunks.vocab_loss(inputs, setting, passes, with_gradient=with_gradient)


def with_chunks(setting: Setting, rows: int, vocab: int) -> Setting:
    """Default chunks: the whole vocabulary with as many rows as fit, at least 64."""
    row_chunk, vocab_chunk = setting.row_chunk, setting.vocab_chunk
    if row_chunk is None:
        fitting = max(64, CHUNK_ELEMENTS // min(vocab, vocab_chunk or vocab))
        row_chunk = min(rows, 1 << (fitting.bit_length() - 1), 4096)
    if vocab_chunk is None:
        vocab_chunk = min(vocab, max(1024, CHUNK_ELEMENTS // row_chunk))
    return dataclasses.replace(setting, row_chunk=row_chunk, vocab_chunk=vocab_chunk)


def target_columns(inputs: Inputs, setting: Setting, start, size: int) -> Array:
    """Target head columns of `size` draft columns from `start`: [Ht, size] or [size, Ht]."""
    axis = 0 if setting.target_head_transposed else 1
    if inputs.draft_token_ids is None:
        return jax.lax.dynamic_slice_in_dim(inputs.target_head, start, size, axis=axis)
    ids = jax.lax.dynamic_slice_in_dim(inputs.draft_token_ids, start, size)
    # An id outside the head would show as NaN.
    return jnp.take(inputs.target_head, ids, axis=axis, mode="fill")


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


def _logits(inputs: Inputs, setting: Setting, start, size: int):
    """Draft and target logits, both float32 [R, size]."""
    head = jax.lax.dynamic_slice_in_dim(inputs.draft_head, start, size, axis=1)
    draft = jnp.dot(inputs.draft_hidden, head, preferred_element_type=jnp.float32)
    columns = target_columns(inputs, setting, start, size)
    return draft, target_logits(inputs.target_hidden, columns, setting)


def _columns(start, fresh, size: int):
    columns = start + jnp.arange(size, dtype=jnp.int32)
    return columns, (columns >= fresh)[None, :]


def _statistics(inputs: Inputs, setting: Setting) -> Statistics:
    vocab = inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)

    def body(stats, start, fresh):
        draft, target = _logits(inputs, setting, start, size)
        return merge_block(stats, draft, target, *_columns(start, fresh, size))

    stats = no_statistics(inputs.draft_hidden.shape[0])
    return chunks.over_vocabulary(body, stats, vocab, size)


def _acceptance(inputs: Inputs, setting: Setting, stats: Statistics):
    vocab = inputs.draft_head.shape[1]
    size = min(setting.vocab_chunk, vocab)

    def body(carry, start, fresh):
        draft, target = _logits(inputs, setting, start, size)
        _, is_fresh = _columns(start, fresh, size)
        q, p = probabilities(stats.draft_lse, stats.target_lse, draft, target, is_fresh)
        acceptance, below = carry
        return (
            acceptance + jnp.sum(jnp.minimum(p, q), axis=1),
            below + jnp.sum(jnp.where(q < p, q, 0.0), axis=1),
        )

    zero = jnp.zeros_like(inputs.weights)
    return chunks.over_vocabulary(body, (zero, zero), vocab, size)


def _derivative(
    inputs: Inputs, setting: Setting, stats, row_factors: Factors, below, start, fresh, size: int
):
    draft, target = _logits(inputs, setting, start, size)
    columns, is_fresh = _columns(start, fresh, size)
    q, p = probabilities(stats.draft_lse, stats.target_lse, draft, target, is_fresh)
    label = (columns[None, :] == stats.target_argmax[:, None]) & is_fresh
    dz = logit_derivative(row_factors, below, q, p, label)
    return dz.astype(inputs.draft_head.dtype), jnp.sum(jnp.minimum(p, q), axis=1)
