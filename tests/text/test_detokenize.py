"""Streaming text that never breaks a character, whatever the block sizes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peagle_jax.testing import ByteTokenizer
from peagle_jax.text.detokenize import Detokenizer
from peagle_jax.text.gguf_tokenizer import GgufTokenizer
from tests.tiny_gguf import tokenizer_metadata

BYTES = ByteTokenizer()
GGUF = GgufTokenizer(tokenizer_metadata(), source="tiny.gguf")


def stream(tokenizer, ids, block, **options):
    """(pieces of `push`, last piece) of ids given in blocks of `block`."""
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[i : i + block]) for i in range(0, len(ids), block)]
    return pieces, detokenizer.finish()


@pytest.mark.parametrize("block", [1, 2, 3, 4])
@pytest.mark.parametrize("tokenizer", [BYTES, GGUF], ids=["bytes", "gguf"])
def test_four_byte_character_over_tokens(tokenizer, block):
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) == 4
    pieces, last = stream(tokenizer, ids, block)
    assert [p for p in pieces if p] == ["\U0001f600"] and last == ""


@pytest.mark.parametrize("block", [1, 2, 3])
def test_truncated_tail_is_one_replacement_at_the_end(block):
    ids = list(b"ok \xf0\x9f")
    pieces, last = stream(BYTES, ids, block)
    assert "".join(pieces) == "ok " and last == "\ufffd"
    assert BYTES.decode(ids) == "ok \ufffd"


def test_a_genuine_replacement_character_comes_at_once():
    ids = BYTES.encode("\ufffdx")
    pieces, last = stream(BYTES, ids, 1)
    assert pieces == ["", "", "\ufffd", "x"] and last == ""


def test_a_broken_character_does_not_swallow_what_follows():
    pieces, last = stream(BYTES, list(b"\xf0\x9fA"), 1)
    assert pieces == ["", "", "\ufffdA"] and last == ""


@given(
    st.lists(st.one_of(st.integers(0, 262), st.sampled_from(list("é😀\ufffd".encode())))),
    st.integers(1, 5),
    st.booleans(),
)
@example([0xF0, 0x9F, 256, 0x98, 0x80], 1, True)
@example([0xF0, 0x9F, 256, 0x98, 0x80], 2, False)
def test_pieces_join_to_the_full_decode(ids, block, skip):
    for tokenizer in (BYTES, GGUF):
        pieces, last = stream(tokenizer, ids, block, skip_special_tokens=skip)
        assert "".join(pieces) + last == tokenizer.decode(ids, skip_special_tokens=skip)
        # What was shown is never taken back, and is a character only once it is certain.
        assert not any("\ufffd" in p for p in pieces) or "\ufffd" in tokenizer.decode(
            ids, skip_special_tokens=skip
        )


def test_blanks_at_the_start_are_dropped_once():
    class Metaspace(ByteTokenizer):
        strip_left = 1

    for block in (1, 2, 5):
        pieces, last = stream(Metaspace(), list(b"  a b"), block)
        assert "".join(pieces) + last == " a b"


def test_negative_ids_raise():
    with pytest.raises(ValueError, match="-1 is negative"):
        Detokenizer(BYTES).push([65, -1])
