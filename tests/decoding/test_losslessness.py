"""Speculative output equals plain output, token by token: families, methods, drafters, K, batch.

CI meets every two values of the product over six static shapes, and makes 200 random draws over the
same shapes; `slow` runs the full product with a program for each K and batch. See fuzz.py.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from tests.decoding import fuzz, tiny
from tests.decoding.drafters import Behaviour
from tests.decoding.fuzz import Draw, Request, Shape

NUM_DRAFTS = (1, 2, 3, 5, 7, 11, 16)
FACTORS = {
    "family": tuple(tiny.TARGETS),
    "method": fuzz.METHODS,
    "behaviour": tuple(Behaviour),
    "num_drafts": NUM_DRAFTS,
    "batch": (1, 5),
    "temperature": (0.0, 0.8),
}


@functools.cache
def covering_rows() -> list[dict]:
    """Few rows in which every two values of different factors meet."""
    factors = FACTORS
    names = list(factors)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    generator, rows = np.random.default_rng(0), []

    def pairs(row):
        return set(itertools.combinations([(name, row[name]) for name in names], 2))

    while open_pairs:
        candidates = []
        (a, x), (b, y) = min(open_pairs, key=str)
        for _ in range(60):
            row = {
                name: values[generator.integers(len(values))] for name, values in factors.items()
            }
            candidates.append(row | {a: x, b: y})
        best = max(candidates, key=lambda row: len(pairs(row) & open_pairs))
        rows.append(best)
        open_pairs -= pairs(best)
    return rows


DRAWS = -(-200 // len(fuzz.SHAPES))  # of each shape


def draw_of(shape: Shape, row: dict, seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    requests = [
        Request(
            generator.integers(0, tiny.VOCAB, generator.integers(1, fuzz.MAX_PROMPT)).tolist(),
            dict(
                max_tokens=24,
                temperature=row["temperature"],
                seed=index,
                num_speculative_tokens=row["num_drafts"],
            ),
            row["method"],
            row["behaviour"],
        )
        for index in range(row["batch"])
    ]
    return Draw(shape, 3, 4, requests)


@pytest.mark.parametrize("shape", fuzz.SHAPES, ids=str)
def test_plain_and_speculative_texts_are_equal(shape):
    """One test for each pair of programs, since compiling them is most of its cost."""
    accepted = 0
    if shape.num_drafts == max(NUM_DRAFTS):
        for seed, row in enumerate(covering_rows()):
            if row["family"] == shape.family:
                outcome = fuzz.check(draw_of(shape, row, seed))
                assert not outcome.near_ties
                accepted += outcome.accepted
        assert accepted > 20
    total = fuzz.run_draws(DRAWS, (shape,))
    assert total["draws"] >= DRAWS
    assert total["near_ties"] * 5000 <= max(total["tokens"], 5000)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
@pytest.mark.parametrize("family", tiny.TARGETS)
def test_full_product(family, num_drafts, batch):
    features = fuzz.SAMPLED
    shape = Shape(family, num_drafts, batch, features)
    for method, behaviour in itertools.product(fuzz.METHODS, Behaviour):
        for temperature in (0.0, 0.8):
            row = dict(
                method=method,
                behaviour=behaviour,
                num_drafts=num_drafts,
                batch=batch,
                temperature=temperature,
            )
            assert fuzz.check(draw_of(shape, row, 1)).near_ties == 0
    # Seventy pairs of programs in one process would use up its memory maps.
    fuzz.compiled.cache_clear()
    jax.clear_caches()
