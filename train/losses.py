"""What the parts of a P-EAGLE step share: the depth-0 stream, losses of rows, and counts.

Which parts there are, and in which order they run forward and backward, is decided in `objective`
(structured) and `algorithm_one`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32

from peagle_jax.models.config import DrafterConfig
from train.forward import MaskInputs, Stream, depth_zero, mask_inputs, mask_rows
from train.parameters import MASK_ROW, Params, build_drafter, kept_ids
from train.partition import ChunkPlan
from train.rows import TargetHead, TrainingRows
from train.spread import row_losses


class Sums(NamedTuple):
    """What a step adds up over rows, chunks, accumulation steps and devices.

    Attributes:
        loss: float32 [], sum of the losses of the counted elements.
        count: int32 [], counted elements: the loss's denominator.
        correct, total: int32 [K], per depth the supervised elements, and those whose argmax is the
            target's over the full vocabulary.
        joint_correct, joint_total: int32 [K], per depth d the rollouts from supervised anchors that
            reach d, and those that are correct at all depths 0 .. d.
    """

    loss: Array
    count: Array
    correct: Array
    total: Array
    joint_correct: Array
    joint_total: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What every objective says of its losses and its computation.

    Attributes:
        config: the drafter's.
        loss: a loss of `pallas_kernels.vocab_loss`.
        outside: what becomes of rows whose target argmax is outside the draft vocabulary.
        train_head: whether the head is among the trained parameters.
        dtype: of the computation.
        mesh: devices, or None for one.
        implementation: see `pallas_kernels.dispatch`.
    """

    config: DrafterConfig
    loss: str = "kl"
    outside: Literal["renormalise", "drop"] = "renormalise"
    train_head: bool = False
    dtype: Any = jnp.float32
    mesh: Mesh | None = None
    implementation: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(LossSettings):
    """Everything about the P-EAGLE objective that is not an array.

    Attributes:
        num_depths: K, depths trained.
        chunks: slots of the rollout chunks; in Algorithm 1 one chunk for each segment.
        partition: "structured" or "algorithm-1".
    """

    num_depths: int
    chunks: ChunkPlan
    partition: Literal["structured", "algorithm-1"] = "structured"


def zero_sums(num_depths: int) -> Sums:
    """Nothing counted yet."""
    none = jnp.zeros((num_depths,), jnp.int32)
    return Sums(jnp.float32(0), jnp.int32(0), none, none, none, none)


def run_stream(
    objective: Objective, learned: Params, frozen: Params, rows: TrainingRows
) -> tuple[Stream, MaskInputs | None]:
    """The depth-0 stream and what mask rows are fed; None for a drafter without mask rows."""
    drafter = build_drafter(objective.config, {**frozen, **learned}, objective.dtype)
    stream = depth_zero(drafter, rows, mesh=objective.mesh, implementation=objective.implementation)
    if not objective.config.parallel_drafting:
        return stream, None
    return stream, mask_inputs(drafter, learned.get(MASK_ROW))


def target_labels(
    settings: LossSettings, frozen: Params, head: TargetHead, rows: TrainingRows
) -> Int32[Array, "B n"] | None:
    """The target's greedy token per row where the draft vocabulary cannot tell it."""
    if kept_ids(settings.config, frozen) is None:
        return None
    if rows.target_tokens is not None:
        return rows.target_tokens
    return head.greedy_tokens(rows.last_hidden)


def losses_of(
    settings: LossSettings,
    params: Params,
    hidden: Array,
    head: TargetHead,
    target_hidden: Array,
    labels: Array | None,
    supervised: Array,
) -> tuple[Array, Array, Array]:
    """Loss sum, number of elements in it, and agreement [B, R], of rows with their targets."""
    kept = kept_ids(settings.config, params)
    loss, agreement, inside = row_losses(
        hidden,
        params["head"].astype(hidden.dtype),
        head.normed(target_hidden),
        head.matrix if kept is None else head.of_draft,
        kept,
        labels,
        supervised.astype(jnp.float32),
        mesh=settings.mesh,
        loss=settings.loss,
        outside=settings.outside,
        target_soft_cap=head.soft_cap,
        target_head_transposed=head.transposed,
        head_trainable=settings.train_head,
        implementation=settings.implementation,
    )
    counted = supervised if settings.outside == "renormalise" else supervised & inside
    return loss, jnp.sum(counted, dtype=jnp.int32), agreement & supervised


def depth_zero_loss(
    objective: Objective,
    params: Params,
    hidden: Array,
    head: TargetHead,
    rows: TrainingRows,
    labels: Array | None,
    charged: Array | None = None,
) -> tuple[Array, Sums, Bool[Array, "B n"]]:
    """Loss and counts of depth-0 rows (those `charged`), and which of them are correct."""
    supervised = rows.loss_mask if charged is None else rows.loss_mask & charged
    loss, count, correct = losses_of(
        objective, params, hidden, head, rows.last_hidden, labels, supervised
    )
    total = _at_depth_zero(objective, supervised)
    hits = _at_depth_zero(objective, correct)
    return loss, Sums(loss, count, hits, total, hits, total), correct


def _at_depth_zero(objective: Objective, mask: Array) -> Array:
    number = jnp.sum(mask, dtype=jnp.int32)
    return jnp.zeros((objective.num_depths,), jnp.int32).at[0].set(number)


def chunk_hidden(
    objective: Objective,
    params: Params,
    stream: Stream,
    mask: MaskInputs,
    rows: TrainingRows,
    anchors: Int32[Array, "B R"],
    depths: Int32[Array, "B R"],
) -> Float[Array, "B R H"]:
    """Hidden states of one chunk of rollouts; `params` needs layers and norm alone."""
    drafter = build_drafter(objective.config, params, objective.dtype)
    return mask_rows(
        drafter,
        stream,
        mask,
        rows,
        anchors,
        depths,
        mesh=objective.mesh,
        implementation=objective.implementation,
    )


def chunk_loss(
    objective: Objective,
    params: Params,
    hidden: Float[Array, "B R H"],
    head: TargetHead,
    rows: TrainingRows,
    labels: Array | None,
    correct: Bool[Array, "B n"],
    anchors: Int32[Array, "B R"],
    depths: Int32[Array, "B R"],
) -> tuple[Array, Sums]:
    """Loss and counts of one chunk of rollouts, from its hidden states.

    params: the head (and d2t) alone are read. correct: depth-0 rows that are supervised and
    correct, for the joint counts.
    """
    labelled = anchors + depths
    valid = depths > 0
    own_labels = None if labels is None else jnp.take_along_axis(labels, labelled, axis=1)
    target_hidden = jnp.take_along_axis(rows.last_hidden, labelled[:, :, None], axis=1)
    # The draw has supervised rows alone; the mask is read again so that none slips in.
    supervised = valid & jnp.take_along_axis(rows.loss_mask, labelled, axis=1)
    loss, count, agrees = losses_of(
        objective, params, hidden, head, target_hidden, own_labels, supervised
    )
    misses = jnp.cumsum(jnp.where(valid, ~agrees, False).astype(jnp.int32), axis=1)
    before = jnp.pad(misses, ((0, 0), (1, 0)))
    here = jnp.arange(depths.shape[1], dtype=jnp.int32)[None, :]
    begins = jnp.where(valid, here + 1 - depths, 0)
    own_misses = misses - jnp.take_along_axis(before, begins, axis=1)
    served = supervised & jnp.take_along_axis(rows.loss_mask, anchors, axis=1)
    joint = served & (own_misses == 0) & jnp.take_along_axis(correct, anchors, axis=1)

    def by_depth(mask: Array) -> Array:
        at = jnp.where(mask, depths, objective.num_depths)
        return jnp.zeros((objective.num_depths,), jnp.int32).at[at].add(1, mode="drop")

    counts = (by_depth(agrees), by_depth(supervised), by_depth(joint), by_depth(served))
    return loss, Sums(loss, count, *counts)


def add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
