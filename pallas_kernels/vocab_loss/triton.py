"""The passes of the vocabulary loss as Pallas kernels for NVIDIA GPUs (Triton backend).

A block computes a tile of rows x columns of both products, the target's columns picked by token id
straight from the whole head, and reduces it before it leaves the registers.
`vocab_loss_statistics` walks over its share of the vocabulary and keeps running sums;
`vocab_loss_derivative` makes one tile of dz (or, without it, only the acceptance sums). The
products of dz with head and hidden states are ordinary matrix products and stay with XLA. Each pass
must read the hidden states and the used head columns; only the derivative writes more than a few
numbers per row: dz, of one chunk of rows and columns.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import launch, memory
from pallas_kernels.devices import DEVICES
from pallas_kernels.vocab_loss import chunks
from pallas_kernels.vocab_loss.chunks import Inputs, Passes, Results, Setting
from pallas_kernels.vocab_loss.losses import (
    Factors,
    Statistics,
    logit_derivative,
    merge_block,
    merge_parts,
    no_statistics,
    probabilities,
)

# Default chunk of dz: 64 MiB in bfloat16.
ROW_CHUNK, VOCAB_CHUNK = 4096, 8192


def unsupported_reason(inputs: Inputs) -> str | None:
    """Why the kernels cannot take such heads; None where they can."""
    for head in (inputs.draft_head, inputs.target_head):
        if head.dtype.name not in launch.TABLE["vocab_loss_statistics"]:
            return f"no tile of the launch table takes heads of {head.dtype}"
    return None


def vocab_loss(
    inputs: Inputs, setting: Setting, *, with_gradient: bool, interpret: bool
) -> Results:
    """See `chunks.vocab_loss`."""
    setting = dataclasses.replace(
        setting,
        row_chunk=setting.row_chunk or ROW_CHUNK,
        vocab_chunk=setting.vocab_chunk or VOCAB_CHUNK,
    )
    passes = Passes(
        statistics=functools.partial(_statistics, interpret=interpret),
        acceptance=functools.partial(_acceptance, interpret=interpret),
        derivative=functools.partial(_derivative, interpret=interpret),
    )
    return chunks.vocab_loss(inputs, setting, passes, with_gradient=with_gradient)


def _operands(inputs: Inputs) -> dict:
    operands = {
        "draft_hidden": inputs.draft_hidden,
        "draft_head": inputs.draft_head,
        "target_hidden": inputs.target_hidden,
        "target_head": inputs.target_head,
    }
    if inputs.draft_token_ids is not None:
        operands["draft_token_ids"] = inputs.draft_token_ids
    return operands


def _call(kernel, name: str, operands: dict, out_shape, grid, parameters, interpret: bool):
    return pl.pallas_call(
        functools.partial(kernel, names=tuple(operands), blocks=dict(parameters.blocks)),
        grid=grid,
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * len(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=parameters.num_warps, num_stages=parameters.num_stages
        ),
        interpret=interpret,
        name=name,
    )(*operands.values())


# --- tiles of logits ----------------------------------------------------------------------------


def _product(hidden_ref, rows, load_head, width: int, tile: tuple[int, int], depth: int, label):
    """hidden[rows] @ head[:, columns] as a float32 tile, `depth` inner elements at a time."""
    num_rows = hidden_ref.shape[0]
    row_lives = (rows < num_rows)[:, None]
    even = width % depth == 0

    def step(index, total):
        inner = index * depth + jnp.arange(depth, dtype=jnp.int32)
        lives = None if even else inner < width
        mask = row_lives if even else row_lives & lives[None, :]
        hidden = memory.load(
            hidden_ref.at[rows[:, None], inner[None, :]],
            mask=jnp.broadcast_to(mask, (tile[0], depth)),
            other=jnp.zeros((), hidden_ref.dtype),
            label=label,
        )
        head, axis = load_head(inner, lives)
        return total + jax.lax.dot_general(
            hidden,
            head,
            (((1,), (axis,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    return jax.lax.fori_loop(0, pl.cdiv(width, depth), step, jnp.zeros(tile, jnp.float32))


def _head_loader(head_ref, columns, column_lives, transposed: bool, label: str):
    """load(inner, inner_lives) -> the head's block and which of its axes is the inner one."""

    def load(inner, inner_lives):
        shape = (inner.shape[0], columns.shape[0])
        mask = jnp.broadcast_to(column_lives[None, :], shape)
        if inner_lives is not None:
            mask = mask & inner_lives[:, None]
        other = jnp.zeros((), head_ref.dtype)
        if transposed:
            view = head_ref.at[columns[:, None], inner[None, :]]
            mask = jnp.broadcast_to(column_lives[:, None], shape[::-1])
            if inner_lives is not None:
                mask = mask & inner_lives[None, :]
            return memory.load(view, mask=mask, other=other, label=label), 1
        view = head_ref.at[inner[:, None], columns[None, :]]
        return memory.load(view, mask=mask, other=other, label=label), 0

    return load


def _logit_tiles(ref, rows, columns, setting: Setting, blocks):
    """Draft and target logits of rows x columns, float32; columns past the vocabulary give 0."""
    hidden_size, vocab = ref["draft_head"].shape
    lives = columns < vocab
    tile = (blocks["rows"], blocks["columns"])
    draft = _product(
        ref["draft_hidden"],
        rows,
        _head_loader(ref["draft_head"], columns, lives, False, "draft_head"),
        hidden_size,
        tile,
        blocks["depth"],
        "draft_hidden",
    )
    tokens = columns
    if "draft_token_ids" in ref:
        view = ref["draft_token_ids"].at[columns]
        tokens = memory.load(view, mask=lives, other=0, label="draft_token_ids")
    target = _product(
        ref["target_hidden"],
        rows,
        _head_loader(
            ref["target_head"], tokens, lives, setting.target_head_transposed, "target_head"
        ),
        ref["target_hidden"].shape[1],
        tile,
        blocks["depth"],
        "target_hidden",
    )
    if setting.target_soft_cap is not None:
        cap = setting.target_soft_cap
        target = cap * jnp.tanh(target * (1.0 / cap))
    return draft, target


# --- pass 1 -------------------------------------------------------------------------------------


def num_splits(tiles: int, column_blocks: int) -> int:
    """Into how many parts the vocabulary is split, so that few rows still fill the GPU."""
    device = DEVICES[launch.target_device() or "a100"]
    return max(1, min(column_blocks, pl.cdiv(2 * device.multiprocessors, tiles)))


def _statistics(inputs: Inputs, setting: Setting, *, interpret: bool) -> Statistics:
    parameters = launch.find_launch("vocab_loss_statistics", inputs.draft_head.dtype.name)
    rows, vocab = inputs.draft_hidden.shape[0], inputs.draft_head.shape[1]
    tiles = pl.cdiv(rows, parameters.blocks["rows"])
    column_blocks = pl.cdiv(vocab, parameters.blocks["columns"])
    share = pl.cdiv(column_blocks, num_splits(tiles, column_blocks))
    # Every split has at least one block: an empty one would have no maximum.
    splits = pl.cdiv(column_blocks, share)
    kinds = no_statistics(1)
    parts = _call(
        functools.partial(_statistics_kernel, setting=setting, share=share),
        "vocab_loss_statistics",
        _operands(inputs),
        [jax.ShapeDtypeStruct((splits, rows), kind.dtype) for kind in kinds],
        # Neighbouring blocks differ in their rows: they read the same head columns.
        (tiles, splits),
        parameters,
        interpret,
    )
    return merge_parts(Statistics(*parts))


def _statistics_kernel(*refs, names, blocks, setting, share):
    ref = dict(zip(names, refs, strict=False))
    outputs = refs[len(names) :]
    num_rows, vocab = ref["draft_hidden"].shape[0], ref["draft_head"].shape[1]
    rows = pl.program_id(0) * blocks["rows"] + jnp.arange(blocks["rows"], dtype=jnp.int32)
    split = pl.program_id(1)

    def visit(index, stats):
        columns = index * blocks["columns"] + jnp.arange(blocks["columns"], dtype=jnp.int32)
        draft, target = _logit_tiles(ref, rows, columns, setting, blocks)
        return merge_block(stats, draft, target, columns, (columns < vocab)[None, :])

    stop = jnp.minimum((split + 1) * share, pl.cdiv(vocab, blocks["columns"]))
    stats = jax.lax.fori_loop(split * share, stop, visit, no_statistics(blocks["rows"]))
    for out, value, label in zip(outputs, stats, Statistics._fields, strict=True):
        memory.store(out.at[split, rows], value, mask=rows < num_rows, label=label)


# --- pass 2 -------------------------------------------------------------------------------------


def _acceptance(inputs: Inputs, setting: Setting, stats: Statistics, *, interpret: bool):
    parameters = launch.find_launch("vocab_loss_derivative", inputs.draft_head.dtype.name)
    rows, vocab = inputs.draft_hidden.shape[0], inputs.draft_head.shape[1]
    column_blocks = pl.cdiv(vocab, parameters.blocks["columns"])
    operands = _operands(inputs) | _logs(stats) | _span(0, 0)
    sums = jax.ShapeDtypeStruct((column_blocks, rows), jnp.float32)
    acceptance, below = _call(
        functools.partial(_derivative_kernel, setting=setting, size=vocab),
        "vocab_loss_acceptance",
        operands,
        [sums, sums],
        (pl.cdiv(rows, parameters.blocks["rows"]), column_blocks),
        parameters,
        interpret,
    )
    return jnp.sum(acceptance, axis=0), jnp.sum(below, axis=0)


def _derivative(
    inputs: Inputs,
    setting: Setting,
    stats: Statistics,
    row_factors: Factors,
    below,
    start,
    fresh,
    size: int,
    *,
    interpret: bool,
):
    parameters = launch.find_launch("vocab_loss_derivative", inputs.draft_head.dtype.name)
    rows = inputs.draft_hidden.shape[0]
    column_blocks = pl.cdiv(size, parameters.blocks["columns"])
    operands = _operands(inputs) | _logs(stats) | _span(start, fresh)
    operands |= {"target_argmax": stats.target_argmax, "below": below, **row_factors._asdict()}
    dz, acceptance = _call(
        functools.partial(_derivative_kernel, setting=setting, size=size),
        "vocab_loss_derivative",
        operands,
        [
            jax.ShapeDtypeStruct((rows, size), inputs.draft_head.dtype),
            jax.ShapeDtypeStruct((column_blocks, rows), jnp.float32),
        ],
        (pl.cdiv(rows, parameters.blocks["rows"]), column_blocks),
        parameters,
        interpret,
    )
    return dz, jnp.sum(acceptance, axis=0)


def _logs(stats: Statistics) -> dict:
    return {"draft_lse": stats.draft_lse, "target_lse": stats.target_lse}


def _span(start, fresh) -> dict:
    return {"span": jnp.stack([jnp.asarray(x, jnp.int32) for x in (start, fresh)])}


def _derivative_kernel(*refs, names, blocks, setting, size):
    ref = dict(zip(names, refs, strict=False))
    outputs = refs[len(names) :]
    num_rows = ref["draft_hidden"].shape[0]
    rows = pl.program_id(0) * blocks["rows"] + jnp.arange(blocks["rows"], dtype=jnp.int32)
    lives = rows < num_rows
    # Column in the chunk, and in the vocabulary: only the last chunk is moved back, so a column
    # outside the chunk may well lie inside the vocabulary.
    at = pl.program_id(1) * blocks["columns"] + jnp.arange(blocks["columns"], dtype=jnp.int32)
    start = memory.load(ref["span"].at[jnp.int32(0)], label="span")
    first_fresh = memory.load(ref["span"].at[jnp.int32(1)], label="span")
    columns = start + at
    inside = at < size
    fresh = (inside & (columns >= first_fresh))[None, :]
    draft, target = _logit_tiles(ref, rows, columns, setting, blocks)

    def per_row(name):
        none = jnp.zeros((), ref[name].dtype)
        return memory.load(ref[name].at[rows], mask=lives, other=none, label=name)

    q, p = probabilities(per_row("draft_lse"), per_row("target_lse"), draft, target, fresh)
    acceptance = jnp.sum(jnp.minimum(p, q), axis=1)
    where_ = (pl.program_id(1), rows)
    if "below" not in ref:
        below = jnp.sum(jnp.where(q < p, q, 0.0), axis=1)
        memory.store(outputs[0].at[where_], acceptance, mask=lives, label="acceptance")
        memory.store(outputs[1].at[where_], below, mask=lives, label="below")
        return
    row_factors = Factors(*(per_row(name) for name in Factors._fields))
    label = (columns[None, :] == per_row("target_argmax")[:, None]) & fresh
    dz = logit_derivative(row_factors, per_row("below"), q, p, label)
    memory.store(
        outputs[0].at[rows[:, None], at[None, :]],
        dz.astype(outputs[0].dtype),
        mask=lives[:, None] & inside[None, :],
        label="dz",
    )
    memory.store(outputs[1].at[where_], acceptance, mask=lives, label="acceptance")
