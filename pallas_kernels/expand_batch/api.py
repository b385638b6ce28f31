"""`expand_batch` and `expand_tile`: argument checks, choice of implementation, meshes."""

import functools

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from pallas_kernels import dispatch
from pallas_kernels.checks import check_arrays
from pallas_kernels.expand_batch.layout import (
    CacheLayout,
    ExpandedBatch,
    ExpandedTile,
    Method,
    drafting_method,
)
from pallas_kernels.expand_batch.reference import expand_batch_reference, expand_tile_reference
from pallas_kernels.expand_batch.triton import expand_batch_triton


def expand_batch(
    token_ids: Int[Array, "T"],
    positions: Int[Array, "T"],
    next_token_ids: Int[Array, "B"],
    query_start_loc: Int[Array, "B_plus_1"],
    query_end_loc: Int[Array, "B"],
    *,
    method: str | Method = "p_eagle",
    num_speculative_tokens: int = 1,
    mask_token_id: int,
    num_rows: int | None = None,
    max_query_len: int | None = None,
    padding_token_id: int = 0,
    padding_position: int = 0,
    cache: CacheLayout | None = None,
    block_table: Int[Array, "B P"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> ExpandedBatch:
    """The drafter's input from the target's, for a batch of prefills, chunks and decodes alike.

    Row j of a request whose target rows are s..e (valid) and e+1.. (rejected) becomes, with shift:
    `ids[s+1+j]` for j < e-s, the new token at j = e-s, mask tokens for the next E-1 rows, padding
    for the rest; its position is `positions[s] + j`. Without shift the ids are `ids[s+j]` and there
    is one row more. So each request grows by N = E-1 (shift) or E rows.

    Args:
      token_ids: ids that the target just processed, rejected drafts included, request by request.
      positions: their absolute positions; consecutive within a request.
      next_token_ids: the token that follows each request's last valid row: newly sampled, or the
        true next prompt token of a chunk.
      query_start_loc: first row of each request, and the end of the last (int32, ascending). A
        request may be empty (padding of the batch): all its N rows are padding.
      query_end_loc: last valid row of each request, inclusive; below its first row for none, and
        past its last row the same as the last.
      method: "p_eagle" (shift, E = K), "eagle3" (shift, E = 1), "draft_model" (E = 1), "pard"
        (E = K), or a `Method`.
      num_speculative_tokens: K.
      mask_token_id: id of the mask token.
      num_rows: rows of the result, a bucket of at least T + N * B (the default).
      max_query_len: the most rows of a request (T by default): fewer need fewer blocks. A request
        with more is not written whole.
      padding_token_id, padding_position: what rejected and padding rows hold.
      cache: where positions lie in the drafter's cache; None to leave the slots out.
      block_table: pages of each request; None for a contiguous cache.
      implementation: see `pallas_kernels.dispatch`.

    Returns: `ExpandedBatch`.

    Raises: ValueError for shapes that do not fit together or a bucket that is too small.
    """
    if isinstance(method, str):
        method = drafting_method(method, num_speculative_tokens)
    check_arrays(
        "expand_batch",
        token_ids=(token_ids, (None,), "integer"),
        positions=(positions, token_ids.shape, "integer"),
        next_token_ids=(next_token_ids, (None,), "integer"),
    )
    target_rows, requests = token_ids.shape[0], next_token_ids.shape[0]
    check_arrays(
        "expand_batch",
        query_start_loc=(query_start_loc, (requests + 1,), "integer"),
        query_end_loc=(query_end_loc, (requests,), "integer"),
        block_table=(block_table, (requests, None), "integer"),
    )
    least = target_rows + method.new_rows * requests
    num_rows = least if num_rows is None else num_rows
    max_query_len = target_rows if max_query_len is None else max_query_len
    if num_rows < least:
        raise ValueError(
            f"expand_batch: {target_rows} rows of {requests} requests need "
            f"{least} rows, the bucket num_rows has {num_rows}"
        )
    if max_query_len < 1:
        raise ValueError(f"expand_batch: max_query_len {max_query_len} leaves requests no row")
    if block_table is not None and cache is None:
        raise ValueError(f"expand_batch: a block_table {block_table.shape} needs a cache layout")
    keywords = {
        "method": method,
        "mask_token_id": mask_token_id,
        "num_rows": num_rows,
        "padding_token_id": padding_token_id,
        "padding_position": padding_position,
        "cache": cache,
    }
    run = dispatch.select(
        functools.partial(expand_batch_reference, **keywords),
        functools.partial(expand_batch_triton, max_query_len=max_query_len, **keywords),
        implementation,
        name="expand_batch",
    )
    integers = (token_ids, positions, next_token_ids, query_start_loc, query_end_loc, block_table)
    return run(*(None if array is None else array.astype(jnp.int32) for array in integers))


def expand_tile(
    token_ids: Int[Array, "B Q"],
    start_positions: Int[Array, "B"],
    next_token_ids: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    *,
    mask_token_id: int,
    padding_token_id: int = 0,
    sharding: dispatch.KernelSharding | None = None,
    implementation: dispatch.Implementation | None = None,
) -> ExpandedTile:
    """`expand_batch` for a decoding round: each request verified Q = K+1 rows, its draft has 2K.

    Args:
      token_ids: the rows just verified: the last committed token and K drafts.
      start_positions: position of each request's first row.
      next_token_ids: the token sampled at the last valid row.
      num_valid: accepted drafts + 1, at most K+1; 0 for a request that is finished or empty: all
        rows padding.
      mask_token_id, padding_token_id: ids of mask and padding rows.
      sharding: requests are split over `sharding.batch`, one launch per shard.
      implementation: see `pallas_kernels.dispatch`.

    Returns: `ExpandedTile`, with row numbers counted within each request.

    Raises: ValueError when no row of the K+1 is a draft, or for shapes that do not fit together.
    """
    check_arrays("expand_tile", token_ids=(token_ids, (None, None), "integer"))
    if token_ids.shape[1] < 2:
        raise ValueError(f"expand_tile: token_ids {token_ids.shape} hold no draft (K+1 rows)")
    per_request = (token_ids.shape[:1], "integer")
    check_arrays(
        "expand_tile",
        start_positions=(start_positions, *per_request),
        next_token_ids=(next_token_ids, *per_request),
        num_valid=(num_valid, *per_request),
    )
    run = dispatch.select(
        functools.partial(
            expand_tile_reference, mask_token_id=mask_token_id, padding_token_id=padding_token_id
        ),
        functools.partial(
            _expand_tile_triton, mask_token_id=mask_token_id, padding_token_id=padding_token_id
        ),
        implementation,
        name="expand_tile",
    )
    batch = P(sharding.batch) if sharding else P()
    split = dispatch.sharded(run, sharding, in_specs=(batch,) * 4, out_specs=batch)
    arrays = (token_ids, start_positions, next_token_ids, num_valid)
    return split(*(array.astype(jnp.int32) for array in arrays))


def _expand_tile_triton(
    token_ids,
    start_positions,
    next_token_ids,
    num_valid,
    *,
    mask_token_id: int,
    padding_token_id: int,
    interpret: bool,
) -> ExpandedTile:
    requests, rows = token_ids.shape
    starts = jnp.arange(requests + 1, dtype=jnp.int32) * rows
    # Only the position of a request's first row is read.
    positions = jnp.broadcast_to(start_positions[:, None], token_ids.shape).reshape(-1)
    drafts = rows - 1
    expanded = expand_batch_triton(
        token_ids.reshape(-1),
        positions,
        next_token_ids,
        starts,
        starts[:-1] + num_valid - 1,
        method=drafting_method("p_eagle", drafts),
        mask_token_id=mask_token_id,
        num_rows=requests * 2 * drafts,
        padding_token_id=padding_token_id,
        padding_position=-1,
        max_query_len=rows,
        interpret=interpret,
    )
    tile = (requests, 2 * drafts)
    source = expanded.source_rows.reshape(tile)
    return ExpandedTile(
        token_ids=expanded.token_ids.reshape(tile),
        positions=expanded.positions.reshape(tile),
        is_mask=expanded.is_mask.reshape(tile),
        source_rows=jnp.where(source >= 0, source - starts[:-1, None], -1),
        sample_rows=expanded.sample_rows.reshape(requests, drafts)
        - expanded.query_start_loc[:-1, None],
    )
