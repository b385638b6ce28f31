"""The heads that come with the package: size, card, what they draft, both export layouts."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.shipped_heads import heads_folder, load_shipped_head, shipped_heads
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.engine import Engine
from peagle_jax.text.tokenizer import load_tokenizer
from tests.smollm2_file import smollm2_gguf

QUESTIONS = ["Why is the sky blue?", "Write a Python function that adds two numbers."]
HEADS = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")


@pytest.fixture(scope="module")
def target():
    return load_target(smollm2_gguf(), dtype=jnp.float32)


def parameters(drafter):
    flat = nnx.to_flat_state(nnx.state(drafter))
    return {".".join(map(str, path)): np.asarray(value.get_value()) for path, value in flat}


def test_both_heads_ship_small_and_with_a_card():
    assert shipped_heads() == HEADS
    files = [file for name in HEADS for file in (heads_folder() / name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 24 << 20
    for name in HEADS:
        card = (heads_folder() / name / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in ("Data", "Recipe", "Figures", "Licence", "int8"))


@pytest.mark.parametrize("layout", ["raw", "speculators"])
@pytest.mark.parametrize("name", HEADS)
def test_an_exported_head_reloads_with_equal_parameters(name, layout, target, tmp_path):
    drafter = load_shipped_head(name, target)
    parallel = "p-eagle" in name
    assert len(drafter.layers) == (4 if parallel else 1)
    assert drafter.config.parallel_drafting == parallel
    path = save_drafter(
        drafter, tmp_path / "head", layout, dtype=jnp.float32, verifier="smollm2-135m"
    )
    again = load_drafter(
        path, target=target, dtype=jnp.float32, parallel_drafting=True if parallel else None
    )
    before, after = parameters(drafter), parameters(again)
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    assert again.config.taps == drafter.config.taps
    assert again.config.norm_before_residual == drafter.config.norm_before_residual
    assert again.config.mask_token_id == drafter.config.mask_token_id


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_an_exported_head_drafts_and_generates_the_same(name, target, tmp_path):
    tokenizer = load_tokenizer(smollm2_gguf())
    shipped = load_shipped_head(name, target)
    parallel = True if "p-eagle" in name else None
    heads = [shipped]
    for layout in ("raw", "speculators"):
        path = save_drafter(
            shipped, tmp_path / layout, layout, dtype=jnp.float32, verifier="smollm2-135m"
        )
        heads.append(
            load_drafter(path, target=target, dtype=jnp.float32, parallel_drafting=parallel)
        )
    found = []
    for head in heads:
        engine = Engine(target, tokenizer, head, num_speculative_tokens=5)
        answers = engine.generate(QUESTIONS, SamplingParams(max_tokens=48))
        found.append([(one.token_ids, one.draft_depths) for one in answers])
    assert found[0] == found[1] == found[2]
    assert sum(depth > 0 for _, depths in found[0] for depth in depths) > 5, "drafts are accepted"
