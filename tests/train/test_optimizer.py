"""Learning rates, clipping and decay against numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.optimizer import OptimizerConfig, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        # 10 steps, 4 of warm-up: 1/4, 2/4, 3/4, 4/4, then down to nothing after 6 more.
        ("linear", [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        (
            "cosine",
            [0.25, 0.5, 0.75, 1] + [0.5 * (1 + np.cos(np.pi * i / 6)) for i in range(6)],
        ),
    ],
)
def test_warmup_and_decay(schedule, wanted):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_ratio=0.4)
    rate = learning_rate(config, 10)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(rate(i)) / 2 for i in range(10)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-5, atol=1e-7)


def test_clipping_and_decay_of_matrices_alone():
    config = OptimizerConfig(
        learning_rate=1.0, schedule="constant", warmup_ratio=0.0, clip=1.0, weight_decay=0.5,
        beta1=0.0, beta2=0.0, epsilon=1e-30,
    )  # fmt: skip
    params = {"matrix": jnp.full((2, 2), 4.0), "vector": jnp.full((3,), 4.0)}
    optimizer = make_optimizer(config, 10)
    grads = {"matrix": jnp.full((2, 2), 30.0), "vector": jnp.full((3,), -40.0)}
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam without memory moves by the sign; decay adds half of the matrix.
    np.testing.assert_allclose(updates["matrix"], -1.0 - 2.0, rtol=1e-5)
    np.testing.assert_allclose(updates["vector"], 1.0, rtol=1e-5)


def test_impossible_settings_are_named():
    with pytest.raises(ValueError, match="warmup_ratio"):
        OptimizerConfig(warmup_ratio=1.5)
