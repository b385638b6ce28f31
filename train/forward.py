"""The drafter on training rows: the depth-0 stream once, and mask rows against its keys and values.

A depth-0 row never sees a mask row, and a mask row sees the depth-0 rows of its document up to its
anchor and its own rollout. So the depth-0 rows run first, on their own, and leave keys and values
per layer; mask rows then run in any grouping that keeps a rollout whole. No loss is taken here.
(P-EAGLE, arXiv 2602.01469; its dense mask is the oracle of the tests.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from peagle_jax.models.drafter import Drafter
from peagle_jax.models.layers import (
    attention_inputs,
    attention_output,
    attention_scale,
    mlp_block,
)
from peagle_jax.models.primitives import norm
from train.rows import TrainingRows
from train.spread import attend_documents, attend_rollouts, place_rows

# MLPs of longer streams run block by block, so that their inner rows never exist all at once.
MLP_BLOCK = 16_384
# Shorter depth-0 streams keep what their layers compute: a layer's inner rows are small then, and
# running it again in the backward pass costs a quarter of its work.
RECOMPUTED_FROM = 2_048


class MaskInputs(NamedTuple):
    """What mask rows are fed, float32 [H]: the mask token's embedding, the fused mask vector."""

    embedded: Array
    fused: Array


class Stream(NamedTuple):
    """The depth-0 stream of B sequences of n rows.

    hidden: after the final norm, [B, n, H]. residual: before it. keys, values: per layer
    [B, n, KV, D], rotated, float32 so that what the chunks add to their gradients is summed in
    float32.
    """

    hidden: Array
    residual: Array
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def mask_inputs(drafter: Drafter, mask_row: Float[Array, " H"] | None = None) -> MaskInputs:
    """What mask rows are fed; `mask_row` stands for the mask token's row of the embedding."""
    config = drafter.config
    if mask_row is None:
        # A slice, whose derivative is a pad. A second look-up's scatter into a table sharded over
        # `tensor` gave wrong gradients on a mesh (jax 0.10).
        token, table = config.mask_token_id, drafter.embedding.get_value()
        mask_row = jax.lax.slice_in_dim(table, token, token + 1, axis=0)[0]
    embedded = mask_row.astype(drafter.dtype)
    if config.embedding_scale is not None:
        embedded = embedded * jnp.asarray(config.embedding_scale, embedded.dtype)
    fused = drafter.fused_mask().astype(jnp.float32)
    return MaskInputs(embedded=embedded.astype(jnp.float32), fused=fused)


def embed_rows(drafter: Drafter, tokens: Int32[Array, "B n"]) -> Float[Array, "B n H"]:
    """`Drafter.embed`, cast after the look-up: no copy of the table, no rounding of its gradient.

    An id outside the vocabulary gives NaN.
    """
    table = drafter.embedding.get_value()
    x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    x = x.astype(drafter.dtype)
    scale = drafter.config.embedding_scale
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def depth_zero(
    drafter: Drafter,
    rows: TrainingRows,
    *,
    mesh: Mesh | None = None,
    implementation: Any = None,
) -> Stream:
    """Run the depth-0 rows; of many, only each layer's input is kept for the backward pass."""
    embedded = place_rows(embed_rows(drafter, rows.tokens), mesh)
    x = place_rows(drafter.fuse(rows.taps), mesh)
    keys, values = [], []
    for index, layer in enumerate(drafter.layers):

        def attend(q: Array, k: Array, v: Array, layer: Any = layer) -> Array:
            return attend_documents(
                q,
                k,
                v,
                rows.document_ids,
                scale=attention_scale(layer),
                window=layer.layer.window,
                mesh=mesh,
                implementation=implementation,
            )

        def run(
            embedded: Array, x: Array, layer: Any = layer, first: bool = index == 0,
            attend: Callable = attend,
        ) -> tuple[Array, Array, Array]:  # fmt: skip
            return run_layer(layer, first, embedded, x, rows.positions, attend, mesh)

        recomputed = jax.checkpoint(run) if x.shape[0] * x.shape[1] >= RECOMPUTED_FROM else run
        x, k, v = recomputed(embedded, x)
        keys.append(k.astype(jnp.float32))
        values.append(v.astype(jnp.float32))
    return Stream(hidden=drafter.finish(x), residual=x, keys=tuple(keys), values=tuple(values))


def mask_rows(
    drafter: Drafter,
    stream: Stream,
    mask: MaskInputs,
    rows: TrainingRows,
    anchors: Int32[Array, "B R"],
    depths: Int32[Array, "B R"],
    *,
    mesh: Mesh | None = None,
    implementation: Any = None,
) -> Float[Array, "B R H"]:
    """Hidden states, after the final norm, of mask rows in whole rollouts; depth 0 is padding."""
    shape = (*anchors.shape, drafter.config.hidden_size)
    # Cast behind the broadcast, so that their gradients are summed over rows in float32.
    embedded, x = (
        place_rows(jnp.broadcast_to(vector[None, None], shape).astype(drafter.dtype), mesh)
        for vector in mask
    )
    positions = jnp.take_along_axis(rows.positions, anchors, axis=1) + depths
    for index, layer in enumerate(drafter.layers):

        def attend(q: Array, k: Array, v: Array, layer: Any = layer, index: int = index) -> Array:
            prefix = (stream.keys[index].astype(k.dtype), stream.values[index].astype(v.dtype))
            return attend_rollouts(
                q,
                prefix,
                (k, v),
                anchors,
                depths,
                rows.document_ids,
                scale=attention_scale(layer),
                window=layer.layer.window,
                mesh=mesh,
                implementation=implementation,
            )

        x, _, _ = run_layer(layer, index == 0, embedded, x, positions, attend, mesh)
    return drafter.finish(x)


def run_layer(
    layer: Any,
    first: bool,
    embedded: Array,
    x: Array,
    positions: Array,
    attend: Callable[[Array, Array, Array], Array],
    mesh: Mesh | None,
) -> tuple[Array, Array, Array]:
    """One decoder layer with the caller's attention: new residual stream, keys, values."""
    if first:
        read, residual = layer.inputs(embedded, x)
    else:
        read, residual = norm(x, layer.attention_norm, layer.options), x
    query, key, value = attention_inputs(layer, read, positions)
    batch, rows, kv_heads, group, width = query.shape
    out = attend(query.reshape(batch, rows, kv_heads * group, width), key, value)
    x = residual + attention_output(layer, out.reshape(query.shape))
    x = place_rows(x, mesh)
    return place_rows(x + _mlp(layer, x, positions), mesh), key, value


def _mlp(layer: Any, x: Array, positions: Array) -> Array:
    """The MLP of normed rows, in blocks of rows where there are many."""

    def block(x: Array, positions: Array) -> Array:
        return mlp_block(layer, norm(x, layer.mlp_norm, layer.options), positions)

    batch, rows, hidden = x.shape
    if rows <= MLP_BLOCK or rows % MLP_BLOCK:
        return block(x, positions)
    blocks = rows // MLP_BLOCK

    def cut(values: Array) -> Array:
        return jnp.moveaxis(values.reshape(batch, blocks, MLP_BLOCK, *values.shape[2:]), 1, 0)

    out = jax.lax.map(lambda part: jax.checkpoint(block)(*part), (cut(x), cut(positions)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, rows, hidden)
