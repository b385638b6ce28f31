"""Recipes: what they refuse, what flags change, and what a resumed run may change."""

import pytest

from train.recipe import differences, load_recipe, resolved

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
        (MINIMAL + "[objective]\nratio = 2\n", "ratio is 2"),
        (MINIMAL + '[objective]\nnum_depths = "8"\n', "objective.num_depths must be of type int"),
        (MINIMAL + "[train.embedding]\n", "train.embedding"),
        (MINIMAL + '[drafter]\nstart = "head"\n', "path"),
        (MINIMAL.replace("steps = 10", "steps = 10\nepochs = 1"), "either steps or epochs"),
        (MINIMAL.replace('path = "rows"', ""), "data.path is missing"),
        (MINIMAL + '[objective]\npartition = "flat"\n', "choose one of structured"),
        ("[target\n", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, text))


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
