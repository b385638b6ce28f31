"""Rotary frequencies against published values and transformers; rotation at any position."""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.models.config import RopeConfig
from peagle_jax.models.rope import inverse_frequencies, rotate, rotation

GPT_OSS = RopeConfig(
    kind="yarn", theta=150_000.0, factor=32.0, original_max_positions=4096, truncate=False
)
LLAMA3 = RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_positions=8192)
PROPORTIONAL = RopeConfig(kind="proportional", theta=1e6, rotary_fraction=0.25)

# Values that transformers 5.24 computes for the published configs.
PUBLISHED = [
    pytest.param(
        GPT_OSS,
        64,
        {0: 1.0, 1: 0.689044, 3: 0.327146, 8: 5.0813e-2, 12: 6.7950e-3, 31: 3.0235e-7},
        1.3465736,
        id="yarn_gpt_oss",
    ),
    pytest.param(
        LLAMA3,
        128,
        {0: 1.0, 1: 0.814617, 20: 0.0165604, 28: 3.21145e-3, 30: 1.37189e-3, 63: 3.06893e-7},
        1.0,
        id="llama3",
    ),
    pytest.param(
        PROPORTIONAL, 512, {0: 1.0, 1: 0.947464, 63: 0.0333762, 64: 0.0, 255: 0.0}, 1.0,
        id="proportional_gemma4",
    ),
    pytest.param(RopeConfig(theta=1e4), 4, {0: 1.0, 1: 0.01}, 1.0, id="default"),
    pytest.param(
        RopeConfig(kind="linear", theta=1e4, factor=4.0), 4, {0: 0.25, 1: 0.0025}, 1.0, id="linear"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "head_dim", "values", "factor"), PUBLISHED)
def test_frequencies_have_their_published_values(rope, head_dim, values, factor):
    found, attention_factor = inverse_frequencies(rope, head_dim)
    assert found.shape == (head_dim // 2,) and found.dtype == np.float32
    assert attention_factor == pytest.approx(factor, rel=1e-6)
    for index, value in values.items():
        assert found[index] == pytest.approx(value, rel=2e-5), index


def test_truncated_yarn_rounds_its_range():
    """Unrounded range of gpt-oss: 8.09 to 17.40; truncated: 8 to 18, so pair 8 is kept whole."""
    kept, _ = inverse_frequencies(
        RopeConfig(kind="yarn", theta=150_000.0, factor=32.0, original_max_positions=4096), 64
    )
    base = 150_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert kept[8] == pytest.approx(base[8], rel=1e-6)
    assert kept[18] == pytest.approx(base[18] / 32, rel=1e-6)
    ramp = 1 / 10
    assert kept[9] == pytest.approx(base[9] * (1 - ramp) + base[9] / 32 * ramp, rel=1e-6)


@pytest.mark.parametrize("position", [0, 20, 4097, 131_071])
def test_any_position_has_its_analytic_angle_C1(position):
    """No table ends anywhere: nothing is clamped to a last row."""
    rope = RopeConfig(theta=1e4)
    cos, sin = rotation(jnp.full((1, 1), position, jnp.int32), rope, 8)
    angle = position * np.float64(1e4) ** (-np.arange(4) / 4)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle), atol=position * 6e-8 + 1e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle), atol=position * 6e-8 + 1e-6)


def test_pairs_are_halves_of_the_head():
    """Dimension i turns with i + D/2: the first unit vector turns into the third of four."""
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    cos, sin = rotation(jnp.ones((1, 1), jnp.int32), RopeConfig(), 4)
    turned = rotate(x, cos, sin)[0, 0, 0]
    np.testing.assert_allclose(turned, [np.cos(1), 0, np.sin(1), 0], atol=1e-6)


@pytest.mark.parametrize(
    ("rope", "head_dim", "message"),
    [
        (RopeConfig(kind="yarn", factor=2.0), 8, "original_max_position_embeddings"),
        (RopeConfig(kind="llama3", factor=2.0), 8, "original_max_position_embeddings"),
        (RopeConfig(), 7, "even head_dim"),
    ],
)
def test_what_cannot_be_computed_is_refused(rope, head_dim, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(rope, head_dim)
