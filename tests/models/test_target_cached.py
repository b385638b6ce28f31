"""Cached decoding, ragged batches, padding rows and rings give the numbers of the full pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.models.cache import init_cache, ring_slots
from tests.decoding.tiny import LAYER, TARGETS, VOCAB, make_target

LIMIT = 1e-4  # of the largest |logit|


@functools.partial(jax.jit, static_argnums=0)
def run(graph, state, tokens, positions, cache):
    target = nnx.merge(graph, state)
    out = target(tokens, positions, cache)
    return target.logits(out.hidden), out.cache


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


def full_logits(graph, state, tokens):
    """Logits of whole rows without a cache, the oracle of this file."""
    rows = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return np.asarray(run(graph, state, jnp.asarray(tokens), jnp.asarray(rows), None)[0])


def padded_chunk(tokens, starts, counts, width):
    """Rows starts .. starts + counts of each request, padding rows at -1 holding a real id."""
    offsets = np.arange(width)[None, :]
    positions = np.where(offsets < counts[:, None], starts[:, None] + offsets, -1)
    ids = np.take_along_axis(tokens, np.clip(positions, 0, None), axis=1)
    ids = np.where(positions < 0, 7, ids)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize("family", TARGETS)
def test_ragged_cached_passes_equal_the_full_pass(family):
    """Three requests of unlike lengths, in passes of 6 rows of which each uses some or none."""
    config = TARGETS[family]
    graph, state = nnx.split(make_target(config))
    tokens = random_tokens(3, 14)
    expected = full_logits(graph, state, tokens)
    cache = init_cache(config.layers, batch_size=3, num_slots=16, max_new_rows=6, dtype=jnp.float32)
    starts = np.zeros(3, int)
    for counts in ([6, 3, 1], [0, 6, 2], [5, 1, 6], [1, 4, 5]):
        counts = np.asarray(counts)
        logits, cache = run(graph, state, *padded_chunk(tokens, starts, counts, 6), cache)
        assert np.isfinite(logits).all(), "padding rows must stay finite"
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            found, wanted = logits[row, :count], expected[row, start : start + count]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=LIMIT * np.abs(expected).max())
        starts = starts + counts


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_any_number_of_new_rows_equals_the_full_pass(rows):
    config = TARGETS["gpt_oss"]
    config = dataclasses.replace(
        config, layers=tuple(dataclasses.replace(layer, moe=None) for layer in config.layers)
    )
    graph, state = nnx.split(make_target(config))
    tokens = random_tokens(2, 68)
    expected = full_logits(graph, state, tokens)
    cache = init_cache(
        config.layers, batch_size=2, num_slots=68, max_new_rows=max(rows, 4), dtype=jnp.float32
    )
    start = 0
    for count in [4, rows, 4] if rows > 2 else [4] + [rows] * 6:
        count = min(count, 68 - start)
        chunk = padded_chunk(tokens, np.full(2, start), np.full(2, count), count)
        if count:
            logits, cache = run(graph, state, *chunk, cache)
            wanted = expected[:, start : start + count]
            limit = LIMIT * np.abs(expected).max()
            np.testing.assert_allclose(logits, wanted, rtol=0, atol=limit)
        start += count


@pytest.mark.parametrize("window", [2, 7], ids=["window_shorter_than_K", "window_longer_than_K"])
def test_rings_keep_correct_keys_after_rejected_rows(window):
    """Every accepted count at every ring phase, as one batch.

    Request (phase, accepted) has `phase` more tokens than a ring turn; a verify pass writes K + 1
    rows of which the drafts past `accepted` are wrong; the next pass must not see them.
    """
    drafts = 4
    rows = drafts + 1
    slots = ring_slots(window, rows)
    config = dataclasses.replace(
        TARGETS["llama"], layers=(dataclasses.replace(LAYER, window=window), LAYER)
    )
    graph, state = nnx.split(make_target(config))
    phase, accepted = (x.reshape(-1) for x in np.mgrid[:slots, : drafts + 1])
    batch = len(phase)
    truth = random_tokens(batch, 3 * slots + 3 * rows)
    expected = full_logits(graph, state, truth)
    cache = init_cache(
        config.layers,
        batch_size=batch,
        num_slots=truth.shape[1],
        max_new_rows=rows,
        dtype=jnp.float32,
    )
    assert cache.layers[0].num_slots == slots and cache.layers[1].positions is None
    prompt = slots + 1 + phase
    done = np.zeros(batch, int)
    while (done < prompt).any():
        counts = np.minimum(prompt - done, rows)
        _, cache = run(graph, state, *padded_chunk(truth, done, counts, rows), cache)
        done = done + counts
    everything = np.full(batch, rows)
    for _ in range(2):
        drafted = truth.copy()
        for request in range(batch):
            wrong = slice(done[request] + 1 + accepted[request], None)
            drafted[request, wrong] = (drafted[request, wrong] + 1) % VOCAB
        logits, cache = run(graph, state, *padded_chunk(drafted, done, everything, rows), cache)
        for request in range(batch):
            valid = accepted[request] + 1
            np.testing.assert_allclose(
                logits[request, :valid],
                expected[request, done[request] : done[request] + valid],
                rtol=0,
                atol=LIMIT * np.abs(expected).max(),
                err_msg=f"phase {phase[request]}, accepted {accepted[request]}",
            )
        done = done + accepted + 1


def test_a_ring_too_small_for_the_pass_is_refused():
    config = dataclasses.replace(TARGETS["llama"], layers=(dataclasses.replace(LAYER, window=3),))
    target = make_target(config)
    cache = init_cache(config.layers, batch_size=1, num_slots=32, max_new_rows=2, dtype=jnp.float32)
    tokens, positions = padded_chunk(random_tokens(1, 8), np.zeros(1, int), np.full(1, 3), 3)
    with pytest.raises(ValueError, match="max_new_rows >= 3"):
        jax.eval_shape(target, tokens, positions, cache)


def test_taps_outside_the_model_are_refused():
    target = make_target(TARGETS["llama"])
    tokens, positions = padded_chunk(random_tokens(1, 8), np.zeros(1, int), np.full(1, 3), 3)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        jax.eval_shape(lambda t, p: target(t, p, taps=(3,)), tokens, positions)


def test_segments_attend_as_if_each_document_were_alone():
    graph, state = nnx.split(make_target(TARGETS["qwen3"]))
    tokens = random_tokens(1, 12)
    positions = jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], jnp.int32)
    segments = jnp.asarray([[0] * 5 + [1] * 7], jnp.int32)
    target = nnx.merge(graph, state)
    packed = jax.jit(lambda t: target(t, positions, segment_ids=segments).hidden)(tokens)
    for piece in (slice(0, 5), slice(5, 12)):
        alone = jax.jit(lambda t, p: target(t, p).hidden)(tokens[:, piece], positions[:, piece])
        np.testing.assert_allclose(packed[:, piece], alone, atol=1e-5)


def test_prompts_of_unequal_length_do_not_change_each_other_C13():
    """Prompts [1,2,3] and [1..7], alone and together, then four greedy tokens each."""
    config = TARGETS["qwen3"]
    graph, state = nnx.split(make_target(config))

    def greedy(prompts):
        """Ids [B, 4] and the logits that they were taken from."""
        width, batch = 7, len(prompts)
        lengths = np.asarray([len(p) for p in prompts])
        tokens = np.asarray([list(p) + [0] * (width - len(p)) for p in prompts], np.int32)
        cache = init_cache(
            config.layers, batch_size=batch, num_slots=16, max_new_rows=width, dtype=jnp.float32
        )
        chunk = padded_chunk(tokens, np.zeros(batch, int), lengths, width)
        logits, cache = run(graph, state, *chunk, cache)
        last = np.asarray(logits)[np.arange(batch), lengths - 1]
        chosen, seen = [], []
        for step in range(4):
            ids = last.argmax(-1).astype(np.int32)
            chosen.append(ids)
            seen.append(last)
            at = jnp.asarray((lengths + step)[:, None], jnp.int32)
            logits, cache = run(graph, state, jnp.asarray(ids[:, None]), at, cache)
            last = np.asarray(logits)[:, 0]
        return np.stack(chosen, 1), np.stack(seen, 1)

    short, long = [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]
    together = greedy([short, long])
    for row, prompt in enumerate((short, long)):
        for mine, alone in zip(together, greedy([prompt]), strict=True):
            np.testing.assert_allclose(mine[row], alone[0], atol=1e-5)
