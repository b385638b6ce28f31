"""The drafter network against an independent float64 derivation, and its rules on rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.models.cache import init_cache
from peagle_jax.models.config import LayerConfig, RopeConfig
from peagle_jax.models.drafter import Drafter, check_num_speculative_tokens, init_drafter
from peagle_jax.models.rope import rotation
from tests.models import drafter_oracle
from tests.models.drafter_configs import small_drafter

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=64,
)
CONFIGS = {
    "plain": small_drafter(),
    "residual": small_drafter(norm_before_residual=True, num_layers=3),
    "qwen3-fc-normed-5-taps": small_drafter(
        style="qwen3", norm_before_fc=True, taps=(0, 2, 4, 5, 6), rope=LLAMA3
    ),
    "norm-per-tap-4-taps": small_drafter(fc_norm=True, taps=(1, 2, 4, 5), norm_output=True),
    "biases-window": small_drafter(
        attention_bias=True, mlp_bias=True, windows=(3, None), norm_output=True
    ),
    "eagle3-linear-rope": small_drafter(
        num_layers=1, parallel_drafting=False, rope=RopeConfig(kind="linear", factor=4.0)
    ),
    "scaled-embedding": small_drafter(embedding_scale=3.5, draft_vocab_size=32),
    "no-taps": small_drafter(taps=(), use_taps=False, fuse=False, target_hidden_size=16),
    "no-taps-fused": small_drafter(taps=(), use_taps=False),
}
TOKENS = np.array([3, 7, 31, 0, 19], np.int32)
POSITIONS = np.array([0, 1, 2, 5, 9], np.int32)


def draw(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(drafter: Drafter, fused, tokens=TOKENS, positions=POSITIONS, cache=None):
    graph, state = nnx.split(drafter)
    rows = (jnp.asarray(array)[None] for array in (tokens, fused, positions))
    return _pass(graph, state, *rows, cache)


@functools.partial(jax.jit, static_argnums=0)
def _pass(graph, state, tokens, fused, positions, cache):
    return nnx.merge(graph, state)(tokens, fused, positions, cache)


def tensors_of(drafter: Drafter, folder) -> dict[str, np.ndarray]:
    """The drafter's tensors as an independent reader finds them in an exported file."""
    config = dataclasses.replace(drafter.config, embedding_scale=None)
    plain = Drafter(config, source=lambda name, shape, dtype: _value(drafter, name))
    save_drafter(plain, folder, "speculators" if config.use_taps else "raw")
    found = load_file(folder / "model.safetensors")
    return {name.replace("midlayer.", "layers.0."): value for name, value in found.items()}


def _value(drafter: Drafter, name: str):
    flat = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(drafter))}
    return flat[name].get_value()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_network_equals_float64_derivation(config, tmp_path):
    drafter = init_drafter(config, jax.random.key(3))
    tensors = tensors_of(drafter, tmp_path / "head")
    taps = draw(5, config.input_size)
    fused = drafter.fuse(jnp.asarray(taps))
    np.testing.assert_allclose(fused, drafter_oracle.fuse(tensors, config, taps), atol=2e-5)
    if config.parallel_drafting:
        mask = drafter_oracle.fuse(tensors, config, tensors["mask_hidden"].reshape(-1))
        np.testing.assert_allclose(drafter.fused_mask(), mask, atol=2e-5)
    want = drafter_oracle.forward(tensors, config, TOKENS, np.asarray(fused), POSITIONS)
    out = run(drafter, fused)
    np.testing.assert_allclose(out.hidden[0], want.hidden, atol=2e-5)
    np.testing.assert_allclose(out.feedback[0], want.feedback, atol=2e-5)
    np.testing.assert_allclose(drafter.logits(out.hidden)[0], want.logits, atol=5e-5)
    again = drafter_oracle.forward(tensors, config, TOKENS, want.feedback, POSITIONS)
    out = run(drafter, out.feedback[0])
    np.testing.assert_allclose(drafter.logits(out.hidden)[0], again.logits, atol=5e-5)


def test_cache_repeats_a_pass_without_cache():
    config = small_drafter(windows=(3, None))
    drafter = init_drafter(config, jax.random.key(0))
    fused, positions = draw(5, 16), np.arange(5, dtype=np.int32)
    whole = run(drafter, fused, positions=positions).hidden[0]
    cache = init_cache(config.layers, batch_size=1, num_slots=16, max_new_rows=3, dtype=jnp.float32)
    for rows in (slice(0, 3), slice(3, 5)):
        out = run(drafter, fused[rows], TOKENS[rows], positions[rows], cache)
        cache = out.cache
        np.testing.assert_allclose(out.hidden[0], whole[rows], atol=1e-5)


def test_positions_matter_and_only_their_differences_A5():
    """The rotary layer obeys the positions it is given (pitfall A5)."""
    layer = LayerConfig(num_heads=2, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    config = dataclasses.replace(small_drafter(), layers=(layer,) * 4)
    drafter = init_drafter(config, jax.random.key(0))
    fused = draw(3, 16)

    def logits(positions):
        out = run(drafter, fused, TOKENS[:3], np.array(positions, np.int32))
        return np.asarray(drafter.logits(out.hidden))

    near = logits([0, 1, 2])
    assert np.abs(near - logits([0, 5, 9])).max() > 1e-4
    np.testing.assert_allclose(near, logits([10, 11, 12]), atol=1e-5)


def test_positions_past_the_draft_config_are_analytic_C1():
    """No table of angles: position 20 of a head configured for 16 turns as it should (C1)."""
    rope = RopeConfig(theta=100.0)
    cos, sin = rotation(jnp.array([[20]], jnp.int32), rope, 6)
    angles = 20.0 * 100.0 ** (-np.array([0, 2, 4]) / 6)
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=1e-5)
    drafter = init_drafter(small_drafter(max_positions=16), jax.random.key(0))
    outs = [
        np.asarray(run(drafter, draw(5, 16), positions=np.arange(5, dtype=np.int32) + start).hidden)
        for start in (0, 20)
    ]
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


def test_draft_logits_are_placed_by_offsets_D1():
    """d2t holds offsets: draft ids 0..3 stand for 0, 1, 3, 6 (pitfall D1)."""
    config = small_drafter(vocab_size=8, draft_vocab_size=4, mask_token_id=7)
    drafter = with_offsets(init_drafter(config, jax.random.key(0)), [0, 0, 1, 3])
    assert drafter.kept_ids().tolist() == [0, 1, 3, 6]
    logits = jnp.asarray(draw(2, 4))
    placed = np.asarray(drafter.target_logits(logits))
    assert placed.shape == (2, 8)
    np.testing.assert_array_equal(placed[:, [0, 1, 3, 6]], logits)
    assert np.isneginf(placed[:, [2, 4, 5, 7]]).all()
    found = drafter.target_ids(jnp.array([[3, 0], [2, 1]], jnp.int32))
    assert found.tolist() == [[6, 0], [3, 1]]
    assert drafter.target_ids(jnp.array([4, -1], jnp.int32)).tolist() == [-1, -1]


def test_padded_draft_ids_are_never_drafted_D2():
    """Ten draft logits for a target of eight tokens: the last two are -inf (pitfall D2)."""
    config = small_drafter(vocab_size=8, draft_vocab_size=10, target_vocab_size=8, mask_token_id=7)
    drafter = init_drafter(config, jax.random.key(0))
    logits = np.asarray(drafter.logits(jnp.asarray(draw(64, 16))))
    assert np.isneginf(logits[:, 8:]).all() and np.isfinite(logits[:, :8]).all()
    assert drafter.target_logits(jnp.asarray(logits)).shape == (64, 8)
    same = dataclasses.replace(config, draft_vocab_size=8, target_vocab_size=None)
    assert np.isfinite(init_drafter(same, jax.random.key(0)).logits(jnp.asarray(draw(4, 16)))).all()


def test_row_of_the_mask_token_is_used_D18():
    """A changed embedding of the mask token changes what mask rows draft (pitfall D18)."""
    config = small_drafter()
    drafter = init_drafter(config, jax.random.key(0))
    fused = jnp.broadcast_to(drafter.fused_mask()[None], (3, 16))
    tokens, positions = np.full(3, 31, np.int32), np.arange(3, dtype=np.int32)
    before = run(drafter, fused, tokens, positions).hidden
    table = drafter.embedding.get_value()
    drafter.embedding.set_value(table.at[31].add(jnp.float32(0.5)))
    assert np.abs(before - run(drafter, fused, tokens, positions).hidden).max() > 1e-3


def test_without_taps_the_final_state_alone_is_read_D19():
    """use_aux_hidden_state false: input of the target's width, no fc needed (pitfall D19)."""
    config = CONFIGS["no-taps"]
    drafter = init_drafter(config, jax.random.key(0))
    assert config.input_size == 16 and not hasattr(drafter, "fc")
    state = jnp.asarray(draw(5, 16))
    np.testing.assert_array_equal(drafter.fuse(state), state)
    with pytest.raises(ValueError, match="width 16 must be that of its input, 12"):
        init_drafter(dataclasses.replace(config, target_hidden_size=12), jax.random.key(0))


def test_padding_rows_write_nothing_and_stay_finite():
    config = small_drafter()
    drafter = init_drafter(config, jax.random.key(0))
    fused = draw(5, 16)
    real = run(drafter, fused[:3], TOKENS[:3], POSITIONS[:3]).hidden[0]
    fused[3:] = np.nan
    positions = np.where(np.arange(5) < 3, POSITIONS, -1).astype(np.int32)
    tokens = np.where(np.arange(5) < 3, TOKENS, 999).astype(np.int32)
    cache = init_cache(config.layers, batch_size=1, num_slots=8, max_new_rows=5, dtype=jnp.float32)
    for given in (None, cache):
        out = run(drafter, fused, tokens, positions, given)
        assert np.isfinite(out.hidden).all() and np.isfinite(out.feedback).all()
        np.testing.assert_allclose(out.hidden[0, :3], real, atol=1e-6)
    assert not np.asarray(out.cache.layers[0].keys[:, 3:]).any()


def test_unknown_token_gives_nan_not_a_neighbour():
    drafter = init_drafter(small_drafter(), jax.random.key(0))
    for token in (-1, 32):
        assert np.isnan(drafter.embed(jnp.array([token], jnp.int32))).all()


def test_gradients_skip_the_vocabulary_and_reach_all_else():
    drafter = init_drafter(small_drafter(fc_norm=True), jax.random.key(0))
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)
    fused_rows = jnp.asarray(draw(5, 36))

    @jax.jit
    def loss(params):
        model = nnx.merge(graph, params, rest)
        fused = model.fuse(fused_rows).at[3:].set(model.fused_mask()[None])
        out = run(model, fused)
        return jnp.sum(jnp.square(model.logits(out.hidden)))

    grads = nnx.to_flat_state(jax.grad(loss)(params))
    assert {".".join(map(str, path)) for path, _ in grads} >= {"mask_hidden", "fc", "layers.0.qkv"}
    assert all(np.abs(value.get_value()).max() > 0 for _, value in grads)
    assert "d2t" not in {path[0] for path, _ in grads}


def test_padded_windows_refuse_longer_drafts():
    config = small_drafter(windows=(None, 4))
    check_num_speculative_tokens(config, 4)
    with pytest.raises(ValueError, match="window of 4 positions.*at most 4"):
        check_num_speculative_tokens(config, 5)
    alone = dataclasses.replace(config, parallel_drafting=False, mask_token_id=None)
    check_num_speculative_tokens(alone, 5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"mask_token_id": 32}, r"outside the drafter's vocabulary, 0\.\.31"),
        ({"mask_token_id": None}, "needs mask_token_id"),
        ({"taps": ()}, "taps no target layer"),
        ({"layers": ()}, "at least one layer"),
    ],
)
def test_contradicting_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        init_drafter(dataclasses.replace(small_drafter(), **changes), jax.random.key(0))


def test_head_without_mask_vector_says_so():
    drafter = init_drafter(CONFIGS["eagle3-linear-rope"], jax.random.key(0))
    with pytest.raises(ValueError, match="not trained for parallel drafting"):
        drafter.fused_mask()


def with_offsets(drafter: Drafter, offsets: list[int]) -> Drafter:
    drafter.d2t.set_value(jnp.array(offsets, jnp.int32))
    return drafter
