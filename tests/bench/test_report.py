"""Figures by hand, equality with plain decoding, and the report's files."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.bench import report as report_file
from peagle_jax.bench.environment import command_line, environment
from peagle_jax.bench.measure import Arm, Measurement
from peagle_jax.bench.near_ties import top_two_gap
from peagle_jax.bench.pictures import draw
from peagle_jax.bench.report import (
    HEADER,
    cells,
    content,
    equality,
    markdown_table,
    text_table,
    write_report,
)
from peagle_jax.bench.results import (
    against_plain,
    first_difference,
    near_tie_bound,
    result_row,
    rows,
)
from peagle_jax.bench.session import Record
from peagle_jax.decoding.stats import AcceptanceStats
from tests.chain_target import chain_target


def record(name="0", tokens=range(7), *, rounds=3, first=0.5, total=3.5, accepted=(), drafts=0):
    return Record(
        name=name,
        prompt=(1, 2),
        token_ids=tuple(tokens),
        num_rounds=rounds,
        acceptance=AcceptanceStats(
            num_drafts=drafts,
            num_draft_tokens=drafts * len(accepted),
            num_accepted_per_position=tuple(accepted),
        ),
        first_token_s=first,
        total_s=total,
    )


def measured(method="p-eagle", k=3, concurrency=1, records=None, seconds=4.0):
    records = [record()] if records is None else records
    return Measurement(Arm(method, k), concurrency, seconds=seconds, records=records)


def test_figures_of_a_run_by_hand():
    # Three rounds of three drafts with 3, 0 and 1 accepted: 1 + 4/3, 4 of 9, and by position.
    drafted = record(accepted=(2, 1, 1), drafts=3, tokens=range(8))
    other = record("1", tokens=[5], rounds=0, first=0.25, total=0.25, accepted=(0, 0, 0))
    row = result_row(measured(records=[drafted, other]), "mine")
    assert row["acceptance_length"] == pytest.approx(7 / 3)
    assert row["acceptance_rate"] == pytest.approx(4 / 9)
    assert row["acceptance_rate_per_position"] == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert row["num_output_tokens"] == 9 and row["output_tokens_per_s"] == pytest.approx(9 / 4)
    assert row["passes_per_token"] == pytest.approx(3 / 7)
    # One output has a single token and so no time per token.
    assert row["time_per_output_token_ms"]["mean"] == pytest.approx(3000 / 7)
    assert row["time_to_first_token_ms"] == pytest.approx(
        {"mean": 375.0, "p50": 375.0, "p90": 475.0, "p95": 487.5, "p99": 497.5}
    )


def test_nothing_drafted_and_nothing_later_divide_by_nothing():
    row = result_row(measured("none", None, records=[record(tokens=[4], rounds=0)]), "mine")
    assert row["acceptance_length"] == 1.0
    assert row["acceptance_rate"] is None and row["acceptance_rate_per_position"] is None
    assert row["time_per_output_token_ms"] is None and row["passes_per_token"] is None
    assert json.loads(json.dumps(row)) == row
    assert cells(row | {"speedup_over_plain": None})[6:8] == ("-", "-")


@pytest.mark.parametrize(
    ("left", "right", "step"),
    [
        ([1, 2], [1, 2], None),
        ([1, 3], [1, 2], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [], None),
    ],
)
def test_first_difference(left, right, step):
    assert first_difference(left, right) == step


def test_only_near_ties_excuse_another_token_and_few_of_them():
    plain = [record(str(i), range(100)) for i in range(3)]
    changed = [*range(40), 77, *range(41, 100)]
    asked = []

    def gap(ids):
        asked.append(list(ids))
        return 1e-4

    same = against_plain(plain, plain, gap)
    assert same["lossless"] and same["num_tokens"] == 300 and not same["differences"]
    found = against_plain([record("0", changed)], plain, gap)
    assert asked == [[1, 2, *range(40)]]
    assert found["differences"] == [{"prompt": "0", "step": 40, "gap": 1e-4}]
    assert found["lossless"] and found["num_excused"] == 1 and found["num_unexcused"] == 0
    twice = against_plain([record("0", changed), record("1", changed)], plain, gap)
    assert not twice["lossless"]  # two in a few hundred tokens
    far = against_plain([record("0", changed)], plain, lambda ids: 1e-3)
    assert not far["lossless"] and far["num_unexcused"] == 1
    for cell, found in (
        ("yes", same),
        ("yes, 1 near-tie", against_plain([record("0", changed)], plain, gap)),
        ("NO: 2 near-ties", twice),
        ("NO: 1 differ", far),
    ):
        assert equality({"against_plain": found}) == cell
    # Not yet computed, or no bound is known (bfloat16): nothing is called a defect.
    for unknown in (
        against_plain([record("0", changed)], plain, None),
        against_plain([record("0", changed)], plain, lambda ids: 1.0, None),
    ):
        assert unknown["lossless"] is None and unknown["num_unexcused"] == 0
        assert unknown["num_not_judged"] == 1
        assert equality({"against_plain": unknown}) == "1 differ, not judged"


def test_near_ties_have_a_bound_in_greedy_float32_alone():
    assert near_tie_bound("float32", 0.0) == 5e-4
    assert near_tie_bound("bfloat16", 0.0) is None and near_tie_bound("float32", 1.0) is None


def test_what_a_peer_does_not_tell_is_not_known():
    one = dataclasses.replace(record(rounds=4), acceptance=None)
    row = result_row(measured("transformers-prompt-lookup", 3, records=[one]), "mine")
    for name in ("acceptance_length", "num_drafts", "acceptance_rate"):
        assert row[name] is None
    assert row["passes_per_token"] == pytest.approx(4 / 6) and cells(row)[6] == "-"


def table():
    arms = [("p-eagle", 3, 2.0), ("p-eagle", 5, 1.5), ("eagle3", 3, 3.0), ("none", None, 4.0)]
    found = []
    for concurrency in (1, 4):
        for method, k, seconds in arms:
            accepted = (3, 2, 1, 1, 0)[:k] if k else ()
            one = record(accepted=accepted, drafts=4 if k else 0)
            found.append(measured(method, k, concurrency, [one], seconds))
    return rows(found, "mine", None)


def test_speedup_is_over_plain_at_the_same_concurrency():
    found = {(r["method"], r["k"], r["concurrency"]): r["speedup_over_plain"] for r in table()}
    assert found["p-eagle", 5, 4] == pytest.approx(4 / 1.5)
    assert found["none", None, 1] == 1.0
    [alone] = rows([measured()], "mine", None)
    assert alone["speedup_over_plain"] is None and "against_plain" not in alone


def test_files_and_pictures(tmp_path):
    report = content(environment() | {"dtype": "float32"}, table(), complete=True)
    written = write_report(tmp_path / "out", report, pictures=True)
    assert [path.name for path in written] == [
        *("results.json", "table.md", "throughput.svg", "acceptance.svg", "speedup.svg")
    ]
    assert sorted(tmp_path.joinpath("out").iterdir()) == sorted(written)  # no leftovers
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(again) == ["environment", "results", "complete"]
    assert {"revision", "command", "jax", "cores", "processor"} <= set(again["environment"])
    keys = {"method", "k", "concurrency", "dataset", "acceptance_length", "output_tokens_per_s"}
    assert keys | {"acceptance_rate_per_position"} <= set(again["results"][0])
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) == 2 + len(table())
    assert draw(report) == draw(report)  # the same figures give the same files
    for path in written[2:]:
        assert path.read_text().count("<svg") == 1


def test_a_picture_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    report = content({}, table())
    write_report(tmp_path, report, pictures=False)
    before = (tmp_path / "results.json").read_text()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report_file.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, content({}, []), pictures=False)
    assert (tmp_path / "results.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.md"]


def test_pictures_only_where_there_are_figures():
    only_plain = rows([measured("none", None, records=[record()])], "mine", None)
    assert draw(content({}, only_plain)) == {}


def test_tables_line_up():
    lines = [cells(row) for row in table()]
    assert len({len(line) for line in (HEADER, *lines)}) == 1
    first, *rest = text_table(("a", "bb"), [("xyz", "1"), ("y", "22")]).splitlines()
    assert first == "a    bb" and rest == ["xyz   1", "y    22"]
    assert markdown_table(("a", "b"), [("c", "d")]) == "| a | b |\n| --- | ---: |\n| c | d |"


def test_gap_is_that_of_the_targets_logits():
    target = chain_target("abcd")
    ids = [*b"abca"]
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None, :]
    hidden = target(jnp.asarray([ids], jnp.int32), positions).hidden
    best = np.sort(np.asarray(target.logits(hidden))[0, -1])
    assert top_two_gap(target)(ids) == pytest.approx(best[-1] - best[-2], rel=1e-4)
    with pytest.raises(ValueError, match="empty"):
        top_two_gap(target)([])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/v/bin/python3.11", "/v/bin/peagle", "bench", "-k", "3"], "peagle bench -k 3"),
        (["/v/bin/python3.11", "-m", "benchmarks.training"], "python3.11 -m benchmarks.training"),
        (["python"], "python"),
    ],
)
def test_a_command_is_written_as_it_is_typed(words, command):
    assert command_line(words) == command
