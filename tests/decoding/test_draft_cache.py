"""What the drafter sees while serving: true states for every committed token, training's layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding.drafting import RoundView
from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.methods import make_method
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.models import layers as model_layers
from peagle_jax.models.cache import LayerCache, init_cache, write_layer
from peagle_jax.models.drafter import Drafter
from tests.decoding import programs, tiny
from tests.decoding.drafters import Behaviour
from tests.decoding.programs import sampling
from train.alignment import shift_rows

K = 7
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 1, 4]]
GREEDY = Features()
LAW = Features(sampled=True, draft_law=True)


def after_rounds(behaviour: Behaviour, rounds: int, prompts=PROMPTS):
    """A state with a P-EAGLE head's cache after rounds whose drafts are told."""
    params = [sampling(max_tokens=30)] * len(prompts)
    _, plain_state = programs.run_plain(prompts, params, features=GREEDY)
    fn = programs.scripted(K, GREEDY, network=True)
    values, state = programs.start(fn, prompts, params, plain_state.tokens, behaviour)
    return fn, values, fn.compiled.step(values, state, np.int32(rounds))


LENGTH = programs.CACHE_LENGTH


HEAD = tiny.make_drafter()
TARGET = programs.target()


@jax.jit
def true_rows(tokens):
    """Next tokens and fused true states of a text of LENGTH tokens, from one full target pass."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
    output = TARGET(tokens[None, :], positions, taps=HEAD.config.taps)
    return jnp.roll(tokens, -1), HEAD.fuse(output.taps)[0]


@jax.jit
def fresh_cache(tokens, count):
    """The draft cache after one pass over rows 0..count-1 of a text."""
    ids, fused = true_rows(tokens)
    empty = init_cache(
        HEAD.config.layers,
        batch_size=1,
        num_slots=LENGTH,
        max_new_rows=LENGTH,
        dtype=jnp.float32,
    )
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    positions = jnp.where(positions < count, positions, -1)
    return HEAD(ids[None, :], fused[None], positions[None, :], empty).cache


@pytest.mark.parametrize("behaviour", [Behaviour.AGREES, Behaviour.FICKLE, Behaviour.ERRS])
def test_committed_rows_hold_true_states_C6(behaviour):
    """Whatever was accepted, the draft cache equals that of a fresh pass over the same tokens."""
    _, _, state = after_rounds(behaviour, 2)
    draft = state.draft[0]
    for row in range(2):
        count = int(draft.first_position[row])
        assert count >= len(PROMPTS[row])
        fresh = fresh_cache(state.tokens[row], count)
        for mine, expected in zip(draft.cache.layers, fresh.layers, strict=True):
            np.testing.assert_allclose(mine.keys[row, :count], expected.keys[0, :count], atol=1e-5)
            np.testing.assert_allclose(
                mine.values[row, :count], expected.values[0, :count], atol=1e-5
            )


@pytest.mark.parametrize("behaviour", [Behaviour.AGREES, Behaviour.ERRS])
def test_short_prompts_pair_as_the_trainer_does_A4(behaviour):
    """Prompts of one and two tokens: the rows in the draft cache are the trainer's, one by one."""
    prompts = [[7], [7, 8]]
    _, _, state = after_rounds(behaviour, 2, prompts)
    draft = state.draft[0]
    for row in range(2):
        tokens, count = state.tokens[row], int(draft.first_position[row])
        mask, document = jnp.ones(LENGTH, bool), jnp.zeros(LENGTH, jnp.int32)
        trained, _, _ = shift_rows(tokens, mask, document)
        ids, _ = true_rows(tokens)
        np.testing.assert_array_equal(ids[:count], trained[:count])
        expected = fresh_cache(tokens, count).layers[0].keys[0, :count]
        np.testing.assert_allclose(draft.cache.layers[0].keys[row, :count], expected, atol=1e-5)


@pytest.mark.parametrize("accepted", [0, 2], ids=["seven rejected", "five rejected"])
def test_rejected_rows_leave_nothing_that_is_read_A9(accepted):
    """A round adds accepted + 1 tokens; junk in every stale slot changes nothing."""
    params = [sampling(max_tokens=30)] * 2
    _, plain = programs.run_plain(PROMPTS, params, features=GREEDY)
    lengths = np.array([len(prompt) for prompt in PROMPTS]) + 1
    told = np.array(plain.tokens)
    for row, length in enumerate(lengths):
        told[row, length + accepted :] = (told[row, length + accepted :] + 1) % tiny.VOCAB
    fn = programs.scripted(K, GREEDY, network=True)
    values, state = programs.start(fn, PROMPTS, params, told, Behaviour.AGREES)
    state = fn.compiled.step(values, state, np.int32(1))
    drafts, depth = np.asarray(state.round_drafts)[:2], np.asarray(state.draft_depth)[:2]
    assert drafts.max(1).tolist() == [K, K] and (depth > 0).sum(1).tolist() == [accepted] * 2
    np.testing.assert_array_equal(np.asarray(state.committed)[:2], lengths + accepted + 1)

    def poison(cache, first_stale):
        def one(layer: LayerCache) -> LayerCache:
            slots = jnp.arange(layer.num_slots)[None, :]
            stale = (slots >= first_stale[:, None])[:, :, None, None]
            junk = jnp.float32(1e4)
            return dataclasses.replace(
                layer,
                keys=jnp.where(stale, junk, layer.keys),
                values=jnp.where(stale, junk, layer.values),
            )

        return dataclasses.replace(cache, layers=tuple(one(layer) for layer in cache.layers))

    draft = state.draft[0]
    poisoned = dataclasses.replace(
        state,
        target_cache=poison(state.target_cache, state.committed - 1),
        draft=(dataclasses.replace(draft, cache=poison(draft.cache, draft.first_position)),),
    )
    poisoned = jax.tree.map(jnp.copy, poisoned)
    own = dataclasses.replace(
        values, draft=dataclasses.replace(values.draft, behaviour=np.zeros(5, np.int32))
    )
    clean = fn.compiled.step(own, state, np.int32(3))
    dirty = fn.compiled.step(own, poisoned, np.int32(3))
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)
    np.testing.assert_array_equal(clean.round_drafts, dirty.round_drafts)
    np.testing.assert_array_equal(clean.draft_depth, dirty.draft_depth)
    for row, count in enumerate(np.asarray(dirty.committed)[:2]):
        np.testing.assert_array_equal(dirty.tokens[row, :count], plain.tokens[row, :count])


def test_a_write_at_the_end_moves_nothing_C3():
    cache = LayerCache(jnp.zeros((1, 8, 1, 1)), jnp.zeros((1, 8, 1, 1)))
    rows = jnp.ones((1, 4, 1, 1), jnp.float32)
    cache = write_layer(cache, rows, rows, jnp.array([[6, 7, 8, 9]], jnp.int32))
    assert cache.keys[0, :, 0, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


@jax.jit
def dense_training_logits(tokens):
    """Draft logits [n, K, Vd] by the training definition: every element of every rollout at once,
    with the mask of (anchor, depth) pairs written out."""
    head, n, num_depths = HEAD, LENGTH, K
    ids, fused = true_rows(tokens)
    anchor = np.concatenate([np.arange(n - d if d else n) for d in range(num_depths)])
    depth = np.concatenate([np.full(n - d if d else n, d) for d in range(num_depths)])
    real = (depth[None, :] == 0) & (anchor[None, :] <= anchor[:, None])
    chain = (anchor[None, :] == anchor[:, None]) & (depth[None, :] <= depth[:, None])
    allowed = jnp.asarray(real | chain)
    positions = jnp.asarray(anchor + depth, jnp.int32)[None, :]
    elements = jnp.where(depth == 0, ids[anchor], head.config.mask_token_id)
    states = jnp.where((depth == 0)[:, None], fused[anchor], head.fused_mask()[None, :])
    embedded, x = head.embed(elements[None, :]), states[None]
    for index, layer in enumerate(head.layers):
        if index == 0:
            read, residual = layer.inputs(embedded, x)
        else:
            read, residual = model_layers.norm(x, layer.attention_norm, layer.options), x
        query, keys, values = model_layers.attention_inputs(layer, read, positions)
        keys = jnp.repeat(keys[:, :, :, None], query.shape[3], axis=3)
        values = jnp.repeat(values[:, :, :, None], query.shape[3], axis=3)
        scores = jnp.einsum("btkgd,bskgd->bkgts", query, keys) * query.shape[-1] ** -0.5
        scores = jnp.where(allowed[None, None, None], scores, -jnp.inf)
        out = jnp.einsum("bkgts,bskgd->btkgd", jax.nn.softmax(scores, axis=-1), values)
        x = residual + model_layers.attention_output(layer, out)
        normed = model_layers.norm(x, layer.mlp_norm, layer.options)
        x = x + model_layers.mlp_block(layer, normed, positions)
    logits = head.logits(head.finish(x))[0]
    found = jnp.full((n, num_depths, logits.shape[-1]), jnp.nan)
    return found.at[anchor, depth].set(logits)


@pytest.mark.parametrize("rounds", [0, 1, 3], ids=["after prefill", "one round", "three rounds"])
def test_serving_equals_training(rounds):
    """Logits of the one-pass draft at (anchor, depth) are those of a dense-mask training pass."""
    _, _, state = after_rounds(Behaviour.FICKLE, rounds)
    method, params = make_method(
        "p-eagle", programs.target().config, HEAD, num_speculative_tokens=K
    )
    requests = dataclasses.replace(
        state.requests, draft_temperature=jnp.ones(5), temperature=jnp.ones(5)
    )
    view = RoundView(
        tokens=state.tokens,
        committed=state.committed,
        wanted=jnp.where(state.running, K, 0),
        running=state.running,
        num_rounds=state.num_rounds,
        requests=requests,
    )
    drafts, _ = jax.jit(method.propose, static_argnames="features")(
        params, state.draft[0], view, features=LAW
    )
    for row in range(2):
        anchor = int(state.committed[row]) - 2
        logits = dense_training_logits(state.tokens[row])[anchor]
        expected = jax.nn.log_softmax(logits, axis=-1)
        kept = np.asarray(HEAD.kept_ids())
        mine = np.log(np.asarray(drafts.law)[row][:, kept])
        np.testing.assert_allclose(mine, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "passes"), [("p-eagle", 1), ("eagle3", 2)])
def test_network_passes_of_a_round(name, passes, monkeypatch):
    """P-EAGLE: one pass for all K. EAGLE-3: one for the valid rows and a loop body for the rest."""
    calls = []
    right = Drafter.__call__

    def counted(self, tokens, *args, **kwargs):
        calls.append(tokens.shape)
        return right(self, tokens, *args, **kwargs)

    head = tiny.make_drafter(tiny.PARALLEL if name == "p-eagle" else tiny.AUTOREGRESSIVE)
    fn = make_generate_fn(programs.target(), head, name, num_speculative_tokens=K, cache_length=32)
    requests, tokens = fn.requests([[1, 2]], [SamplingParams(max_tokens=9)])
    state = jax.eval_shape(fn.empty_state, requests, tokens)
    monkeypatch.setattr(Drafter, "__call__", counted)
    method, params = fn.method, fn.params.draft
    view = RoundView(
        tokens=state.tokens,
        committed=state.committed,
        wanted=state.committed,
        running=state.finished,
        num_rounds=state.num_rounds,
        requests=state.requests,
    )
    jaxpr = jax.make_jaxpr(lambda *args: method.propose(*args, Features()))(
        params, state.draft, view
    )
    assert len(calls) == passes
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    assert len(loops) == (0 if name == "p-eagle" else 1)
    assert calls[0] == ((1, 2 * K) if name == "p-eagle" else (1, K + 1))
    if name == "eagle3":
        assert calls[1] == (1, 1) and loops[0].params["length"] == K - 1


def test_the_mask_state_is_computed_once_per_load():
    _, params = make_method("p-eagle", programs.target().config, HEAD)
    np.testing.assert_array_equal(params.mask, HEAD.fused_mask())
