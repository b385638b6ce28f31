"""The fingerprint of a target: other weights or sizes, not another dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.sharding import make_mesh
from tests.train.tiny_run import rule_target
from train.feed import on_mesh
from train.identity import target_fingerprint


def changed(target, change):
    """A copy of the target with `change` applied to the path and value of each parameter."""
    graph, state = nnx.split(target)
    return nnx.merge(graph, jax.tree.map_with_path(change, state))


def test_weights_count_and_their_dtype_and_place_do_not():
    target = rule_target()
    rounded = changed(target, lambda _, x: x.astype(jnp.bfloat16))
    again = changed(rounded, lambda _, x: x.astype(jnp.float32))
    own = target_fingerprint(rounded)
    assert own == target_fingerprint(again) == target_fingerprint(target)
    mesh = make_mesh(data=8)
    assert target_fingerprint(changed(target, lambda _, x: on_mesh(x, mesh))) == own

    def tuned(path, x):
        return x + 1 if "qkv" in jax.tree_util.keystr(path) else x

    assert target_fingerprint(changed(target, tuned)) != own
