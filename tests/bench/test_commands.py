"""`peagle bench` and `peagle demo` end to end on a tiny target: shapes, figures, bad usage."""

import argparse
import dataclasses
import hashlib
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import cli
from peagle_jax.bench.models import head_facts, load_models
from peagle_jax.bench.session import Session
from peagle_jax.checkpoints.embedded import EMBEDDED_MODELS
from peagle_jax.checkpoints.shipped_heads import heads_folder
from peagle_jax.cli_flags import UsageError
from peagle_jax.commands import bench, demo, progress
from tests.bench.tiny_models import TEXT, tiny_models


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": TEXT[i:] + TEXT[:i]} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "load", lambda arguments: tiny_models())


def run(capsys, *flags):
    status = cli.main(["bench", *map(str, flags)])
    out = capsys.readouterr().out
    return status, json.loads(out)


def test_every_method_at_every_k_and_concurrency(tiny, prompts, tmp_path, capsys):
    status, report = run(
        *(capsys, "--dataset", prompts, "--methods", "none,p-eagle", "-k", "2"),
        *("--concurrency", "1,2", "--max-tokens", "12", "--no-chat", "--json"),
        *("--output", tmp_path / "out"),
    )
    assert status == 0 and report["complete"]
    found = [(row["method"], row["k"], row["concurrency"]) for row in report["results"]]
    each = [("none", None), ("p-eagle", 2)]
    assert found == [(*one, rows) for rows in (1, 2) for one in each]
    for row in report["results"]:
        assert row["dataset"] == str(prompts) and row["num_requests"] == 3
        assert row["num_output_tokens"] == 36
        assert row["against_plain"]["lossless"] and row["against_plain"]["num_tokens"] == 36
        drafts = row["num_drafts"] * (row["k"] or 0)
        assert row["num_draft_tokens"] <= drafts
        if row["k"]:
            assert 1 <= row["acceptance_length"] <= 3
            assert len(row["acceptance_rate_per_position"]) == 2
    # Acceptance belongs to prompts and heads, not to who is in flight beside.
    by_rows = [
        [r["acceptance_length"] for r in report["results"] if r["concurrency"] == rows]
        for rows in (1, 2)
    ]
    assert by_rows[0] == by_rows[1]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report
    assert (tmp_path / "out" / "speedup.svg").is_file()


def test_a_seed_gives_the_same_again_and_another_seed_does_not(tiny, prompts, capsys):
    flags = (
        "--dataset",
        prompts,
        "--methods",
        "none,prompt-lookup",
        "-k",
        "2",
        "--max-tokens",
        "12",
    )
    flags += ("--no-chat", "--json", "--temperature", "5", "--ignore-eos")
    counts = []
    for seed in (3, 3, 4):
        _, report = run(capsys, *flags, "--seed", seed)
        plain, lookup = report["results"]
        assert lookup["against_plain"]["lossless"]  # a seed's text does not depend on the drafts
        assert lookup["outputs_sha256"] == plain["outputs_sha256"]
        counts.append((lookup["outputs_sha256"], lookup["num_accepted_tokens"]))
    assert counts[0] == counts[1] and counts[0][0] != counts[2][0]


def test_an_interrupted_run_keeps_what_it_measured(tiny, prompts, tmp_path, capsys, monkeypatch):
    calls = []

    def run_some(self, requests, *, real=Session.run):
        calls.append(len(requests))
        if len(calls) == 7:  # two warm-ups and two prompts by two arms are done
            raise KeyboardInterrupt
        return real(self, requests)

    monkeypatch.setattr(Session, "run", run_some)
    flags = ("--dataset", prompts, "--methods", "none,p-eagle", "-k", "2", "--max-tokens", "12")
    status, report = run(capsys, *flags, "--no-chat", "--json", "--output", tmp_path / "out")
    assert status == 130 and not report["complete"]
    assert [row["num_requests"] for row in report["results"]] == [2, 2]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report


def test_an_interrupted_run_goes_on_behind_what_it_has(tiny, prompts, capsys):
    flags = ("--dataset", prompts, "--methods", "none", "--max-tokens", "12", "--no-chat", "--json")
    _, whole = run(capsys, *flags)
    _, rest = run(capsys, *flags, "--skip", "2", "--concurrency", "2", "--refill", "2")
    (row,) = rest["results"]
    assert (row["num_requests"], whole["results"][0]["num_requests"]) == (1, 3)
    assert rest["settings"]["skipped"] == 2


def test_prompts_run_in_order_of_their_length_if_asked(tiny, tmp_path, capsys, monkeypatch):
    file = tmp_path / "uneven.jsonl"
    rows = [{"prompt": TEXT[:size]} for size in (9, 3, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen, real = [], Session.run

    def run_and_note(self, requests):
        seen.append([len(request.prompt) for request in requests])
        return real(self, requests)

    monkeypatch.setattr(Session, "run", run_and_note)
    flags = ("--dataset", file, "--methods", "none", "--max-tokens", "8", "--no-chat", "--json")
    _, as_given = run(capsys, *flags, "--concurrency", "3")
    given = seen[-1]
    _, by_length = run(capsys, *flags, "--concurrency", "3", "--by-length")
    assert given != sorted(given) and seen[-1] == sorted(given)
    tokens = [one["results"][0]["num_output_tokens"] for one in (as_given, by_length)]
    assert tokens[0] == tokens[1] and by_length["settings"]["by_length"]


def test_the_table_is_for_people(tiny, prompts, capsys):
    flags = ["bench", "--dataset", str(prompts), "--methods", "none", "--max-tokens", "12"]
    assert cli.main([*flags, "--no-chat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["method", "K", "rows", "requests"]
    assert lines[1].split()[:4] == ["none", "-", "1", "3"] and lines[1].endswith("yes")
    assert "prefill included" in lines[2] and "compilation" in lines[2]


BAD = {
    "K 0": (["-k", "3,0"], "-k/--num-speculative-tokens: '0' is not an integer from 1 to 31"),
    "K 99": (["-k", "99"], "'99' is not an integer from 1 to 31"),
    "K word": (["-k", "three"], "'three' is not an integer from 1 to 31"),
    "rows": (["--concurrency", "1,129"], "--concurrency: '129' is not an integer from 1 to 128"),
    "method": (["--methods", "none,medusa"], "'medusa' is not one of p-eagle, eagle3"),
    "prompts": (["--num-prompts", "0"], "--num-prompts: '0' is not an integer of at least 1"),
    "skip": (["--skip", "3"], "--skip 3: there are only 3 prompts"),
    "head": (["--drafter", "folder"], "'folder' is not METHOD=HEAD"),
    "file": (["--dataset-path", "/none"], "--dataset-path /none: no such file"),
    "dataset": (["--dataset", "speed-bench"], "--dataset-path"),
    "unknown": (["--dataset", "mtbench"], "mtbench: no such file"),
    "long": (["--max-tokens", "511"], "prompt 1 has 8 tokens.*above the context of 512"),
    "sampled peers": (
        ["--methods", "transformers", "--temperature", "1"],
        "measured greedily only",
    ),
    "peers together": (
        ["--methods", "transformers,none", "--concurrency", "2,3"],
        "one request at a time; add 1 to --concurrency 2,3",
    ),
    "temperature": (["--temperature", "-1"], "--temperature must be at least 0"),
    "infinite": (["--temperature", "inf"], "--temperature must be a finite number, got inf"),
    "context": (["--context-length", "0"], "--context-length: '0' is not an integer of at least 1"),
    "too many rows": (
        ["--concurrency", "1,4"],
        "--concurrency 4: there are only 3 prompts.*lower it, or give more prompts",
    ),
    "small blocks": (["--concurrency", "3", "--block", "2"], "--concurrency 3 is above --block 2"),
    "block alone": (["--block", "2"], "--block has no effect at --concurrency 1"),
    "rounds alone": (["--rounds-per-step", "2"], "--rounds-per-step has no effect"),
    "refill": (["--concurrency", "3,2", "--refill", "3"], "--refill 3 is above --concurrency 2"),
    "unused head": (["--drafter", "p-eagle=/nope"], "p-eagle is not among --methods none"),
    "two heads": (
        ["--drafter", "p-eagle=a", "--drafter", "p-eagle=b"],
        "--drafter: a method was given two heads",
    ),
    "path of nothing": (
        ["--dataset", "nonsense", "--dataset-path", __file__],
        "'nonsense' is not a data set that a path can be given for",
    ),
}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_usage_is_said_in_one_line(tiny, prompts, capsys, flags, message):
    base = ["bench", "--dataset", str(prompts), "--no-chat", "--methods", "none"]
    try:
        status = cli.main([*base, *flags])
    except SystemExit as error:
        status = error.code
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1
    assert re.search(message, error)


def test_peers_say_at_which_dtype_and_concurrency_they_run(capsys, monkeypatch):
    monkeypatch.setattr("peagle_jax.bench.models.head_facts", lambda models: {})
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    arguments = parser.parse_args(["--methods", "none,transformers", "--concurrency", "1,4"])
    target = types.SimpleNamespace(dtype=np.dtype(jnp.bfloat16))
    facts = bench._facts(types.SimpleNamespace(target=target, heads={}), [], arguments)
    assert facts["environment"]["peers_dtype"] == "float32"
    assert capsys.readouterr().err.splitlines() == [
        "transformers: in float32, the others in bfloat16",
        "transformers: at concurrency 1 alone",
    ]


def test_a_longer_context_than_the_models_names_the_flag(monkeypatch, tmp_path):
    monkeypatch.setattr("peagle_jax.bench.models.find_target", lambda name: tmp_path)
    monkeypatch.setattr("peagle_jax.bench.models.load_tokenizer", lambda path: None)
    target = tiny_models().target
    monkeypatch.setattr("peagle_jax.bench.models.load_target", lambda path, **_: target)
    with pytest.raises(ValueError, match="^--context-length 513 is above the 512 positions"):
        load_models("some", ("none",), {}, context_length=513)


def test_the_report_says_which_heads_drafted(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    shipped = heads_folder() / "smollm2-135m-eagle3"
    models = dataclasses.replace(tiny_models(), heads={"p-eagle": tmp_path, "eagle3": shipped})
    facts = head_facts(models)
    digest = hashlib.sha256(b"weights").hexdigest()
    assert facts["p-eagle"] == {"head": str(tmp_path), "sha256": {"model.safetensors": digest}}
    assert facts["eagle3"]["head"] == "smollm2-135m-eagle3"
    assert list(facts["eagle3"]["sha256"]) == ["head.safetensors"]


def demo_arguments(*flags):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--max-tokens", "24", *flags])


def test_the_demo_compares_and_says_that_all_is_identical(capsys):
    arguments = demo_arguments("--prompt", TEXT, "--prompt", TEXT[3:], "--color", "always")
    assert demo.run_with(tiny_models(), arguments) == 0
    out = capsys.readouterr().out
    assert "Answers with p-eagle; accepted draft tokens are green" in out
    assert f"> {TEXT[3:]}" in out
    table = [
        line.split() for line in out.splitlines() if line.startswith(tuple(tiny_models().engines))
    ]
    assert [line[:2] for line in table] == [
        [name, "48"] for name in ("none", "prompt-lookup", "eagle3", "p-eagle")
    ]
    assert table[0][3:] == ["1.00", "-", "1.00"]
    assert out.rstrip().endswith("All outputs were identical, token by token.")
    assert "prefill is not in it" in out


def test_the_demo_refuses_too_long_answers_before_it_compiles(capsys):
    with pytest.raises(UsageError, match="^--max-tokens 9000: .* above the context of 512"):
        demo.run_with(tiny_models(), demo_arguments("--prompt", TEXT, "--max-tokens", "9000"))
    assert capsys.readouterr() == ("", "")


def test_progress_is_for_terminals(capsys, monkeypatch):
    progress.show("Compiling")
    progress.clear()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress.show("Compiling")
    assert capsys.readouterr().err == "\r\x1b[KCompiling"


def test_the_demo_names_an_output_that_differs(capsys):
    def answer(ids):
        return types.SimpleNamespace(token_ids=ids, prompt_token_ids=(9,))

    answers = {"none": [answer((1, 2, 3))], "p-eagle": [answer((1, 5, 3))]}
    assert demo._compare(answers, lambda ids: 0.25 if ids == [9, 1] else 0.0, 5e-4) == 1
    out = capsys.readouterr().out
    assert "p-eagle, prompt 1: token 2 differs" in out and "DEFECT" in out
    assert "identical" not in out
    assert demo._compare(answers, lambda ids: 1e-5, 5e-4) == 0
    assert "near-tie" in capsys.readouterr().out
    assert demo._compare(answers, lambda ids: 0.25, None) == 0  # bfloat16: no bound is known
    out = capsys.readouterr().out
    assert "is for float32" in out and "DEFECT" not in out


def test_the_demo_without_heads_says_so_and_shows_what_it_can(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("peagle_jax.bench.models.find_target", lambda name: tmp_path)
    monkeypatch.setattr("peagle_jax.bench.models.find_drafter", lambda *args, **kwargs: None)
    models = tiny_models(("none", "prompt-lookup"))
    monkeypatch.setattr("peagle_jax.bench.models.load_models", lambda *args, **kwargs: models)
    assert "smollm2-135m" in EMBEDDED_MODELS
    assert demo.run(demo_arguments("--prompt", TEXT)) == 0
    out = capsys.readouterr().out
    assert out.startswith("No trained head for smollm2-135m comes with this version")
    assert "Answers with prompt-lookup" in out and "identical" in out
