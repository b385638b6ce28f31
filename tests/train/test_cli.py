"""`peagle-train`: lazy commands, exit codes, and `prepare` from end to end."""

import json
import subprocess
import sys

import pytest

from tests.train.toy_tokenizers import TOKENIZERS
from train.cli import COMMANDS, main
from train.data.prepared import open_prepared


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A target folder whose tokenizer is the toy ChatML one."""
    monkeypatch.setattr(
        "peagle_jax.text.tokenizer.load_tokenizer", lambda path: TOKENIZERS["chatml"]
    )
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 264}}))
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"messages": [{"content": "no role"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def prepare(target, *more):
    root = target.parent
    return main(
        ["prepare", str(root / "rows.jsonl"), "--target", str(target)]
        + ["--output", str(root / "out"), *more]
    )


def test_prepare_writes_the_data_set_and_prints_the_report(target, capsys):
    assert prepare(target, "--draft-vocab-size", "8", "--mask-token-id", "263") == 0
    data = open_prepared(target.parent / "out")
    assert len(data) == 1 and data.vocab_size == 264
    assert len(data.draft_vocabulary(8).d2t) == 8
    out = capsys.readouterr().out
    assert "rows read 2, kept 1" in out and "dropped 1: no role" in out
    assert f"{target.parent / 'rows.jsonl'}:2: message 0 has neither role nor from" in out
    assert prepare(target, "--draft-vocab-size", "8") == 0
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-bad-rows", "0"], "rows.jsonl:2"),
        (["--mask-token-id", str(ord("y"))], "occurs 1 times"),
        (["--template-arg", "oops"], "expected NAME=JSON"),
        (["--template-arg", "messages=1"], "is not allowed"),
    ],
)
def test_failures_are_one_message_and_exit_code_1(target, capsys, arguments, message):
    assert prepare(target, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("peagle-train prepare: error: ") and message in error


def test_processes_without_a_coordinator_are_refused(capsys):
    for flag in ("--process-count", "--process-index"):
        assert main(["fit", "recipe.toml", flag, "1"]) == 1
        assert "need --coordinator" in capsys.readouterr().err


def test_a_source_that_is_missing_is_named_before_the_target(tmp_path, capsys):
    given = ["prepare", str(tmp_path / "no.jsonl"), "--target", "nowhere", "--output", "o"]
    assert main(given) == 1
    assert "no.jsonl: no such file or folder; expected a .jsonl" in capsys.readouterr().err


PREPARE = ["prepare", "rows.jsonl", "--target", "t", "--output", "o"]
WRONG = [
    [*PREPARE, "--vocab-size", "0"],
    [*PREPARE, "--max-bad-rows", "-1"],
    [*PREPARE, "--draft-vocab-size", "0"],
    [*PREPARE, "--max-length", "-3"],
    [*PREPARE, "--mask-token-id", "-1"],
    [],
    ["frobnicate"],
    ["prepare"],
    ["prepare", "--oops"],
    ["capture", "rows", "--target", "t", "--output", "o", "--batch-size", "0"],
    ["regenerate", "--magpie", "0", "--target", "t", "--output", "o"],
    ["evaluate", "head", "--target", "t", "--data", "rows", "-k", "0"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: peagle-train" in capsys.readouterr().err


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys\nfrom train.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not any(m.startswith('train.commands') or m == 'jax' for m in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(name in done.stdout for name in COMMANDS)
