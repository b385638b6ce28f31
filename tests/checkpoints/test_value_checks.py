"""Checks that need the weights themselves: tied heads that differ, scales that are NaN."""

import jax.numpy as jnp
import pytest

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.load import load_target
from tests.checkpoints import tiny


def test_a_head_stored_beside_the_embedding_it_is_tied_to(tmp_path):
    arrays = tiny.tensors(tiny.QWEN3)
    same = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    target = load_target(tiny.write_folder(tmp_path / "same", tiny.QWEN3, same))
    assert not hasattr(target, "head")
    other = arrays["model.embed_tokens.weight"].copy()
    other[-1, -1] += 1
    folder = tiny.write_folder(tmp_path / "other", tiny.QWEN3, {**arrays, "lm_head.weight": other})
    with pytest.raises(CheckpointError, match="'lm_head.weight' differs.*tie_word_embeddings"):
        load_target(folder)


@pytest.mark.parametrize("keep_packed", [False, True])
def test_an_mxfp4_scale_that_is_nan(tmp_path, keep_packed):
    stored, _ = tiny.mxfp4_tensors(tiny.GPT_OSS)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    stored[name][2, 3, 0] = 255
    folder = tiny.write_folder(tmp_path, tiny.GPT_OSS, stored)
    with pytest.raises(CheckpointError, match=f"'{name}' holds the scale 255"):
        load_target(folder, dtype=jnp.float32, keep_packed=keep_packed)
