"""`vocab_loss`: head products and drafter loss without an array of rows x vocabulary.

The JAX it stands for:

    p = softmax(cap(target_hidden @ target_head)[:, draft_token_ids])
    q = softmax(draft_hidden @ draft_head)
    loss_sum = sum(weights * loss(p, q))          # "kl": sum(p * log(p / q), axis=1)

Source of the losses: P-EAGLE trains by cross-entropy or KL against the target (arXiv 2602.01469 and
its public implementations); see `losses`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.checks import check_arrays
from pallas_kernels.dispatch import Implementation, select
from pallas_kernels.vocab_loss import chunks, reference, triton
from pallas_kernels.vocab_loss.chunks import Inputs, Setting
from pallas_kernels.vocab_loss.losses import LOSSES

OUTSIDE = ("renormalise", "drop")


class VocabLoss(NamedTuple):
    """What `vocab_loss` returns. Only `loss_sum` carries gradients.

    Attributes:
      loss_sum: float32 [], sum over rows of weight times loss.
      weight_sum: float32 [], sum of the weights that counted (under "drop" fewer).
      row_losses: float32 [R], 0 in rows of weight zero.
      agreement: bool [R], whether the draft's argmax is the target's argmax of the full vocabulary;
        a target argmax outside the draft vocabulary is a miss under either policy.
      acceptance: float32 [R], sum_v min(p_v, q_v): how often a token sampled from q is accepted,
        p renormalised to the draft vocabulary. 0 in rows of weight zero, or when not asked for.
      target_argmax: int32 [R], token id in the full vocabulary.
      in_draft_vocabulary: bool [R], whether that token is one of the draft's.
    """

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    row_losses: Float[Array, "R"]
    agreement: Bool[Array, "R"]
    acceptance: Float[Array, "R"]
    target_argmax: Int[Array, "R"]
    in_draft_vocabulary: Bool[Array, "R"]


def vocab_loss(
    draft_hidden: Float[Array, "R H"],
    draft_head: Float[Array, "H Vd"],
    target_hidden: Float[Array, "R Ht"],
    target_head: Float[Array, "_ _"],
    draft_token_ids: Int[Array, "Vd"] | None,
    weights: Float[Array, "R"],
    *,
    loss: str = "kl",
    target_soft_cap: float | None = None,
    target_head_transposed: bool = False,
    target_head_selected: bool = False,
    target_argmax: Int[Array, "R"] | None = None,
    outside: str = "renormalise",
    head_trainable: bool = False,
    needs_acceptance: bool = True,
    row_chunk: int | None = None,
    vocab_chunk: int | None = None,
    implementation: Implementation | None = None,
) -> VocabLoss:
    """Weighted loss of draft rows against the target's distribution, with metrics.

    Args:
      draft_hidden: after the drafter's final norm; gets a gradient.
      draft_head: in draft_hidden's dtype; gets a gradient if `head_trainable`, else none.
      target_hidden: after the target's final norm; row r predicts the token that draft row r does.
        No gradient.
      target_head: [Ht, V], in target_hidden's dtype; no gradient.
      draft_token_ids: token id of each draft column (column + d2t[column]), inside 0..V-1; None
        where draft and target vocabulary are the same. Columns are picked chunk by chunk, never all
        at once.
      weights: float32, zero for rows that do not count; such rows may hold NaN. Put 1 / (global
        denominator) into them or divide the sum by it.
      loss: one of LOSSES.
      target_soft_cap: cap of the target's final logits (Gemma: 30.0).
      target_head_transposed: `target_head` is [V, Ht], as a tied embedding is.
      target_head_selected: `target_head` holds the Vd draft columns alone, in draft order (selected
        once, before training). Needs `target_argmax`.
      target_argmax: the target's argmax over the full vocabulary per row, from the function
        `target_argmax`; computed here when not given and the vocabularies differ. Draft rows that
        predict the same token share it, so it is cheaper made once per token.
      outside: what becomes of rows whose target argmax is not in the draft vocabulary:
        "renormalise" keeps them, "drop" gives them weight zero.
      head_trainable: whether draft_head is trained.
      needs_acceptance: False saves a pass over the vocabulary when no gradient is taken.
      row_chunk, vocab_chunk: rows and draft columns at a time; any size, dividing or not. None:
        chosen so that a chunk of logits, or of their derivative, stays near 64 MiB.
      implementation: see `pallas_kernels.dispatch`.

    The derivative is formed along with the loss (its row weights are known), so do not wrap this in
    `jax.checkpoint` unless the head is trained: what is kept for the backward direction is one
    array like draft_hidden, and one like draft_head if it is trained.
    """
    vocab = draft_head.shape[1]
    head_axis = 0 if target_head_transposed else 1
    rows = draft_hidden.shape[:1]
    check_arrays(
        "vocab_loss",
        draft_hidden=(draft_hidden, (None, draft_head.shape[0]), "floating"),
        draft_head=(draft_head, (None, None), None),
        target_hidden=(target_hidden, (*rows, None), "floating"),
        draft_token_ids=(draft_token_ids, (vocab,), "integer"),
        weights=(weights, rows, "floating"),
        target_argmax=(target_argmax, rows, "integer"),
    )
    for name, number in (
        ("row_chunk", row_chunk),
        ("vocab_chunk", vocab_chunk),
        ("target_soft_cap", target_soft_cap),
    ):
        if number is not None and number <= 0:
            raise ValueError(f"vocab_loss: {name} {number} must be positive, or None")
    _check(draft_hidden, draft_head, target_hidden, target_head, loss, outside, head_axis)
    if target_head_selected:
        if draft_token_ids is None or target_argmax is None:
            raise ValueError(
                "target_head_selected needs draft_token_ids and target_argmax: a head of the draft "
                "columns alone cannot tell the argmax over the full vocabulary"
            )
    columns = target_head.shape[head_axis]
    if (target_head_selected or draft_token_ids is None) and columns != vocab:
        raise ValueError(
            f"the target head has {columns} columns and the draft head {vocab}; "
            "give draft_token_ids with the full head, or one of equal size"
        )
    setting = Setting(
        loss=loss,
        target_soft_cap=target_soft_cap,
        target_head_transposed=target_head_transposed,
        head_trainable=head_trainable,
        row_chunk=row_chunk,
        vocab_chunk=vocab_chunk,
        needs_acceptance=needs_acceptance,
    )
    target_hidden, target_head = jax.lax.stop_gradient((target_hidden, target_head))
    if draft_token_ids is not None and target_argmax is None:
        target_argmax = _target_argmax(target_hidden, target_head, setting)
    inside = None
    if target_argmax is not None:
        inside = _is_in(target_argmax, draft_token_ids, vocab)
        if outside == "drop":
            weights = jnp.where(inside, weights, 0.0)
    inputs = Inputs(
        draft_hidden=draft_hidden,
        draft_head=draft_head,
        target_hidden=target_hidden,
        target_head=target_head,
        draft_token_ids=None if target_head_selected else draft_token_ids,
        weights=jax.lax.stop_gradient(weights),
    )
    loss_sum, results = _differentiable(setting, implementation, inputs)
    if target_argmax is None:
        target_argmax = results.target_argmax
        inside = jnp.ones_like(target_argmax, bool)
    return VocabLoss(
        loss_sum=loss_sum,
        weight_sum=jnp.sum(inputs.weights),
        row_losses=results.losses,
        agreement=_token_ids(results.draft_argmax, draft_token_ids) == target_argmax,
        acceptance=results.acceptance,
        target_argmax=target_argmax,
        in_draft_vocabulary=inside,
    )


def target_argmax(
    target_hidden: Float[Array, "R Ht"],
    target_head: Float[Array, "_ _"],
    *,
    target_soft_cap: float | None = None,
    target_head_transposed: bool = False,
    row_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Int[Array, "R"]:
    """The target's greedy token of each row over its full vocabulary; lowest id of equals."""
    setting = Setting(
        loss="kl",
        target_soft_cap=target_soft_cap,
        target_head_transposed=target_head_transposed,
        head_trainable=False,
        row_chunk=row_chunk,
        vocab_chunk=vocab_chunk,
        needs_acceptance=False,
    )
    return _target_argmax(*jax.lax.stop_gradient((target_hidden, target_head)), setting)


def _target_argmax(hidden, head, setting: Setting):
    axis = 0 if setting.target_head_transposed else 1
    vocab, rows = head.shape[axis], hidden.shape[0]
    setting = reference.with_chunks(setting, rows, vocab)
    size, chunk = min(setting.vocab_chunk, vocab), min(setting.row_chunk, rows)
    starts, _ = chunks.chunk_starts(vocab, size)
    parts = -(-rows // chunk)

    def of_rows(part):
        def body(carry, start):
            best, token = carry
            part_of_head = jax.lax.dynamic_slice_in_dim(head, start, size, axis=axis)
            logits = reference.target_logits(part, part_of_head, setting)
            found = jnp.max(logits, axis=1)
            columns = start + jnp.arange(size, dtype=jnp.int32)[None, :]
            none = jnp.iinfo(jnp.int32).max
            at = jnp.min(jnp.where(logits == found[:, None], columns, none), axis=1)
            return (jnp.maximum(best, found), jnp.where(found > best, at, token)), None

        carry = (jnp.full((chunk,), -jnp.inf, jnp.float32), jnp.zeros((chunk,), jnp.int32))
        return jax.lax.scan(body, carry, jnp.asarray(starts, jnp.int32))[0][1]

    hidden = chunks.in_chunks(hidden, parts, chunk)
    return jax.lax.map(of_rows, hidden).reshape(parts * chunk)[:rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(setting: Setting, implementation, inputs: Inputs):
    results = _run(setting, implementation, inputs, with_gradient=False)
    return jnp.sum(inputs.weights * results.losses), results


def _forward(setting, implementation, inputs):
    results = _run(setting, implementation, inputs, with_gradient=True)
    kept = (results.d_hidden, results.d_head)
    results = results._replace(d_hidden=None, d_head=None)
    return (jnp.sum(inputs.weights * results.losses), results), kept


def _backward(setting, implementation, kept, cotangents):
    d_hidden, d_head = kept
    slope = cotangents[0]
    # None: no cotangent, for what is not trained. Zeros of a head's size would cost memory.
    return (
        Inputs(
            draft_hidden=d_hidden * slope.astype(d_hidden.dtype),
            draft_head=None if d_head is None else d_head * slope.astype(d_head.dtype),
            target_hidden=None,
            target_head=None,
            draft_token_ids=None,
            weights=None,
        ),
    )


_differentiable.defvjp(_forward, _backward)


def _run(setting: Setting, implementation, inputs: Inputs, *, with_gradient: bool):
    static = {"setting": setting, "with_gradient": with_gradient}
    run = select(
        functools.partial(reference.vocab_loss, **static),
        functools.partial(triton.vocab_loss, **static),
        implementation,
        name="vocab_loss",
        unsupported=triton.unsupported_reason(inputs),
    )
    return run(inputs)


def _token_ids(columns: Int[Array, "R"], draft_token_ids) -> Int[Array, "R"]:
    return columns if draft_token_ids is None else draft_token_ids[columns]


def _is_in(tokens: Int[Array, "R"], draft_token_ids, vocab: int) -> Bool[Array, "R"]:
    if draft_token_ids is None:
        return jnp.ones_like(tokens, bool)
    kept = jnp.sort(draft_token_ids)
    at = jnp.minimum(jnp.searchsorted(kept, tokens), vocab - 1)
    return kept[at] == tokens


def _check(draft_hidden, draft_head, target_hidden, target_head, loss, outside, head_axis):
    if loss not in LOSSES:
        raise ValueError(f"loss {loss!r} is unknown; choose one of {', '.join(LOSSES)}")
    if outside not in OUTSIDE:
        raise ValueError(f"outside={outside!r} is unknown; choose one of {', '.join(OUTSIDE)}")
    for name, hidden, head in (
        ("draft", draft_hidden, draft_head),
        ("target", target_hidden, target_head),
    ):
        if hidden.dtype != head.dtype:
            raise ValueError(
                f"{name} hidden states are {hidden.dtype}, their head is {head.dtype}; cast one"
            )
    width = target_head.shape[1 - head_axis]
    if width != target_hidden.shape[1]:
        raise ValueError(
            f"the target head is {target_head.shape}, its hidden states {target_hidden.shape[1]} "
            "wide; [Ht, V] is expected, or [V, Ht] with target_head_transposed=True"
        )
