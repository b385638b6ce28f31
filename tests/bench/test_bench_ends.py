"""How `peagle bench` ends early and goes on: what is kept, where it is written, what is told."""

import dataclasses
import json

import pytest

from peagle_jax import cli
from peagle_jax.bench.session import Session
from peagle_jax.commands import bench
from tests.bench.tiny_models import TEXT, tiny_models

LENGTHS = (9, 3, 6, 5, 8, 4)
BASE = ("--no-chat", "--ignore-eos", "--max-tokens", "8")
PLAIN = ("--methods", "none")
BOTH = ("--methods", "none,prompt-lookup", "-k", "2")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "six.jsonl"
    rows = [{"prompt": TEXT[i:] + TEXT[:i], "id": "same"} for i in range(6)]
    for row, length in zip(rows, LENGTHS, strict=True):
        row["prompt"] = (row["prompt"] * 2)[:length]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def loads(monkeypatch):
    """Models are loaded so many times."""
    calls = []
    monkeypatch.setattr(bench, "load", lambda _: (calls.append(1), tiny_models())[1])
    return calls


@pytest.fixture
def ran(monkeypatch, loads):
    """Name and seed of every request that a session has answered, the warm-up's apart."""
    seen, real = [], Session.run

    def run(self, requests):
        done = real(self, requests)
        names = [(one.name, one.params.seed) for one in requests]
        seen.extend(names if requests[0].params.max_tokens == 8 else [])
        return done

    monkeypatch.setattr(Session, "run", run)
    return seen


@pytest.fixture
def fails(monkeypatch, loads):
    """fails(n, error): the n-th answer raises it, warm-ups' counted."""

    def arm(number, error):
        count, real = [0], Session._record

        def record(self, *args, **kwargs):
            count[0] += 1
            if count[0] == number:
                raise error
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Session, "_record", record)

    return arm


def run(capsys, prompts, *flags):
    status = cli.main(["bench", "--dataset", str(prompts), *BASE, *map(str, flags)])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out.startswith("{") else out, err


@pytest.mark.parametrize("order", [(), ("--by-length",)], ids=["given", "by length"])
def test_what_is_skipped_is_the_first_of_what_would_run(prompts, ran, capsys, order):
    flags = (*PLAIN, *order, "--json", "--temperature", "5", "--seed", "3")
    run(capsys, prompts, *flags)
    whole = list(ran)
    ran.clear()
    _, rest, _ = run(capsys, prompts, *flags, "--skip", "4")
    assert ran == whole[4:] and len(set(whole)) == 6
    assert {seed - 2: name for name, seed in whole} == {i: f"{i}: same" for i in range(1, 7)}
    assert rest["settings"]["prompts"] == [name for name, _ in ran]


def test_finished_answers_of_an_interrupted_turn_are_kept(prompts, fails, capsys, tmp_path):
    fails(7, KeyboardInterrupt())  # two of the warm-up
    flags = (*PLAIN, "--concurrency", "2", "--json", "--output", tmp_path / "out")
    status, report, err = run(capsys, prompts, *flags)
    assert status == 130 and not report["complete"] and "what was measured is kept" in err
    assert report["results"][0]["num_requests"] == 4 and "common" not in report
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report


def test_nothing_is_called_kept_where_nothing_is(prompts, fails, capsys, tmp_path):
    fails(2, KeyboardInterrupt())
    status, out, err = run(capsys, prompts, *PLAIN, "--output", tmp_path / "out")
    assert (status, out) == (130, "") and "nothing was measured" in err and "kept" not in err


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), 1)],
    ids=["interrupt", "error"],
)
def test_an_end_in_the_middle_loses_nothing(prompts, fails, capsys, tmp_path, error, status):
    fails(2 * 2 + 2 * 4 + 1, error)  # warm-ups of two rows, two turns of two prompts by two arms
    flags = (*BOTH, "--concurrency", "2", "--block", "2", "--json", "--output", tmp_path / "out")
    found, report, err = run(capsys, prompts, *flags)
    assert found == status and not report["complete"]
    assert (str(error) in err.splitlines()[-1]) or status == 130
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report
    assert report["common"]["num_prompts"] == 4 and "--skip 4" in err
    assert [row["num_requests"] for row in report["common"]["results"]] == [4, 4]
    assert all(row["speedup_over_plain"] for row in report["common"]["results"])


def test_a_speed_up_is_over_the_same_prompts(prompts, fails, capsys):
    fails(4, KeyboardInterrupt())  # two warm-ups; plain has one prompt, the other arm none
    _, report, _ = run(capsys, prompts, *BOTH, "--json")
    assert [row["num_requests"] for row in report["results"]] == [1]
    fails(6, KeyboardInterrupt())
    _, report, _ = run(capsys, prompts, *BOTH, "--json")
    counts = [row["num_requests"] for row in report["results"]]
    rates = [row["speedup_over_plain"] for row in report["results"]]
    assert sorted(counts) == [1, 2] and rates.count(None) == 1


def test_results_are_there_after_the_first_turn(prompts, loads, capsys, tmp_path, monkeypatch):
    real, seen = Session.run, []

    def look(self, requests):
        seen.append((tmp_path / "out" / "results.json").is_file())
        return real(self, requests)

    monkeypatch.setattr(Session, "run", look)
    run(capsys, prompts, *PLAIN, "--output", tmp_path / "out")
    assert seen == [False, False, True, True, True, True, True]


def test_an_output_that_cannot_be_written_is_found_before_models_load(
    prompts, loads, capsys, tmp_path
):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        status, out, err = run(capsys, prompts, *PLAIN, "--output", place)
        assert status == 2 and f"--output {place}: cannot be written" in err and out == ""
    assert not loads


def test_the_results_of_another_run_are_not_overwritten(prompts, loads, capsys, tmp_path):
    out = tmp_path / "out"
    assert run(capsys, prompts, *BOTH, "--output", out)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for other, name in (
        (("--skip", "3"), "skipped"),
        (("--temperature", "1"), "temperature"),
        (("--concurrency", "2"), "concurrency"),
    ):
        status, _, err = run(capsys, prompts, *BOTH, *other, "--output", out)
        assert status == 2 and name in err and "choose another folder, or delete" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "speedup.svg").write_text("of some other time")
    assert run(capsys, prompts, *BOTH, "--output", out)[0] == 0  # the same run again
    assert sorted(path.name for path in out.iterdir()) == sorted(before)
    (out / "results.json").write_text("[]")
    assert run(capsys, prompts, *BOTH, "--output", out)[0] == 2


def test_another_text_than_plain_decodings_is_an_error(prompts, loads, capsys, monkeypatch):
    real = Session._record

    def record(self, request, *args, **kwargs):
        one = real(self, request, *args, **kwargs)
        if not self.fn.num_speculative_tokens:
            return one
        return dataclasses.replace(one, token_ids=(*one.token_ids[:-1], 0))

    monkeypatch.setattr(Session, "_record", record)
    status, report, err = run(capsys, prompts, *BOTH, "--json")
    assert status == 1 and "NOT LOSSLESS" in err
    assert report["results"][1]["against_plain"]["num_unexcused"] == 6
    status, out, err = run(capsys, prompts, *BOTH, "--temperature", "1")
    assert status == 0 and "6 differ, not judged" in out and "is for whole greedy runs" in err


def test_an_answer_of_one_token_may_fill_the_context(loads, capsys, tmp_path):
    file = tmp_path / "full.jsonl"
    file.write_text(json.dumps({"prompt": (TEXT * 100)[:511]}) + "\n")
    status, report, _ = run(capsys, file, *PLAIN, "--max-tokens", "1", "--json")
    assert status == 0 and report["results"][0]["num_output_tokens"] == 1
