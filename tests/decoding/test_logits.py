"""Logit processing against the slow definition, row by row, and the borders of each filter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding import logits as lg
from peagle_jax.decoding.logits import History
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features, make_requests
from tests.decoding import oracle

VOCAB = 12
ALL = Features(sampled=True, penalties=True)
EOS = (2,)


def requests_of(prompts, params, features=ALL, vocab=VOCAB):
    return make_requests(
        prompts,
        params,
        batch_size=len(params),
        vocab_size=vocab,
        context_length=1024,
        eos_token_ids=EOS,
        num_speculative_tokens=3,
        features=features,
        max_stop_ids=4,
    )


PARAMS = {
    "neutral": {},
    "bias": dict(logit_bias={3: 2.5, 4: -4.0}),
    "repetition": dict(repetition_penalty=1.7),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.8),
    "min tokens": dict(min_tokens=5, stop_token_ids=(7,)),
    "temperature": dict(temperature=0.6),
    "top-k": dict(temperature=1.0, top_k=4),
    "top-p": dict(temperature=1.0, top_p=0.6),
    "min-p": dict(temperature=2.0, min_p=0.3),
    "everything": dict(
        temperature=0.7,
        top_k=6,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={0: 1.0, 9: -1.0},
        min_tokens=4,
    ),
}


def test_every_row_equals_plain_processing_at_its_step_B11():
    """Row i sees prompt, committed output and drafts 0..i-1; all settings in one batch."""
    generator = np.random.default_rng(0)
    params = [SamplingParams(**fields) for fields in PARAMS.values()]
    prompts = [generator.integers(0, VOCAB, 4).tolist() for _ in params]
    outputs = [generator.integers(3, VOCAB, 3).tolist() for _ in params]
    drafts = generator.integers(3, VOCAB, (len(params), 3)).astype(np.int32)
    raw = (3 * generator.standard_normal((len(params), 4, VOCAB))).astype(np.float32)
    counts = np.stack([np.bincount(output, minlength=VOCAB) for output in outputs])
    history = History(
        jnp.asarray(np.stack([np.isin(np.arange(VOCAB), prompt) for prompt in prompts])),
        jnp.asarray(counts, jnp.int32),
    )
    process = jax.jit(lg.process_logits, static_argnames="features")
    found = process(
        jnp.asarray(raw),
        requests_of(prompts, params),
        features=ALL,
        history=history,
        drafts=jnp.asarray(drafts),
        num_output=jnp.full(len(params), 3, jnp.int32),
    )
    found = np.asarray(found, np.float64)
    for row, (name, one) in enumerate(zip(PARAMS, params, strict=True)):
        for step in range(4):
            output = [*outputs[row], *drafts[row, :step].tolist()]
            expected = oracle.process(raw[row, step], prompts[row], output, one, EOS)
            mine = found[row, step]
            # Logits are free up to a shift.
            mine, expected = mine - mine.max(), expected - expected.max()
            np.testing.assert_allclose(mine, expected, atol=1e-4, err_msg=f"{name}, row {step}")


@jax.jit
def filtered(logits, top_k, top_p, min_p):
    return lg.keep_min_p(lg.keep_top(logits, top_k, top_p), min_p)


def kept(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    out = filtered(
        np.asarray(logits, np.float32)[None, None, :],
        np.array([[top_k]], np.int32),
        np.array([[top_p]], np.float32),
        np.array([[min_p]], np.float32),
    )
    return np.flatnonzero(np.isfinite(np.asarray(out)[0, 0])).tolist()


@pytest.mark.parametrize(
    ("probabilities", "filters", "expected"),
    [
        ([0.5, 0.3, 0.2], dict(top_k=1), [0]),
        ([0.4, 0.2, 0.2, 0.2], dict(top_k=2), [0, 1, 2, 3]),  # ties with the k-th stay
        ([0.5, 0.3, 0.2], dict(top_k=9), [0, 1, 2]),
        ([0.5, 0.3, 0.2], dict(top_p=0.5), [0]),
        ([0.5, 0.3, 0.2], dict(top_p=0.51), [0, 1]),  # the token that crosses stays
        ([0.25, 0.25, 0.25, 0.25], dict(top_p=0.5), [0, 1]),  # ties at the border by id
        ([0.2, 0.3, 0.5], dict(top_p=1e-6), [2]),
        ([0.5, 0.3, 0.2], dict(top_p=1.0), [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.1], dict(top_k=2, top_p=0.6), [0, 1]),  # 0.4/0.7 < 0.6 after top-k
        ([0.6, 0.3, 0.1], dict(min_p=0.5), [0, 1]),
        ([0.6, 0.29, 0.11], dict(min_p=0.5), [0]),
        ([0.6, 0.4, 0.0], dict(top_k=3), [0, 1]),
    ],
)
def test_borders(probabilities, filters, expected):
    with np.errstate(divide="ignore"):
        assert kept(np.log(np.array(probabilities)), **filters) == expected


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 1e-3, 50.0])
def test_no_temperature_gives_nan(temperature):
    params = [SamplingParams(temperature=temperature, top_p=0.9)]
    raw = jnp.array([[[1.0, 30.0, -70.0, 29.0]]], jnp.float32)
    found = lg.process_logits(
        raw,
        requests_of([[0]], params, Features(sampled=True), vocab=4),
        Features(sampled=True),
        history=None,
        drafts=jnp.zeros((1, 0), jnp.int32),
        num_output=jnp.zeros(1, jnp.int32),
    )
    assert not bool(jnp.any(jnp.isnan(found)))
    assert int(jnp.argmax(found[0, 0])) == 1


def test_logprobs_are_of_the_raw_logits():
    raw = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]], jnp.float32)) + 4
    tokens = jnp.array([[1]], jnp.int32)
    np.testing.assert_allclose(lg.log_probabilities(raw, tokens), np.log([[0.3]]), atol=1e-6)
    values, ids = lg.top_log_probabilities(raw, 2)
    assert ids.tolist() == [[[0, 1]]]
    np.testing.assert_allclose(values, np.log([[[0.5, 0.3]]]), atol=1e-6)
