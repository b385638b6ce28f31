"""What `expand_batch` means, in jnp: every output row finds its request, the rest is arithmetic."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.expand_batch.layout import CacheLayout, ExpandedBatch, ExpandedTile, Method


def expand_batch_reference(
    token_ids: Int[Array, "T"],
    positions: Int[Array, "T"],
    next_token_ids: Int[Array, "B"],
    query_start_loc: Int[Array, "B_plus_1"],
    query_end_loc: Int[Array, "B"],
    block_table: Int[Array, "B P"] | None = None,
    *,
    method: Method,
    mask_token_id: int,
    num_rows: int,
    padding_token_id: int = 0,
    padding_position: int = 0,
    cache: CacheLayout | None = None,
) -> ExpandedBatch:
    """Arguments and result as in the public function."""
    requests = next_token_ids.shape[0]
    query_end_loc = jnp.minimum(query_end_loc, query_start_loc[1:] - 1)
    request_numbers = jnp.arange(requests + 1, dtype=jnp.int32)
    new_start_loc = query_start_loc + method.new_rows * request_numbers

    row = jnp.arange(num_rows, dtype=jnp.int32)
    request = jnp.searchsorted(new_start_loc, row, side="right").astype(jnp.int32) - 1
    # Rows past the last request belong to none; they compute with the last and are masked.
    inside = request < requests
    request = jnp.minimum(request, requests - 1)
    first, last = query_start_loc[request], query_end_loc[request]
    index = row - new_start_loc[request]

    lives = inside & (last >= first)
    copied_rows = last - first + (0 if method.shift else 1)
    is_copied = lives & (index < copied_rows)
    is_new = lives & (index == copied_rows)
    is_mask = lives & (index > copied_rows) & (index < copied_rows + method.sampled_rows)
    is_rejected = ~(is_copied | is_new | is_mask)
    source_token = jnp.where(is_copied, first + index + (1 if method.shift else 0), 0)
    ids = jnp.where(is_copied, token_ids[source_token], padding_token_id)
    ids = jnp.where(is_new, next_token_ids[request], ids)
    ids = jnp.where(is_mask, mask_token_id, ids)
    start = positions[jnp.where(lives, first, 0)]
    out_positions = jnp.where(is_rejected, padding_position, start + index)

    # One row per request and sampled row, whether or not it lives.
    alive = query_end_loc >= query_start_loc[:-1]
    copied_of_request = query_end_loc - query_start_loc[:-1] + (0 if method.shift else 1)
    first_sampled = new_start_loc[:-1] + jnp.where(alive, copied_of_request, 0)
    offsets = jnp.arange(method.sampled_rows, dtype=jnp.int32)
    sampled = first_sampled[:, None] + jnp.where(alive[:, None], offsets[None, :], 0)

    source_rows = hidden_rows = slots = None
    if method.shift:
        source_rows = jnp.where(is_copied | is_new, first + index, -1)
        hidden_rows = _hidden_rows(query_start_loc, new_start_loc, positions.shape[0], num_rows)
    if cache is not None:
        slots = _slots(out_positions, request, is_rejected, block_table, cache)
    return ExpandedBatch(
        token_ids=ids,
        positions=out_positions,
        is_rejected=is_rejected,
        is_mask=is_mask,
        sample_rows=jnp.minimum(sampled, num_rows - 1).reshape(-1),
        query_start_loc=new_start_loc,
        source_rows=source_rows,
        hidden_rows=hidden_rows,
        slots=slots,
    )


def _hidden_rows(query_start_loc, new_start_loc, num_target_rows: int, num_rows: int):
    """Old row -> new row; rows of no request go out of range."""
    requests = query_start_loc.shape[0] - 1
    row = jnp.arange(num_target_rows, dtype=jnp.int32)
    request = jnp.searchsorted(query_start_loc, row, side="right").astype(jnp.int32) - 1
    inside = request < requests
    request = jnp.minimum(request, requests - 1)
    moved = row + new_start_loc[request] - query_start_loc[request]
    return jnp.where(inside, moved, num_rows)


def _slots(positions, request, is_rejected, block_table, cache: CacheLayout):
    writable = ~is_rejected & (positions >= 0) & (positions < cache.max_length)
    part = jnp.where(writable, positions, 0) // cache.page_size
    if block_table is None:
        # A contiguous cache is one page per request.
        page = request
        writable &= part == 0
    else:
        writable &= part < block_table.shape[1]
        page = block_table[request, jnp.minimum(part, block_table.shape[1] - 1)]
    slot = page * cache.page_size + positions % cache.page_size
    writable &= (page >= 0) & (page < cache.num_slots // cache.page_size)
    return jnp.where(writable, slot, cache.num_slots)


def expand_tile_reference(
    token_ids: Int[Array, "B Q"],
    start_positions: Int[Array, "B"],
    next_token_ids: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    *,
    mask_token_id: int,
    padding_token_id: int = 0,
) -> ExpandedTile:
    """The same for equal requests of Q = K+1 rows, of which `num_valid` count: [B, 2K] tiles."""
    drafts = token_ids.shape[1] - 1
    index = jnp.arange(2 * drafts, dtype=jnp.int32)[None, :]
    new_row = (jnp.minimum(num_valid, drafts + 1) - 1)[:, None]
    lives = num_valid[:, None] > 0
    is_copied, is_new = lives & (index < new_row), lives & (index == new_row)
    is_mask = lives & (index > new_row) & (index < new_row + drafts)
    shifted = jnp.pad(token_ids[:, 1:], ((0, 0), (0, drafts)), constant_values=padding_token_id)
    ids = jnp.where(is_copied, shifted, padding_token_id)
    ids = jnp.where(is_new, next_token_ids[:, None], ids)
    keeps = is_copied | is_new
    offsets = jnp.arange(drafts, dtype=jnp.int32)[None, :]
    return ExpandedTile(
        token_ids=jnp.where(is_mask, mask_token_id, ids),
        positions=jnp.where(keeps | is_mask, start_positions[:, None] + index, -1),
        is_mask=is_mask,
        source_rows=jnp.where(keeps, index, -1),
        sample_rows=jnp.where(lives, new_row + offsets, 0),
    )
