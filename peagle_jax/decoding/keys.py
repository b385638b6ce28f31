"""Where every random draw of decoding gets its key: (request seed, purpose, counter).

A key depends on nothing else: not on the slot of the request, its neighbours, the batch, K, or what
was drawn before. The counter is the absolute position of the token that is drawn, except for
sampled drafts and block verification, whose counter is (committed length at the start of the round,
index in the block). Keyed by position alone these two would draw the same noise again when a later
round reaches a position whose noise has already decided something, and block verification would no
longer keep the target's law.
"""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32


class Purpose(enum.IntEnum):
    """What a draw is for. The numbers are part of what a seed means: never renumber them."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BLOCK_ACCEPT = 4
    BLOCK_RESIDUAL = 5


def seed_words(seeds: Sequence[int]) -> np.ndarray:
    """Seeds below 2**64 as uint32 words [B, 2], high word first; needs no 64-bit jax."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32).reshape(-1, 2)


def fold(seeds: UInt32[Array, "B 2"], purpose: Purpose, *counters: Int[Array, "B N"]) -> jax.Array:
    """Typed keys [B, N], one for each counter (or tuple of counters)."""

    def one(words: Array, *values: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), int(purpose))
        for value in values:
            key = jax.random.fold_in(key, value)
        return key

    over_counters = jax.vmap(one, in_axes=(None, *(0 for _ in counters)))
    return jax.vmap(over_counters)(seeds, *counters)


def position_keys(
    seeds: UInt32[Array, "B 2"], purpose: Purpose, positions: Int[Array, "B N"]
) -> jax.Array:
    """Keys by absolute position."""
    return fold(seeds, purpose, positions)


def block_keys(
    seeds: UInt32[Array, "B 2"],
    purpose: Purpose,
    committed: Int[Array, "B"],
    indices: Int[Array, "B N"],
) -> jax.Array:
    """Keys by (committed length at the start of the round, index in the block)."""
    return fold(seeds, purpose, jnp.broadcast_to(committed[:, None], indices.shape), indices)


def gumbel(keys: jax.Array, vocab_size: int) -> Float[Array, "B N V"]:
    """Standard Gumbel noise, one row of the vocabulary for each key."""
    draw = lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32)  # noqa: E731
    return jax.vmap(jax.vmap(draw))(keys)


def uniform(keys: jax.Array) -> Float[Array, "B N"]:
    """Uniform numbers in [0, 1), one for each key."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys)
