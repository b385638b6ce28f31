"""Algorithm 1 of the P-EAGLE paper: segments of a sequence, forward and backward one by one.

Segment s holds its own depth-0 rows and rollouts, and recomputes all depth-0 rows before them as
context, with gradient. It is here to be compared with; `objective` has the cheaper partition.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from train.losses import (
    Objective,
    Sums,
    add,
    chunk_hidden,
    chunk_loss,
    depth_zero_loss,
    run_stream,
    target_labels,
    zero_sums,
)
from train.parameters import Params
from train.partition import segment_starts
from train.rows import Chunks, TargetHead, TrainingRows, segment_rollouts


def segment_loss(
    objective: Objective,
    learned: Params,
    frozen: Params,
    head: TargetHead,
    rows: TrainingRows,
    labels: Array | None,
    chunks: Chunks,
    segment: int,
    correct_before: Array | None,
) -> tuple[Array, tuple[Sums, Array]]:
    """Loss of one segment: its own depth-0 rows and rollouts, behind the whole depth-0 prefix.

    correct_before: correct depth-0 rows [B, n] of the segments before; returned with this one's.
    """
    num_rows = rows.tokens.shape[1]
    starts = segment_starts(num_rows, objective.chunks.num_chunks)
    first, end = starts[segment], starts[segment + 1]
    context = rows._replace(
        tokens=rows.tokens[:, :end],
        taps=rows.taps[:, :end],
        document_ids=rows.document_ids[:, :end],
        positions=rows.positions[:, :end],
    )
    stream, mask = run_stream(objective, learned, frozen, context)
    own = rows._replace(
        last_hidden=rows.last_hidden[:, first:end], loss_mask=rows.loss_mask[:, first:end]
    )
    own_labels = None if labels is None else labels[:, first:end]
    params = {**frozen, **learned}
    loss, sums, found = depth_zero_loss(
        objective, params, stream.hidden[:, first:end], head, own, own_labels
    )
    correct = jnp.zeros_like(rows.loss_mask) if correct_before is None else correct_before
    correct = correct.at[:, first:end].set(found)
    if objective.num_depths == 1:
        return loss, (sums, correct)
    visible = rows._replace(document_ids=context.document_ids, positions=context.positions)
    chunk = (chunks.anchors[:, segment], chunks.depths[:, segment])
    hidden = chunk_hidden(objective, params, stream, mask, visible, *chunk)
    added, counted = chunk_loss(objective, params, hidden, head, visible, labels, correct, *chunk)
    return loss + added, (add(sums, counted), correct)


def segments_grad(
    objective: Objective,
    learned: Params,
    frozen: Params,
    head: TargetHead,
    rows: TrainingRows,
    lengths: Array,
) -> tuple[Sums, Params]:
    """Algorithm 1 as the paper runs it: forward and backward of one segment after the other."""
    labels = target_labels(objective, frozen, head, rows)
    plan = objective.chunks
    chunks = segment_rollouts(lengths, plan.num_chunks, plan.capacity)

    def of_segment(segment: int) -> Callable[[Array], tuple[Sums, Params, Array]]:
        def run(correct: Array) -> tuple[Sums, Params, Array]:
            (_, (own, correct)), grads = jax.value_and_grad(
                lambda p: segment_loss(
                    objective, p, frozen, head, rows, labels, chunks, segment, correct
                ),
                has_aux=True,
            )(learned)
            return own, grads, correct

        return run

    segments = [of_segment(segment) for segment in range(plan.num_chunks)]

    def step(segment: Array, carry: tuple[Sums, Params, Array]) -> tuple[Sums, Params, Array]:
        sums, grads, correct = carry
        own, added, correct = jax.lax.switch(segment, segments, correct)
        return add(sums, own), add(grads, added), correct

    # A loop, or the compiler may keep the gradients of all segments at once.
    nothing = (
        zero_sums(objective.num_depths),
        jax.tree.map(jnp.zeros_like, learned),
        jnp.zeros_like(rows.loss_mask),
    )
    sums, grads, _ = jax.lax.fori_loop(jnp.int32(0), jnp.int32(plan.num_chunks), step, nothing)
    return sums, grads
