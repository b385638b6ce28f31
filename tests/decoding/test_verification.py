"""Verification by exact enumeration: the law of the output is the target's for any drafts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding import verification as vf
from peagle_jax.decoding.logits import process_logits
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.decoding.rounds import sanitise
from peagle_jax.decoding.verification import Drafts
from tests.decoding.test_logits import requests_of

V, K = 4, 3
LAW = Features(sampled=True, draft_law=True)


def laws(seed: int, *, conditional: bool):
    """A target law for every prefix and a draft law for every position (or prefix), float64."""
    generator = np.random.default_rng(seed)

    def table(count):
        return generator.dirichlet(np.full(V, 0.6), size=count)

    target = [table(V**depth) for depth in range(K + 1)]
    draft = [table(V**depth if conditional else 1) for depth in range(K)]
    return target, draft


def at(tables, depth, prefix):
    rows = tables[depth]
    index = int(np.ravel_multi_index(prefix, (V,) * depth)) if depth else 0
    return rows[index % len(rows)]


TRIPLES = list(itertools.product(range(V), repeat=K))


def batch_of(target, draft):
    p = np.array([[at(target, i, t[:i]) for i in range(K + 1)] for t in TRIPLES])
    q = np.array([[at(draft, i, t[:i]) for i in range(K)] for t in TRIPLES])
    chance = np.array([np.prod([q[r, i, t[i]] for i in range(K)]) for r, t in enumerate(TRIPLES)])
    return p, q, chance


def accepted_law(rule, p, q):
    """P(tau = 0..K) for every triple from the product's ratios and thresholds."""
    tokens = jnp.asarray(TRIPLES, jnp.int32)
    target, law = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
    count = jnp.full(len(TRIPLES), K, jnp.int32)
    ratios = vf.acceptance_ratios(target, law, tokens)
    reach, thresholds = vf.block_thresholds(target, law, ratios, count)
    chances = np.zeros((len(TRIPLES), K + 1))
    if rule == "rejection":
        keep = np.minimum(np.asarray(ratios, np.float64), 1)
        alive = np.ones(len(TRIPLES))
        for i in range(K):
            chances[:, i] = alive * (1 - keep[:, i])
            alive = alive * keep[:, i]
        chances[:, K] = alive
        scale = jnp.ones_like(reach)
    else:
        h = np.minimum(np.asarray(thresholds, np.float64), 1)
        longer = np.ones(len(TRIPLES))
        for i in range(K, 0, -1):
            chances[:, i] = longer * h[:, i - 1]
            longer = longer * (1 - h[:, i - 1])
        chances[:, 0] = longer
        scale = reach
    last = []
    for tau in range(K + 1):
        weights = vf.residual(
            target, law, jnp.full(len(TRIPLES), tau, jnp.int32), count, scale=scale
        )
        weights = np.asarray(weights, np.float64)
        last.append(weights / weights.sum(-1, keepdims=True))
    return chances, last


@pytest.mark.parametrize("conditional", [False, True], ids=["parallel", "autoregressive"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("length", [2, 4])
def test_exact_joint_law_B14(rule, conditional, length):
    """All 64 draft triples with exact probabilities; later rounds are lossless by induction."""
    target, draft = laws(3, conditional=conditional)
    p, q, chance = batch_of(target, draft)
    chances, last = accepted_law(rule, p, q)
    found = np.zeros((V,) * length)
    for row, triple in enumerate(TRIPLES):
        for tau in range(K + 1):
            for token in range(V):
                emitted = (*triple[:tau], token)[:length]
                weight = chance[row] * chances[row, tau] * last[tau][row, token]
                for rest in itertools.product(range(V), repeat=length - len(emitted)):
                    text, extra = (*emitted, *rest), 1.0
                    for i in range(len(emitted), length):
                        extra *= at(target, i, text[:i])[text[i]]
                    found[text] += weight * extra
    expected = np.zeros((V,) * length)
    for text in itertools.product(range(V), repeat=length):
        expected[text] = np.prod([at(target, i, text[:i])[text[i]] for i in range(length)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_acceptance_equals_the_closed_forms():
    """Rejection keeps sum(min(p, q)) at each position; block keeps at least as many in the mean.

    The block thresholds are computed again in NumPy from the paper's formula, in float64.
    """
    target, draft = laws(5, conditional=False)
    p, q, chance = batch_of(target, draft)
    rejection, _ = accepted_law("rejection", p, q)
    first = chance @ (1 - rejection[:, 0])
    assert first == pytest.approx(np.minimum(p[0, 0], q[0, 0]).sum(), abs=1e-6)
    expected = np.zeros(len(TRIPLES))
    for row, triple in enumerate(TRIPLES):
        reach, thresholds = 1.0, []
        for i, token in enumerate(triple):
            reach = min(reach * p[row, i, token] / q[row, i, token], 1.0)
            if i == K - 1:
                thresholds.append(reach)
                continue
            excess = np.maximum(reach * p[row, i + 1] - q[row, i + 1], 0).sum()
            below = excess + 1 - reach
            thresholds.append(1.0 if below == 0 else excess / below)
        longer = 1.0
        for i in range(K, 0, -1):
            expected[row] += i * longer * thresholds[i - 1]
            longer *= 1 - thresholds[i - 1]
    block, _ = accepted_law("block", p, q)
    lengths = np.arange(K + 1)
    assert chance @ (block @ lengths) == pytest.approx(chance @ expected, abs=1e-6)
    assert chance @ (block @ lengths) >= chance @ (rejection @ lengths) - 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_one_draft_from_q_B3(rule):
    """p=[.5,.3,.2], q=[.2,.7,.1]: kept 0.60, residual [.75,0,.25], emitted marginals p."""
    trials = 200_000
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    drafts = np.random.default_rng(0).choice(3, size=(trials, 1), p=q).astype(np.int32)
    one = requests_of([[0]], [SamplingParams(temperature=1.0, rule=rule)], LAW, vocab=3)
    requests = jax.tree.map(lambda x: jnp.repeat(x, trials, axis=0), one)
    seeds = np.stack([np.zeros(trials), np.arange(trials)], axis=1).astype(np.uint32)
    requests = type(requests)(**{**vars(requests), "seeds": jnp.asarray(seeds)})

    def broadcast(values, rows):
        values = jnp.asarray(values, jnp.float32)[None, None, :]
        return jnp.broadcast_to(values, (trials, rows, 3))

    verdict = jax.jit(vf.verify, static_argnames="features")(
        jnp.log(broadcast(p, 2)),
        Drafts(jnp.asarray(drafts), jnp.ones(trials, jnp.int32), broadcast(q, 1)),
        requests,
        jnp.full(trials, 5, jnp.int32),
        features=LAW,
    )
    accepted = np.asarray(verdict.num_accepted)
    first = np.asarray(verdict.tokens)[:, 0]
    assert abs(accepted.mean() - 0.6) < 0.005
    rejected = np.bincount(first[accepted == 0], minlength=3) / (accepted == 0).sum()
    np.testing.assert_allclose(rejected, [0.75, 0, 0.25], atol=0.01)
    assert rejected[1] == 0
    sigma = np.sqrt(p * (1 - p) / trials)
    assert np.all(np.abs(np.bincount(first, minlength=3) / trials - p) < 3 * sigma)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_temperature_and_top_p_hold_in_verification_B6(rule):
    """p=[.5,.3,.2] at temperature 0.5 and top-p 0.7: 25/34, 9/34 and never token 2."""
    trials = 100_000
    fields = dict(temperature=0.5, top_p=0.7, rule=rule)
    one = requests_of([[0]], [SamplingParams(**fields)], LAW, vocab=3)
    requests = jax.tree.map(lambda x: jnp.repeat(x, trials, axis=0), one)
    seeds = np.stack([np.zeros(trials), np.arange(trials)], axis=1).astype(np.uint32)
    requests = type(requests)(**{**vars(requests), "seeds": jnp.asarray(seeds)})
    drafts = np.random.default_rng(1).integers(0, 3, (trials, 1)).astype(np.int32)

    @jax.jit
    def run(requests, drafts):
        raw = jnp.log(jnp.array([0.5, 0.3, 0.2], jnp.float32))
        logits = process_logits(
            jnp.broadcast_to(raw[None, None, :], (trials, 2, 3)),
            requests,
            LAW,
            history=None,
            drafts=drafts,
            num_output=jnp.zeros(trials, jnp.int32),
        )
        flat = jnp.full((trials, 1, 3), 1 / 3, jnp.float32)
        count = jnp.ones(trials, jnp.int32)
        return vf.verify(
            logits, Drafts(drafts, count, flat), requests, jnp.full(trials, 4, jnp.int32), LAW
        )

    verdict = run(requests, jnp.asarray(drafts))
    found = np.bincount(np.asarray(verdict.tokens)[:, 0], minlength=3) / trials
    np.testing.assert_allclose(found, [25 / 34, 9 / 34, 0], atol=0.005)
    assert found[2] == 0


@pytest.mark.parametrize("last", [0, 4])
def test_token_0_is_never_special_A10(last):
    own = jnp.array([[3, 5, last]], jnp.int32)
    drafts = Drafts(jnp.array([[3, 5]], jnp.int32), jnp.array([2], jnp.int32))
    verdict = vf.match(own, drafts)
    assert verdict.num_accepted.tolist() == [2]
    assert verdict.tokens.tolist() == [[3, 5, last]]


def test_fewer_drafts_than_columns():
    """What stands in places beyond the count is never taken for a draft, even if it matches."""
    own = jnp.array([[0, 0, 7], [0, 0, 7], [1, 0, 7]], jnp.int32)
    drafts = Drafts(jnp.zeros((3, 2), jnp.int32), jnp.array([0, 1, 2], jnp.int32))
    assert vf.match(own, drafts).num_accepted.tolist() == [0, 1, 0]


def test_ties_go_to_the_lowest_id_B13():
    logits = jnp.zeros((1, 3, 12), jnp.float32).at[:, :, jnp.array([9, 4])].set(1.0)
    requests = requests_of([[0]], [SamplingParams()], Features())
    tokens = vf.own_tokens(logits, requests, jnp.array([3], jnp.int32), Features())
    assert tokens.tolist() == [[4, 4, 4]]


def test_equal_laws_leave_a_usable_residual():
    p = jnp.full((1, 2, 4), 0.25, jnp.float32)
    weights = vf.residual(
        p, p[:, :1], jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), scale=jnp.ones((1, 2))
    )
    np.testing.assert_array_equal(weights, p[:, 0])


def test_ids_outside_the_vocabulary_end_the_drafts():
    drafts = Drafts(jnp.array([[1, -1, 2], [9, 1, 1]], jnp.int32), jnp.array([3, 3], jnp.int32))
    clean = sanitise(drafts, 8)
    assert clean.count.tolist() == [1, 0]
    assert clean.tokens.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_rules_and_temperatures_stay_with_their_request_B8():
    """Every rule and greedy in one batch: reordering the requests reorders the verdicts."""
    generator = np.random.default_rng(2)
    params = [
        SamplingParams(seed=seed, temperature=temperature, rule=rule)
        for seed, (temperature, rule) in enumerate(
            [(0.0, "match"), (1.0, "match"), (0.5, "rejection"), (1.0, "block"), (0.0, "block")]
        )
    ]
    logits = jnp.asarray(generator.standard_normal((5, 4, 6)), jnp.float32)
    law = jax.nn.softmax(jnp.asarray(generator.standard_normal((5, 3, 6)), jnp.float32))
    tokens = jnp.asarray(generator.integers(0, 6, (5, 3)), jnp.int32)
    count, committed = jnp.array([3, 3, 2, 3, 1]), jnp.array([4, 5, 6, 7, 8])

    def run(order):
        order = np.asarray(order)
        verdict = vf.verify(
            logits[order],
            Drafts(tokens[order], count[order], law[order]),
            requests_of([[0]] * len(order), [params[i] for i in order], LAW, vocab=6),
            committed[order],
            LAW,
        )
        return np.asarray(verdict.tokens), np.asarray(verdict.num_accepted)

    straight, kept = run(range(5))
    for order in ([4, 2, 0, 3, 1], [1], [2], [3]):
        other, other_kept = run(order)
        np.testing.assert_array_equal(other_kept, kept[order])
        for row, source in enumerate(order):
            upto = kept[source] + 1
            np.testing.assert_array_equal(other[row, :upto], straight[source, :upto])
