"""Routed experts: each row runs through a few of many MLPs, chosen by a router.

Rows are sorted by expert, each expert's rows padded to blocks of a fixed number of rows, and a loop
over blocks reads the one expert that a block needs. So no array is larger than the padded rows,
and experts that no row chose are not read. (`jax.lax.ragged_dot` would be the obvious call; on
NVIDIA GPUs and CPUs it makes one copy of the rows per expert.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.models.config import MoEConfig
from peagle_jax.models.parameters import Source, scoped, weight
from peagle_jax.models.primitives import activate
from peagle_jax.models.products import product

_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16


def add_moe_parameters(
    module: nnx.Module, config: MoEConfig, hidden: int, source: Source, prefix: str, dtype: Any
) -> None:
    """Set what `moe` reads on `module`: the router and the experts' stacked weights."""
    make = scoped(source, prefix)
    experts, inner = config.num_experts, config.intermediate_size
    module.router = make("router", hidden, experts, dtype=dtype)
    if config.router_bias:
        module.router_bias = make("router_bias", experts, dtype=dtype)
    module.experts_gate_up = make("experts_gate_up", experts, hidden, 2, inner, dtype=dtype)
    module.experts_down = make("experts_down", experts, inner, hidden, dtype=dtype)
    if config.expert_bias:
        module.experts_gate_up_bias = make("experts_gate_up_bias", experts, 2, inner, dtype=dtype)
        module.experts_down_bias = make("experts_down_bias", experts, hidden, dtype=dtype)


def moe(
    module: nnx.Module, x: Float[Array, "B T H"], valid: Bool[Array, "B T"]
) -> Float[Array, "B T H"]:
    """The experts' weighted sum for each row; rows that are not valid give zero, even from NaN."""
    config: MoEConfig = module.layer.moe
    rows = jnp.where(valid[..., None], x, 0).reshape(-1, x.shape[-1])
    chosen, weights = route(router_logits(module, rows), config)
    chosen = jnp.where(valid.reshape(-1, 1), chosen, config.num_experts)
    plan = plan_blocks(chosen, config.num_experts)
    out = _run_blocks(module, rows, plan)
    # A pair without a slot (a row that is not valid) reads zeros.
    picked = out.at[plan.slot_of_pair].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    total = jnp.sum(picked.astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1)
    return jnp.where(valid[..., None], total.astype(x.dtype).reshape(x.shape), 0)


def router_logits(module: nnx.Module, rows: Float[Array, "N H"]) -> Float[Array, "N E"]:
    """Scores of every expert for each row, in the rows' dtype, bias included."""
    scores = product(rows, weight(module.router, rows.dtype), 1)
    if module.layer.moe.router_bias:
        scores = scores + weight(module.router_bias, rows.dtype)[None]
    return scores


def route(
    scores: Float[Array, "N E"], config: MoEConfig
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """The chosen experts of each row and their weights, in the scores' dtype.

    `topk_softmax` (gpt-oss) normalises the chosen scores alone, in their dtype; `softmax_topk`
    (Qwen3) normalises all in float32, chooses, and renormalises where configured.
    """
    k = config.num_experts_per_token
    if config.router_order == "topk_softmax":
        best, chosen = jax.lax.top_k(scores, k)
        return chosen, jax.nn.softmax(best, axis=-1)
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), k)
    if config.normalise_top_k:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    return chosen, best.astype(scores.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Where each (row, choice) pair is computed.

    row_of_slot: the row that a slot of a block holds, N where it holds none.
    slot_of_pair: the slot of each pair, the number of slots where it has none.
    expert_of_block: the expert that a block runs through; `num_blocks` blocks are in use.
    """

    row_of_slot: Int[Array, "blocks size"]
    slot_of_pair: Int[Array, "N k"]
    expert_of_block: Int[Array, " blocks"]
    num_blocks: Int[Array, ""]


def block_shape(rows: int, choices: int, experts: int) -> tuple[int, int]:
    """Number of blocks that always suffices, and rows per block.

    A row chooses an expert once at most, so with as many slots as rows every expert needs one
    block; otherwise each started block beyond the full ones belongs to another expert.
    """
    pairs = rows * choices
    size = 1 << max(pairs // experts - 1, 0).bit_length()
    size = min(max(size, _SMALLEST_BLOCK), _LARGEST_BLOCK, rows)
    most = min(experts, pairs)
    return (most if size == rows else most + pairs // size), size


def plan_blocks(chosen: Int[Array, "N k"], experts: int) -> BlockPlan:
    """Sort pairs by expert and cut them into blocks; `chosen == experts` means no expert."""
    rows, choices = chosen.shape
    blocks, size = block_shape(rows, choices, experts)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sorted_experts = flat[order]
    edges = jnp.searchsorted(sorted_experts, jnp.arange(experts + 1, dtype=flat.dtype))
    counts = edges[1:] - edges[:-1]
    last_block = jnp.cumsum((counts + size - 1) // size)
    first_block = jnp.concatenate([jnp.zeros(1, last_block.dtype), last_block[:-1]])

    inside = jnp.minimum(sorted_experts, experts - 1)
    rank = jnp.arange(rows * choices, dtype=edges.dtype) - edges[inside]
    slot = jnp.where(sorted_experts < experts, first_block[inside] * size + rank, blocks * size)
    row_of_slot = jnp.full(blocks * size, rows, jnp.int32)
    row_of_slot = row_of_slot.at[slot].set((order // choices).astype(jnp.int32), mode="drop")
    expert_of_block = jnp.searchsorted(last_block, jnp.arange(blocks), side="right")
    return BlockPlan(
        row_of_slot=row_of_slot.reshape(blocks, size),
        slot_of_pair=jnp.zeros_like(slot).at[order].set(slot).reshape(rows, choices),
        expert_of_block=jnp.minimum(expert_of_block, experts - 1),
        num_blocks=last_block[-1],
    )


def _run_blocks(
    module: nnx.Module, rows: Float[Array, "N H"], plan: BlockPlan
) -> Float[Array, "slots H"]:
    """The expert MLP of every slot; slots without a row are zero, blocks not in use are skipped."""
    blocks, size = plan.row_of_slot.shape

    def run(row_of_slot: Array, expert: Array) -> Array:
        block = rows.at[row_of_slot].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        out = _expert_mlp(module, block, expert)
        return jnp.where((row_of_slot < rows.shape[0])[:, None], out, 0)

    def skip(row_of_slot: Array, expert: Array) -> Array:
        return jnp.zeros((size, rows.shape[1]), rows.dtype)

    def step(index: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        return index + 1, jax.lax.cond(index < plan.num_blocks, run, skip, *block)

    start = jnp.zeros((), plan.num_blocks.dtype)
    _, out = jax.lax.scan(step, start, (plan.row_of_slot, plan.expert_of_block))
    return out.reshape(blocks * size, rows.shape[1])


def _expert_mlp(
    module: nnx.Module, block: Float[Array, "size H"], expert: Int[Array, ""]
) -> Float[Array, "size H"]:
    """One expert's MLP; biases lie inside the routing weight (gpt-oss)."""
    config, dtype = module.layer.moe, block.dtype
    gate_up = product(block, _of_expert(module.experts_gate_up, expert, dtype), 1)
    if config.expert_bias:
        gate_up = gate_up + _of_expert(module.experts_gate_up_bias, expert, dtype)[None]
    inner = activate(gate_up[:, 0], gate_up[:, 1], module.options)
    out = product(inner, _of_expert(module.experts_down, expert, dtype), 1)
    if config.expert_bias:
        out = out + _of_expert(module.experts_down_bias, expert, dtype)[None]
    return out


def _of_expert(parameter: nnx.Param, expert: Int[Array, ""], dtype: Any) -> Array:
    """One expert's slice of a stacked weight; a packed one is cut before it is unpacked."""
    value = parameter.get_value()
    if hasattr(value, "dequantize"):
        return value.take(expert).dequantize(dtype)
    return jax.lax.dynamic_index_in_dim(value, expert, axis=0, keepdims=False).astype(dtype)
