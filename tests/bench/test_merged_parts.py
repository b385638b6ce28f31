"""Parts of a run, merged, give the figures of the whole run."""

import pytest

from benchmarks.heads_evidence import join, merge, same_prompts
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
    facts = {"dtype": "float32", "cores": 2, "revision": "r"}
    settings = {
        "num_prompts": len(indices), "num_prompt_tokens": 2 * len(indices), "skipped": indices[0],
        "max_tokens": 9, "temperature": 0.0, "seed": 0,
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


def test_other_arms_or_dtypes_are_refused():
    one, other = report(range(2)), report(range(2, 4))
    other["environment"]["dtype"] = "bfloat16"
    with pytest.raises(ValueError, match="differ in dtype"):
        merge([one, other])
    other = report(range(2, 4))
    other["results"].pop()
    with pytest.raises(ValueError, match="different methods"):
        merge([one, other])


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
