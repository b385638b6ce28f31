"""The commands one after the other, as a user types them, on a tiny model in a folder."""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from peagle_jax.checkpoints.drafter_files import load_drafter
from tests.tiny_folder import write_tiny_model
from train.cli import main
from train.data.hidden_store import open_store
from train.data.prepared import open_prepared
from train.progress import read_log

ROOT = Path(__file__).parents[2]
RECIPE = """
[target]
path = "{base}/model"
[data]
path = "{base}/states"
validation_rows = 2
sequence_length = 128
read_threads = 0
[drafter]
num_layers = 1
taps = [1, 2, 3]
mask_token_id = 262
[objective]
num_depths = 3
chunk_rows = 64
[train]
steps = 4
global_batch = 2
[output]
folder = "{base}/run"
save_every = 2
validate_every = 2
log_every = 1
tensorboard = {tensorboard}
"""
HAS_TENSORBOARD = importlib.util.find_spec("tensorboardX") is not None


QUESTIONS = ["hi", "the sea?", "count", "a longer question of some words", "why", "more"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model and six questions."""
    return with_questions(tmp_path_factory.mktemp("commands"))


def with_questions(folder):
    write_tiny_model(folder / "model")
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RECIPE.format(base=folder, tensorboard=str(HAS_TENSORBOARD).lower())
    (folder / "recipe.toml").write_text(text)
    return folder


def regenerating(base, output):
    return ["regenerate", str(base / "questions.jsonl"), "--target", str(base / "model"),
            "--output", str(base / output), "--max-tokens", "24", "--batch-size", "1"]  # fmt: skip


def killed_regeneration(base, output):
    """Start the command in a process of its own and kill it once there is an answer."""
    code = "import sys; from train.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *regenerating(base, output)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    path, end = base / output, time.monotonic() + 300
    while not (path.is_file() and path.read_bytes().count(b"\n")):
        assert process.poll() is None and time.monotonic() < end, "no answer came"
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -9
    return path.read_bytes().count(b"\n")


def test_from_questions_to_an_evaluated_drafter(base, capsys):
    # The target's own answers; a run that was killed goes on to the same file.
    assert main(regenerating(base, "whole.jsonl")) == 0
    there = killed_regeneration(base, "answers.jsonl")
    assert main(regenerating(base, "answers.jsonl")) == 0
    assert f"{6 - there} written, {there} were there" in capsys.readouterr().err
    assert (base / "answers.jsonl").read_bytes() == (base / "whole.jsonl").read_bytes()

    model = ["--target", str(base / "model")]
    rows, states = str(base / "rows"), str(base / "states")
    prepare = ["prepare", str(base / "answers.jsonl"), *model, "--output", rows]
    assert main([*prepare, "--mask-token-id", "262"]) == 0
    assert "rows read 6, kept 6" in capsys.readouterr().out
    capture = ["capture", rows, *model, "--output", states, "--dtype", "float32", "--batch-size"]
    assert main([*capture, "6", "--taps", "1", "2", "3"]) == 0
    assert len(open_store(base / "states")) == len(open_prepared(base / "rows")) == 6

    fit = ["fit", str(base / "recipe.toml"), "--set", "optimizer.learning_rate=0.01"]
    assert main(fit) == 0
    run = base / "run"
    assert (run / "curves.png").stat().st_size > 1000
    check_log(run)
    check_provenance(run)
    assert main(fit) == 1
    assert "step 4; resume it (--resume)" in capsys.readouterr().err
    assert main([*fit, "--resume"]) == 0, "nothing is left to do"
    assert main([*fit, "--resume", "--set", "objective.ratio=0.5"]) == 1
    assert "objective.ratio: saved 0.8, now 0.5" in capsys.readouterr().err

    for layout in ("raw", "speculators"):
        export = ["export", str(run), str(base / layout), "--layout", layout]
        assert main([*export, "--which", "last", "--dtype", "float32"]) == 0
    raw, other = (load_drafter(base / name) for name in ("raw", "speculators"))
    assert raw.config.num_depths == 3 and raw.config.taps == other.config.taps == (1, 2, 3)
    for name in ("embedding", "fc", "mask_hidden"):
        values = [np.asarray(getattr(d, name).get_value()) for d in (raw, other)]
        np.testing.assert_array_equal(*values, err_msg=name)

    evaluate = ["evaluate", str(base / "raw"), *model, "--data", rows, "-k", "1", "3"]
    figures = base / "figures.json"
    assert main([*evaluate, "--prompts", "2", "--max-tokens", "8", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert [one["num_speculative_tokens"] for one in found] == [1, 3]
    assert all(one["acceptance_length"] >= 1 and one["prompts"] == 2 for one in found)
    assert "acceptance length" in capsys.readouterr().out


MISTAKES = [
    ("data.path=nowhere", "data.path is nowhere: neither prepared rows"),
    ("data.path={base}/model", "model.safetensors: not a shard of hidden states"),
    ("data.path={base}/damaged", "damaged/p0-00000.safetensors: sample '0000000"),
    ("data.sequence_length=8", "none of the"),
    ("data.validation_rows=6", "data.validation_rows: cannot hold out 6 of 6 rows"),
    ("drafter.taps=[1,2,4]", "holds taps [1, 2, 3] of width 24, the drafter reads [1, 2, 4]"),
    ("drafter.mask_token_id=999", "mask_token_id 999 is outside"),
    ("drafter.draft_vocab_size=8", "drafter.vocabulary"),
    ("mesh.data=16", "needs 16 devices, found 8"),
    ("train.accumulation=4", "global_batch is 2; it must be a multiple of accumulation 4"),
    ("train.global_batch=32", "sequences do not fill a batch of 32"),
    ("target.path=nowhere", "nowhere: no such file"),
    ("target.path={base}/wider", "of width 24, the drafter reads [1, 2, 3] of width 32"),
]


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Such a folder with stored states of six answers, a damaged copy of them, and a target of
    another width."""
    base = with_questions(tmp_path_factory.mktemp("spoiled"))
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1] * 3}]
        for text in QUESTIONS
    ]
    lines = (json.dumps({"messages": talk}) + "\n" for talk in talks)
    (base / "answers.jsonl").write_text("".join(lines))
    model, rows, states = str(base / "model"), str(base / "rows"), str(base / "states")
    prepare = ["prepare", str(base / "answers.jsonl"), "--target", model, "--output", rows]
    assert main([*prepare, "--mask-token-id", "262"]) == 0
    capture = ["capture", rows, "--target", model, "--output", states, "--dtype", "float32"]
    assert main([*capture, "--batch-size", "6", "--taps", "1", "2", "3"]) == 0
    shutil.copytree(base / "states", base / "damaged")
    (shard,) = (base / "damaged").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    content[data::48] = bytes(byte ^ 1 for byte in content[data::48])  # some of every sample
    shard.write_bytes(content)
    write_tiny_model(base / "wider", hidden=32)
    return base


@pytest.mark.parametrize("change, message", MISTAKES)
def test_a_recipe_that_cannot_be_is_one_line_naming_file_and_key(spoiled, capsys, change, message):
    change = change.format(base=spoiled)
    arguments = ["fit", str(spoiled / "recipe.toml"), "--set", change, "--set"]
    assert main([*arguments, f"output.folder={spoiled}/refused"]) == 1
    *notes, error = capsys.readouterr().err.splitlines()
    assert error.startswith("peagle-train fit: error: ")
    assert all("rows longer than" in note for note in notes)
    assert message in error
    assert "recipe.toml" in error or "safetensors" in error


def test_a_fit_that_a_signal_stops_is_not_done_and_counts_rows_left_out(
    spoiled, tmp_path, capsys, monkeypatch
):
    changes = [
        f"output.folder={tmp_path}/run",
        f"data.path={spoiled}/rows",
        "data.validation_rows=0",
        "data.sequence_length=80",
        "train.global_batch=1",
    ]
    fit = ["fit", str(spoiled / "recipe.toml")]
    for change in changes:
        fit += ["--set", change]
    longest = sorted(open_prepared(spoiled / "rows").lengths)
    assert longest[-2] <= 80 < longest[-1]
    with monkeypatch.context() as patch:
        patch.setattr("train.loop.any_process", lambda flag: True)
        assert main(fit) == 128 + 15
    error = capsys.readouterr().err
    assert "stopped at step 1, saved" in error
    assert "training: 1 of 6 rows longer than data.sequence_length left out" in error
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["rows_longer_than_sequence"] == {"training": {"left_out": 1, "rows": 6}}
    assert main([*fit, "--resume", "--set", "train.steps=4"]) == 0


def check_log(run):
    records = read_log(run)
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4]
    assert [r["step"] for r in records if r["kind"] == "validation"] == [2, 4]
    if not HAS_TENSORBOARD:
        return
    scalars = read_scalars(run / "tensorboard")
    assert scalars["train/loss"] == [(r["step"], np.float32(r["loss"])) for r in train]
    depths = [(r["step"], np.float32(r["accuracy"][2])) for r in train]
    assert scalars["train/accuracy/2"] == depths
    assert len(scalars["validation/estimated_acceptance_length"]) == 2


def check_provenance(run):
    content = json.loads((run / "run.json").read_text())
    recipe = content["recipe"]
    assert recipe["optimizer"]["learning_rate"] == 0.01, "the flag wins over the default"
    assert recipe["objective"]["ratio"] == 0.8, "defaults are written too"
    assert content["argv"] == sys.argv and content["drafter"]["taps"] == [1, 2, 3]
    assert content["versions"]["jax"] == jax.__version__
    if (ROOT / ".git").exists():
        # HEAD may have moved on since.
        known = ["git", "merge-base", "--is-ancestor", content["git_revision"], "HEAD"]
        assert subprocess.run(known, cwd=ROOT).returncode == 0


def read_scalars(folder):
    """Tag to (step, value)s of TensorBoard's event files: records of length, CRC, event, CRC."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                pair = (event.step, np.float32(value.simple_value))
                found.setdefault(value.tag, []).append(pair)
    return found
