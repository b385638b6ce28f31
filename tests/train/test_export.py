"""Export of a run: from what it wrote itself, wherever it is called, and never over the run."""

import json
import shutil

import jax
import numpy as np
import pytest

from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.models.parameters import weight
from tests.tiny_folder import write_tiny_model
from train.assemble import assemble
from train.checkpoint import Checkpoints
from train.cli import main
from train.data.prepared import PreparedWriter
from train.export import run_recipe, trained_drafter
from train.parameters import parameters_of

RECIPE = """
target.path = "model"
data = {path = "rows", sequence_length = 64, read_threads = 0}
drafter = {num_layers = 1, taps = [1, 2, 3], mask_token_id = 263, draft_vocab_size = 32}
objective = {num_depths = 2, chunk_rows = 32}
train = {steps = 1, global_batch = 2, embedding = "mask-row"}
mesh.data = 2
output = {folder = "run", picture = false}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on two devices, its paths relative to this folder; what it gave is in `wanted`."""
    base = tmp_path_factory.mktemp("export")
    write_tiny_model(base / "model")
    write_tiny_model(base / "another", seed=1)
    rng = np.random.default_rng(0)
    with PreparedWriter(base / "rows", 264) as writer:
        for _ in range(8):
            writer.add(rng.integers(0, 200, 40), np.arange(40) >= 5)
        writer.finish(digest="x", settings={}, report={}, draft_vocab_size=32)
    (base / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["fit", "recipe.toml"]) == 0
        made = assemble(run_recipe("run"))
        with Checkpoints("run/checkpoints") as checkpoints:
            state, _ = checkpoints.restore(made.state, made.run.recipe, mesh=made.mesh)
        wanted = parameters_of(trained_drafter(made, state))
    shutil.rmtree(base / "rows")
    return base, wanted


def test_neither_data_nor_mesh_nor_folder_of_the_run_is_needed(base, tmp_path, monkeypatch):
    base, wanted = base
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.assemble.make_mesh", None)
    assert main(["export", str(base / "run"), "head", "--dtype", "float32"]) == 0
    found = load_drafter(tmp_path / "head")
    for name, value in parameters_of(found).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    assert len(np.unique(found.kept_ids())) == 32
    assert weight(found.norm, jax.numpy.float32).sharding.device_set == {jax.devices()[0]}


def test_a_target_that_moved_is_named_and_another_is_refused(base, tmp_path, monkeypatch, capsys):
    base, _ = base
    monkeypatch.chdir(tmp_path)
    export = ["export", str(base / "run"), "head", "--target"]
    assert main([*export, str(base / "another")]) == 1
    assert "another: is target" in capsys.readouterr().err
    assert main([*export, str(base / "model")]) == 0


@pytest.mark.parametrize("output", ["run", ".", "run/checkpoints", "run/checkpoints/last/head"])
def test_a_run_is_never_replaced(base, monkeypatch, capsys, output):
    base, _ = base
    monkeypatch.chdir(base)
    before = sorted(base.rglob("*"))
    assert main(["export", "run", output, "--overwrite"]) == 1
    assert "the run run; give a folder of its own" in capsys.readouterr().err
    assert sorted(base.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "{}", '{"recipe": {}', "[]", '{"recipe": 3, "drafter": 3}',
                                  '{"recipe": {"target": 1}, "drafter": {}}'])  # fmt: skip
def test_a_damaged_description_of_a_run_is_named(tmp_path, capsys, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "head")]) == 1
    error = capsys.readouterr().err
    assert "run.json: " in error and error.count("\n") == 1


def test_a_run_without_its_vocabulary_says_how_to_get_it(base, tmp_path, capsys):
    shutil.copytree(base[0] / "run", tmp_path / "run")
    (tmp_path / "run" / "draft_ids.npy").unlink()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["target_fingerprint"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "head")]) == 1
    assert "fit --resume writes it" in capsys.readouterr().err
