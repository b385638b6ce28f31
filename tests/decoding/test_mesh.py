"""Decoding on a mesh of eight host devices gives the tokens of one device."""

import jax
import numpy as np
import pytest
from flax import nnx

from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from peagle_jax.sharding import make_mesh, shardings
from tests.decoding import tiny

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1], [4, 1, 5], [9]]
PARAMS = [SamplingParams(max_tokens=12)] * 4


def on_mesh(module: Target | Drafter, mesh) -> Target | Drafter:
    graph, values = nnx.split(module)
    return nnx.merge(graph, jax.device_put(values, shardings(values, mesh)))


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_tokens_on_a_mesh_are_those_of_one_device():
    config = tiny.TARGETS["llama"]
    options = dict(num_speculative_tokens=3, cache_length=32, max_prefill_chunk=16)
    target, drafter = tiny.make_target(config), tiny.make_drafter()
    one = make_generate_fn(target, drafter, **options)
    expected = one.outputs(one.run(PROMPTS, PARAMS))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    many = make_generate_fn(on_mesh(target, mesh), on_mesh(drafter, mesh), mesh=mesh, **options)
    state = many.run(PROMPTS, PARAMS)
    assert many.outputs(state) == expected
    keys = state.target_cache.layers[0].keys
    assert keys.sharding.shard_shape(keys.shape) == (1, 32, 1, 8)
    sizes = many.compiled.step.__wrapped__._cache_size()
    state = many.run(PROMPTS, PARAMS)
    assert many.compiled.step.__wrapped__._cache_size() == sizes == 1
    assert np.asarray(state.num_rounds).min() > 0
