"""Hugging Face folders: text as transformers gives it, and folders that cannot be used."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from peagle_jax.text import ChatTemplateError, Tokenizer, TokenizerError, load_tokenizer
from peagle_jax.text.detokenize import Detokenizer
from tests.text.hf_folders import byte_level_backend, sentencepiece_backend, write_folder

SPECIALS = ("<bos>", "<eos>", "<turn|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<turn|>{% endfor %}"
    "{% if add_generation_prompt %}model:{% if thinking %}<think>{% endif %}{% endif %}"
)
BACKENDS = {
    "byte level": lambda: byte_level_backend(SPECIALS),
    "gemma style": lambda: sentencepiece_backend(SPECIALS, strip=False),
    "llama 2 style": lambda: sentencepiece_backend(SPECIALS, strip=True),
}


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_folder(
        folder,
        BACKENDS[request.param](),
        template=TEMPLATE,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
    )
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", ["the a", " the  aé", "a\n\nb 😀", "", "x<turn|>y", "<bos>"])
def test_encode_and_decode_as_transformers(tokenizer, text):
    inner = tokenizer._tokenizer
    ids = tokenizer.encode(text)
    assert ids == inner(text)["input_ids"]
    assert tokenizer.decode(ids) == inner.decode(ids, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == inner.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text("abcdethé \n😀", max_size=20), block=st.integers(1, 4))
def test_streams_join(tokenizer, text, block):
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(ids[i : i + block]) for i in range(0, len(ids), block)]
    assert "".join(pieces) + stream.finish() == text == tokenizer.decode(ids)


def test_bytes_that_never_become_a_character(tokenizer):
    """One U+FFFD for a cut character in every style; transformers gives one per byte in some."""
    cut = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b"\xf0", b"\x9f")]
    cut.sort(key=tokenizer.token_bytes, reverse=True)
    assert len(cut) == 2 and tokenizer.decode(cut) == "\ufffd"


def test_interface(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    inner = tokenizer._tokenizer
    assert tokenizer.vocab_size == len(inner)
    assert tokenizer.bos_id == inner.bos_token_id and tokenizer.eos_id == tokenizer.pad_id
    assert {inner.convert_tokens_to_ids(t) for t in SPECIALS} <= tokenizer.special_ids
    assert tokenizer.stop_ids == {tokenizer.eos_id, inner.convert_tokens_to_ids("<turn|>")}
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_chat(tokenizer):
    messages = [{"role": "user", "content": "the"}]
    text = "<bos>user: the<turn|>model:"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.render_chat(messages, thinking=True) == text + "<think>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text[:-6]
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(
        text, add_special_tokens=False
    )
    with pytest.raises(ChatTemplateError, match="'chat_template' is not allowed"):
        tokenizer.render_chat(messages, chat_template="{{ 1 }}")


def test_a_folder_without_tokenizer_names_the_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    for part in (str(tmp_path), "tokenizer.json", "tokenizer.model", "vocab.json"):
        assert part in str(caught.value)


def test_a_damaged_tokenizer_names_the_folder(tmp_path):
    write_folder(tmp_path, byte_level_backend(SPECIALS))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(TokenizerError, match=f"{tmp_path}: transformers cannot build"):
        load_tokenizer(tmp_path)


def test_without_a_template(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend(SPECIALS)))
    assert tokenizer.chat_template is None and tokenizer.stop_ids == frozenset()
    with pytest.raises(ChatTemplateError, match=r"no chat template \(looked for chat_template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_the_templates_refusal_arrives(tmp_path):
    template = "{{ raise_exception('no system role') }}"
    tokenizer = load_tokenizer(
        write_folder(tmp_path, byte_level_backend(SPECIALS), template=template)
    )
    with pytest.raises(ChatTemplateError, match="refused the conversation: no system role"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert tokenizer.stop_ids == frozenset()


def test_unknown_decoders_are_refused(tmp_path):
    backend = byte_level_backend(SPECIALS)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decoder 'WordPiece' is not supported"):
        load_tokenizer(write_folder(tmp_path, backend))


def test_only_tokenizer_json(tmp_path):
    byte_level_backend(SPECIALS).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the é")) == "the é"
