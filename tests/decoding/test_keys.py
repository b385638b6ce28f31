"""A key is a function of (request seed, purpose, counter) and of nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.decoding import keys
from peagle_jax.decoding.keys import Purpose


def data(key_array):
    return np.asarray(jax.random.key_data(key_array))


def test_slot_and_neighbours_do_not_matter():
    seeds = jnp.asarray(keys.seed_words([7, 2**63 + 7, 0]))
    positions = jnp.array([[3, 4], [9, 3], [3, 3]], jnp.int32)
    together = data(keys.position_keys(seeds, Purpose.TARGET, positions))
    for row in range(3):
        alone = keys.position_keys(seeds[row : row + 1], Purpose.TARGET, positions[row : row + 1])
        np.testing.assert_array_equal(data(alone)[0], together[row])


def test_seed_purpose_and_counter_all_count():
    seeds = jnp.asarray(keys.seed_words([1, 2**32 + 1]))
    positions = jnp.array([[5, 6], [5, 6]], jnp.int32)
    committed = jnp.array([5, 6], jnp.int32)
    index = jnp.array([[0, 1], [0, 1]], jnp.int32)
    found = [
        data(keys.position_keys(seeds, purpose, positions)).reshape(-1, 2) for purpose in Purpose
    ]
    found += [
        data(keys.block_keys(seeds, purpose, committed, index)).reshape(-1, 2)
        for purpose in Purpose
    ]
    rows = [tuple(row) for row in np.concatenate(found).tolist()]
    assert len(set(rows)) == len(rows)


def test_noise_does_not_depend_on_the_batch():
    seeds = jnp.asarray(keys.seed_words(range(6)))
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (6, 3))
    noise = keys.gumbel(keys.position_keys(seeds, Purpose.TARGET, positions), 11)
    one = keys.gumbel(keys.position_keys(seeds[4:5], Purpose.TARGET, positions[4:5, 1:2]), 11)
    np.testing.assert_array_equal(noise[4, 1], one[0, 0])


def test_the_seed_of_a_text_stays_what_it_is():
    """A changed number here would change every sampled text of every user."""
    seeds = jnp.asarray(keys.seed_words([42]))
    positions = jnp.array([[10]], jnp.int32)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(42), 0), 10)
    found = keys.position_keys(seeds, Purpose.TARGET, positions)
    np.testing.assert_array_equal(data(found)[0, 0], jax.random.key_data(key))


def test_uniform_covers_the_unit_interval():
    seeds = jnp.asarray(keys.seed_words(range(1000)))
    values = keys.uniform(keys.position_keys(seeds, Purpose.ACCEPT, jnp.ones((1000, 2), jnp.int32)))
    assert values.shape == (1000, 2)
    low, high = float(jnp.min(values)), float(jnp.max(values))
    assert 0 <= low < 0.01 and 0.99 < high < 1
    assert len(set(itertools.chain(*np.asarray(values).tolist()))) > 900
