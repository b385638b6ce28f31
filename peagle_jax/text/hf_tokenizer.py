"""The tokenizer of a model folder in the Hugging Face layout, through transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from peagle_jax.text.chat_template import check_messages, check_template_kwargs
from peagle_jax.text.stop_ids import config_stop_ids, template_stop_ids
from peagle_jax.text.token_bytes import TokenBytes
from peagle_jax.text.tokenizer import ChatTemplateError, Messages, TokenizerError

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class HfTokenizer:
    """A transformers tokenizer with the interface of `peagle_jax.text.Tokenizer`.

    Decoding joins token bytes and never "cleans up" blanks, so that streamed and whole text agree.
    """

    def __init__(self, tokenizer: Any, folder: Path):
        """`tokenizer` is what `AutoTokenizer` gives for `folder`; it must be a fast one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{folder}: {type(tokenizer).__name__} has no `tokenizers` backend; save the model "
                "with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(backend, source=str(folder))
        self.strip_left = self._bytes.strip_left
        # Not len(): ids may have gaps.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_ids = frozenset(tokenizer.all_special_ids) | frozenset(
            i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.pad_id: int | None = tokenizer.pad_token_id
        self.chat_template = _default_template(tokenizer.chat_template)
        self.stop_ids = (
            config_stop_ids(folder)
            | frozenset(i for i in (self.eos_id,) if i is not None)
            | template_stop_ids(self.render_chat, self.encode, self.special_ids)
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._bytes.text(ids, skip=self.special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        check_template_kwargs(template_kwargs)
        plain = check_messages(messages)
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self._tokenizer.name_or_path}: no chat template (looked for chat_template.jinja "
                "and the key chat_template of tokenizer_config.json); pass plain text instead of "
                "messages"
            )
        try:
            return self._tokenizer.apply_chat_template(
                plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatTemplateError(
                f"the chat template refused the conversation: {error or type(error).__name__}"
            ) from error

    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def load_hf_tokenizer(folder: str | Path) -> HfTokenizer:
    """The tokenizer of a local model folder. Never asks a hub, never runs code from the folder.

    Raises TokenizerError naming the folder and the files looked for, or what transformers said.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise TokenizerError(
            f"{folder}: no tokenizer files; looked for {', '.join(_VOCABULARY_FILES)}. Copy the "
            "model's tokenizer.json and tokenizer_config.json there"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds here; all mean "cannot be built"
        raise TokenizerError(
            f"{folder}: transformers cannot build the tokenizer: {type(error).__name__}: {error}"
        ) from error
    return HfTokenizer(tokenizer, folder)
