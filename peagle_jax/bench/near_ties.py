"""How sure the target was: the gap of its two largest logits, by a pass without any cache."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.models.target import Target


def top_two_gap(target: Target) -> Callable[[Sequence[int]], float]:
    """A function from ids to the difference of the two largest logits of the next token.

    One program for each power of two of the length.
    """
    graph, params = nnx.split(target)

    @jax.jit
    def best_two(params, tokens, positions, last):
        model = nnx.merge(graph, params)
        hidden = model(tokens, positions).hidden
        row = jax.lax.dynamic_index_in_dim(hidden, last, axis=1, keepdims=True)
        return jax.lax.top_k(model.logits(row)[0, 0], 2)[0]

    def gap(ids: Sequence[int]) -> float:
        if not ids:
            raise ValueError("there is no next token of an empty sequence")
        size = max(16, 1 << (len(ids) - 1).bit_length())
        tokens, positions = np.zeros((1, size), np.int32), np.full((1, size), -1, np.int32)
        tokens[0, : len(ids)], positions[0, : len(ids)] = ids, np.arange(len(ids))
        best, second = best_two(
            params, jnp.asarray(tokens), jnp.asarray(positions), jnp.int32(len(ids) - 1)
        )
        return float(best - second)

    return gap
