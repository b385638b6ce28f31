"""Sampled text has the target's joint law under every rule and setting; known mistakes do not.

The joint law of five tokens over consecutive rounds at K = 3, drawn with the product's own keys and
compared by chi-square. CI draws enough to catch the mistakes below; `slow` draws 200,000.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding import drafting, keys, rounds, verification
from tests.decoding import law

LIMIT = 1e-6
SEEDS = 2_000


def p_values(method, names, num_draws, seeds_per_call=SEEDS):
    """The p-value of each setting, which may be named several times."""
    sampler = law.Sampler(method, names, seeds_per_call)
    counts, accepted = sampler.counts(num_draws)
    assert np.all(accepted[:, 0] > 0.02 * accepted[:, 1]), "drafts must matter"
    expected = {name: law.expected_law(sampler.target, law.parameters(name)) for name in set(names)}
    return [law.p_value(counts[row], expected[name]) for row, name in enumerate(names)]


def test_every_rule_and_setting_keeps_the_law():
    found = p_values("p-eagle", list(law.SETTINGS), 8_000)
    assert min(found) > LIMIT, dict(zip(law.SETTINGS, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_every_rule_and_setting_keeps_the_law_200k(method):
    found = p_values(method, list(law.SETTINGS), 200_000)
    assert min(found) > LIMIT, dict(zip(law.SETTINGS, found, strict=True))


# Known mistakes. Each is made in some rows of a batch alone, so that one program has them all:
# `rows` is [B], true where the mistake is made.


def residual_of_target(monkeypatch, rows):
    """The token after a rejection drawn from p itself."""
    right = verification.residual

    def wrong(target, law, num_accepted, count, *, scale):
        law = jnp.where(rows[:, None, None], jnp.float32(0), law)
        return right(target, law, num_accepted, count, scale=scale)

    monkeypatch.setattr(verification, "residual", wrong)


def residual_after_the_last_draft(monkeypatch, rows):
    """A residual where every draft was kept, in place of the target's own law."""
    right = verification.residual

    def wrong(target, law, num_accepted, count, *, scale):
        return right(target, law, num_accepted, jnp.where(rows, 99, count), scale=scale)

    monkeypatch.setattr(verification, "residual", wrong)


def one_hot_in_acceptance(monkeypatch, rows):
    """Drawn drafts are kept with chance p, as certain ones are, for p / q."""
    right = verification.acceptance_ratios

    def wrong(target, law, tokens):
        certain = verification.one_hot_law(tokens, law.shape[-1])
        return right(target, jnp.where(rows[:, None, None], certain, law), tokens)

    monkeypatch.setattr(verification, "acceptance_ratios", wrong)


def one_hot_throughout(monkeypatch, rows):
    """Drawn drafts taken as certain in acceptance and residual alike: no mistake, since this keeps
    the law whatever the drafts are, as with argmax drafts; it only accepts fewer."""
    right = drafting.choose_drafts

    def other(*args):
        tokens, law = right(*args)
        certain = verification.one_hot_law(tokens, law.shape[-1])
        return tokens, jnp.where(rows[:, None, None], certain, law)

    monkeypatch.setattr(drafting, "choose_drafts", other)


def block_by_position(monkeypatch, rows):
    """Block verification and sampled drafts keyed by position alone."""
    right = keys.block_keys

    def wrong(seeds, purpose, committed, indices):
        by_position = keys.position_keys(seeds, purpose, committed[:, None] + indices)
        return jnp.where(rows[:, None], by_position, right(seeds, purpose, committed, indices))

    monkeypatch.setattr(keys, "block_keys", wrong)


def temperature_ignored_in_verification(monkeypatch, rows):
    """The target's law at temperature 1 whatever was asked."""
    right = rounds.process_logits

    def wrong(raw, *args, **keywords):
        found = right(raw, *args, **keywords)
        is_round = raw.shape[1] > 1
        return jnp.where(rows[:, None, None], raw, found) if is_round else found

    monkeypatch.setattr(rounds, "process_logits", wrong)


MISTAKES = [
    (residual_of_target, "rejection, temperature 1"),
    (residual_of_target, "block, temperature 1"),
    (residual_after_the_last_draft, "rejection, temperature 1"),
    (one_hot_in_acceptance, "rejection, temperature 1"),
    (block_by_position, "block, temperature 1"),
    (temperature_ignored_in_verification, "match, temperature 0.6, top-p 0.85"),
]
SOUND = [
    (one_hot_throughout, "rejection, temperature 1"),
    (None, "rejection, temperature 1"),
    (None, "block, temperature 1"),
    (None, "match, temperature 0.6, top-p 0.85"),
]


def test_every_mistake_breaks_the_law(monkeypatch):
    """The same comparison, with rows beside the mistaken ones in which nothing is wrong."""
    cases, seeds = [*MISTAKES, *SOUND], 5_000
    for index, (change, _) in enumerate(cases):
        if change is not None:
            change(monkeypatch, np.arange(len(cases) * seeds) // seeds == index)
    found = p_values("p-eagle", [name for _, name in cases], 15_000, seeds)
    for index, ((change, name), value) in enumerate(zip(cases, found, strict=True)):
        assert (value < LIMIT) == (index < len(MISTAKES)), (change, name, found)
