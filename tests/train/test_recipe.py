"""Recipes: what they refuse, what flags change, and what a resumed run may change."""

import typing

import pytest

from pallas_kernels.vocab_loss import LOSSES
from train.recipe import ObjectivePart, differences, load_recipe, resolved

MINIMAL = """
[target]
path = "model"
[data]
path = "rows"
[train]
steps = 10
[output]
folder = "out"
"""


def write(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_paper_s(tmp_path):
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.objective.num_depths, recipe.objective.ratio) == (8, 0.8)
    assert recipe.objective.min_ratio == 0
    assert recipe.optimizer.learning_rate == 1e-4 and recipe.optimizer.warmup_ratio == 0.0025
    assert recipe.drafter.num_layers == 4 and recipe.train.embedding == "table"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[objektive]\n", "unknown key objektive"),
        (MINIMAL.replace("steps", "stepz"), r"unknown key train.stepz"),
        (MINIMAL + "[objective]\nratio = 2\n", "objective.ratio is 2"),
        (MINIMAL + '[objective]\nnum_depths = "8"\n', "objective.num_depths must be of type int"),
        (MINIMAL + "[train.embedding]\n", "train.embedding"),
        (MINIMAL + '[drafter]\nstart = "head"\n', "path"),
        (MINIMAL.replace("steps = 10", "steps = 10\nepochs = 1"), "either steps or epochs"),
        (MINIMAL.replace('path = "rows"', ""), "data.path is missing"),
        (MINIMAL + '[objective]\npartition = "flat"\n', "choose one of structured"),
        ("[target\n", "not TOML"),
        (MINIMAL.replace("steps = 10", "steps = 0"), "train.steps is 0; at least 1"),
        (MINIMAL + "[objective]\nchunk_rows = 6\n", "objective.chunk_rows is 6; at least 7"),
        (MINIMAL + "[mesh]\ndata = 0\n", "mesh.data is 0; at least 1"),
        (MINIMAL + "log_every = 0\n", "output.log_every is 0; at least 1"),
        (MINIMAL + "keep = 0\n", "output.keep is 0; at least 1"),
        (MINIMAL + "[drafter]\ntaps = []\n", "drafter.taps is empty"),
        (MINIMAL + "[drafter]\nmask_token_id = -1\n", "drafter.mask_token_id is -1"),
        (MINIMAL + "[optimizer]\nlearning_rate = nan\n", "optimizer.learning_rate is nan"),
        (MINIMAL + "[optimizer]\nbeta2 = 1.0\n", "optimizer.beta2 is 1.0"),
        (MINIMAL + "[optimizer]\nlearning_rate = 0\n", "optimizer.learning_rate is 0"),
        (MINIMAL + "[optimizer]\nepsilon = 0\n", "optimizer.epsilon is 0"),
        (MINIMAL + "[optimizer]\nfinal_ratio = 1.5\n", "optimizer.final_ratio is 1.5"),
        (MINIMAL + "[objective]\nratio = nan\n", "objective.ratio is nan"),
        (MINIMAL + "[objective]\nmin_ratio = inf\n", "objective.min_ratio is inf"),
        (MINIMAL + "[objective]\ndecay = -1\n", "objective.decay is -1"),
        (MINIMAL + "[objective]\ndecay = inf\n", "objective.decay is inf"),
        (MINIMAL.replace("steps = 10", f"steps = 10\nseed = {2**70}"), "train.seed is .* at most"),
        (
            MINIMAL.replace('"rows"', '"rows"\nvalidation = "v"\nvalidation_rows = 1'),
            "data: give either validation or validation_rows",
        ),
        (MINIMAL + '[objective]\nloss = "hca"\n', "objective.loss is 'hca'; choose one of kl"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, text))


def test_files_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="recipe.toml: not TOML"):
        load_recipe(path)


def test_every_loss_can_be_asked_for():
    assert set(typing.get_args(typing.get_type_hints(ObjectivePart)["loss"])) == set(LOSSES)


def test_flags_override_keys(tmp_path):
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(
        path, ["objective.ratio=0.7", "optimizer.schedule=cosine", "drafter.taps=[2,3,4]"]
    )
    assert recipe.objective.ratio == 0.7 and recipe.optimizer.schedule == "cosine"
    assert recipe.drafter.taps == (2, 3, 4)
    with pytest.raises(ValueError, match="unknown key objective.ration"):
        load_recipe(path, ["objective.ration=0.7"])
    with pytest.raises(ValueError, match=r"section\.key=value"):
        load_recipe(path, ["ratio"])


def test_a_resumed_run_may_change_place_and_pace_only(tmp_path):
    path = write(tmp_path, MINIMAL)
    saved = resolved(load_recipe(path))
    moved = resolved(load_recipe(path, ["mesh.data=8", "output.folder=elsewhere"]))
    assert differences(saved, moved) == []
    other = resolved(load_recipe(path, ["objective.ratio=0.7", "train.seed=1"]))
    assert differences(saved, other) == [
        "objective.ratio: saved 0.8, now 0.7",
        "train.seed: saved 0, now 1",
    ]
