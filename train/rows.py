"""A batch as the objective sees it: aligned rows, the draw of rollouts, and the target's head.

Alignment itself is in `alignment`, sampling in `sampling`, layout in `partition`; here they are
applied to every sequence of a batch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.vocab_loss import target_argmax
from peagle_jax.models.primitives import rms_norm
from peagle_jax.models.target import Target
from train.alignment import drafter_rows, shift_left
from train.partition import ChunkPlan, pack_rollouts, pack_segments
from train.sampling import sample_rollouts


class TrainingRows(NamedTuple):
    """Depth-0 rows of B sequences of n slots, after the shift (see `alignment.DrafterRows`).

    tokens Int32 [B, n] · taps [B, n, A*Ht] · last_hidden [B, n, Ht], normed · loss_mask Bool [B, n]
    · document_ids Int32 [B, n], -1 without a row · positions Int32 [B, n] · target_tokens Int32
    [B, n], the target's greedy tokens, or None where they are computed from last_hidden
    """

    tokens: Array
    taps: Array
    last_hidden: Array
    loss_mask: Array
    document_ids: Array
    positions: Array
    target_tokens: Array | None = None


class Chunks(NamedTuple):
    """Mask rows of B sequences in C chunks of R slots (see `partition.RolloutChunks`).

    anchors, depths Int32 [B, C, R]; rows_used Int32 [B, C]; rows_left_out Int32 [B]
    """

    anchors: Array
    depths: Array
    rows_used: Array
    rows_left_out: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetHead:
    """What turns the target's last hidden state into its logits.

    matrix: [Ht, V], or [V, Ht] with `transposed` (a tied embedding). of_draft: its columns of the
    draft vocabulary in draft order, None where the vocabularies are the same. norm: scale of the
    final norm, for hidden states stored before it; None for normed ones.
    """

    matrix: Any
    of_draft: Any = None
    norm: Any = None
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    norm_eps: float = dataclasses.field(default=1e-6, metadata={"static": True})
    norm_cast: str = dataclasses.field(default="before_weight", metadata={"static": True})

    def normed(self, hidden: Array) -> Array:
        """Hidden states as the head reads them, in the head's dtype."""
        if self.norm is not None:
            hidden = rms_norm(hidden, self.norm, self.norm_eps, self.norm_cast)
        return hidden.astype(self.matrix.dtype)

    def greedy_tokens(self, hidden: Float[Array, "*rows Ht"]) -> Int32[Array, "*rows"]:
        """The target's greedy token of each row, from hidden states as the store has them."""
        hidden = self.normed(hidden)
        flat = target_argmax(
            hidden.reshape(-1, hidden.shape[-1]),
            self.matrix,
            target_soft_cap=self.soft_cap,
            target_head_transposed=self.transposed,
        )
        return flat.reshape(hidden.shape[:-1])


def target_head(target: Target, kept: Array | None = None, *, residual: bool = False) -> TargetHead:
    """The head of a target, with the columns of the draft vocabulary picked once.

    residual: the hidden states to come are those before the final norm.
    """
    from peagle_jax.models.parameters import weight

    config = target.config
    tied = config.tied_embeddings
    matrix = weight(target.embedding if tied else target.head, target.dtype)
    of_draft = None
    if kept is not None:
        of_draft = jnp.take(matrix, kept, axis=0 if tied else 1, mode="fill")
    return TargetHead(
        matrix=matrix,
        of_draft=of_draft,
        norm=weight(target.norm, jnp.float32) if residual else None,
        transposed=tied,
        soft_cap=config.final_soft_cap,
        norm_eps=config.norm_eps,
        norm_cast=config.norm_cast,
    )


def training_rows(
    tokens: Int32[Array, "B S"],
    taps: Float[Array, "B S AH"],
    last_hidden: Float[Array, "B S Ht"],
    loss_mask: Bool[Array, "B S"],
    document_ids: Int32[Array, "B S"],
    target_tokens: Int32[Array, "B S"] | None = None,
) -> TrainingRows:
    """`alignment.drafter_rows` for every sequence of a batch; target_tokens go as last_hidden."""

    def one(*arrays: Array) -> TrainingRows:
        rows = drafter_rows(*arrays)
        return TrainingRows(**{f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)})

    rows = jax.vmap(one)(tokens, taps, last_hidden, loss_mask, document_ids)
    if target_tokens is None:
        return rows
    return rows._replace(target_tokens=jax.vmap(shift_left)(target_tokens))


def draw(
    key: Array,
    sequence_numbers: Int32[Array, "B"],
    loss_mask: Bool[Array, "B n"],
    document_ids: Int32[Array, "B n"],
    table: Int32[Array, "K n1"],
) -> Int32[Array, "B n"]:
    """Rollout lengths of every sequence, each under a key of its own.

    sequence_numbers: place of each sequence in the global batch, so that a draw depends neither on
    the number of processes nor on how the batch is cut into steps of accumulation.
    """

    def one(number: Array, mask: Array, documents: Array) -> Array:
        return sample_rollouts(jax.random.fold_in(key, number), mask, documents, table)

    return jax.vmap(one)(sequence_numbers, loss_mask, document_ids)


def chunk_rollouts(lengths: Int32[Array, "B n"], plan: ChunkPlan) -> Chunks:
    """`partition.pack_rollouts` for every sequence."""

    def one(own: Array) -> Chunks:
        chunks = pack_rollouts(own, plan)
        return Chunks(*(getattr(chunks, name) for name in Chunks._fields))

    return jax.vmap(one)(lengths)


def segment_rollouts(lengths: Int32[Array, "B n"], num_segments: int, capacity: int) -> Chunks:
    """`partition.pack_segments` for every sequence: chunk s holds segment s of Algorithm 1."""

    def one(own: Array) -> Chunks:
        chunks = pack_segments(own, num_segments, capacity)
        return Chunks(*(getattr(chunks, name) for name in Chunks._fields))

    return jax.vmap(one)(lengths)
