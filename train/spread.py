"""Training operations over a mesh: which rows, heads and batches each device works on.

Attention and vocabulary loss are opaque to the compiler's partitioner (loops over tiles, kernels),
so under a mesh they run once per shard inside `shard_map`. Rows go over `sequence`, sequences over
`data` and `fsdp`, heads over `tensor`; keys and values of the depth-0 rows are gathered along
`sequence`. A rollout never crosses a shard: the caller lays out whole chunks per shard. Without a
mesh these are the plain operations.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from pallas_kernels.document_attention import document_attention
from pallas_kernels.interval_attention.api import interval_attention
from pallas_kernels.interval_attention.intervals import document_intervals
from pallas_kernels.rollout_attention import rollout_attention
from pallas_kernels.vocab_loss import vocab_loss

BATCH_AXES = ("data", "fsdp")


def sequence_shards(mesh: Mesh | None) -> int:
    """Shards that the rows of one sequence are cut into."""
    return 1 if mesh is None else mesh.shape["sequence"]


def batch_shards(mesh: Mesh | None) -> int:
    """Shards that a batch is cut into."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def put(x: Array, sharding: NamedSharding) -> Array:
    """A host-local array, the same in every process, onto a mesh that may span processes."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable or not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])


def place_rows(x: Array, mesh: Mesh | None) -> Array:
    """Tell the compiler that [B, rows, ...] lies over batch and sequence."""
    if mesh is None:
        return x
    spec = PartitionSpec(BATCH_AXES, "sequence", *[None] * (x.ndim - 2))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def attend_documents(
    q: Array,
    k: Array,
    v: Array,
    document_ids: Array,
    *,
    scale: float,
    window: int | None,
    mesh: Mesh | None,
    implementation: Any = None,
) -> Array:
    """`document_attention` of [B, n, N, D] rows."""
    if mesh is None:
        return document_attention(
            q, k, v, document_ids, scale=scale, window=window, implementation=implementation
        )
    first, last = document_intervals(document_ids, window)

    def local(q: Array, k: Array, v: Array, first: Array, last: Array) -> Array:
        return interval_attention(q, k, v, first, last, scale=scale, implementation=implementation)[
            0
        ]

    heads = _heads(mesh, k.shape[2])
    rows = PartitionSpec(BATCH_AXES, "sequence", heads, None)
    keys = PartitionSpec(BATCH_AXES, None, heads, None)
    flat = PartitionSpec(BATCH_AXES, "sequence")
    return _shard(local, mesh, (rows, keys, keys, flat, flat), rows)(q, k, v, first, last)


def attend_rollouts(
    q: Array,
    prefix: tuple[Array, Array],
    own: tuple[Array, Array],
    anchors: Array,
    depths: Array,
    document_ids: Array,
    *,
    scale: float,
    window: int | None,
    mesh: Mesh | None,
    implementation: Any = None,
) -> Array:
    """`rollout_attention` of [B, R, N, D] mask rows; depth 0 marks a padding row."""
    run = functools.partial(
        rollout_attention, scale=scale, window=window, implementation=implementation
    )
    arrays = (q, *prefix, *own, anchors, depths, depths > 0, document_ids)
    if mesh is None:
        return run(*arrays)
    heads = _heads(mesh, prefix[0].shape[2])
    rows = PartitionSpec(BATCH_AXES, "sequence", heads, None)
    keys = PartitionSpec(BATCH_AXES, None, heads, None)
    flat, documents = PartitionSpec(BATCH_AXES, "sequence"), PartitionSpec(BATCH_AXES, None)
    specs = (rows, keys, keys, rows, rows, flat, flat, flat, documents)
    return _shard(run, mesh, specs, rows)(*arrays)


def attend_unrolled(
    q: Array,
    prefix: tuple[Array, Array],
    own: tuple[Array, Array],
    step: int,
    document_ids: Array,
    *,
    scale: float,
    window: int | None,
    mesh: Mesh | None,
    implementation: Any = None,
) -> Array:
    """Attention of step t of an unrolled drafter: one row per anchor, [B, n, N, D].

    Row p sees the depth-0 keys of its document up to p, and its own keys of steps 1 .. t. own: keys
    and values [B, n, t, KV, D]. The two softmaxes are merged by their log-sum-exp.
    """
    first, last = document_intervals(document_ids)
    if window is not None:
        # Row p stands at position p + t; its anchor stays visible, as in a rollout.
        first = jnp.minimum(jnp.maximum(first, last + step - (window - 1)), last)
        # An empty interval marks padding and must stay empty.
        first = jnp.where(document_ids >= 0, first, last + 1)

    def local(q, k, v, own_k, own_v, first, last):
        out, lse = interval_attention(
            q, k, v, first, last, scale=scale, implementation=implementation
        )
        batch, rows, heads, width = q.shape
        kv_heads = k.shape[2]
        grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, width)
        scores = jnp.einsum(
            "bnkgd,bntkd->bnkgt", grouped, own_k, preferred_element_type=jnp.float32
        )
        scores = (scores * jnp.float32(scale)).reshape(batch, rows, heads, -1)
        lse = jnp.moveaxis(lse, 1, 2)
        total = jnp.logaddexp(lse, jax.nn.logsumexp(scores, axis=-1))
        own_weights = jnp.exp(scores - total[..., None])
        own_weights = own_weights.reshape(batch, rows, kv_heads, heads // kv_heads, -1)
        added = jnp.einsum("bnkgt,bntkd->bnkgd", own_weights, own_v.astype(jnp.float32))
        share = jnp.exp(lse - total)[..., None]
        return (out.astype(jnp.float32) * share + added.reshape(q.shape)).astype(q.dtype)

    arrays = (q, *prefix, *own, first, last)
    if mesh is None:
        return local(*arrays)
    heads = _heads(mesh, prefix[0].shape[2])
    rows = PartitionSpec(BATCH_AXES, "sequence", heads, None)
    keys = PartitionSpec(BATCH_AXES, None, heads, None)
    chain = PartitionSpec(BATCH_AXES, "sequence", None, heads, None)
    flat = PartitionSpec(BATCH_AXES, "sequence")
    specs = (rows, keys, keys, chain, chain, flat, flat)
    return _shard(local, mesh, specs, rows)(*arrays)


def row_losses(
    hidden: Array,
    head: Array,
    target_hidden: Array,
    target_matrix: Array,
    kept: Array | None,
    labels: Array | None,
    weights: Array,
    *,
    mesh: Mesh | None,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """`vocab_loss` of [B, R] rows: the loss sum, and agreement and in-vocabulary [B, R].

    kept: target id of each draft id, with `labels` the target's argmax per row; both None where
    the vocabularies are the same.
    """
    batch, rows = weights.shape

    def local(hidden, head, target_hidden, target_matrix, weights, *vocabulary):
        shape = weights.shape
        ids, argmax = vocabulary if vocabulary else (None, None)
        out = vocab_loss(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            target_hidden.reshape(-1, target_hidden.shape[-1]),
            target_matrix,
            ids,
            weights.reshape(-1),
            target_head_selected=ids is not None,
            target_argmax=None if argmax is None else argmax.reshape(-1),
            needs_acceptance=False,
            **options,
        )
        sums = out.loss_sum.reshape(1, 1)
        return sums, out.agreement.reshape(shape), out.in_draft_vocabulary.reshape(shape)

    arrays = (hidden, head, target_hidden, target_matrix, weights)
    vocabulary = () if kept is None else (kept, labels)
    if mesh is None:
        sums, agreement, inside = local(*arrays, *vocabulary)
        return sums[0, 0], agreement, inside
    ways = mesh.shape["sequence"] * mesh.shape["tensor"]
    over = ("sequence", "tensor") if rows % ways == 0 else ("sequence",)
    wide, flat = PartitionSpec(BATCH_AXES, over, None), PartitionSpec(BATCH_AXES, over)
    specs = (wide, PartitionSpec(), wide, PartitionSpec(), flat)
    specs += () if kept is None else (PartitionSpec(), flat)
    run = _shard(local, mesh, specs, (flat, flat, flat))
    sums, agreement, inside = run(*arrays, *vocabulary)
    return jnp.sum(sums), agreement, inside


def _heads(mesh: Mesh, kv_heads: int) -> str | None:
    return "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None


def _shard(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
