"""`fill_hidden` as a Pallas kernel for NVIDIA GPUs (Triton backend).

One block writes `rows` draft rows, `width` columns of each. It must move M*H elements out and one
element in for each copied one; the mask row is read once per block, and only where a block has mask
rows, and padding rows are not read at all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import launch, memory


def _kernel(hidden_ref, mask_hidden_ref, source_ref, is_mask_ref, out_ref, *, block_rows, width):
    num_sources, hidden_size = hidden_ref.shape
    num_rows = source_ref.shape[0]
    row = pl.program_id(0) * block_rows + jnp.arange(block_rows, dtype=jnp.int32)
    column = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    row_lives, column_lives = row < num_rows, column < hidden_size

    source = memory.load(source_ref.at[row], mask=row_lives, other=-1, label="source_rows")
    is_mask = memory.load(is_mask_ref.at[row], mask=row_lives, other=False, label="is_mask")
    copied = (source >= 0) & (source < num_sources) & ~is_mask
    # One scalar decides for the whole block: a branch on it costs less than reading the mask row.
    any_mask = jnp.max(is_mask.astype(jnp.int32)) > 0

    zero = jnp.zeros((), out_ref.dtype)
    mask_hidden = memory.load(
        mask_hidden_ref.at[column], mask=column_lives & any_mask, other=zero, label="mask_hidden"
    )
    rows = memory.load(
        hidden_ref.at[source[:, None], column[None, :]],
        mask=copied[:, None] & column_lives[None, :],
        other=zero,
        label="hidden",
    )
    memory.store(
        out_ref.at[row[:, None], column[None, :]],
        jnp.where(is_mask[:, None], mask_hidden[None, :], rows),
        mask=row_lives[:, None] & column_lives[None, :],
        label="out",
    )


def shape_class(num_rows: int) -> str:
    """Below some rows there are too few blocks to fill a GPU, so blocks are made smaller."""
    return "few_rows" if num_rows <= 1024 else "many_rows"


def fill_hidden_triton(hidden, mask_hidden, source_rows, is_mask, *, interpret: bool):
    """Same arguments and result as `fill_hidden_reference`."""
    num_rows, hidden_size = source_rows.shape[0], hidden.shape[1]
    parameters = launch.find_launch("fill_hidden", shape_class(num_rows))
    block_rows = parameters.blocks["rows"]
    width = min(parameters.blocks["width"], pl.next_power_of_2(hidden_size))
    return pl.pallas_call(
        functools.partial(_kernel, block_rows=block_rows, width=width),
        grid=(pl.cdiv(num_rows, block_rows), pl.cdiv(hidden_size, width)),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((num_rows, hidden_size), hidden.dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=parameters.num_warps, num_stages=parameters.num_stages
        ),
        interpret=interpret,
        name="fill_hidden",
    )(hidden, mask_hidden, source_rows, is_mask)
