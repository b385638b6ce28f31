"""Interval attention as Pallas kernels for NVIDIA GPUs (Triton backend), forward and backward.

Forward and dQ: one block serves a tile of rows of one query head and walks over the key blocks on
its schedule, those that every row sees without a mask first, then the others, then its own keys.
dK and dV: one block serves a block of keys of one key-value head and walks over the tiles that see
it, all query heads of the group in turn. Every sum is formed by one block in a fixed order, so
results do not change from run to run and nothing needs atomics.
Each tile must move its rows once and every key and value on its schedule once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import launch, memory
from pallas_kernels.interval_attention import schedule as schedules

LOG2_E = math.log2(math.e)


def shape_class(head_dim: int, itemsize: int) -> str:
    """Bytes of one key row, rounded up to a power of two: what limits the tiles."""
    return f"{max(pl.next_power_of_2(head_dim), 16) * itemsize}B"


def unsupported_reason(q) -> str | None:
    """Why the kernels cannot take rows like q's; None where they can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernels take bfloat16, float16 and float32, not {q.dtype}"
    if shape_class(q.shape[-1], q.dtype.itemsize) not in launch.TABLE["interval_attention_forward"]:
        return f"no tile of the launch table holds heads of {q.shape[-1]} {q.dtype} numbers"
    return None


def _parameters(kernel: str, q) -> launch.Launch:
    return launch.find_launch(kernel, shape_class(q.shape[-1], q.dtype.itemsize))


def _call(body, parameters, *, grid, operands, out_shape, name, interpret):
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * len(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=parameters.num_warps, num_stages=parameters.num_stages
        ),
        interpret=interpret,
        name=name,
    )(*operands)


# --- forward ------------------------------------------------------------------------------------


def forward(q, k, v, first, last, own=None, *, scale: float, interpret: bool):
    """Same arguments and results as `reference.interval_attention`."""
    parameters = _parameters("interval_attention_forward", q)
    tile, block = parameters.blocks["rows"], parameters.blocks["keys"]
    own_first, own_last = (None, None) if own is None else own[2:]
    work = schedules.tile_schedule(first, last, own_first, own_last, tile=tile, block=block)
    operands = {"q": q, "k": k, "v": v, "first": first, "last": last, "work": work}
    operands |= _own_operands(own)
    batch, rows, heads, _ = q.shape
    body = functools.partial(
        _forward_kernel, names=tuple(operands), tile=tile, block=block, scale=scale
    )
    out, lse = _call(
        body,
        parameters,
        grid=(pl.cdiv(rows, tile), heads, batch),
        operands=operands.values(),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
        ],
        name="interval_attention_forward",
        interpret=interpret,
    )
    return out, lse


def _own_operands(own) -> dict:
    if own is None:
        return {}
    return dict(zip(("own_k", "own_v", "own_first", "own_last"), own, strict=True))


class _Place:
    """Where a block of the forward or dQ kernel stands, and its rows' intervals."""

    def __init__(self, ref, tile: int):
        _, self.num_rows, heads, self.head_dim = ref["q"].shape
        # Tiles with the largest anchors have the most keys: they go first.
        self.tile = pl.num_programs(0) - 1 - pl.program_id(0)
        self.head, self.request = pl.program_id(1), pl.program_id(2)
        self.kv_head = jax.lax.div(self.head, jnp.int32(heads // ref["k"].shape[2]))
        self.row = self.tile * tile + jnp.arange(tile, dtype=jnp.int32)
        self.lives = self.row < self.num_rows
        self.column = jnp.arange(max(pl.next_power_of_2(self.head_dim), 16), dtype=jnp.int32)
        self.column_lives = (self.column < self.head_dim)[None, :]
        self.first = self._interval(ref, "first", 1)
        self.last = self._interval(ref, "last", 0)
        if "own_k" in ref:
            self.own_first = self._interval(ref, "own_first", 1)
            self.own_last = self._interval(ref, "own_last", 0)

    def _interval(self, ref, name: str, other: int):
        view = ref[name].at[self.request, self.row]
        return memory.load(view, mask=self.lives, other=other, label=name)

    def rows(self, array, label: str):
        """The tile's rows [T, D] of a [B, M, N, D] array."""
        return memory.load(
            array.at[self.request, self.row[:, None], self.head, self.column[None, :]],
            mask=self.lives[:, None] & self.column_lives,
            other=jnp.zeros((), array.dtype),
            label=label,
        )

    def per_row(self, array, other: float, label: str):
        """The tile's entries [T] of a [B, N, M] array."""
        view = array.at[self.request, self.head, self.row]
        return memory.load(view, mask=self.lives, other=other, label=label)


def _load_keys(array, request, kv_head, slot, column, label: str, *, whole: bool):
    """Key or value rows [block, D]; `whole` promises that every slot exists."""
    num_slots, head_dim = array.shape[1], array.shape[3]
    mask = None
    if not whole:
        mask = (slot < num_slots)[:, None]
    if head_dim != column.shape[0]:
        inside = (column < head_dim)[None, :]
        mask = inside if mask is None else mask & inside
    if mask is not None:
        mask = jnp.broadcast_to(mask, (slot.shape[0], column.shape[0]))
    return memory.load(
        array.at[request, slot[:, None], kv_head, column[None, :]],
        mask=mask,
        other=None if mask is None else jnp.zeros((), array.dtype),
        label=label,
    )


def _dot(a, b, contract: tuple[int, int]):
    """a and b contracted over one dimension each, accumulated in float32, exact for float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _visible(interval, slot):
    """[T, block]: whether each slot lies in each row's interval."""
    first, last = interval
    return (first[:, None] <= slot[None, :]) & (slot[None, :] <= last[:, None])


def _walk(ref, place: _Place, visit, carry):
    """`carry` after all key blocks on the tile's schedule.

    visit(keys, values, labels, block index, interval or None, carry) -> carry
    """

    def bound(column):
        view = ref["work"].at[place.request, place.tile, jnp.int32(column)]
        return memory.load(view, label="work")

    def plain(index, carry):
        return visit(ref["k"], ref["v"], ("k", "v"), index, None, carry)

    def masked(index, carry):
        interval = (place.first, place.last)
        return visit(ref["k"], ref["v"], ("k", "v"), index, interval, carry)

    def one_range(index, carry):
        column = schedules.PARTIAL + 2 * index
        return jax.lax.fori_loop(bound(column), bound(column + 1), masked, carry)

    def own(index, carry):
        interval = (place.own_first, place.own_last)
        return visit(ref["own_k"], ref["own_v"], ("own_k", "own_v"), index, interval, carry)

    full = schedules.FULL
    carry = jax.lax.fori_loop(bound(full), bound(full + 1), plain, carry)
    carry = jax.lax.fori_loop(0, schedules.PARTIAL_RANGES, one_range, carry)
    if "own_k" in ref:
        start, stop = bound(schedules.OWN), bound(schedules.OWN + 1)
        carry = jax.lax.fori_loop(start, stop, own, carry)
    return carry


def _forward_kernel(*refs, names, tile, block, scale):
    ref = dict(zip(names, refs, strict=False))
    out_ref, lse_ref = refs[len(names) :]
    place = _Place(ref, tile)
    q = place.rows(ref["q"], "q")

    def visit(keys, values, labels, index, interval, carry):
        highest, total, mixed = carry
        slot = index * block + jnp.arange(block, dtype=jnp.int32)
        load = functools.partial(
            _load_keys,
            request=place.request,
            kv_head=place.kv_head,
            slot=slot,
            column=place.column,
            whole=interval is None,
        )
        scores = _dot(q, load(keys, label=labels[0]), (1, 1)) * (scale * LOG2_E)
        if interval is not None:
            visible = (interval[0][:, None] <= slot[None, :]) & (
                slot[None, :] <= interval[1][:, None]
            )
            scores = jnp.where(visible, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        finite = jnp.where(new_highest == -jnp.inf, 0.0, new_highest)
        fade = jnp.exp2(highest - finite)
        weights = jnp.exp2(scores - finite[:, None])
        value = load(values, label=labels[1])
        mixed = mixed * fade[:, None] + _dot(weights.astype(value.dtype), value, (1, 0))
        return new_highest, total * fade + jnp.sum(weights, axis=1), mixed

    carry = (
        jnp.full((tile,), -jnp.inf, jnp.float32),
        jnp.zeros((tile,), jnp.float32),
        jnp.zeros((tile, place.column.shape[0]), jnp.float32),
    )
    highest, total, mixed = _walk(ref, place, visit, carry)
    # Padding rows took part in blocks without a mask: they are blanked here.
    sees = (total > 0) & (place.first <= place.last)
    total = jnp.where(sees, total, 1.0)
    out = jnp.where(sees[:, None], mixed / total[:, None], 0.0)
    lse = jnp.where(sees, (highest + jnp.log2(total)) / LOG2_E, -jnp.inf)
    memory.store(
        out_ref.at[place.request, place.row[:, None], place.head, place.column[None, :]],
        out.astype(out_ref.dtype),
        mask=place.lives[:, None] & place.column_lives,
        label="out",
    )
    view = lse_ref.at[place.request, place.head, place.row]
    memory.store(view, lse, mask=place.lives, label="lse")


# --- backward -----------------------------------------------------------------------------------


def backward(q, k, v, first, last, own, out, lse, d_out, d_lse, *, scale: float, interpret: bool):
    """Cotangents (dq, dk, dv, d own k, d own v), the last two None without own keys."""
    mean = jnp.einsum("bmnd,bmnd->bnm", d_out.astype(jnp.float32), out.astype(jnp.float32)) - d_lse
    # In base 2; +inf makes every weight of a row that sees nothing zero.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    shared = {"q": q, "d_out": d_out, "lse": lse, "mean": mean}
    d_q = _d_query(shared, k, v, first, last, own, scale=scale, interpret=interpret)
    d_keys = functools.partial(_d_keys, shared, scale=scale, interpret=interpret)
    d_k, d_v = d_keys(k, v, first, last, name="interval_attention_d_keys")
    if own is None:
        return d_q, d_k, d_v, None, None
    own_k, own_v, own_first, own_last = own
    d_own = d_keys(own_k, own_v, own_first, own_last, name="interval_attention_d_own_keys")
    return d_q, d_k, d_v, *d_own


def _d_query(shared, k, v, first, last, own, *, scale, interpret):
    q = shared["q"]
    parameters = _parameters("interval_attention_d_query", q)
    tile, block = parameters.blocks["rows"], parameters.blocks["keys"]
    own_first, own_last = (None, None) if own is None else own[2:]
    work = schedules.tile_schedule(first, last, own_first, own_last, tile=tile, block=block)
    operands = {**shared, "k": k, "v": v, "first": first, "last": last, "work": work}
    operands |= _own_operands(own)
    body = functools.partial(
        _d_query_kernel, names=tuple(operands), tile=tile, block=block, scale=scale
    )
    (d_q,) = _call(
        body,
        parameters,
        grid=(pl.cdiv(q.shape[1], tile), q.shape[2], q.shape[0]),
        operands=operands.values(),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        name="interval_attention_d_query",
        interpret=interpret,
    )
    return d_q


def _d_query_kernel(*refs, names, tile, block, scale):
    ref = dict(zip(names, refs, strict=False))
    (d_q_ref,) = refs[len(names) :]
    place = _Place(ref, tile)
    q, d_out = place.rows(ref["q"], "q"), place.rows(ref["d_out"], "d_out")
    lse = place.per_row(ref["lse"], jnp.inf, "lse")
    mean = place.per_row(ref["mean"], 0.0, "mean")

    def visit(keys, values, labels, index, interval, d_q):
        slot = index * block + jnp.arange(block, dtype=jnp.int32)
        load = functools.partial(
            _load_keys,
            request=place.request,
            kv_head=place.kv_head,
            slot=slot,
            column=place.column,
            whole=interval is None,
        )
        key = load(keys, label=labels[0])
        weights = jnp.exp2(_dot(q, key, (1, 1)) * (scale * LOG2_E) - lse[:, None])
        if interval is not None:
            visible = (interval[0][:, None] <= slot[None, :]) & (
                slot[None, :] <= interval[1][:, None]
            )
            weights = jnp.where(visible, weights, 0.0)
        d_weights = _dot(d_out, load(values, label=labels[1]), (1, 1))
        d_scores = weights * (d_weights - mean[:, None])
        return d_q + _dot(d_scores.astype(key.dtype), key, (1, 0))

    d_q = jnp.zeros((tile, place.column.shape[0]), jnp.float32)
    d_q = _walk(ref, place, visit, d_q) * scale
    d_q = jnp.where((place.first <= place.last)[:, None], d_q, 0.0)
    memory.store(
        d_q_ref.at[place.request, place.row[:, None], place.head, place.column[None, :]],
        d_q.astype(d_q_ref.dtype),
        mask=place.lives[:, None] & place.column_lives,
        label="d_q",
    )


def _d_keys(shared, k, v, first, last, *, scale, name, interpret):
    q = shared["q"]
    parameters = _parameters("interval_attention_d_keys", q)
    tile, block = parameters.blocks["rows"], parameters.blocks["keys"]
    keys = k.shape[1]
    work = schedules.block_schedule(first, last, keys=keys, tile=tile, block=block)
    operands = {**shared, "k": k, "v": v, "first": first, "last": last, "work": work}
    body = functools.partial(
        _d_keys_kernel, names=tuple(operands), tile=tile, block=block, scale=scale
    )
    return _call(
        body,
        parameters,
        grid=(pl.cdiv(keys, block), k.shape[2], k.shape[0]),
        operands=operands.values(),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        name=name,
        interpret=interpret,
    )


def _d_keys_kernel(*refs, names, tile, block, scale):
    ref = dict(zip(names, refs, strict=False))
    d_k_ref, d_v_ref = refs[len(names) :]
    _, num_rows, heads, head_dim = ref["q"].shape
    num_keys, kv_heads = ref["k"].shape[1:3]
    group = heads // kv_heads
    index, kv_head, request = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slot = index * block + jnp.arange(block, dtype=jnp.int32)
    column = jnp.arange(max(pl.next_power_of_2(head_dim), 16), dtype=jnp.int32)
    column_lives = (column < head_dim)[None, :]
    load = functools.partial(
        _load_keys, request=request, kv_head=kv_head, slot=slot, column=column, whole=False
    )
    key, value = load(ref["k"], label="k"), load(ref["v"], label="v")
    start = memory.load(ref["work"].at[request, index, jnp.int32(0)], label="work")
    stop = memory.load(ref["work"].at[request, index, jnp.int32(1)], label="work")

    def visit(step, carry):
        d_k, d_v = carry
        at = jax.lax.div(step, jnp.int32(group))
        head = kv_head * group + step - at * group
        row = (start + at) * tile + jnp.arange(tile, dtype=jnp.int32)
        lives = row < num_rows

        def rows(name):
            return memory.load(
                ref[name].at[request, row[:, None], head, column[None, :]],
                mask=lives[:, None] & column_lives,
                other=jnp.zeros((), ref[name].dtype),
                label=name,
            )

        def per_row(name, other):
            view = ref[name].at[request, head, row]
            return memory.load(view, mask=lives, other=other, label=name)

        first = memory.load(ref["first"].at[request, row], mask=lives, other=1, label="first")
        last = memory.load(ref["last"].at[request, row], mask=lives, other=0, label="last")
        # Padding rows may hold anything: they are not read.
        lives = lives & (first <= last)
        q, d_out = rows("q"), rows("d_out")
        # Keys by rows, so that both products take the weights as they are.
        weights = jnp.exp2(
            _dot(key, q, (1, 1)) * (scale * LOG2_E) - per_row("lse", jnp.inf)[None, :]
        )
        visible = (first[None, :] <= slot[:, None]) & (slot[:, None] <= last[None, :])
        weights = jnp.where(visible, weights, 0.0)
        d_v = d_v + _dot(weights.astype(d_out.dtype), d_out, (1, 0))
        d_weights = _dot(value, d_out, (1, 1))
        d_scores = weights * (d_weights - per_row("mean", 0.0)[None, :])
        return d_k + _dot(d_scores.astype(q.dtype), q, (1, 0)), d_v

    zeros = jnp.zeros((block, column.shape[0]), jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, (stop - start) * group, visit, (zeros, zeros))
    at = (request, slot[:, None], kv_head, column[None, :])
    mask = (slot < num_keys)[:, None] & column_lives
    memory.store(d_k_ref.at[at], (d_k * scale).astype(d_k_ref.dtype), mask=mask, label="d_k")
    memory.store(d_v_ref.at[at], d_v.astype(d_v_ref.dtype), mask=mask, label="d_v")
