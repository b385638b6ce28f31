"""The tokenizer inside a GGUF file: the golden cases, each rule name, and bad metadata."""

import json
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.text import ChatTemplateError, Tokenizer, TokenizerError, load_tokenizer
from peagle_jax.text.gguf_tokenizer import GgufTokenizer
from peagle_jax.text.pretokenizers import RULES
from tests.smollm2_file import smollm2_gguf
from tests.tiny_gguf import tokenizer_metadata, write_tiny_gguf

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "smollm2.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_gguf())


@pytest.fixture(scope="module")
def tiny():
    return GgufTokenizer(tokenizer_metadata(), source="tiny.gguf")


@pytest.mark.parametrize("prompt", GOLDEN["prompts"], ids=lambda p: p["id"])
def test_golden_prompts(smollm2, prompt):
    messages = [{"role": "user", "content": prompt["prompt"]}]
    assert smollm2.render_chat(messages) == prompt["chat_text"]
    assert smollm2.apply_chat_template(messages) == prompt["token_ids"]
    assert smollm2.decode(prompt["token_ids"]) == prompt["chat_text"]
    assert smollm2.decode(prompt["greedy_ids"]) == prompt["greedy_text"]


@pytest.mark.parametrize("case", GOLDEN["tokenizer_cases"], ids=lambda c: repr(c["text"])[:30])
def test_golden_tokenizer_cases(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["text"]


def test_the_rule_name_decides(smollm2):
    """Under the rule `gpt-2` the same vocabulary gives the ids that transformers gives."""
    from peagle_jax.checkpoints.gguf_file import open_gguf

    metadata = {**open_gguf(smollm2_gguf()).metadata, "tokenizer.ggml.pre": "gpt-2"}
    other = GgufTokenizer(metadata, source="renamed")
    differing = 0
    for case in GOLDEN["tokenizer_cases"]:
        expected = case["transformers_gguf_ids"] or case["ids"]
        assert other.encode(case["text"]) == expected
        differing += expected != case["ids"]
    assert differing >= 4


def test_smollm2_facts(smollm2):
    assert isinstance(smollm2, Tokenizer)
    assert smollm2.stop_ids == frozenset(GOLDEN["meta"]["stop_ids"])
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.pad_id) == (49152, 1, 2, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode([1, 19556, 2]) == "<|im_start|>Hello<|im_end|>"
    assert smollm2.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
    assert smollm2.decode([49152, 60000]) == ""  # padded embedding rows have no text
    with pytest.raises(ValueError, match="-1 is negative"):
        smollm2.decode([19556, -1])


@given(st.text(max_size=30))
def test_every_text_round_trips(text):
    tokenizer = _round_trip_tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


_round_trip_tokenizer = GgufTokenizer(tokenizer_metadata(), source="tiny.gguf")


@given(st.lists(st.integers(0, 270), max_size=12), st.booleans())
def test_decode_equals_the_tokenizers_library(ids, skip):
    """Also for bytes that are no UTF-8: one U+FFFD for each malformed piece."""
    tokenizer = _round_trip_tokenizer
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


# Llama 3's published pattern, to be compared as plain regular-expression splitting.
LLAMA3 = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXTS = [
    "I'll DON'T we'Ve",
    "12345678 a1b22  333",
    "x\n\n  1. y \r\n\r\n z",
    "¿Qué?\t\t((ok))!!\n\n½²٣",
    "   lead and trail   ",
    "日本語 123",
]


def words(rule, text):
    return [text[a:b] for _, (a, b) in RULES[rule]().splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
def test_rules_split_as_their_patterns(text):
    assert words("llama-bpe", text) == LLAMA3.findall(text)
    assert words("gpt-2", text) == GPT2.findall(text)
    smollm = []
    for piece in regex.split(r"(\p{N})", text):
        smollm += [piece] if regex.fullmatch(r"\p{N}", piece) else GPT2.findall(piece)
    assert words("smollm", text) == smollm


def test_llama3_habits():
    """A whole word in the vocabulary is taken without merges; a begin token is added."""
    changes = dict(merges=["t h"], bos_token_id=0)
    default_bos = dict(add_bos_token=None)
    kept = GgufTokenizer(
        tokenizer_metadata("llama-bpe", **changes, **default_bos), source="llama.gguf"
    )
    the = kept.encode("the")
    assert the[0] == 0 and kept.decode(the[1:]) == "the" and len(the) == 2
    assert kept.encode("the", add_special_tokens=False) == the[1:]
    merged = GgufTokenizer(tokenizer_metadata("gpt-2", **changes), source="gpt2.gguf")
    assert len(merged.encode("the")) == 2  # "th", "e"
    off = GgufTokenizer(
        tokenizer_metadata("llama-bpe", **changes, add_bos_token=False), source="llama.gguf"
    )
    assert off.encode("the") == the[1:]


def test_user_defined_tokens_are_whole_but_not_special():
    tokens = tokenizer_metadata()["tokenizer.ggml.tokens"] + ["<think>"]
    kinds = tokenizer_metadata()["tokenizer.ggml.token_type"] + [4]
    tokenizer = GgufTokenizer(
        tokenizer_metadata(tokens=tokens, token_type=kinds), source="tiny.gguf"
    )
    think = len(tokens) - 1
    assert tokenizer.encode("a<think>b")[1] == think
    assert tokenizer.decode([think], skip_special_tokens=True) == "<think>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre.*'deepseek-llm'.*known: gpt-2, smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre' is missing"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'"),
        ({"merges": None}, r"tokenizer\.ggml\.merges' is missing"),
        ({"merges": ["t h", "q q"]}, r"merges' entry 1 is 'q q'"),
        ({"merges": ["th"]}, r"merges' entry 0 is 'th'"),
        ({"tokens": ["a", "b"]}, r"token_type' has \d+ entries for 2 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, r"tokens' lists 'a' twice"),
        ({"eos_token_id": 5000}, r"eos_token_id' is 5000, outside"),
        ({"add_bos_token": True, "bos_token_id": None}, r"bos_token_id is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_metadata_names_file_and_key(changes, message):
    with pytest.raises(TokenizerError, match=r"bad\.gguf.*" + message):
        GgufTokenizer(tokenizer_metadata(**changes), source="bad.gguf")


def test_without_a_template(tiny):
    metadata = tokenizer_metadata()
    del metadata["tokenizer.chat_template"]
    bare = GgufTokenizer(metadata, source="bare.gguf")
    with pytest.raises(ChatTemplateError, match=r"tokenizer\.chat_template.*missing"):
        bare.render_chat([{"role": "user", "content": "hi"}])
    assert bare.stop_ids == tiny.stop_ids == {0, 2}


def test_load_from_a_tiny_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(FileNotFoundError, match="absent.gguf: no such file"):
        load_tokenizer(tmp_path / "absent.gguf")
