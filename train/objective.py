"""The P-EAGLE objective: loss and gradients of depth-0 rows and rollouts, in two partitions.

Structured (the default): the depth-0 stream runs once; the rollouts run in chunks, each forward and
backward in one step of a loop that sums the gradients of parameters and of the stream's keys and
values; then the stream goes backward once. No row is recomputed for the partition's sake, and
chunks that the draw left empty are skipped. Algorithm 1 of the paper is the second mode: segment by
segment, each with its whole depth-0 prefix recomputed. Both equal the unpartitioned loss.

Losses and gradients here are sums over supervised elements; whoever has summed over all rows,
chunks, accumulation steps and devices divides by `Sums.count` once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from peagle_jax.models.config import DrafterConfig
from train.algorithm_one import segment_loss, segments_grad
from train.forward import MaskInputs, Stream, mask_rows
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
from train.parameters import Params, build_drafter
from train.partition import ChunkPlan, plan_chunks, segment_capacity
from train.rows import Chunks, TargetHead, TrainingRows, chunk_rollouts, segment_rollouts
from train.sampling import CodConfig, max_mask_rows
from train.spread import sequence_shards

# Most slots of a rollout chunk where nothing else is asked for.
CHUNK_ROWS = 2048
# Chunks are not cut smaller than this for the sake of less padding.
FEWEST_ROWS = 256
# Parameters that mask rows read; the rest reaches them through MaskInputs and the stream.
_READ_BY_MASK_ROWS = ("layers", "norm", "head")


def make_objective(
    config: DrafterConfig,
    cod: CodConfig,
    num_rows: int,
    *,
    partition: str = "structured",
    chunk_rows: int | None = None,
    num_chunks: int | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Objective:
    """An objective whose chunks hold every draw of `cod` on sequences of `num_rows`.

    chunk_rows, num_chunks: size or number of the chunks, one of them; in Algorithm 1 `num_chunks`
    is the number of segments. Under a mesh each shard of the sequence axis has chunks of its own,
    and their number is rounded up to a multiple of the shards.

    Raises:
        ValueError: an unknown partition, a drafter without mask rows or with draft ids of no target
            id, or sizes that the partition cannot use.
    """
    if cod.num_depths > 1 and not config.parallel_drafting:
        raise ValueError("the P-EAGLE objective needs a drafter with mask rows (mask_hidden).")
    if config.draft_vocab_size > (config.target_vocab_size or config.vocab_size):
        raise ValueError(
            f"the draft vocabulary has {config.draft_vocab_size} ids, the target "
            f"{config.target_vocab_size or config.vocab_size}; train without padded draft ids."
        )
    longest, most = cod.num_depths - 1, max_mask_rows(cod, num_rows)
    shards = sequence_shards(mesh)
    if num_rows % shards:
        raise ValueError(f"{num_rows} rows do not divide among {shards} sequence shards.")
    if partition == "algorithm-1":
        if num_chunks is None or shards > 1:
            raise ValueError("algorithm-1 needs num_chunks (segments) and no sequence shards.")
        capacity = segment_capacity(num_rows, num_chunks, cod.num_depths, most)
        plan = ChunkPlan(num_chunks=num_chunks, capacity=capacity)
    elif partition == "structured":
        if chunk_rows is None and num_chunks is None:
            chunk_rows = default_chunk_rows(most, longest)
        plan = plan_chunks(most, longest, num_chunks=num_chunks, capacity=chunk_rows)
        rounded = -(-plan.num_chunks // shards) * shards
        plan = dataclasses.replace(plan, num_chunks=rounded)
    else:
        raise ValueError(f"partition is {partition!r}; choose structured or algorithm-1.")
    return Objective(
        config=config,
        num_depths=cod.num_depths,
        partition=partition,
        chunks=plan,
        mesh=mesh,
        **options,
    )


def default_chunk_rows(most: int, longest: int) -> int:
    """Slots of a chunk: 24 chunks where all is supervised, so that the last, part-filled one is a
    small part of them even where half is; at most CHUNK_ROWS, for memory. Short sequences have
    fewer, as each chunk reads all parameters and adds to all their gradients."""
    count = max(1, min(24, -(-most // FEWEST_ROWS)))
    rows = -(-most // count)
    multiple = 64 if rows > FEWEST_ROWS else 16
    return max(min(CHUNK_ROWS, -(-rows // multiple) * multiple), longest, 1)


def loss_sum(
    objective: Objective,
    learned: Params,
    frozen: Params,
    head: TargetHead,
    rows: TrainingRows,
    lengths: Int32[Array, "B n"],
) -> tuple[Float[Array, ""], Sums]:
    """Sum of the losses, differentiable by `learned`, and what else is counted.

    For training use `value_and_grad`, which gives the same without recomputing the chunks.

    Args:
        learned, frozen: see `parameters.split`.
        lengths: rollout length of each anchor (`rows.draw`).
    """
    labels = target_labels(objective, frozen, head, rows)
    if objective.partition == "algorithm-1":
        total, sums, correct = jnp.float32(0), zero_sums(objective.num_depths), None
        chunks = segment_rollouts(lengths, objective.chunks.num_chunks, objective.chunks.capacity)
        for segment in range(objective.chunks.num_chunks):
            part = jax.checkpoint(
                lambda p, c, segment=segment: segment_loss(
                    objective, p, frozen, head, rows, labels, chunks, segment, c
                )
            )
            loss, (own, correct) = part(learned, correct)
            total, sums = total + loss, add(sums, own)
        return total, sums
    stream, mask = run_stream(objective, learned, frozen, rows)
    loss, sums, correct = depth_zero_loss(
        objective, {**frozen, **learned}, stream.hidden, head, rows, labels
    )

    if objective.num_depths == 1:
        return loss, sums

    def step(carry: tuple[Array, Sums], chunk: tuple[Array, Array]) -> tuple[Any, None]:
        total, sums = carry

        def part(read: Params, stream: Stream, mask: MaskInputs) -> tuple[Array, Sums]:
            def run() -> tuple[Array, Sums]:
                params = {**frozen, **read}
                hidden = chunk_hidden(objective, params, stream, mask, rows, *chunk)
                return chunk_loss(objective, params, hidden, head, rows, labels, correct, *chunk)

            nothing = zero_sums(objective.num_depths)
            return jax.lax.cond(jnp.any(chunk[1] > 0), run, lambda: (nothing.loss, nothing))

        added, own = jax.checkpoint(part)(_of_mask_rows(learned), stream, mask)
        return (total + added, add(sums, own)), None

    (loss, sums), _ = jax.lax.scan(step, (loss, sums), _super_chunks(objective, lengths))
    return loss, sums


def value_and_grad(
    objective: Objective,
    learned: Params,
    frozen: Params,
    head: TargetHead,
    rows: TrainingRows,
    lengths: Int32[Array, "B n"],
) -> tuple[Sums, Params]:
    """What is counted, and the gradient of the loss sum by `learned`, in float32.

    Arguments as of `loss_sum`.
    """
    if objective.partition == "algorithm-1":
        return segments_grad(objective, learned, frozen, head, rows, lengths)
    labels = target_labels(objective, frozen, head, rows)
    without_head = {name: value for name, value in learned.items() if name != "head"}
    (stream, mask), pull = jax.vjp(lambda p: run_stream(objective, p, frozen, rows), without_head)

    def at_depth_zero(hidden: Array, trained_head: Params) -> tuple[Array, Any]:
        params = {**frozen, **learned, **trained_head}
        loss, sums, correct = depth_zero_loss(objective, params, hidden, head, rows, labels)
        return loss, (sums, correct)

    own_head = {"head": learned["head"]} if objective.train_head else {}
    (_, (sums, correct)), (d_hidden, d_head) = jax.value_and_grad(
        at_depth_zero, argnums=(0, 1), has_aux=True
    )(stream.hidden, own_head)

    read = {n: v for n, v in _of_mask_rows(learned).items() if n != "head"}
    shared = (read, (stream.keys, stream.values), mask)
    grads = jax.tree.map(jnp.zeros_like, shared)

    def run_chunk(carry: tuple[Any, Any, Any], chunk: tuple[Array, Array]) -> tuple[Any, Any, Any]:
        sums, d_head, grads = carry

        def forward(read: Params, keys_values: Any, mask: MaskInputs) -> Array:
            prefix = stream._replace(keys=keys_values[0], values=keys_values[1])
            return chunk_hidden(objective, read, prefix, mask, rows, *chunk)

        def loss(hidden: Array, trained_head: Params) -> tuple[Array, Sums]:
            params = {**frozen, **learned, **trained_head}
            return chunk_loss(objective, params, hidden, head, rows, labels, correct, *chunk)

        hidden, pull_chunk = jax.vjp(forward, *shared)
        (_, own), (d_hidden, added_head) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            hidden, own_head
        )
        return add(sums, own), add(d_head, added_head), add(grads, pull_chunk(d_hidden))

    carry = (sums, d_head, grads)
    if objective.num_depths > 1:
        anchors, depths = _super_chunks(objective, lengths)
        # Chunks fill up from the first: those that the draw left empty are not visited at all.
        used = jnp.sum(jnp.any(depths > 0, axis=(1, 2)), dtype=jnp.int32)
        carry = jax.lax.fori_loop(
            jnp.int32(0), used, lambda i, c: run_chunk(c, (anchors[i], depths[i])), carry
        )
    sums, d_head, grads = carry
    d_read, (d_keys, d_values), d_mask = grads
    (d_learned,) = pull(
        (Stream(d_hidden, jnp.zeros_like(stream.residual), d_keys, d_values), d_mask)
    )
    d_learned |= {name: d_learned[name] + value for name, value in d_read.items()}
    d_learned |= d_head
    return sums, d_learned


def element_hidden(
    objective: Objective,
    learned: Params,
    frozen: Params,
    rows: TrainingRows,
    lengths: Int32[Array, "B n"],
) -> tuple[Float[Array, "B n H"], Float[Array, "B C R H"], Chunks]:
    """Hidden states behind the final norm of depth-0 rows and of all chunks, to be looked at."""
    chunks = chunk_rollouts(lengths, objective.chunks)
    stream, mask = run_stream(objective, learned, frozen, rows)
    drafter = build_drafter(objective.config, {**frozen, **learned}, objective.dtype)

    def one(chunk: tuple[Array, Array]) -> Array:
        return mask_rows(
            drafter, stream, mask, rows, *chunk, implementation=objective.implementation
        )

    by_chunk = (jnp.moveaxis(chunks.anchors, 1, 0), jnp.moveaxis(chunks.depths, 1, 0))
    return stream.hidden, jnp.moveaxis(jax.lax.map(one, by_chunk), 0, 1), chunks


def _super_chunks(objective: Objective, lengths: Array) -> tuple[Array, Array]:
    """Anchors and depths [C / shards, B, shards * R]: one chunk for every shard at a time."""
    chunks = chunk_rollouts(lengths, objective.chunks)
    shards = sequence_shards(objective.mesh)
    plan = objective.chunks

    def stack(values: Array) -> Array:
        steps = plan.num_chunks // shards
        values = values.reshape(values.shape[0], steps, shards * plan.capacity)
        return jnp.moveaxis(values, 1, 0)

    return stack(chunks.anchors), stack(chunks.depths)


def _of_mask_rows(learned: Params) -> Params:
    return {n: v for n, v in learned.items() if n.split(".")[0] in _READ_BY_MASK_ROWS}
