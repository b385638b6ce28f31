"""The joint law of generated tokens, counted over many seeds, against the enumerated target.

Everything is the product's: target, drafter, rounds, rules and keys. The target is tiny, so that
the law of its first tokens is enumerated from full passes and the slow definition of the logits.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from peagle_jax.decoding import keys
from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.models.config import LayerConfig, RopeConfig
from tests.decoding import oracle, tiny

VOCAB = 4
PROMPT = [1, 2]
LENGTH = 5  # one token of prefill, then at least two rounds at K = 3
K = 3
LAYER = LayerConfig(num_heads=2, num_kv_heads=1, head_dim=4, rope=RopeConfig(theta=100.0))
TARGET = tiny.tiny_target(
    "llama", (LAYER,), vocab_size=VOCAB, hidden_size=8, intermediate_size=8, max_positions=16
)
FIELDS = dict(
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    hidden_size=8,
    target_hidden_size=8,
    intermediate_size=8,
    layers=(LAYER,),
    taps=(0, 1),
    max_positions=16,
)
DRAFTERS = {
    "p-eagle": tiny.drafter_config(**FIELDS, mask_token_id=3),
    "eagle3": tiny.drafter_config(**FIELDS, parallel_drafting=False, mask_token_id=None),
}
FEATURES = Features(sampled=True, penalties=True, draft_law=True)

PENALTIES = dict(
    repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5, logit_bias={0: 0.8}
)
SETTINGS: dict[str, dict] = {
    f"{rule}, {name}": dict(rule=rule, **fields)
    for rule in ("match", "rejection", "block")
    for name, fields in {
        "temperature 1": dict(temperature=1.0),
        "temperature 0.6, top-p 0.85": dict(temperature=0.6, top_p=0.85),
        "temperature 1.5, top-k 3, min-p 0.15": dict(temperature=1.5, top_k=3, min_p=0.15),
        "penalties": dict(temperature=1.0, **PENALTIES),
    }.items()
} | {
    "rejection, argmax drafts": dict(rule="rejection", temperature=1.0, draft_temperature=0.0),
    "block, hot drafts": dict(rule="block", temperature=1.0, draft_temperature=2.0),
}


def parameters(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **SETTINGS[name])


def models(method: str, seed: int = 11):
    """Weights that make the laws neither flat nor certain, and target and drafter differ."""
    return tiny.make_target(TARGET, seed), tiny.make_drafter(DRAFTERS[method], seed + 1)


def expected_law(target, params: SamplingParams) -> np.ndarray:
    """P(text) of every text of LENGTH tokens, by the definition."""
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    raw = oracle.full_logits(target, np.array([[*PROMPT, *text] for text in texts], np.int32))
    law = np.ones(len(texts))
    for step in range(LENGTH):
        same_start = VOCAB ** (LENGTH - step)  # texts in a row that agree before `step`
        for row in range(0, len(texts), same_start):
            logits = oracle.process(
                raw[row, len(PROMPT) + step - 1], PROMPT, list(texts[row][:step]), params, ()
            )
            weights = np.exp(logits - logits.max())
            chances = np.repeat(weights / weights.sum(), same_start // VOCAB)
            law[row : row + same_start] *= chances
    return law


class Sampler:
    """Compiled once; draws any setting, all in one batch."""

    def __init__(self, method: str, names: list[str], seeds_per_call: int):
        self.names, self.seeds = names, seeds_per_call
        self.target, drafter = models(method)
        batch = len(names) * seeds_per_call
        self.fn = make_generate_fn(
            self.target,
            drafter,
            method,
            num_speculative_tokens=K,
            cache_length=8,
            features=FEATURES,
            max_prefill_chunk=2,
            eos_token_ids=(),
            max_stop_ids=1,
        )
        one, tokens = self.fn.requests([PROMPT] * len(names), [parameters(n) for n in names])
        spread = np.repeat(np.arange(len(names)), seeds_per_call)
        self.requests = jax.tree.map(lambda column: column[spread], one)
        self.tokens = tokens[spread]
        self.batch = batch

    def counts(self, num_draws: int, first_seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """How often each setting gave each text, [settings, V**LENGTH], and accepted per round."""
        found = np.zeros((len(self.names), VOCAB**LENGTH), np.int64)
        accepted = np.zeros((len(self.names), 2), np.int64)
        for start in range(first_seed, first_seed + num_draws, self.seeds):
            seeds = keys.seed_words(range(start, start + self.seeds))
            requests = dataclasses.replace(
                self.requests, seeds=jnp.asarray(np.tile(seeds, (len(self.names), 1)))
            )
            state = self.fn.compiled.empty(requests, self.tokens)
            state = self.fn.compiled.prefill(self.fn.params, state, chunk=2)
            state = self.fn.compiled.step(self.fn.params, state, np.int32(LENGTH))
            texts = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + LENGTH]
            codes = texts @ (VOCAB ** np.arange(LENGTH - 1, -1, -1))
            depth = np.asarray(state.draft_depth)
            for index in range(len(self.names)):
                rows = slice(index * self.seeds, (index + 1) * self.seeds)
                found[index] += np.bincount(codes[rows], minlength=VOCAB**LENGTH)
                accepted[index] += [
                    (depth[rows] > 0).sum(),
                    np.asarray(state.num_rounds)[rows].sum(),
                ]
        return found, accepted


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of counts against a law; cells that expect fewer than 5 are pooled."""
    total = counts.sum()
    impossible = law == 0
    if counts[impossible].any():
        return 0.0
    rare = (law * total < 5) & ~impossible
    common = ~rare & ~impossible
    observed, expected = [*counts[common]], [*(law[common] * total)]
    if law[rare].sum() * total >= 5:
        observed.append(counts[rare].sum())
        expected.append(law[rare].sum() * total)
    observed, expected = np.array(observed), np.array(expected)
    expected *= observed.sum() / expected.sum()
    return float(stats.chisquare(observed, expected).pvalue)
