"""`expand_batch` as a Pallas kernel for NVIDIA GPUs (Triton backend).

One launch; a block writes up to `rows` rows of one request, with the request's offsets in scalars.
It must write each output element once, and read each copied id, and per request four offsets and
ids (and a page number per written row). Rows past the last request are shared out among all blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import launch, memory
from pallas_kernels.expand_batch.layout import CacheLayout, ExpandedBatch, Method


def shape_class(rows_per_request: int) -> str:
    """A decoding round has few rows per request, a prompt chunk many."""
    return "short" if rows_per_request <= 64 else "long"


def expand_batch_triton(
    token_ids,
    positions,
    next_token_ids,
    query_start_loc,
    query_end_loc,
    block_table=None,
    *,
    method: Method,
    mask_token_id: int,
    num_rows: int,
    padding_token_id: int = 0,
    padding_position: int = 0,
    cache: CacheLayout | None = None,
    max_query_len: int,
    interpret: bool,
) -> ExpandedBatch:
    """Same arguments and result as the reference; no request has more than `max_query_len` rows."""
    requests, num_target_rows = next_token_ids.shape[0], token_ids.shape[0]
    rows_per_request = max_query_len + method.new_rows
    parameters = launch.find_launch("expand_batch", shape_class(rows_per_request))
    block = min(parameters.blocks["rows"], pl.next_power_of_2(rows_per_request))
    blocks = pl.cdiv(rows_per_request, block)

    def out(size: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((size,), dtype)

    outputs = {
        "token_ids": out(num_rows),
        "positions": out(num_rows),
        "is_rejected": out(num_rows, jnp.bool_),
        "is_mask": out(num_rows, jnp.bool_),
        "sample_rows": out(requests * method.sampled_rows),
        "query_start_loc": out(requests + 1),
        "source_rows": out(num_rows) if method.shift else None,
        "hidden_rows": out(num_target_rows) if method.shift else None,
        "slots": out(num_rows) if cache is not None else None,
    }
    shapes = {name: shape for name, shape in outputs.items() if shape is not None}
    operands = {
        "target_ids": token_ids,
        "target_positions": positions,
        "next_token_ids": next_token_ids,
        "starts": query_start_loc,
        "ends": query_end_loc,
        "block_table": block_table,
    }
    operands = {name: array for name, array in operands.items() if array is not None}
    body = functools.partial(
        _kernel,
        names=(*operands, *shapes),
        method=method,
        mask_token_id=mask_token_id,
        padding_token_id=padding_token_id,
        padding_position=padding_position,
        cache=cache,
        block=block,
        # How often all blocks together go over the rows to write all that no request owns.
        padding_steps=pl.cdiv(num_rows, requests * blocks * block),
    )
    values = pl.pallas_call(
        body,
        grid=(requests, blocks),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * len(shapes),
        out_shape=list(shapes.values()),
        compiler_params=plgpu.CompilerParams(
            num_warps=parameters.num_warps, num_stages=parameters.num_stages
        ),
        interpret=interpret,
        name="expand_batch",
    )(*operands.values())
    written = dict(zip(shapes, values, strict=True))
    return ExpandedBatch(**{name: written.get(name) for name in outputs})


def _kernel(
    *refs,
    names,
    method,
    mask_token_id,
    padding_token_id,
    padding_position,
    cache,
    block,
    padding_steps,
):
    ref = dict(zip(names, refs, strict=True))
    num_rows = ref["token_ids"].shape[0]
    requests = ref["next_token_ids"].shape[0]
    request, part = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(block, dtype=jnp.int32)
    index = part * block + lane

    first = memory.load(ref["starts"].at[request], label="starts")
    past = memory.load(ref["starts"].at[request + 1], label="starts")
    # Never past the request's own rows: what lies behind them need not exist.
    last = jnp.minimum(memory.load(ref["ends"].at[request], label="ends"), past - 1)
    lives = last >= first
    new_first = first + method.new_rows * request
    copied_rows = last - first + (0 if method.shift else 1)
    # The one row of the new token; scalars are read only where they are needed.
    new_token = memory.load(
        ref["next_token_ids"].at[request], mask=lives, other=0, label="next_token_ids"
    )
    start = memory.load(
        ref["target_positions"].at[first], mask=lives, other=0, label="target_positions"
    )

    owned = index < past - first + method.new_rows
    is_copied = lives & (index < copied_rows)
    is_new = lives & (index == copied_rows)
    is_mask = lives & (index > copied_rows) & (index < copied_rows + method.sampled_rows)
    is_rejected = ~(is_copied | is_new | is_mask)
    copied = memory.load(
        ref["target_ids"].at[first + index + (1 if method.shift else 0)],
        mask=is_copied & owned,
        other=padding_token_id,
        label="target_ids",
    )
    rows = {
        "token_ids": jnp.where(is_mask, mask_token_id, jnp.where(is_new, new_token, copied)),
        "positions": jnp.where(is_rejected, padding_position, start + index),
        "is_rejected": is_rejected,
        "is_mask": is_mask,
    }
    if method.shift:
        rows["source_rows"] = jnp.where(is_copied | is_new, first + index, -1)
    if cache is not None:
        rows["slots"] = _slots(ref, request, start + index, ~is_rejected & owned, cache)
    for name, value in rows.items():
        memory.store(ref[name].at[new_first + index], value, mask=owned, label=name)
    if method.shift:
        memory.store(
            ref["hidden_rows"].at[first + index],
            new_first + index,
            mask=index < past - first,
            label="hidden_rows",
        )
    _store_per_request(ref, method, request, part, lives, past, new_first, copied_rows)
    padding = {
        "token_ids": padding_token_id,
        "positions": padding_position,
        "is_rejected": True,
        "is_mask": False,
        "source_rows": -1,
        "slots": cache.num_slots if cache is not None else 0,
    }
    # One element, as a vector: the interpreter takes no constant as a scalar index.
    end = requests + jnp.arange(1, dtype=jnp.int32)
    taken = memory.load(ref["starts"].at[end], label="starts")
    all_blocks = requests * pl.num_programs(1)
    for step in range(padding_steps):
        spare = ((step * all_blocks) + request * pl.num_programs(1) + part) * block + lane
        row = taken + method.new_rows * requests + spare
        for name, value in padding.items():
            if name in ref:
                filler = jnp.full((block,), value, ref[name].dtype)
                memory.store(ref[name].at[row], filler, mask=row < num_rows, label=name)
        if method.shift:
            row = taken + spare
            memory.store(
                ref["hidden_rows"].at[row],
                jnp.full((block,), num_rows, jnp.int32),
                mask=row < ref["hidden_rows"].shape[0],
                label="hidden_rows",
            )


def _store_per_request(ref, method, request, part, lives, past, new_first, copied_rows):
    """Rows to sample and new offsets, by the first block of each request."""
    num_rows, requests = ref["token_ids"].shape[0], ref["next_token_ids"].shape[0]
    offset = jnp.arange(pl.next_power_of_2(method.sampled_rows), dtype=jnp.int32)
    # A request without valid rows samples nothing: any row that exists will do.
    sampled = new_first + jnp.where(lives, copied_rows + offset, 0)
    memory.store(
        ref["sample_rows"].at[request * method.sampled_rows + offset],
        jnp.minimum(sampled, num_rows - 1),
        mask=(part == 0) & (offset < method.sampled_rows),
        label="sample_rows",
    )
    memory.store(
        ref["query_start_loc"].at[request], new_first, mask=part == 0, label="query_start_loc"
    )
    memory.store(
        ref["query_start_loc"].at[request + 1],
        past + method.new_rows * requests,
        mask=(part == 0) & (request == requests - 1),
        label="query_start_loc",
    )


def _slots(ref, request, position, written, cache: CacheLayout):
    """Flat slot of each row; the number of slots, out of range, where nothing may be written."""
    written &= (position >= 0) & (position < cache.max_length)
    size = jnp.int32(cache.page_size)
    part = jax.lax.div(position, size)
    if "block_table" in ref:
        written &= part < ref["block_table"].shape[1]
        page = memory.load(
            ref["block_table"].at[request, part], mask=written, other=-1, label="block_table"
        )
    else:
        written &= part == 0
        page = jnp.broadcast_to(request, part.shape)
    written &= (page >= 0) & (page < cache.num_slots // cache.page_size)
    return jnp.where(written, page * size + position - part * size, cache.num_slots)
