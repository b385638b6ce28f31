"""`short_query_attention` as a Pallas kernel for NVIDIA GPUs (Triton backend).

One block serves one request, one key-value head and up to `rows` packed query rows (the new tokens
of all query heads of the group), so that each key and value is read once for all of them and the
matrix unit's tile is filled. It walks over the key blocks that its rows can see: first to last by
position, or its share of them where the keys are split. With splits, each writes a normalised part
and its log-sum-exp, and the parts are merged afterwards. It must move each visible key and value
once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import launch, memory
from pallas_kernels.devices import DEVICES

LOG2_E = math.log2(math.e)
# Below this many keys a split costs more than it saves.
LEAST_KEYS_PER_SPLIT = 256
BLOCKS_PER_MULTIPROCESSOR = 2


def shape_class(head_dim: int, itemsize: int) -> str:
    """Bytes of one key row, rounded up to a power of two: what limits the tiles."""
    return f"{max(pl.next_power_of_2(head_dim), 16) * itemsize}B"


def unsupported_reason(head_dim: int, dtype) -> str | None:
    """Why the kernel cannot take such heads; None where it can."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes bfloat16, float16 and float32, not {dtype}"
    if shape_class(head_dim, dtype.itemsize) not in launch.TABLE["short_query_attention"]:
        return f"no tile of the launch table holds heads of {head_dim} {dtype} numbers"
    return None


def num_splits(programs: int, most_keys: int) -> int:
    """Into how many parts the keys are split, so that few requests still fill the GPU."""
    device = DEVICES[launch.target_device() or "a100"]
    wanted = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR // programs
    return max(1, min(wanted, most_keys // LEAST_KEYS_PER_SPLIT))


def short_query_attention_triton(
    query,
    keys,
    values,
    query_positions,
    block_table=None,
    key_positions=None,
    num_valid=None,
    sinks=None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int | None = None,
    interpret: bool,
):
    """Same arguments and result as the reference; `splits` overrides the number of key parts."""
    batch, num_rows, heads, size = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    slots = keys.shape[1] if block_table is None else keys.shape[1] * block_table.shape[1]
    parameters = launch.find_launch(
        "short_query_attention", shape_class(size, query.dtype.itemsize)
    )
    packed = num_rows * group
    # The matrix unit's tile has at least 16 rows.
    rows = min(max(pl.next_power_of_2(packed), 16), parameters.blocks["rows"])
    tiles = pl.cdiv(packed, rows)
    if splits is None:
        most_keys = slots if window is None else min(slots, window + num_rows)
        splits = num_splits(batch * kv_heads * tiles, most_keys)

    operands = {
        "query": query,
        "keys": keys,
        "values": values,
        "query_positions": query_positions,
        "block_table": block_table,
        "key_positions": key_positions,
        "num_valid": num_valid,
        # With splits the sinks enter once, at the merge.
        "sinks": sinks if splits == 1 else None,
    }
    operands = {name: array for name, array in operands.items() if array is not None}
    if splits == 1:
        out_shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    else:
        out_shape = (
            jax.ShapeDtypeStruct((splits, *query.shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, *query.shape[:3]), jnp.float32),
        )
    body = functools.partial(
        _kernel,
        operands=tuple(operands),
        rows=rows,
        block_keys=parameters.blocks["keys"],
        splits=splits,
        slots=slots,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    out = pl.pallas_call(
        body,
        grid=(tiles * splits, kv_heads, batch),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=pl.no_block_spec if splits == 1 else [pl.no_block_spec] * 2,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=parameters.num_warps, num_stages=parameters.num_stages
        ),
        interpret=interpret,
        name="short_query_attention",
    )(*operands.values())
    if splits == 1:
        return out
    return _merge(*out, sinks).astype(query.dtype)


def _merge(parts, log_sums, sinks):
    """Normalised parts [P, B, T, N, D] and their log2-sum-exp2 [P, B, T, N] -> [B, T, N, D]."""
    highest = jnp.max(log_sums, axis=0)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, None, :] * jnp.float32(LOG2_E)
        highest = jnp.maximum(highest, sink)
    finite = jnp.where(jnp.isfinite(highest), highest, jnp.float32(0))
    weights = jnp.exp2(log_sums - finite[None])
    total = jnp.sum(weights, axis=0)
    if sinks is not None:
        total += jnp.exp2(sink - finite)
    total = jnp.where(total > 0, total, jnp.float32(1))
    return jnp.sum(parts * weights[..., None], axis=0) / total[..., None]


def _kernel(
    *refs, operands, rows, block_keys, splits, slots, scale, window, soft_cap
):  # fmt: skip
    ref = dict(zip(operands, refs, strict=False))
    outputs = refs[len(operands) :]
    _, num_rows, heads, size = ref["query"].shape
    group = heads // ref["keys"].shape[2]
    block_size = max(pl.next_power_of_2(size), 16)
    tile = jax.lax.div(pl.program_id(0), splits)
    split = pl.program_id(0) - tile * splits
    kv_head, request = pl.program_id(1), pl.program_id(2)

    packed = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    row = jax.lax.div(packed, jnp.int32(group))
    head = kv_head * group + packed - row * group
    row_lives = row < num_rows
    column = jnp.arange(block_size, dtype=jnp.int32)
    column_lives = (column < size)[None, :]

    position = memory.load(
        ref["query_positions"].at[request, row],
        mask=row_lives,
        other=-1,
        label="query_positions",
    )
    query = memory.load(
        ref["query"].at[request, row[:, None], head[:, None], column[None, :]],
        mask=row_lives[:, None] & column_lives,
        other=jnp.zeros((), ref["query"].dtype),
        label="query",
    )
    first, past, last = _visible_slots(ref, request, position, slots, window)
    first_block = jax.lax.div(first, block_keys)
    share = pl.cdiv(pl.cdiv(past, block_keys) - first_block, splits)
    start = first_block + split * share
    stop = jnp.minimum(start + share, pl.cdiv(past, block_keys))
    exact = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def visit(block, carry):
        highest, total, mixed = carry
        slot = block * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        key_position, present, where_ = _locate(ref, request, slot, first, past, last)
        mask = present[:, None] & column_lives
        zero = jnp.zeros((), ref["keys"].dtype)
        key_index = (*where_, kv_head, column[None, :])
        key = memory.load(ref["keys"].at[key_index], mask=mask, other=zero, label="keys")
        scores = jax.lax.dot_general(
            query,
            key,
            (((1,), (1,)), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        if soft_cap is None:
            scores *= scale * LOG2_E
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
        visible = present[None, :] & (key_position[None, :] <= position[:, None])
        if window is not None:
            visible &= key_position[None, :] > position[:, None] - window
        scores = jnp.where(visible, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        finite = jnp.where(new_highest == -jnp.inf, 0.0, new_highest)
        fade = jnp.exp2(highest - finite)
        weights = jnp.exp2(scores - finite[:, None])
        value = memory.load(ref["values"].at[key_index], mask=mask, other=zero, label="values")
        product = jax.lax.dot_general(
            weights.astype(value.dtype),
            value,
            (((1,), (0,)), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        total = total * fade + jnp.sum(weights, axis=1)
        return new_highest, total, mixed * fade[:, None] + product

    highest, total, mixed = jax.lax.fori_loop(
        start,
        stop,
        visit,
        (
            jnp.full((rows,), -jnp.inf, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, block_size), jnp.float32),
        ),
    )
    if "sinks" in ref:
        none = jnp.zeros((), ref["sinks"].dtype)
        sink = memory.load(ref["sinks"].at[head], mask=row_lives, other=none, label="sinks")
        sink = sink.astype(jnp.float32) * LOG2_E
        with_sink = jnp.maximum(highest, sink)
        mixed *= jnp.exp2(highest - with_sink)[:, None]
        total = total * jnp.exp2(highest - with_sink) + jnp.exp2(sink - with_sink)
    # Rows that see nothing have a zero total and a zero mixture.
    out = mixed / jnp.where(total > 0, total, 1.0)[:, None]
    at = (request, row[:, None], head[:, None], column[None, :])
    mask = row_lives[:, None] & column_lives
    if splits == 1:
        memory.store(outputs[0].at[at], out.astype(outputs[0].dtype), mask=mask, label="out")
        return
    memory.store(outputs[0].at[(split, *at)], out, mask=mask, label="parts")
    log_sum = jnp.where(total > 0, highest + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    memory.store(
        outputs[1].at[split, request, row, head], log_sum, mask=row_lives, label="log_sums"
    )


def _visible_slots(ref, request, position, slots, window):
    """First and past-the-last slot that some row may see, and the largest position of the rows."""
    last = jnp.max(position)
    if "key_positions" in ref:
        first, past = jnp.int32(0), (last >= 0).astype(jnp.int32) * slots
    else:
        first, past = jnp.int32(0), jnp.minimum(last + 1, slots)
        if window is not None:
            far = jnp.iinfo(jnp.int32).max
            earliest = jnp.min(jnp.where(position >= 0, position, far))
            first = jnp.maximum(earliest - window + 1, 0)
    if "num_valid" in ref:
        limit = memory.load(ref["num_valid"].at[request], label="num_valid")
        past = jnp.minimum(past, limit)
    return jnp.minimum(first, past), past, last


def _locate(ref, request, slot, first, past, last):
    """The position that each slot of a block holds, whether it may be read, and its index."""
    present = (slot >= first) & (slot < past)
    key_position = slot
    if "key_positions" in ref:
        key_position = memory.load(
            ref["key_positions"].at[request, slot], mask=present, other=-1, label="key_positions"
        )
        present &= (key_position >= 0) & (key_position <= last)
    if "block_table" not in ref:
        return key_position, present, (request, slot[:, None])
    pages, page_size = ref["keys"].shape[:2]
    part = jax.lax.div(slot, jnp.int32(page_size))
    page = memory.load(
        ref["block_table"].at[request, part],
        mask=present,
        other=-1,
        label="block_table",
    )
    present &= (page >= 0) & (page < pages)
    return key_position, present, (page[:, None], (slot - part * page_size)[:, None])
