"""The sharding table, and equal logits on one and on eight host devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from peagle_jax.models.cache import init_cache
from peagle_jax.sharding import (
    PARAMETER_AXES,
    RULES,
    batch_sharding,
    cache_shardings,
    check_rules,
    make_mesh,
    parameter_spec,
    shardings,
)
from tests.decoding.tiny import TARGETS, VOCAB, make_target

MESHES = {
    "data=8": dict(data=8),
    "fsdp=4,tensor=2": dict(fsdp=4, tensor=2),
    "data=2,tensor=2,expert=2": dict(data=2, tensor=2, expert=2),
}


def logits_of(target, mesh=None):
    """Prefill of 8 requests and one decode step, on `mesh` or on one device."""
    graph, state = nnx.split(target)
    config = target.config
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 6)).astype(np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (8, 6))
    cache = init_cache(config.layers, batch_size=8, num_slots=8, max_new_rows=5, dtype=jnp.float32)

    @jax.jit
    def run(state, tokens, positions, cache):
        target = nnx.merge(graph, state)
        first = target(tokens[:, :5], positions[:, :5], cache)
        second = target(tokens[:, 5:], positions[:, 5:], first.cache)
        hidden = jnp.concatenate([first.hidden, second.hidden], axis=1)
        return target.logits(hidden), second.cache

    if mesh is None:
        return run(state, jnp.asarray(tokens), jnp.asarray(positions), cache)
    state = jax.device_put(state, shardings(state, mesh))
    cache = jax.device_put(cache, cache_shardings(cache, mesh))
    rows = jax.device_put((tokens, positions), batch_sharding(tokens.shape, mesh))
    with jax.set_mesh(mesh):
        return run(state, *rows, cache)


@functools.cache
def logits_of_one_device(family):
    return np.asarray(logits_of(make_target(TARGETS[family]))[0])


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_eight_devices_give_the_logits_of_one(family, sizes):
    alone = logits_of_one_device(family)
    together, cache = logits_of(make_target(TARGETS[family]), make_mesh(**sizes))
    np.testing.assert_allclose(np.asarray(together), alone, rtol=0, atol=1e-4 * np.abs(alone).max())
    assert len(together.sharding.device_set) == 8
    batch_ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert together.sharding.shard_shape(together.shape)[0] == 8 // batch_ways
    keys = cache.layers[-1].keys
    assert keys.sharding.shard_shape(keys.shape)[0] == 8 // batch_ways


def test_parameters_lie_where_the_table_says():
    mesh = make_mesh(fsdp=2, tensor=2, expert=2)
    specs = {
        "layers.0.qkv": ((16, 2, 4, 8), PartitionSpec("fsdp", "tensor", None, None)),
        "layers.0.o": ((2, 2, 8, 16), PartitionSpec("tensor", None, None, "fsdp")),
        "layers.0.experts_down": ((4, 6, 16), PartitionSpec("expert", "tensor", "fsdp")),
        "head": ((16, 40), PartitionSpec("fsdp", "tensor")),
        "layers.0.attention_norm": ((16,), PartitionSpec()),
    }
    for name, (shape, expected) in specs.items():
        assert parameter_spec(name, shape, mesh) == expected, name


def test_an_axis_that_does_not_divide_is_replicated():
    mesh = make_mesh(tensor=8)
    assert parameter_spec("qkv", (16, 2, 4, 8), mesh) == PartitionSpec(None, None, None, None)


def test_optimizer_moments_go_with_their_parameters():
    mesh = make_mesh(fsdp=2, tensor=2)
    state = nnx.state(make_target(TARGETS["llama"]))
    found = shardings({"mu": state, "nu": state}, mesh)
    for moment in ("mu", "nu"):
        leaf = found[moment]["layers"][0]["gate_up"].get_value()
        assert leaf.spec == PartitionSpec("fsdp", None, "tensor")


def test_the_table_covers_every_matrix_of_every_family():
    """A matrix that the table forgot would silently be copied to every device."""
    for family, config in TARGETS.items():
        for path, leaf in jax.tree.leaves_with_path(nnx.state(make_target(config))):
            name = next(k.key for k in reversed(path) if isinstance(getattr(k, "key", 0), str))
            known = name in PARAMETER_AXES and len(PARAMETER_AXES[name]) == leaf.ndim
            assert known or leaf.ndim < 2 or name == "router", (family, name)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({**RULES, "vocab": ("fsdp",)}, "embedding.*twice"),
        ({**RULES, "inner": ("expert",)}, "experts_gate_up.*twice"),
        ({**RULES, "batch": ("rows",)}, "rows"),
    ],
    ids=["vocab_and_hidden", "experts_and_inner", "unknown_axis"],
)
def test_colliding_rules_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        check_rules(rules)


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match="tensor=16.* needs 16 devices, found 8"):
        make_mesh(tensor=16)
