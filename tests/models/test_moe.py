"""Routed experts against a dense loop in float64: empty experts, padding rows, gradients."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.models import moe as module_under_test
from peagle_jax.models.config import MoEConfig
from peagle_jax.models.layers import LayerOptions
from peagle_jax.models.moe import block_shape, moe, plan_blocks, route, router_logits
from tests.decoding.tiny import LAYER, numpy_source

HIDDEN, INNER, EXPERTS = 6, 5, 4
QWEN = MoEConfig(
    num_experts=EXPERTS,
    num_experts_per_token=2,
    intermediate_size=INNER,
    router_order="softmax_topk",
)
GPT_OSS = dataclasses.replace(QWEN, router_order="topk_softmax", router_bias=True, expert_bias=True)


class Experts(nnx.Module):
    """The least that `moe` needs of a layer."""

    def __init__(self, config: MoEConfig):
        self.layer = dataclasses.replace(LAYER, moe=config)
        clamped = config.router_bias
        self.options = LayerOptions(
            hidden_size=HIDDEN,
            input_size=HIDDEN,
            intermediate_size=INNER,
            norm_eps=1e-5,
            activation="clamped_swiglu" if clamped else "silu",
            swiglu_limit=0.5 if clamped else None,
        )
        source = numpy_source(3, 8)
        module_under_test.add_moe_parameters(self, config, HIDDEN, source, "", jnp.float32)


def dense_loop(module: Experts, x: np.ndarray) -> np.ndarray:
    """Every expert on every row in float64, then the chosen ones' weighted sum."""
    config = module.layer.moe

    def get(name):
        return np.asarray(getattr(module, name)[...], np.float64)

    scores = x @ get("router") + (get("router_bias") if config.router_bias else 0)
    out = np.zeros_like(x)
    for n, row in enumerate(scores):
        chosen = np.argsort(-row, kind="stable")[: config.num_experts_per_token]
        weights = np.exp(row[chosen] - row[chosen].max())
        weights /= weights.sum()
        for e, share in zip(chosen, weights, strict=True):
            gate, up = np.einsum("h,hgi->gi", x[n], get("experts_gate_up")[e])
            if config.expert_bias:
                gate, up = np.stack([gate, up]) + get("experts_gate_up_bias")[e]
                gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5) + 1
                inner = up * gate / (1 + np.exp(-1.702 * gate))
            else:
                inner = up * gate / (1 + np.exp(-gate))
            result = inner @ get("experts_down")[e]
            if config.expert_bias:
                result = result + get("experts_down_bias")[e]
            out[n] += share * result
    return out


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 5, 90])
def test_experts_equal_a_dense_loop(config, rows):
    module = Experts(config)
    x = np.random.default_rng(0).standard_normal((1, rows, HIDDEN)).astype(np.float32)
    found = jax.jit(lambda x: moe(module, x, jnp.ones((1, rows), bool)))(x)
    np.testing.assert_allclose(found[0], dense_loop(module, x[0].astype(np.float64)), atol=2e-6)


def test_experts_without_rows_have_exactly_zero_gradients_I1():
    """Router biased to experts 0 and 2: the others get no row, and no gradient at all."""
    module = Experts(GPT_OSS)
    module.router_bias.set_value(jnp.asarray([50.0, -50.0, 50.0, -50.0]))
    graph, state = nnx.split(module)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 9, HIDDEN)), jnp.float32)

    def loss(state, use):
        return jnp.sum(jnp.square(use(nnx.merge(graph, state), x)))

    def dense(module, x):
        """Both experts on every row, in jnp, so that autodiff is the oracle."""
        _, weights = route(router_logits(module, x[0]), GPT_OSS)
        chosen, _ = route(router_logits(module, x[0]), GPT_OSS)
        total = 0.0
        for e in (0, 2):
            mid = jnp.einsum("nh,hgi->ngi", x[0], module.experts_gate_up[...][e])
            mid = mid + module.experts_gate_up_bias[...][e][None]
            inner = module_under_test.activate(mid[:, 0], mid[:, 1], module.options)
            out = inner @ module.experts_down[...][e] + module.experts_down_bias[...][e][None]
            share = jnp.sum(jnp.where(chosen == e, weights, 0.0), axis=1, keepdims=True)
            total = total + share * out
        return total

    ours = lambda module, x: moe(module, x, jnp.ones((1, 9), bool))  # noqa: E731
    found = jax.jit(jax.grad(lambda s: loss(s, ours)))(state)
    wanted = jax.jit(jax.grad(lambda s: loss(s, dense)))(state)
    for name in ("experts_gate_up", "experts_down", "experts_gate_up_bias", "experts_down_bias"):
        gradient = np.asarray(found[name].get_value())
        assert not gradient[[1, 3]].any(), name
        np.testing.assert_allclose(gradient, wanted[name].get_value(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["router"][...], wanted["router"][...], rtol=1e-4, atol=1e-4)


def test_spare_rows_of_nan_reach_neither_output_nor_gradient_I2():
    module = Experts(QWEN)
    graph, state = nnx.split(module)
    clean = np.random.default_rng(2).standard_normal((1, 8, HIDDEN)).astype(np.float32)
    x = clean.copy()
    x[0, 5:] = np.nan
    valid = jnp.asarray([[True] * 5 + [False] * 3])

    @jax.jit
    def both(state, x):
        def loss(state, x):
            out = moe(nnx.merge(graph, state), x, valid)
            return jnp.sum(jnp.square(out)), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, x)

    (_, out), (by_weights, by_rows) = both(state, x)
    np.testing.assert_allclose(out[0, :5], dense_loop(module, clean[0, :5]), atol=2e-6)
    assert not np.asarray(out[0, 5:]).any() and not np.asarray(by_rows[0, 5:]).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((by_weights, by_rows)))


@pytest.mark.parametrize(("rows", "choices", "experts"), [(1, 4, 32), (8, 8, 128), (300, 2, 4)])
def test_blocks_hold_every_pair_once(rows, choices, experts):
    """Random, skewed and masked choices; each slot runs through the expert its row chose."""
    generator = np.random.default_rng(4)
    blocks, size = block_shape(rows, choices, experts)
    chosen = np.stack([generator.permutation(experts)[:choices] for _ in range(rows)])
    chosen[rows // 2 :, 0] = np.where((chosen[rows // 2 :] == 0).any(1), chosen[rows // 2 :, 0], 0)
    chosen[rows - 1] = experts if rows > 1 else chosen[rows - 1]
    plan = plan_blocks(jnp.asarray(chosen), experts)
    row_of_slot, slot_of_pair = np.asarray(plan.row_of_slot), np.asarray(plan.slot_of_pair)
    expert_of_block, num_blocks = np.asarray(plan.expert_of_block), int(plan.num_blocks)
    assert row_of_slot.shape == (blocks, size)
    used = 0
    for row in range(rows):
        for choice in range(choices):
            slot = slot_of_pair[row, choice]
            if chosen[row, choice] == experts:
                assert slot == blocks * size
                continue
            block, place = divmod(int(slot), size)
            assert row_of_slot[block, place] == row and block < num_blocks
            assert expert_of_block[block] == chosen[row, choice]
            used += 1
    assert (row_of_slot < rows).sum() == used


def test_few_rows_read_only_the_chosen_experts():
    """One row of 4 out of 32 experts needs 4 blocks of one row, not 32."""
    assert block_shape(1, 4, 32) == (4, 1)
    assert block_shape(8, 8, 128) == (64, 8)


def test_routers_normalise_in_their_own_order():
    """softmax over all, best two, renormalised equals softmax of the best two; without it not."""
    scores = jnp.asarray([[1.0, 3.0, 2.0, 0.0]])
    _, renormalised = route(scores, QWEN)
    chosen, topk_first = route(scores, GPT_OSS)
    _, bare = route(scores, dataclasses.replace(QWEN, normalise_top_k=False))
    np.testing.assert_array_equal(chosen, [[1, 2]])
    np.testing.assert_allclose(renormalised, topk_first, rtol=1e-6)
    everything = np.exp([3.0, 2.0]) / np.exp([1.0, 3.0, 2.0, 0.0]).sum()
    np.testing.assert_allclose(bare[0], everything, rtol=1e-6)


def test_packed_experts_are_cut_before_they_are_unpacked():
    """A packed weight is asked for one expert, never for the whole stack."""
    asked = []

    class Packed:
        def dequantize(self, dtype):
            raise AssertionError("the whole stack was unpacked")

        def take(self, index):
            asked.append(index)
            return types.SimpleNamespace(dequantize=lambda dtype: jnp.ones((2, 3), dtype))

    out = module_under_test._of_expert(nnx.Param(Packed()), jnp.int32(2), jnp.float32)
    assert out.shape == (2, 3) and int(asked[0]) == 2
