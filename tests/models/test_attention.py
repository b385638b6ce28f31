"""Attention against a float64 loop; windows, sinks, caches and the edges of the cache."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoints.hf_config import read_target_config
from peagle_jax.models import attention as module_under_test
from peagle_jax.models.attention import attend, attention
from peagle_jax.models.cache import LayerCache, write_layer
from peagle_jax.models.rope import inverse_frequencies
from tests.decoding.tiny import make_target


def loop(q, k, v, q_at, k_at, scale, window, sinks):
    """One query, one head at a time; a query that sees nothing gives zero."""
    out = np.zeros(q.shape)
    for b, t, n, g in np.ndindex(q.shape[:4]):
        seen = [
            s
            for s in range(k.shape[1])
            if 0 <= k_at[b, s] <= q_at[b, t]
            and (window is None or k_at[b, s] > q_at[b, t] - window)
        ]
        if not seen:
            continue
        weights = np.exp(scale * k[b, seen, n] @ q[b, t, n, g])
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[n, g]))
        out[b, t, n, g] = weights @ v[b, seen, n] / total
    return out


def draw(seed, batch, rows, slots, kv=2, group=3, size=4):
    generator = np.random.default_rng(seed)
    shapes = [(batch, rows, kv, group, size), (batch, slots, kv, size), (batch, slots, kv, size)]
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocked", [False, True], ids=["whole", "blocks"])
def test_attention_equals_a_float64_loop(sinks, window, blocked, monkeypatch):
    if blocked:
        monkeypatch.setattr(module_under_test, "_QUERY_BLOCK", 4)
    q, k, v = draw(0, 2, 6, 6)
    at = np.asarray([[0, 1, 2, 3, 4, 5], [2, -1, 0, 1, -1, 3]], np.int32)
    bias = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32) if sinks else None
    found = attend(
        *map(jnp.asarray, (q, k, v, at, at)),
        scale=0.7,
        window=window,
        sinks=None if bias is None else jnp.asarray(bias),
    )
    np.testing.assert_allclose(found, loop(q, k, v, at, at, 0.7, window, bias), atol=2e-6)


def test_a_window_of_four_at_position_ten_sees_keys_seven_to_ten_C8():
    q, k, v = map(jnp.asarray, draw(2, 1, 12, 12, kv=1, group=1))
    at = jnp.arange(12, dtype=jnp.int32)[None, :]

    def row_ten(values):
        return attend(q, k, values, at, at, scale=0.5, window=4)[0, 10].sum()

    reached = np.abs(jax.grad(row_ten)(v)).sum(axis=(0, 2, 3)) > 0
    assert np.flatnonzero(reached).tolist() == [7, 8, 9, 10]


def test_prefill_and_decode_agree_on_the_window_C8():
    """Twelve rows at once, and one row at a time through a ring of exactly four slots."""
    q, k, v = (jnp.asarray(x) for x in draw(3, 1, 12, 12))
    at = jnp.arange(12, dtype=jnp.int32)[None, :]
    whole = attend(q, k, v, at, at, scale=0.5, window=4)
    empty = jnp.zeros((1, 4, 2, 4))
    cache = LayerCache(empty, empty, jnp.full((1, 4), -1, jnp.int32))
    step = jax.jit(lambda q, k, v, at, c: attention(q, k, v, at, c, scale=0.5, window=4))
    for t in range(12):
        row = slice(t, t + 1)
        out, cache = step(q[:, row], k[:, row], v[:, row], at[:, row], cache)
        np.testing.assert_allclose(out, whole[:, row], atol=1e-5)


def test_rows_past_the_end_of_the_cache_drop_and_earlier_rows_stay_C3():
    """Cache of 8 rows, 4 rows written at 6: 6 and 7 are written, 8 and 9 drop, 0 to 5 stay."""
    old = jnp.arange(8, dtype=jnp.float32).reshape(1, 8, 1, 1)
    new = 100 + jnp.arange(4, dtype=jnp.float32).reshape(1, 4, 1, 1)
    written = write_layer(LayerCache(old, old), new, new, jnp.asarray([[6, 7, 8, 9]]))
    assert written.keys[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101]


def test_padding_rows_write_nothing():
    old = jnp.arange(3, dtype=jnp.float32).reshape(1, 3, 1, 1)
    new = jnp.full((1, 2, 1, 1), 9.0)
    ring = LayerCache(old, old, jnp.asarray([[3, 1, 2]]))
    for cache in (LayerCache(old, old), ring):
        written = write_layer(cache, new, new, jnp.asarray([[-1, -1]]))
        assert written.keys[0, :, 0, 0].tolist() == [0, 1, 2]


_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_TINY_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_SPELLINGS = {
    "rope_scaling": {"rope_theta": 150000.0, "rope_scaling": _YARN},
    "rope_parameters": {"rope_parameters": {"rope_theta": 150000.0, **_YARN}},
    "no scaling": {"rope_parameters": {"rope_theta": 150000.0, "rope_type": "default"}},
    "no window": {
        "rope_parameters": {"rope_theta": 150000.0, **_YARN},
        "layer_types": ["full_attention"] * 2,
    },
}


def test_yarn_and_windows_act_within_twelve_tokens_under_both_spellings_C9(tmp_path):
    logits, configs = {}, {}
    tokens = jnp.arange(12, dtype=jnp.int32)[None, :]
    for name, fields in _SPELLINGS.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(_TINY_GPT_OSS | fields))
        configs[name] = read_target_config(file)
        graph, state = nnx.split(make_target(configs[name]))

        @jax.jit
        def run(state, graph=graph):
            target = nnx.merge(graph, state)
            return target.logits(target(tokens, tokens).hidden)

        logits[name] = np.asarray(run(state))
    _, factor = inverse_frequencies(configs["rope_scaling"].layers[0].rope, 8)
    assert factor == pytest.approx(1.34657, abs=1e-5)
    np.testing.assert_array_equal(logits["rope_scaling"], logits["rope_parameters"])
    for other in ("no scaling", "no window"):
        assert np.abs(logits["rope_scaling"] - logits[other]).max() > 1e-3, other
