"""`peagle` as a user meets it: one JSON object, a stream, one-line errors, heads found by name."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from peagle_jax import cli
from peagle_jax.checkpoints.drafter_export import save_drafter
from peagle_jax.checkpoints.hf_config import read_target_config
from peagle_jax.engine import Engine
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import init_drafter
from tests.tiny_folder import write_tiny_model

PROMPT = "the cat and the cat"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model and a random P-EAGLE head under the names of a public pair."""
    import jax

    root = tmp_path_factory.mktemp("models")
    target = write_tiny_model(root / "openai" / "gpt-oss-20b")
    config = read_target_config(target)
    head = DrafterConfig(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=32,
        target_hidden_size=config.hidden_size,
        layers=config.layers[:1],
        taps=(1, 2, 4),
        max_positions=config.max_positions,
        mask_token_id=263,
        num_depths=4,
    )
    save_drafter(
        init_drafter(head, jax.random.key(0), jnp.float32), root / "amazon" / "gpt-oss-20b-p-eagle"
    )
    return root


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(arguments))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def generate(capsys, models, *arguments: str) -> dict:
    target = str(models / "openai" / "gpt-oss-20b")
    code, out, err = run(
        capsys, "generate", "--target", target, "--json", "--max-tokens", "12", *arguments, PROMPT
    )
    assert code == 0, err
    return json.loads(out)


def test_a_target_finds_its_head_in_the_catalogue_and_the_output_is_plain(capsys, models):
    plain = generate(capsys, models, "--method", "none", "--ignore-eos")
    drafted = generate(capsys, models, "-k", "3", "--ignore-eos")
    assert plain["token_ids"] == drafted["token_ids"] and plain["text"] == drafted["text"]
    assert plain["finish_reason"] == "length" and len(plain["token_ids"]) == 12
    stats = drafted["stats"]
    assert stats["num_drafts"] > 0 and len(stats["acceptance_rate_per_position"]) == 3
    assert plain["stats"]["num_drafts"] == 0
    assert stats["acceptance_length"] >= 1 and stats["output_tokens_per_s"] > 0


def test_the_speculative_config_of_vllm_names_the_same_head(capsys, models):
    head = str(models / "amazon" / "gpt-oss-20b-p-eagle")
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    parallel = {**config, "parallel_drafting": True}
    drafted = generate(capsys, models, "--speculative-config", json.dumps(parallel), "--ignore-eos")
    same = generate(capsys, models, "--drafter", head, "-k", "3", "--ignore-eos")
    assert drafted["token_ids"] == same["token_ids"]
    assert drafted["stats"]["num_drafts"] == same["stats"]["num_drafts"]
    code, _, err = run(
        capsys,
        *("generate", "--target", str(models / "openai" / "gpt-oss-20b")),
        *("--speculative-config", json.dumps(config), PROMPT),
    )
    assert code == 1 and "trained for parallel drafting" in err


def test_a_stream_is_plain_text_when_piped(capsys, models):
    whole = generate(capsys, models, "--method", "none")
    code, out, _ = run(
        capsys,
        *("generate", "--target", str(models / "openai" / "gpt-oss-20b")),
        *("--method", "none", "--max-tokens", "12", PROMPT),
    )
    assert code == 0 and out == whole["text"] + "\n"


def test_accepted_drafts_are_coloured_on_request(capsys, models):
    code, out, _ = run(
        capsys,
        *("generate", "--target", str(models / "openai" / "gpt-oss-20b"), "--color", "always"),
        *("--method", "prompt-lookup", "-k", "3", "--max-tokens", "12", PROMPT),
    )
    assert code == 0 and "12 tokens" in out


BAD_FLAGS = {
    **{
        f"K {value}": (
            ["-k", value],
            f"-k/--num-speculative-tokens: {value!r} is not an integer from 1 to 31",
        )
        for value in ("0", "-1", "99", "three")
    },
    "K without a value": (
        ["--num-speculative-tokens"],
        "-k/--num-speculative-tokens: expected one argument",
    ),
    "top_p zero": (["--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
    "top_p above": (["--top-p", "1.5"], "top_p must be above 0"),
    "temperature": (["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
    "temperature nan": (["--temperature", "nan"], "temperature must be a finite number, got nan"),
    "max_tokens": (["--max-tokens", "0"], "max_tokens must be an integer"),
    "bias": (["--logit-bias", "[1]"], "not a JSON object of ids and numbers"),
    "method": (["--method", "medusa"], "invalid choice: 'medusa'"),
    "both": (["--speculative-config", "{}", "--drafter", "x"], "say the same thing; give one"),
    "unknown": (["--beam", "4"], "unrecognized arguments"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_flags_exit_2_with_one_line_H1(capsys, flags, message):
    last = [] if flags == ["--num-speculative-tokens"] else ["hello"]
    code, out, err = run(capsys, "generate", *last, *flags)
    assert code == 2 and out == ""
    assert message in err and len(err.strip().splitlines()) == 1


@pytest.mark.filterwarnings("default")
def test_K_above_the_trained_depth_warns_once_and_the_default_is_within_H1(
    capsys, models, monkeypatch
):
    made = []

    def stream(engine, *_, **__):
        """No text: only the program's K is asked for, and nothing is compiled."""
        made.append(engine.generate_fn(cache_length=64).num_speculative_tokens)
        return iter(())

    monkeypatch.setattr(Engine, "stream", stream)
    target = str(models / "openai" / "gpt-oss-20b")
    code, _, err = run(capsys, "generate", "--target", target, "-k", "6", PROMPT)
    assert code == 0 and len(err.splitlines()) == 1
    assert "num_speculative_tokens 6 is above the 4 depths" in err
    code, _, err = run(capsys, "generate", "--target", target, PROMPT)
    assert code == 0 and err == ""
    assert made == [6, 4]


def test_bad_requests_exit_1_with_one_line(capsys, models):
    target = str(models / "openai" / "gpt-oss-20b")
    for prompt, message in (("", "prompt is empty"), ("x" * 600, "and the context 512: no room")):
        code, out, err = run(capsys, "generate", "--target", target, "--method", "none", prompt)
        assert code == 1 and out == "" and message in err
    code, _, err = run(capsys, "generate", "--target", str(models / "nowhere"), "hello")
    assert code == 1 and "no such file or folder" in err


def test_a_head_that_is_not_there_is_named_with_the_remedy(capsys, tmp_path):
    target = write_tiny_model(tmp_path / "openai" / "gpt-oss-120b")
    code, _, err = run(capsys, "generate", "--target", str(target), PROMPT)
    assert code == 1
    assert "amazon/gpt-oss-120b-p-eagle" in err and "--method none" in err


def test_models_lists_the_catalogue(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "google/gemma-4-31B-it\n  no known public head" in out
    code, out, _ = run(capsys, "models", "--json")
    assert {row["head"] for row in json.loads(out)} >= {"amazon/gpt-oss-20b-p-eagle"}


def test_convert_writes_what_loads_again(capsys, models, tmp_path):
    target, head = models / "openai" / "gpt-oss-20b", models / "amazon" / "gpt-oss-20b-p-eagle"
    code, out, err = run(capsys, "convert", str(target), str(tmp_path / "target"))
    assert code == 0 and "target" in out, err
    code, out, err = run(
        capsys,
        *("convert", str(head), str(tmp_path / "head"), "--layout", "speculators"),
        *("--target", str(target)),
    )
    assert code == 0 and "drafter" in out, err
    plain = generate(capsys, models, "-k", "3", "--ignore-eos")
    code, out, err = run(
        capsys,
        *("generate", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "head")),
        *("-k", "3", "--ignore-eos", "--json", "--max-tokens", "12", PROMPT),
    )
    assert code == 0, err
    assert json.loads(out)["token_ids"] == plain["token_ids"]
    code, _, err = run(capsys, "convert", str(head), str(tmp_path / "x"), "--dtype", "float32")
    assert code == 2 and "--dtype has no meaning for a drafter" in err


def test_doctor_says_what_runs_H6(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    content = json.loads(out)
    assert code == 0 and content["backend"] == "cpu"
    assert set(content["implementations"].values()) == {"reference"}


# Every module, then commands; on a platform that is not there, so that looking for devices fails.
_WITHOUT_DEVICES = """
import importlib, pkgutil, sys
import pallas_kernels, peagle_jax, train
for package in (pallas_kernels, peagle_jax, train):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from peagle_jax import cli
from train.cli import main as train_main
source, destination = sys.argv[1:]
for main, arguments in (
    (cli.main, ["--help"]),
    (cli.main, ["generate", "--help"]),
    (cli.main, ["bench", "--help"]),
    (cli.main, ["models"]),
    (cli.main, ["convert", source, destination]),
    (train_main, ["--help"]),
):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert not code, (arguments, code)
import jax
try:
    jax.devices()
except RuntimeError:
    print("no devices")
"""


def test_imports_help_and_convert_look_for_no_device_H6(models, tmp_path):
    arguments = (str(models / "openai" / "gpt-oss-20b"), str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DEVICES, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no devices\n"), "the platform was there after all"
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_no_command_and_the_version(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "generate" in out
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].startswith("peagle-jax ")
