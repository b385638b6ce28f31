"""Generating and training with interpreted kernels, against the references: equal tokens, equal
gradients. (The programs differ in nothing else: `dispatch.forcing` decides while they are traced.)
"""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch, memory
from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from tests.decoding import tiny
from tests.train.training_cases import COD, NUM_ROWS, make_case
from train.objective import make_objective, value_and_grad


def with_each(run):
    """Results of `run()` by reference and by interpreted kernels, and which operands these read."""
    seen = set()
    with dispatch.forcing("reference"):
        expected = run()
    with (
        dispatch.forcing("interpret"),
        memory.observing(lambda kind, label, elements: seen.add(label)),
    ):
        found = run()
        jax.effects_barrier()
    return found, expected, seen


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4"])
@pytest.mark.slow
def test_equal_tokens(family):
    target = tiny.make_target(tiny.TARGETS[family])
    drafter = tiny.make_drafter()
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7]]

    def run():
        generate = make_generate_fn(
            target,
            drafter,
            "p-eagle",
            num_speculative_tokens=3,
            cache_length=32,
            max_prefill_chunk=8,
            eos_token_ids=(),
        )
        state = generate.run(prompts, [SamplingParams(max_tokens=9, ignore_eos=True)] * 2)
        return generate.outputs(state)

    found, expected, seen = with_each(run)
    assert found == expected
    assert [len(tokens) for tokens in found] == [9, 9]
    # The kernels of all three operations ran.
    assert {"keys", "target_ids", "hidden"} <= seen


@pytest.mark.slow
def test_equal_gradients():
    config, *arguments = make_case()

    def run():
        objective = make_objective(config, COD, NUM_ROWS, train_head=True, num_chunks=2)
        return jax.jit(functools.partial(value_and_grad, objective))(*arguments)

    (sums, found), (expected_sums, expected), seen = with_each(run)
    np.testing.assert_allclose(float(sums.loss), float(expected_sums.loss), rtol=1e-5)
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * scale, err_msg=name)
    assert seen, "no kernel ran"
