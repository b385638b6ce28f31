"""Answers by the target: turns in order, a file that survives kills, and invented prompts."""

import json

import pytest

from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.stats import AcceptanceStats
from peagle_jax.engine import Engine
from peagle_jax.results import GenerationResult, Stats
from peagle_jax.testing import ByteTokenizer
from train.data.conversations import BadRow, Conversation, Place
from train.regenerate import finished_rows, magpie, regenerate, user_opening


class Tokens(ByteTokenizer):
    """Bytes as ids; messages as |role:content, an answer asked for by |a:."""

    def apply_chat_template(self, messages, **_):
        text = "".join(f"|{m['role'][0]}:{m['content']}" for m in messages)
        return [ord(c) for c in text + "|a:"]


class Parrot(Engine):
    """An engine that answers with the number of its prompt's ids, and remembers what was asked."""

    def __init__(self, fail_after=None, cut=()):
        self.tokenizer, self.context_length = Tokens(), 200
        self.asked, self.seeds, self._fail_after, self._cut = [], [], fail_after, cut

    def generate(self, prompts, params=None, **_):
        results = []
        if self._fail_after is not None and len(self.asked) >= self._fail_after:
            raise KeyboardInterrupt
        for prompt, one in zip(prompts, params, strict=True):
            self.asked.append("".join(map(chr, prompt)))
            self.seeds.append(one.seed)
            reason = "length" if len(prompt) in self._cut else "stop"
            results.append(
                GenerationResult(
                    text=f"n{len(prompt)}-{one.seed}",
                    token_ids=(1,),
                    prompt_token_ids=tuple(prompt),
                    finish_reason=reason,
                    draft_depths=(0,),
                    stats=_stats(),
                )
            )
        return results


def _stats():
    return Stats(
        num_prompt_tokens=0,
        num_output_tokens=0,
        num_rounds=0,
        acceptance=AcceptanceStats(),
        time_to_first_token_s=0.0,
        total_s=0.0,
    )


def talk(*turns):
    roles = ("user", "assistant") * 4
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, turns, strict=False))
    return Conversation(place=Place(file="f", line=1), messages=messages)


ROWS = [talk("hi", "old", "more", "old"), talk("one"), talk("two", "old"), talk("three")]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_assistant_turn_is_written_anew_behind_the_answers_before_it(tmp_path):
    engine, path = Parrot(), tmp_path / "out.jsonl"
    done = regenerate(ROWS, engine, path, SamplingParams(max_tokens=5, seed=10), batch_size=2)
    assert done.written == 4 and done.left_out == {}
    first = lines(path)[0]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"] * 2
    assert first["messages"][1]["content"] == "n8-10"
    # The second question is asked behind the new answer, not the old one.
    assert "|u:hi|a:n8-10|u:more|a:" in engine.asked
    assert [record["row"] for record in lines(path)] == [0, 1, 2, 3]


def test_a_killed_run_goes_on_and_ends_with_the_same_file(tmp_path):
    params = SamplingParams(max_tokens=5, temperature=1.0)
    whole = tmp_path / "whole.jsonl"
    regenerate(ROWS, Parrot(), whole, params, batch_size=1)
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(ROWS, Parrot(fail_after=3), path, params, batch_size=1)
    with path.open("a") as file:
        file.write('{"row": 2, "mess')  # what a kill leaves of a line
    assert finished_rows(path) == {0, 1}
    done = regenerate(ROWS, Parrot(), path, params, batch_size=1)
    assert done.found == 2 and path.read_bytes() == whole.read_bytes()


def test_rows_that_cannot_be_answered_are_counted(tmp_path):
    rows = [
        BadRow(place=Place(file="f", line=1), reason="unknown form", detail="x"),
        talk("q" * 300),
        Conversation(place=Place(file="f", line=3), messages=({"role": "tool", "content": "x"},)),
        talk("cut here", "old", "never asked"),
    ]
    engine = Parrot(cut=(len("|u:cut here|a:"),))
    done = regenerate(rows, engine, tmp_path / "o", SamplingParams(max_tokens=5))
    assert done.left_out == {"unknown form": 1, "no answer": 1, "no user turn": 1}
    (record,) = lines(tmp_path / "o")
    assert record["finish_reasons"] == ["length"] and len(record["messages"]) == 2


def test_another_file_is_not_written_into(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="line 1"):
        regenerate(ROWS, Parrot(), path, SamplingParams(max_tokens=5))


def test_magpie_lets_the_target_write_the_prompt_too(tmp_path):
    engine, path = Parrot(), tmp_path / "magpie.jsonl"
    assert "".join(map(chr, user_opening(engine.tokenizer))) == "|u:"
    done = magpie(3, engine, path, SamplingParams(max_tokens=5, seed=7), batch_size=2)
    assert done.written == 3
    assert [r["messages"][0]["content"] for r in lines(path)] == ["n3-7", "n3-8", "n3-9"]
    assert engine.asked[:2] == ["|u:", "|u:"]
    again = magpie(4, Parrot(), path, SamplingParams(max_tokens=5, seed=7))
    assert (again.written, again.found) == (1, 3)
