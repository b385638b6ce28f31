"""Drafters that behave as told, through the same interface as the real ones.

`Mixed` runs several methods at once and picks by row, as data, whose drafts count; a behaviour can
then replace them. One program thus covers every method, behaviour and number of drafts.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle_jax.decoding.drafting import Method
from peagle_jax.decoding.expand import token_at
from peagle_jax.decoding.verification import Drafts, one_hot_law


class Behaviour(enum.IntEnum):
    OWN = 0
    RANDOM = 1
    ERRS = 2
    AGREES = 3
    FICKLE = 4  # agrees in one round, errs in the next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedParams:
    """`truth` holds the tokens of plain decoding by position."""

    parts: tuple[Any, ...]
    choice: Int[Array, "B"]
    behaviour: Int[Array, "B"]
    truth: Int[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class Mixed:
    parts: tuple[Method, ...]
    num_drafts: int
    vocab_size: int

    @property
    def taps(self) -> tuple[int, ...]:
        (taps,) = {part.taps for part in self.parts if part.taps} or {()}
        return taps

    def init(self, batch_size, cache_length, max_new_rows):
        return tuple(part.init(batch_size, cache_length, max_new_rows) for part in self.parts)

    def prefill(self, params, state, *rows):
        return tuple(
            part.prefill(values, own, *rows)
            for part, values, own in zip(self.parts, params.parts, state, strict=True)
        )

    def observe(self, params, state, *rows):
        return tuple(
            part.observe(values, own, *rows)
            for part, values, own in zip(self.parts, params.parts, state, strict=True)
        )

    def propose(self, params, state, view, features):
        batch = view.committed.shape[0]
        tokens = jnp.zeros((batch, self.num_drafts), jnp.int32)
        count, new_state = jnp.zeros(batch, jnp.int32), []
        law = one_hot_law(tokens, self.vocab_size) if features.draft_law else None
        for index, part in enumerate(self.parts):
            drafts, own = part.propose(params.parts[index], state[index], view, features)
            new_state.append(own)
            if part.num_drafts == 0:
                continue
            chosen = params.choice == index
            tokens = jnp.where(chosen[:, None], drafts.tokens, tokens)
            count = jnp.where(chosen, drafts.count, count)
            if law is not None:
                own_law = drafts.law
                if own_law is None:
                    own_law = one_hot_law(drafts.tokens, self.vocab_size)
                law = jnp.where(chosen[:, None, None], own_law, law)
        steps = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        truth = token_at(params.truth, view.committed[:, None] + steps)
        wrong = (truth + 1 + steps % (self.vocab_size - 1)) % self.vocab_size
        noise = (view.num_rounds * 7 + view.committed * 13)[:, None] + steps * (steps + 3)
        even = (view.num_rounds % 2 == 0)[:, None]
        behaviour = params.behaviour[:, None]
        scripted = jnp.select(
            [
                behaviour == Behaviour.RANDOM,
                behaviour == Behaviour.ERRS,
                behaviour == Behaviour.AGREES,
                behaviour == Behaviour.FICKLE,
            ],
            [noise % self.vocab_size, wrong, truth, jnp.where(even, truth, wrong)],
            tokens,
        )
        is_scripted = params.behaviour != Behaviour.OWN
        count = jnp.where(is_scripted, view.wanted, count)
        if law is not None:
            scripted_law = one_hot_law(scripted, self.vocab_size)
            law = jnp.where(is_scripted[:, None, None], scripted_law, law)
        return Drafts(scripted, count, law), tuple(new_state)


def scripted(num_drafts: int, vocab_size: int) -> Mixed:
    """A method with no network at all: behaviours only."""
    return Mixed((), num_drafts, vocab_size)
