"""`fill_hidden`: argument checks, choice of implementation, derivative."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.checks import check_arrays
from pallas_kernels.fill_hidden.reference import fill_hidden_reference
from pallas_kernels.fill_hidden.triton import fill_hidden_triton


def fill_hidden(
    hidden: Float[Array, "R H"],
    mask_hidden: Float[Array, "H"],
    source_rows: Int[Array, "M"],
    is_mask: Bool[Array, "M"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "M H"]:
    """Hidden states of the draft rows, in one pass over memory.

    In two lines of JAX: `rows = hidden[source_rows]` (zero where there is no such row), then
    `where(is_mask[:, None], mask_hidden, rows)`.

    Args:
      hidden: fused hidden states of the rows that the target just processed, fc already applied.
      mask_hidden: fc(mask_hidden), the vector that every mask row gets; same dtype.
      source_rows: for each draft row its row of `hidden`; anything outside 0..R-1 means none.
      is_mask: which draft rows are mask rows; wins over `source_rows`.
      implementation: see `pallas_kernels.dispatch`.

    Returns: the draft rows; rows that are neither copied nor mask rows are zero, whatever `hidden`
      holds. Differentiable in `hidden` and `mask_hidden`.

    Raises: ValueError for empty arrays, and for shapes or dtypes that do not fit together.
    """
    if mask_hidden.dtype != hidden.dtype:
        raise ValueError(
            f"fill_hidden: mask_hidden is {mask_hidden.dtype}, hidden is {hidden.dtype}; "
            "cast mask_hidden once, at load"
        )
    check_arrays("fill_hidden", hidden=(hidden, (None, None), None))
    check_arrays(
        "fill_hidden",
        mask_hidden=(mask_hidden, hidden.shape[1:], None),
        source_rows=(source_rows, (None,), "integer"),
        is_mask=(is_mask, source_rows.shape, "bool"),
    )
    return _fill(hidden, mask_hidden, source_rows, is_mask, dispatch.resolve(implementation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fill(hidden, mask_hidden, source_rows, is_mask, implementation):
    run = dispatch.select(
        fill_hidden_reference, fill_hidden_triton, implementation, name="fill_hidden"
    )
    return run(hidden, mask_hidden, source_rows, is_mask)


def _fill_forward(hidden, mask_hidden, source_rows, is_mask, implementation):
    out = _fill(hidden, mask_hidden, source_rows, is_mask, implementation)
    return out, (hidden, mask_hidden, source_rows, is_mask)


def _fill_backward(implementation, residuals, cotangent):
    hidden, mask_hidden, source_rows, is_mask = residuals
    _, transpose = jax.vjp(
        lambda rows, mask_row: fill_hidden_reference(rows, mask_row, source_rows, is_mask),
        hidden,
        mask_hidden,
    )
    return *transpose(cotangent), None, None


_fill.defvjp(_fill_forward, _fill_backward)


def fill_hidden_tile(
    hidden: Float[Array, "B R H"],
    mask_hidden: Float[Array, "H"],
    source_rows: Int[Array, "B M"],
    is_mask: Bool[Array, "B M"],
    *,
    sharding: dispatch.KernelSharding | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B M H"]:
    """`fill_hidden` for a batch of equal tiles, `source_rows` counted within each request.

    Under a mesh the requests are split over `sharding.batch`, one launch per shard.
    """

    def of_shard(hidden, mask_hidden, source_rows, is_mask):
        batch, rows, size = hidden.shape
        exists = (source_rows >= 0) & (source_rows < rows)
        offset = jnp.arange(batch, dtype=source_rows.dtype)[:, None] * rows
        flat_rows = jnp.where(exists, source_rows + offset, -1)
        filled = fill_hidden(
            hidden.reshape(batch * rows, size),
            mask_hidden,
            flat_rows.reshape(-1),
            is_mask.reshape(-1),
            implementation=implementation,
        )
        return filled.reshape(batch, -1, size)

    batch = sharding.batch if sharding else None
    split = dispatch.sharded(
        of_shard,
        sharding,
        in_specs=(P(batch), P(), P(batch), P(batch)),
        out_specs=P(batch),
    )
    return split(hidden, mask_hidden, source_rows, is_mask)
