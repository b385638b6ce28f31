"""Which keys a training row may see, as intervals: the visibility rule of P-EAGLE training.

Depth-0 row `i` sees the depth-0 keys of its own document up to itself. Mask row (anchor `a`,
depth `d`) sees the depth-0 keys of the anchor's document up to the anchor, and the rows of its
own rollout of depth 1 to `d`. Both are intervals once mask rows lie rollout by rollout, so no
mask of rows x rows is ever built. An empty interval (`first > last`) marks a padding row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_NOWHERE = (1, 0)  # first, last of an empty interval


def document_starts(document_ids: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """For every row the index of the first row of its document.

    A document is a run of equal ids; the ids themselves carry no order.
    """
    rows = jnp.arange(document_ids.shape[1], dtype=jnp.int32)
    changed = document_ids[:, 1:] != document_ids[:, :-1]
    begins = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, rows[None, :], 0), axis=1)


def document_intervals(
    document_ids: Int[Array, "B n"], window: int | None = None
) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
    """First and last visible key of every depth-0 row; padding rows (id -1) see none."""
    rows = jnp.broadcast_to(
        jnp.arange(document_ids.shape[1], dtype=jnp.int32)[None, :], document_ids.shape
    )
    first = document_starts(document_ids)
    if window is not None:
        first = jnp.maximum(first, rows - (window - 1))
    real = document_ids >= 0
    return jnp.where(real, first, _NOWHERE[0]), jnp.where(real, rows, _NOWHERE[1])


def rollout_intervals(
    anchors: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
    document_ids: Int[Array, "B n"],
    window: int | None = None,
) -> tuple[Int[Array, "B M"], Int[Array, "B M"], Int[Array, "B M"], Int[Array, "B M"]]:
    """Visible intervals of every mask row: first and last prefix key, first and last own row.

    The window counts positions and limits the prefix alone: row (a, d) sits at position a + d and
    sees prefix keys above a + d - window. Its rollout, to which the anchor belongs, is never cut,
    so the anchor stays visible at any depth.
    Rows that are not valid, whose anchor lies outside 0..n-1 or in padding, see nothing.
    """
    n = document_ids.shape[1]
    inside = valid & (anchors >= 0) & (anchors < n) & (depths >= 1)
    anchor = jnp.where(inside, anchors, 0).astype(jnp.int32)
    depth = depths.astype(jnp.int32)
    real = inside & (jnp.take_along_axis(document_ids, anchor, axis=1) >= 0)
    first = jnp.take_along_axis(document_starts(document_ids), anchor, axis=1)
    if window is not None:
        first = jnp.minimum(jnp.maximum(first, anchor + depth - (window - 1)), anchor)
    rows = jnp.arange(anchors.shape[1], dtype=jnp.int32)[None, :]
    own_first = jnp.maximum(rows - depth + 1, 0)
    rows = jnp.broadcast_to(rows, own_first.shape)
    return (
        jnp.where(real, first, _NOWHERE[0]),
        jnp.where(real, anchor, _NOWHERE[1]),
        jnp.where(real, own_first, _NOWHERE[0]),
        jnp.where(real, rows, _NOWHERE[1]),
    )
