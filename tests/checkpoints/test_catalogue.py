"""Which head belongs to which target, and where the files of a name are looked for."""

import json

import pytest

from peagle_jax.checkpoints.catalogue import (
    CATALOGUE,
    NoKnownDrafterError,
    find_head,
    lookup,
    rows,
)
from peagle_jax.checkpoints.drafter_config import default_taps
from peagle_jax.checkpoints.hub import ModelNotFoundError, find_model, local_folder

TARGET, HEAD = "openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network, and a hub cache of this test's own."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def make(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_public_pairs_are_known():
    assert [entry.head for entry in lookup(TARGET)] == [HEAD, HEAD + "-long-context"]
    assert find_head(TARGET).taps == (2, 12, 21)
    assert find_head(TARGET, long_context=True).head == HEAD + "-long-context"
    assert find_head("qwen/qwen3-8b").head == "RedHatAI/Qwen3-8B-speculator.peagle"
    assert lookup("someone/else") == ()


def test_usual_taps_of_the_entries():
    layers = {
        "openai/gpt-oss-20b": 24,
        "openai/gpt-oss-120b": 36,
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": 48,
        "Qwen/Qwen3-8B": 36,
    }
    for entry in CATALOGUE:
        assert entry.verified
        if entry.head is not None:
            assert entry.taps == default_taps(layers[entry.target])


def test_target_without_a_public_head_says_so():
    assert [entry.head for entry in lookup("google/gemma-4-31B-it")] == [None]
    with pytest.raises(NoKnownDrafterError, match="no known public head.*peagle-train"):
        find_head("google/gemma-4-31B-it")
    with pytest.raises(NoKnownDrafterError, match="not in the catalogue.*--drafter"):
        find_head("someone/else")


@pytest.mark.parametrize(
    "folder, config",
    [
        ("openai/gpt-oss-20b", {}),
        ("models/gpt-oss-20b", {}),
        ("hub/models--openai--gpt-oss-20b/snapshots/0123", {}),
        ("anything", {"_name_or_path": TARGET}),
    ],
)
def test_a_folder_is_known_by_name(tmp_path, folder, config):
    path = make(tmp_path / folder, **config)
    assert find_head(path).head == HEAD
    assert lookup(make(tmp_path / "other" / "model")) == ()


def test_head_is_found_beside_its_target(tmp_path):
    target, head = make(tmp_path / TARGET), make(tmp_path / HEAD)
    assert find_model(find_head(target).head, beside=target) == head
    row = rows(beside=target)[0]
    assert (row["target"], row["head"], row["files"]) == (TARGET, HEAD, str(head))
    assert {row["files"] for row in rows()} == {""}
    assert [row["head"] for row in rows()][-1] == "no known public head"


def test_path_goes_first_and_cache_is_searched(tmp_path):
    path = make(tmp_path / "head")
    assert find_model(path) == path
    commit = "0" * 40
    repo = tmp_path / "hub" / ("models--" + HEAD.replace("/", "--"))
    snapshot = make(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert local_folder(HEAD) == snapshot


def test_offline_is_told_clearly():
    with pytest.raises(ModelNotFoundError, match="hub cannot be reached.*hf download amazon/"):
        find_model(HEAD)
    with pytest.raises(ModelNotFoundError, match="not on this machine.*hf download"):
        find_model(HEAD, download=False)
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        find_model("./missing/folder/x")
