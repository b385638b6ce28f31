"""First parameters and configs of drafters, and which parameters are trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.models.config import LayerConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.models.target import init_target
from tests.train import tiny_run
from train.assemble import start
from train.capture import capture
from train.data.prepared import open_prepared
from train.parameters import MASK_ROW, Trained, build_drafter, kept_ids, split, whole
from train.recipe import DrafterPart
from train.warm_start import (
    check_head,
    default_taps,
    drafter_config,
    first_unused_id,
    start_parameters,
    with_depths,
)

LAYER = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope=RopeConfig(theta=50.0))
TARGET = TargetConfig(
    family="llama",
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    layers=(LAYER,) * 8,
    max_positions=64,
    norm_eps=1e-6,
    norm_cast="before_weight",
)
KEPT = np.array([0, 2, 3, 7, 11, 20])


@pytest.fixture(scope="module")
def target():
    return init_target(TARGET, jax.random.key(0))


def new_config(**changes):
    part = DrafterPart(num_layers=2, draft_vocab_size=6, **changes)
    return drafter_config(TARGET, part, mask_token_id=23, num_depths=4)


def test_a_new_config_fits_its_target():
    config = new_config()
    assert config.taps == (2, 4, 5) and config.layers == (LAYER, LAYER)
    assert (config.intermediate_size, config.norm_eps, config.max_positions) == (20, 1e-6, 64)
    assert config.num_depths == 4 and config.parallel_drafting
    assert config.norm_before_residual is False
    experts = dataclasses.replace(
        LAYER,
        window=4,
        moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8,
                      router_order="topk_softmax"),
    )  # fmt: skip
    routed = dataclasses.replace(TARGET, layers=(experts,) * 8)
    made = drafter_config(routed, DrafterPart(), mask_token_id=None, num_depths=None)
    assert made.intermediate_size == 48, "3 x hidden for a target of experts"
    assert made.layers[0].window is None and made.layers[0].moe is None
    assert not made.parallel_drafting


def test_taps_are_three_layers_or_an_error():
    assert default_taps(36) == (2, 18, 33)
    for layers in (4, 5, 6):
        with pytest.raises(ValueError, match="set drafter.taps"):
            default_taps(layers)
    for taps in ((2, 2, 5), (5, 4, 2), (2, 4, 8)):
        with pytest.raises(ValueError, match="different layers in ascending order"):
            new_config(taps=taps)


def test_embedding_head_and_vocabulary_come_from_the_target(target):
    config = new_config()
    params = start_parameters(config, target, jax.random.key(1), kept=KEPT)
    np.testing.assert_array_equal(params["embedding"], target.embedding.get_value())
    np.testing.assert_array_equal(params["head"], target.head.get_value()[:, KEPT])
    np.testing.assert_array_equal(kept_ids(config, params), KEPT)
    drafter = build_drafter(config, params, jnp.float32)
    assert drafter.fused_mask().shape == (16,)
    assert 0.5 < float(jnp.std(params["mask_hidden"])) < 1.5
    with pytest.raises(ValueError, match="needs its ids"):
        start_parameters(config, target, jax.random.key(1))


def test_the_target_s_last_layers_are_taken_where_they_fit(target):
    config = new_config()
    params = start_parameters(config, target, jax.random.key(1), kept=KEPT, from_target_layers=True)
    for index in (0, 1):
        source = target.layers[6 + index]
        np.testing.assert_array_equal(params[f"layers.{index}.down"], source.down.get_value())
        np.testing.assert_array_equal(params[f"layers.{index}.qkv"][-16:], source.qkv.get_value())
    first = target.layers[6].attention_norm.get_value()
    np.testing.assert_array_equal(params["layers.0.hidden_norm"], first)
    # The fusion starts as the last tap.
    fused = params["fc"][-16:] - jnp.eye(16)
    assert float(jnp.abs(fused).max()) < 0.2


def test_draft_ids_and_layers_that_the_target_does_not_have_are_refused(target):
    config = new_config()
    for kept in (np.append(KEPT[:-1], 24), np.append(-1, KEPT[1:])):
        with pytest.raises(ValueError, match="draft ids from .* a vocabulary of 24"):
            start_parameters(config, target, jax.random.key(1), kept=kept)
    deeper = dataclasses.replace(config, layers=(LAYER,) * 9)
    with pytest.raises(ValueError, match="drafter.num_layers is 9, the target has 8 layers"):
        start_parameters(deeper, target, jax.random.key(1), kept=KEPT, from_target_layers=True)


def test_what_is_trained_and_what_is_frozen(target):
    config = new_config()
    params = start_parameters(config, target, jax.random.key(1), kept=KEPT)
    learned, frozen = split(config, params, Trained(), jnp.bfloat16)
    assert "embedding" in learned and set(frozen) == {"head", "d2t"}
    assert frozen["head"].dtype == jnp.bfloat16 and learned["fc"].dtype == jnp.float32
    learned, frozen = split(config, params, Trained(embedding="frozen", head=True), jnp.float32)
    assert "head" in learned and set(frozen) == {"embedding", "d2t"}

    learned, frozen = split(config, params, Trained(embedding="mask-row"), jnp.float32)
    assert "embedding" not in learned and learned[MASK_ROW].shape == (16,)
    learned[MASK_ROW] = learned[MASK_ROW] + 1.0
    table = np.asarray(whole(config, learned, frozen)["embedding"])
    before = np.asarray(params["embedding"])
    assert (table[23] == before[23] + 1.0).all() and (table[:23] == before[:23]).all()


def test_heads_that_do_not_fit_are_refused():
    found = new_config()
    check_head(found, TARGET, DrafterPart(start="head", path="head"))
    with pytest.raises(ValueError, match="head: the head has mask_token_id 23, not 5"):
        check_head(found, TARGET, DrafterPart(path="head", mask_token_id=5))
    other = dataclasses.replace(TARGET, hidden_size=32)
    with pytest.raises(ValueError, match="target_hidden_size 16, not 32"):
        check_head(found, other, DrafterPart(path="head"))
    assert with_depths(found, 8).num_depths == 8


def test_the_mask_token_is_an_unused_row():
    assert first_unused_id(20, 24) == 20
    with pytest.raises(ValueError, match="set drafter.mask_token_id"):
        first_unused_id(24, 24)


def test_a_store_takes_the_vocabulary_of_the_rows_it_was_captured_from(tmp_path):
    data = tiny_run.write_data(tmp_path / "rows", rows=4)
    rule = tiny_run.rule_target()
    store = capture(open_prepared(data), rule, (2, 3, 4), tmp_path / "states", name="rule")
    part = {"draft_vocab_size": tiny_run.WORDS, "vocabulary": str(data)}
    recipe = tiny_run.recipe(tmp_path / "states", tmp_path / "run", drafter=part)
    config, params = start(recipe, rule, store)
    kept = open_prepared(data).draft_vocabulary(tiny_run.WORDS).target_ids
    np.testing.assert_array_equal(kept_ids(config, params), kept)
    recipe = tiny_run.recipe(tmp_path / "states", tmp_path / "run", drafter={"draft_vocab_size": 8})
    with pytest.raises(ValueError, match="in drafter.vocabulary"):
        start(recipe, rule, store)
