"""The byte tokenizer keeps the interface and round-trips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.testing import ByteTokenizer
from peagle_jax.text import ChatTemplateError, Tokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text and max(ids, default=0) < TOKENIZER.vocab_size


def test_interface():
    assert isinstance(TOKENIZER, Tokenizer)
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": "é"}])
    assert TOKENIZER.decode(ids) == "<|start|>user\né<|end|><|start|>assistant\n"
    assert ids[0] == 256 and ids.count(257) == 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "user\néassistant\n"
    assert TOKENIZER.decode([65, 300]) == "A"
    with pytest.raises(ValueError, match="negative"):
        TOKENIZER.decode([-1])
    with pytest.raises(ChatTemplateError, match="'chat_template' is not allowed"):
        TOKENIZER.render_chat([{"role": "user", "content": "x"}], chat_template="{{ 1 }}")
