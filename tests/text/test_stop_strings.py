"""Stop strings against a character-by-character search, for every way of cutting into blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.testing import ByteTokenizer
from peagle_jax.text.stop_strings import TextStream, check_stop_strings, first_match


class Words:
    """A tokenizer of given pieces: id i is `pieces[i]` (bytes)."""

    special_ids = frozenset()
    stop_ids = frozenset()
    bos_id = eos_id = pad_id = chat_template = None
    strip_left = 0

    def __init__(self, pieces):
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def token_bytes(self, token_id):
        return self.pieces[token_id]

    def decode(self, ids, *, skip_special_tokens=False):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")

    def encode(self, text, *, add_special_tokens=True):
        raise NotImplementedError

    render_chat = apply_chat_template = encode


def run(tokenizer, ids, stop, block, **options):
    stream = TextStream(tokenizer, stop, **options)
    pieces = []
    for i in range(0, len(ids), block):
        pieces.append(stream.push(ids[i : i + block]))
        assert stream.text == "".join(pieces)
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return stream


def oracle(pieces, ids, stop):
    """(text, tokens, stop) by growing the text one character at a time."""
    text, counts = "", []
    for n in range(1, len(ids) + 1):
        whole = b"".join(pieces[i] for i in ids[:n])
        certain = (
            whole.decode("utf-8", "ignore") if n < len(ids) else whole.decode("utf-8", "replace")
        )
        counts += [n] * (len(certain) - len(text))
        text = certain
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], counts[end - 1], found
    return text, len(ids), None


PIECES = [b"a", b"b", b"ab", b"ba", b"aab", "é".encode(), b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b""]


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=10),
    st.lists(st.sampled_from(["a", "ab", "aba", "bé", "éb", "é", "bb", "abab"]), max_size=3),
    st.integers(1, 4),
)
def test_equals_the_character_search(ids, stop, block):
    valid = [i for i in ids]
    while b"".join(PIECES[i] for i in valid).decode("utf-8", "ignore").encode() != b"".join(
        PIECES[i] for i in valid
    ):
        valid.pop()  # the oracle's "certain text" is defined for whole characters only
    stream = run(Words(PIECES), valid, stop, block)
    text, tokens, found = oracle(PIECES, valid, stop)
    assert (stream.text, stream.num_tokens) == (text, tokens)
    assert (stream.match.stop if stream.match else None) == found
    if stream.match:
        assert stream.match.num_tokens == tokens and stream.match.text_length == len(text)


@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        ([b"Hello", b" wor", b"ld", b"!", b"?"], ["world"], "Hello ", 3),
        ([b"a", b"b\n", b"\nc", b"d"], ["\n\n"], "ab", 3),
        ([b"x", b"\xf0\x9f", b"\x98", b"\x80y", b"z"], ["\U0001f600"], "x", 4),
        ([b"x\xf0", b"\x9f\x98\x80", b"z"], ["x\U0001f600z"], "", 3),
        ([b"one", b" stopper", b" more"], ["stop"], "one ", 2),
        ([b"ab", b"abc"], ["abd"], "ababc", 2),
        ([b"EN", b"D"], ["END"], "", 2),
    ],
    ids=["two tokens", "line breaks", "inside emoji", "around emoji", "inside", "never", "all"],
)
def test_cases(pieces, stop, text, tokens, block):
    stream = run(Words(pieces), list(range(len(pieces))), stop, block)
    assert (stream.text, stream.num_tokens) == (text, tokens)


def test_nothing_that_may_be_a_stop_string_is_shown():
    stream = TextStream(ByteTokenizer(), ["<end>"])
    assert [stream.push([b]) for b in b"a<e<en"] == ["a", "", "", "<e", "", ""]
    assert stream.push(list(b"x")) == "<enx"
    assert stream.push(list(b"b<end>c")) == "b"
    assert stream.match.num_tokens == 13 and stream.push(list(b"more")) == ""
    assert stream.finish() == "" and stream.num_tokens == 13


def test_held_back_text_comes_with_finish():
    stream = TextStream(ByteTokenizer(), ["<end>"])
    assert stream.push(list(b"a<en")) == "a"
    assert stream.finish() == "<en" and stream.finish() == ""
    assert stream.text == "a<en" and stream.match is None


def test_without_stop_strings_nothing_is_held_back():
    stream = TextStream(ByteTokenizer())
    assert [stream.push([b]) for b in "é<".encode()] == ["", "é", "<"]


def test_first_complete_wins_then_the_longer():
    assert first_match("xabcd", ["bcd", "c"]) == (3, "c")
    assert first_match("xabcd", ["c", "abc"]) == (1, "abc")
    assert first_match("xabcd", ["zz"]) is None
    assert first_match("abab", ["ab"], 2) == (2, "ab")


def test_the_match_can_stay():
    stream = run(Words([b"ab", b"cd"]), [0, 1], ["bc"], 1, include_stop=True)
    assert stream.text == "abc" and stream.match.text_length == 3


@pytest.mark.parametrize("block", [1, 3, 6])
def test_min_tokens(block):
    ids = list(b"a.b.c.")
    kept = {
        n: run(ByteTokenizer(), ids, ["."], block, min_tokens=n).num_tokens for n in (0, 2, 3, 5)
    }
    assert kept == {0: 2, 2: 2, 3: 4, 5: 6}


def test_special_tokens_are_no_text():
    ids = [ord("a"), 257, ord("b")]
    assert run(ByteTokenizer(), ids, ["ab"], 1).text == ""
    assert run(ByteTokenizer(), ids, ["ab"], 1, skip_special_tokens=False).text == "a<|end|>b"


@pytest.mark.parametrize(
    ("stop", "message"), [("END", "bare string 'END'"), (["a", ""], r"stop\[1\] is ''")]
)
def test_unusable_stop_strings(stop, message):
    with pytest.raises(ValueError, match=message):
        check_stop_strings(stop)


def test_repeated_stop_strings_count_once():
    assert check_stop_strings(["b", "a", "b"]) == ("b", "a")
