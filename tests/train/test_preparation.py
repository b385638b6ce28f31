"""`prepare`: every row accounted for, stored whole, rebuilt when anything changes."""

import dataclasses
import json

import numpy as np
import pytest

from tests.train.toy_tokenizers import CHATML, TOKENIZERS, ToyTokenizer
from train.data.preparation import PrepareSettings, prepare
from train.data.prepared import FORMAT, open_prepared
from train.data.template_mask import mask_conversation
from train.data.vocabulary import choose_vocabulary

CHATML_TOKENIZER = TOKENIZERS["chatml"]
SETTINGS = PrepareSettings(max_length=64, vocab_size=260, draft_vocab_size=10)


def talk(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_rows_counts_and_report(tmp_path):
    rows = [
        talk("hi", "yo"),
        talk("x" * 200, "yo"),
        "{oops",
        {"messages": []},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]},
        {"input_ids": [7, 300], "loss_mask": [0, 1]},
        talk("hi", "y" * 100),
    ]
    path = write(tmp_path, *rows)
    data, reused = prepare([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    assert not reused and len(data) == 3 and data.lengths[1] == 3 and data.lengths[2] == 64
    expected = mask_conversation(CHATML_TOKENIZER, rows[0]["messages"]).rows[0]
    assert data[0].tokens.tolist() == expected.tokens
    assert data[0].loss_mask.tolist() == expected.loss_mask
    assert data[1].tokens.tolist() == [7, 8, 9] and data[1].loss_mask.tolist() == [0, 1, 1]

    report = json.loads((tmp_path / "out" / "manifest.json").read_text())["report"]
    assert report["rows_read"] == 8 and report["rows_kept"] == 3 and report["truncated"] == 1
    assert report["malformed"] == 3
    assert report["dropped"] == {
        "not JSON": 1,
        "no supervised token": 1,
        "empty conversation": 1,
        "no assistant turn to learn from": 1,
        "bad token ids": 1,
    }
    assert [b.split(": ")[0] for b in report["bad_rows"]] == [f"{path}:{n}" for n in (3, 4, 7)]
    lengths = sorted(data.lengths)
    assert report["length_percentiles"] == {"50": lengths[1], "90": lengths[2], "99": lengths[2]}
    supervised = sum(int(data[i].loss_mask.sum()) for i in range(3))
    assert report["supervised_fraction"] == pytest.approx(supervised / sum(lengths))

    tokens = np.concatenate([data[i].tokens for i in range(3)])
    masks = np.concatenate([data[i].loss_mask for i in range(3)])
    np.testing.assert_array_equal(data.token_counts(), np.bincount(tokens, minlength=260))
    counts = np.bincount(tokens[masks], minlength=260)
    np.testing.assert_array_equal(data.supervised_counts(), counts)
    stored, chosen = data.draft_vocabulary(10), choose_vocabulary(counts, 10)
    np.testing.assert_array_equal(stored.d2t, chosen.d2t)
    np.testing.assert_array_equal(stored.t2d, chosen.t2d)
    assert stored.coverage == pytest.approx(chosen.coverage)


def test_E6_rows_whose_answer_is_cut_off_are_dropped_and_counted(tmp_path):
    rows = [talk("x" * 200, "abc")] * 7
    path = write(tmp_path, *rows, talk("hi", "yo"))
    data, _ = prepare([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    assert len(data) == 1
    assert data.manifest["report"]["dropped"] == {"no supervised token": 7}
    path = write(tmp_path, *rows)
    with pytest.raises(ValueError, match=r"no row .* is left.*'no supervised token': 7"):
        prepare([path], CHATML_TOKENIZER, tmp_path / "none", SETTINGS)
    assert not (tmp_path / "none").exists()


CHANGES = {
    "max_length": {"settings": {"max_length": 32}},
    "reasoning": {"settings": {"reasoning": "mask"}},
    "template variables": {"settings": {"template_kwargs": {"enable_thinking": False}}},
    "draft vocabulary": {"settings": {"draft_vocab_size": 12}},
    "vocabulary": {"settings": {"vocab_size": 261}},
    "template text": {"template": CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n")},
    "tokenizer": {"merges": ("yo",)},
    "stop tokens": {"stops": ("<|im_start|>",)},
    "source": {"source": talk("hi", "you")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_E13_any_change_rebuilds_and_no_change_reuses(tmp_path, change):
    path = write(tmp_path, talk("hi", "yo"))

    def once(*, settings=None, template=CHATML, merges=(), stops=("<|im_end|>",), source=None):
        if source is not None:
            write(tmp_path, source)
        tokenizer = ToyTokenizer(template, ("<|im_start|>", "<|im_end|>"), stops, merges)
        own = dataclasses.replace(SETTINGS, **(settings or {}))
        return prepare([path], tokenizer, tmp_path / "out", own)

    first, reused = once()
    assert not reused and once()[1]
    second, reused = once(**CHANGES[change])
    assert not reused and second.digest != first.digest
    assert once(**CHANGES[change])[1]


def test_E13_a_draft_vocabulary_of_another_size_is_refused(tmp_path):
    data, _ = prepare(
        [write(tmp_path, talk("hi", "yo"))], CHATML_TOKENIZER, tmp_path / "out", SETTINGS
    )
    with pytest.raises(ValueError, match="of 10 entries, 12 are wanted"):
        data.draft_vocabulary(12)
    bare = dataclasses.replace(SETTINGS, draft_vocab_size=None)
    data, _ = prepare([tmp_path / "rows.jsonl"], CHATML_TOKENIZER, tmp_path / "out", bare)
    with pytest.raises(ValueError, match="without a draft vocabulary"):
        data.draft_vocabulary(10)


def test_too_many_malformed_rows_stop_with_their_lines(tmp_path):
    path = write(tmp_path, talk("hi", "yo"), "{a", "{b", "{c")
    strict = dataclasses.replace(SETTINGS, max_bad_rows=2)
    with pytest.raises(ValueError) as error:
        prepare([path], CHATML_TOKENIZER, tmp_path / "out", strict)
    assert all(f"{path}:{n}" in str(error.value) for n in (2, 3, 4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"], "nothing left behind"


def test_a_conversation_that_the_template_refuses_is_named(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path, talk("hi", "yo"), {"input_ids": [1, 2], "loss_mask": [0, 1]})
    data, _ = prepare([path], ToyTokenizer(template), tmp_path / "out", SETTINGS)
    assert data.manifest["report"]["dropped"] == {"refused by the template": 1}
    assert "roles must alternate" in data.manifest["report"]["bad_rows"][0]


def test_mask_token_must_not_occur(tmp_path):
    data, _ = prepare(
        [write(tmp_path, talk("hi", "yo"))], CHATML_TOKENIZER, tmp_path / "out", SETTINGS
    )
    data.check_mask_token(259)
    with pytest.raises(ValueError, match="occurs 1 times"):
        data.check_mask_token(ord("y"))
    with pytest.raises(ValueError, match="outside the vocabulary of 260"):
        data.check_mask_token(260)


def test_damage_is_found(tmp_path):
    data, _ = prepare(
        [write(tmp_path, talk("hi", "yo"))], CHATML_TOKENIZER, tmp_path / "out", SETTINGS
    )
    data.verify()
    tokens = tmp_path / "out" / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + b"\x01")
    with pytest.raises(ValueError, match="tokens.bin: checksum differs"):
        open_prepared(tmp_path / "out").verify()
    tokens.write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"tokens.bin: has \d+ bytes"):
        open_prepared(tmp_path / "out")


DAMAGE = {
    "a changed byte": lambda folder: (folder / "loss_mask.bin").write_bytes(
        bytes(len((folder / "loss_mask.bin").read_bytes()))
    ),
    "a short file": lambda folder: (folder / "tokens.bin").write_bytes(b"1234"),
    "a missing file": lambda folder: (folder / "offsets.npy").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"format'),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_text(
        json.dumps({"format": FORMAT})
    ),
    "no text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_rows_are_prepared_anew(tmp_path, name):
    path, told = write(tmp_path, talk("hi", "yo")), []
    again = (([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS), {"warn": told.append})
    data, _ = prepare(*again[0], **again[1])
    wanted = data[0].tokens.tolist()
    DAMAGE[name](tmp_path / "out")
    with pytest.raises(ValueError, match=r"out.*(prepare|no prepared data set)"):
        open_prepared(tmp_path / "out").verify()
    data, reused = prepare(*again[0], **again[1])
    data.verify()
    assert not reused and data[0].tokens.tolist() == wanted
    assert len(told) == ("manifest" not in name and name != "no text")
    assert prepare(*again[0], **again[1])[1] and len(told) <= 1


def test_the_end_of_an_answer_that_was_cut_is_not_learned(tmp_path):
    cut = talk("hi", "yo") | {"finish_reasons": ["length"]}
    path = write(tmp_path, talk("hi", "yo"), cut)
    data, _ = prepare([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    whole, short = data[0], data[1]
    assert whole.tokens[-1] in CHATML_TOKENIZER.stop_ids and whole.loss_mask[-1]
    assert short.tokens.tolist() == whole.tokens[:-1].tolist() and short.loss_mask[-1]
    assert data.manifest["report"]["cut_answers"] == 1


def test_a_cut_answer_inside_a_conversation_keeps_its_stop_token_unlearned(tmp_path):
    messages = talk("hi", "yo")["messages"] + talk("more", "no")["messages"]
    rows = [{"messages": messages}, {"messages": messages, "finish_reasons": ["length", "stop"]}]
    data, _ = prepare([write(tmp_path, *rows)], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    whole, short = data[0], data[1]
    assert whole.tokens.tolist() == short.tokens.tolist()
    (place,) = np.flatnonzero(whole.loss_mask != short.loss_mask)
    assert whole.tokens[place] in CHATML_TOKENIZER.stop_ids and whole.loss_mask[place]


def test_text_that_is_no_unicode_is_one_bad_row(tmp_path):
    bad = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
    path = write(tmp_path, talk("hi", "yo"), bad, "[" * 50_000)
    data, _ = prepare([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    assert len(data) == 1
    assert data.manifest["report"]["dropped"] == {"not Unicode text": 1, "not JSON": 1}


def test_other_folders_are_never_replaced(tmp_path):
    path = write(tmp_path, talk("hi", "yo"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="no prepared data set; not replaced"):
        prepare([path], CHATML_TOKENIZER, tmp_path / "out", SETTINGS)
    with pytest.raises(ValueError, match="no prepared data set"):
        open_prepared(tmp_path / "out")


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_length", 1),
        ("draft_vocab_size", 300),
        ("reasoning", "drop"),
        ("vocab_size", 0),
        ("max_bad_rows", -1),
    ],
)
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SETTINGS, **{field: value})
