"""Sampled text has the target's joint law under every rule and setting; known mistakes do not.

The joint law of five tokens over consecutive rounds at K = 3, drawn with the product's own keys and
compared by chi-square. CI draws enough to catch the mutations below; `slow` draws 200,000.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding import drafting, keys, rounds, verification
from tests.decoding import law

LIMIT = 1e-6
SEEDS = 2_000


def p_values(method, names, num_draws):
    sampler = law.Sampler(method, names, min(SEEDS, num_draws))
    counts, accepted = sampler.counts(num_draws)
    assert np.all(accepted[:, 0] > 0.02 * accepted[:, 1]), "drafts must matter"
    return {
        name: law.p_value(counts[row], law.expected_law(sampler.target, law.parameters(name)))
        for row, name in enumerate(names)
    }


def test_every_rule_and_setting_keeps_the_law():
    found = p_values("p-eagle", list(law.SETTINGS), 20_000)
    print(found)
    assert min(found.values()) > LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_every_rule_and_setting_keeps_the_law_200k(method):
    found = p_values(method, list(law.SETTINGS), 200_000)
    print(found)
    assert min(found.values()) > LIMIT, found


def wrong_residual(monkeypatch):
    """The token after a rejection drawn from p itself."""
    right = verification.residual

    def wrong(target, law, num_accepted, count, *, scale):
        return right(target, jnp.zeros_like(law), num_accepted, count, scale=scale)

    monkeypatch.setattr(verification, "residual", wrong)


def one_hot_for_sampled_drafts(monkeypatch):
    """Drafts are drawn, yet verified as if they were certain."""
    right = drafting.choose_drafts

    def wrong(*args):
        tokens, dense = right(*args)
        return tokens, verification.one_hot_law(tokens, dense.shape[-1])

    monkeypatch.setattr(drafting, "choose_drafts", wrong)


def block_by_position(monkeypatch):
    """Block verification and sampled drafts keyed by position alone."""

    def wrong(seeds, purpose, committed, indices):
        return keys.fold(seeds, purpose, committed[:, None] + indices)

    monkeypatch.setattr(keys, "block_keys", wrong)


def temperature_ignored_in_verification(monkeypatch):
    """B6: the target's law at temperature 1 whatever was asked."""
    right = rounds.process_logits

    def wrong(raw, requests, features, **keywords):
        if raw.shape[1] == 1:
            return right(raw, requests, features, **keywords)
        return raw

    monkeypatch.setattr(rounds, "process_logits", wrong)


MUTATIONS = {
    wrong_residual: "rejection, temperature 1",
    one_hot_for_sampled_drafts: "rejection, temperature 1",
    block_by_position: "block, temperature 1",
    temperature_ignored_in_verification: "match, temperature 0.6, top-p 0.85",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_fail(mutation, monkeypatch):
    mutation(monkeypatch)
    name = MUTATIONS[mutation]
    found = p_values("p-eagle", [name], 200_000)
    print(found)
    assert found[name] < LIMIT, found
