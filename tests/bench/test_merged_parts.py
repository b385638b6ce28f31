"""Parts of a run, merged, give the figures of the whole run; what does not belong is refused."""

import json
from pathlib import Path

import pytest

from benchmarks import heads_curve
from benchmarks.heads_evidence import join, main, merge, same_prompts
from examples import run_notebook
from peagle_jax.bench.measure import Arm, Measurement
from peagle_jax.bench.report import content
from peagle_jax.bench.results import rows
from peagle_jax.bench.session import Record
from peagle_jax.decoding.stats import AcceptanceStats


def record(index, *, drafted):
    counts = (index + 2, index) if drafted else ()
    stats = AcceptanceStats(
        num_drafts=4 + index if drafted else 0,
        num_draft_tokens=8 + index if drafted else 0,
        num_accepted_per_position=counts,
    )
    tokens = tuple(range(5 + index)) if index != 3 or not drafted else (0, 9, 2)
    return Record(
        name=str(index),
        prompt=(1, 2),
        token_ids=tokens,
        num_rounds=3 + index,
        acceptance=stats,
        first_token_s=0.5,
        total_s=2.0,
    )


PLAIN, DRAFTED = Arm("none", None), Arm("p-eagle", 2)


def report(indices, arms=(PLAIN, DRAFTED)):
    found = []
    for arm in arms:
        one = Measurement(arm, 2, warm_up_s=1.0, seconds=2.0 * len(indices))
        one.records = [record(i, drafted=arm.k is not None) for i in indices]
        found.append(one)
    table = rows(found, "some", lambda ids: 1e-6)
    facts = {"dtype": "float32", "cores": 2, "revision": "r", "platform": "cpu", "processor": "p"}
    settings = {
        "num_prompts": len(indices), "num_prompt_tokens": 2 * len(indices), "skipped": indices[0],
        "max_tokens": 9, "temperature": 0.0, "seed": 0, "target": "t", "chat_template": True,
        "prompts": [str(i) for i in indices], "methods": [arm.method for arm in arms],
    }  # fmt: skip
    return content(facts, table, complete=True, settings=settings)


def test_two_parts_are_the_whole():
    whole, merged = report(range(6)), merge([report(range(2)), report(range(2, 6))])
    for ours, theirs in zip(merged["results"], whole["results"], strict=True):
        for name in (
            "num_requests", "num_output_tokens", "seconds", "output_tokens_per_s", "num_drafts",
            "acceptance_length", "acceptance_rate", "passes_per_token", "speedup_over_plain",
        ):  # fmt: skip
            assert ours[name] == pytest.approx(theirs[name]), name
        assert ours["against_plain"] == theirs["against_plain"]
        rates = (one["acceptance_rate_per_position"] for one in (ours, theirs))
        left, right = rates
        assert (left is None) == (right is None)
        if left is not None:
            assert left == pytest.approx(list(right))
    assert merged["results"][1]["against_plain"]["num_excused"] == 1
    assert [one["skipped"] for one in merged["parts"]] == [0, 2]
    for name in ("num_prompts", "num_prompt_tokens", "skipped", "prompts"):
        assert merged["settings"][name] == whole["settings"][name]
    assert merged["complete"] and same_prompts([merged, whole])


def edited(part, place, **values):
    part[place] |= values
    return part


OTHERS = {
    "dtype": ("environment", {"dtype": "bfloat16"}),
    "cores": ("environment", {"cores": 64}),
    "platform": ("environment", {"platform": "gpu"}),
    "processor": ("environment", {"processor": "other"}),
    "max_tokens": ("settings", {"max_tokens": 256}),
    "temperature": ("settings", {"temperature": 1.0}),
    "target": ("settings", {"target": "other"}),
    "chat_template": ("settings", {"chat_template": False}),
}


@pytest.mark.parametrize(("place", "values"), OTHERS.values(), ids=OTHERS)
def test_parts_that_differ_are_refused(place, values):
    (name,) = values
    with pytest.raises(ValueError, match=f"differ in {name}"):
        merge([report(range(2)), edited(report(range(2, 4)), place, **values)])
    with pytest.raises(ValueError, match=f"differ in {name}"):
        join([report(range(2)), edited(report(range(2), (PLAIN,)), place, **values)])


def test_other_arms_are_not_merged_and_other_data_sets_not_joined():
    other = report(range(2, 4))
    other["results"].pop()
    with pytest.raises(ValueError, match="different methods"):
        merge([report(range(2)), other])
    other = report(range(2), (PLAIN, Arm("eagle3", 3)))
    for row in other["results"]:
        row["dataset"] = "another"
    with pytest.raises(ValueError, match="differ in dataset"):
        join([report(range(2)), other])
    parts = [report(range(2)), report(range(2), (PLAIN, Arm("p-eagle", 3)))]
    for number, part in enumerate(parts):
        part["settings"]["heads"] = {"p-eagle": {"sha256": number}}
    with pytest.raises(ValueError, match="different heads of p-eagle"):
        join(parts)


@pytest.mark.parametrize("names", [True, False])
def test_no_prompt_counts_twice(names):
    parts = [report(range(4)), report(range(2, 6))]
    if not names:
        for part in parts:
            del part["settings"]["prompts"]
    with pytest.raises(ValueError, match="share"):
        merge(parts)


def test_what_one_part_does_not_know_is_not_known():
    parts = [report(range(2)), report(range(2, 4))]
    parts[1]["results"][1] |= {
        "passes_per_token": None,
        "num_drafts": None,
        "num_draft_tokens": None,
    }
    row = merge(parts)["results"][1]
    for name in ("passes_per_token", "num_drafts", "acceptance_length", "acceptance_rate"):
        assert row[name] is None, name


def test_an_interrupted_part_counts_as_far_as_all_methods_went():
    part, rest = report(range(5)), report(range(2, 6))
    del part["results"][1]  # the second method had answered fewer
    common = report(range(2))
    part |= {
        "complete": False,
        "common": {"num_prompts": 2, "num_prompt_tokens": 4, "results": common["results"]},
    }
    whole = report(range(6))
    merged = merge([rest, part])
    assert merged["complete"] and merged["settings"]["prompts"] == whole["settings"]["prompts"]
    assert [row["num_requests"] for row in merged["results"]] == [6, 6]
    assert not merge([part, report(range(3, 6))])["complete"]  # nobody has prompt 2
    # One of before: no common part is told, so the counts have to be equal.
    old = report(range(2)) | {"complete": False}
    del old["settings"]["prompts"]
    assert merge([old, rest])["complete"]
    old["results"][1]["num_requests"] = 1
    with pytest.raises(ValueError, match="other prompts of each method"):
        merge([old, rest])


def test_reports_of_before_are_read(tmp_path, capsys):
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "smollm2_mt_bench"
    found = json.loads((folder / "results.json").read_text())
    halves = [json.loads(json.dumps(found)) for _ in range(2)]
    for number, half in enumerate(halves):
        half["settings"] |= {"skipped": 80 * number}
        half["results"] = [row for row in half["results"] if number or row["method"] != "eagle3"]
        for row in half["results"]:
            row["against_plain"].pop("num_not_judged", None)
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "results.json").write_text(json.dumps(half))
    halves[1]["results"].pop()
    assert merge(halves)["settings"]["num_prompts"] == 160
    halves[1]["settings"]["skipped"] = 0
    halves[1]["results"] = found["results"][::2]
    assert [row["method"] for row in join(halves)["results"]] == ["none", "p-eagle", "eagle3"]


USAGE = {
    "nothing": ((), "arguments are required"),
    "output alone": (("out",), "arguments are required: parts"),
    "one part": (("out", "a"), "at least two parts"),
    "no folder": (("out", "a", "none"), "none has no results of `peagle bench`"),
    "other file": (("out", "a", "b"), "b has no results of `peagle bench`"),
    "output is a part": (("a", "a", "a"), "a is a part, and would be lost"),
    "the same twice": (("out", "a", "c"), "p-eagle at K = 2 is in two parts"),
}


@pytest.mark.parametrize(("words", "message"), USAGE.values(), ids=USAGE)
def test_bad_usage_is_said_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name, held in {"a": report(range(2)), "b": [1], "c": report(range(2))}.items():
        Path(name).mkdir()
        Path(name, "results.json").write_text(json.dumps(held))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not Path("out").exists()


def test_other_arms_over_the_same_prompts_stand_side_by_side():
    parts = [report(range(4)), report(range(4), (PLAIN, Arm("eagle3", 3)))]
    assert same_prompts(parts) and not same_prompts([parts[0], report(range(4, 8))])
    joined = join(parts)
    assert [row["method"] for row in joined["results"]] == ["none", "p-eagle", "eagle3"]
    assert joined["results"][:2] == parts[0]["results"]
    with pytest.raises(ValueError, match="p-eagle at K = 2 is in two parts"):
        join([parts[0], parts[0]])
    parts[1]["results"][0]["outputs_sha256"] = "other"
    with pytest.raises(ValueError, match="plain decoding gave other texts"):
        join(parts)


def test_acceptance_stands_without_the_clock(tmp_path):
    for name, arms in (("a", (PLAIN, DRAFTED)), ("b", (PLAIN, Arm("eagle3", 3)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(report(range(4), arms)))
    parts = [str(tmp_path / name) for name in "ab"]
    main([str(tmp_path / "out"), *parts, "--acceptance-only"])
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["method"], row["k"]) for row in found["results"]] == [
        ("none", None), ("eagle3", 3), ("p-eagle", 2),
    ]  # fmt: skip
    for row in found["results"]:
        assert row["seconds"] is row["output_tokens_per_s"] is row["speedup_over_plain"] is None
        assert row["num_requests"] == 4 and row["against_plain"]["num_requests"] == 4
    assert (
        found["results"][2]["acceptance_length"]
        == report(range(4))["results"][1]["acceptance_length"]
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.json", "table.md", "acceptance.svg",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "message"),
    [(heads_curve, "has no log.jsonl of p-eagle-1"), (run_notebook, "is not a notebook")],
)
def test_other_scripts_name_a_wrong_path(monkeypatch, capsys, module, message):
    monkeypatch.setattr("sys.argv", ["script", "/none"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
