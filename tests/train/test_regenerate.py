"""Answers by the target: turns in order, a file that survives kills, and invented prompts."""

import dataclasses
import json

import pytest

from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.stats import AcceptanceStats
from peagle_jax.engine import Engine
from peagle_jax.results import GenerationResult, Stats
from peagle_jax.testing import ByteTokenizer
from peagle_jax.text.tokenizer import ChatTemplateError
from train.cli import main
from train.data.conversations import BadRow, Conversation, Place
from train.regenerate import magpie, regenerate, user_opening


@pytest.fixture(autouse=True)
def named_targets(monkeypatch):
    """Targets here are names; fingerprints of real ones: test_identity."""
    monkeypatch.setattr("train.regenerate.target_fingerprint", lambda target: target)


class Tokens(ByteTokenizer):
    """Bytes as ids; messages as |role:content, an answer asked for by |a:."""

    def apply_chat_template(self, messages, tools=(), **_):
        if messages[-1]["content"] == "refused":
            raise ChatTemplateError("roles must alternate")
        text = "".join(f"|tool {tool}" for tool in tools)
        text += "".join(f"|{m['role'][0]}:{m['content']}" for m in messages)
        return [ord(c) for c in text + "|a:"]


class Parrot(Engine):
    """An engine that answers with the number of its prompt's ids, and remembers what was asked."""

    def __init__(self, fail_after=None, cut=(), target="parrot"):
        self.tokenizer, self.context_length, self.target = Tokens(), 200, target
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


def talk(*turns, **more):
    roles = ("user", "assistant") * 4
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, turns, strict=False))
    return Conversation(place=Place(file="f", line=1), messages=messages, **more)


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
    there = path.read_bytes()
    assert there.count(b"\n") == 2
    # What a kill leaves of a line: all lengths, one longer than what all lines begin with.
    for cut in (1, 40, 200):
        path.write_bytes(there + whole.read_bytes().split(b"\n")[2][:cut])
        regenerate(ROWS[:2], Parrot(), path, params)
        assert path.read_bytes() == there
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


GREEDY = SamplingParams(max_tokens=5)


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": []}\n',
        '{"messages": []}\n{"mess',
        '{"messages": []}',
        "one line without an end",
        '{"row": 1, "messages": []}\n',
        "[" * 5000 + "\n",
        "\n",
    ],
)
def test_another_file_is_refused_and_not_touched(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.jsonl line 1: no answer"):
        regenerate(ROWS, Parrot(), path, GREEDY)
    assert path.read_text() == content


def test_own_lines_before_and_behind_foreign_ones_stay_too(tmp_path):
    path = tmp_path / "mixed.jsonl"
    regenerate(ROWS, Parrot(), path, GREEDY)
    for more in ('{"note": 1}\n{"made', "a note"):
        content = path.read_text() + more
        path.write_text(content)
        with pytest.raises(ValueError, match="line 5: no answer"):
            regenerate(ROWS, Parrot(), path, GREEDY)
        assert path.read_text() == content


@pytest.mark.parametrize(
    "change, message",
    [
        ({"engine": Parrot(target="another")}, "target: saved 'parrot', now 'another'"),
        ({"params": SamplingParams(max_tokens=6)}, "max_tokens: saved 5, now 6"),
        ({"params": SamplingParams(max_tokens=5, temperature=0.5)}, "temperature: saved 0.0"),
        ({"params": SamplingParams(max_tokens=5, seed=3)}, "seed: saved 0, now 3"),
        ({"params": SamplingParams(max_tokens=5, top_k=3)}, "top_k: saved None, now 3"),
        ({"rows": [ROWS[0], talk("uno"), *ROWS[2:]]}, "row 2 belongs to another prompt than f:1"),
        ({"rows": ROWS[::-1]}, "row 1 belongs to another prompt"),
        ({"rows": ROWS[:3]}, "answers row 4, the sources have 3 rows"),
    ],
)
def test_answers_of_another_target_setting_or_prompt_are_not_gone_on_with(
    tmp_path, change, message
):
    path = tmp_path / "out.jsonl"
    regenerate(ROWS, Parrot(), path, GREEDY)
    before = path.read_bytes()
    asked = {"rows": ROWS, "engine": Parrot(), "params": GREEDY} | change
    with pytest.raises(ValueError, match=f"out.jsonl.*{message}"):
        regenerate(asked["rows"], asked["engine"], path, asked["params"])
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="magpie: saved None, now 256"):
        magpie(4, Parrot(), path, GREEDY)


def test_prompts_may_be_added_behind_those_that_are_answered(tmp_path):
    path = tmp_path / "out.jsonl"
    regenerate(ROWS[:2], Parrot(), path, GREEDY)
    done = regenerate(ROWS, Parrot(), path, GREEDY)
    assert (done.found, done.written) == (2, 2)


def test_a_conversation_that_the_template_refuses_is_named_and_the_others_go_on(tmp_path):
    rows = [talk("refused"), talk("hi", "old", "refused"), talk("one")]
    done = regenerate(rows, Parrot(), tmp_path / "o", GREEDY)
    assert done.written == 2 and done.left_out == {"refused by the template": 2}
    assert done.named == ("f:1: roles must alternate",) * 2
    # As far as it went.
    assert [len(record["messages"]) for record in lines(tmp_path / "o")] == [2, 2]


def test_tools_reach_the_template_and_stay_with_the_answers(tmp_path):
    engine = Parrot()
    regenerate([talk("hi", tools=("wrench",))], engine, tmp_path / "o", GREEDY)
    assert engine.asked == ["|tool wrench|u:hi|a:"]
    assert lines(tmp_path / "o")[0]["tools"] == ["wrench"]


def test_too_many_malformed_rows_stop_with_their_lines(tmp_path):
    bad = [BadRow(place=Place(file="f", line=n), reason="x", detail="why") for n in (1, 2)]
    done = regenerate([*bad, *ROWS], Parrot(), tmp_path / "o", GREEDY, max_bad_rows=2)
    assert done.written == 4 and done.named == ("f:1: why", "f:2: why")
    with pytest.raises(ValueError, match=r"2 malformed rows, 1 are allowed(.|\n)*f:1(.|\n)*f:2"):
        regenerate([*bad, *ROWS], Parrot(), tmp_path / "p", GREEDY, max_bad_rows=1)


def test_an_answer_as_long_as_the_context_is_refused(tmp_path):
    for make in (lambda *rest: regenerate(ROWS, *rest), lambda *rest: magpie(2, *rest)):
        with pytest.raises(ValueError, match="--max-tokens.* is 200.*context of 200"):
            make(Parrot(), tmp_path / "o", SamplingParams(max_tokens=200))


def command(tmp_path, monkeypatch, text, *more, name="in.jsonl"):
    """The command's exit code on a source of this text; the target is a parrot."""
    monkeypatch.setattr("peagle_jax.load", lambda *_, **__: Parrot())
    if text is not None:
        (tmp_path / name).write_text(text)
    given = ["regenerate", str(tmp_path / name), "--target", "t", "--max-tokens", "5"]
    return main([*given, "--output", str(tmp_path / "out.jsonl"), *more])


def test_sources_are_looked_at_before_the_target_is_loaded(tmp_path, monkeypatch, capsys):
    def loaded(*_, **__):
        raise AssertionError("loaded")

    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n"
    cases = [
        ("no.jsonl", None, "no.jsonl: no such file or folder; expected a .jsonl file"),
        ("in.csv", row, "in.csv: unknown kind of file"),
        ("in.jsonl", "", "no row to answer"),
        ("out.jsonl", row, "out.jsonl is one of the sources"),
    ]
    for name, text, message in cases:
        if text is not None:
            (tmp_path / name).write_text(text)
        monkeypatch.setattr("peagle_jax.load", loaded)
        given = ["regenerate", str(tmp_path / name), "--target", "t", "--output"]
        assert main([*given, str(tmp_path / "out.jsonl")]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == row


def test_where_nothing_can_be_answered_the_command_fails(tmp_path, monkeypatch, capsys):
    assert command(tmp_path, monkeypatch, '{"messages": []}\n') == 1
    error = capsys.readouterr().err
    assert "nothing could be answered" in error and "in.jsonl:1: messages is empty" in error
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n"
    assert command(tmp_path, monkeypatch, "{\n" + row) == 0
    assert "in.jsonl:1: not JSON" in capsys.readouterr().err
    assert command(tmp_path, monkeypatch, "{\n" + row, "--max-bad-rows", "0") == 1


def test_magpie_lets_the_target_write_the_prompt_too(tmp_path):
    engine, path = Parrot(), tmp_path / "magpie.jsonl"
    assert "".join(map(chr, user_opening(engine.tokenizer))) == "|u:"
    done = magpie(3, engine, path, SamplingParams(max_tokens=5, seed=7), batch_size=2)
    assert done.written == 3
    assert [r["messages"][0]["content"] for r in lines(path)] == ["n3-7", "n3-8", "n3-9"]
    assert engine.asked[:2] == ["|u:", "|u:"]
    again = magpie(4, Parrot(), path, SamplingParams(max_tokens=5, seed=7))
    assert (again.written, again.found) == (1, 3)


def test_magpie_counts_prompts_without_an_answer(tmp_path):
    class LongPrompts(Parrot):
        def generate(self, prompts, params=None, **_):
            found = super().generate(prompts, params)
            return [dataclasses.replace(one, text=one.text + "?" * 190) for one in found]

    done = magpie(2, LongPrompts(), tmp_path / "o", GREEDY)
    assert done.written == 0 and done.left_out == {"no answer": 2}
