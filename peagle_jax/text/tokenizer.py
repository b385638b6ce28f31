"""What the rest of the package may ask of a tokenizer, and how a path becomes one.

Not here: the tokenizers themselves (`hf_tokenizer`, `gguf_tokenizer`, `byte_tokenizer`) and the
streaming of text (`detokenize`, `stop_strings`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Messages = Sequence[Mapping[str, Any]]
"""A conversation: dicts with "role" and "content" (and whatever else a template reads)."""


class TokenizerError(ValueError):
    """A tokenizer cannot be built or used; the message names the file, the key and the remedy."""


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered: no template, refused arguments, or the template raised."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Immutable; safe to share between threads.

    Text is defined through bytes: `decode` is the UTF-8 reading of the joined `token_bytes`, with
    one U+FFFD per malformed piece, less up to `strip_left` leading blanks. That makes text
    additive, so that a stream cut anywhere joins to the same text as one call.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` can give."""

    @property
    def bos_id(self) -> int | None:
        """Begin-of-text id, if the tokenizer has one."""

    @property
    def eos_id(self) -> int | None:
        """The one end id the tokenizer names; generation stops at any of `stop_ids`."""

    @property
    def pad_id(self) -> int | None:
        """Padding id, if the tokenizer has one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out with `skip_special_tokens`."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: from generation config, tokenizer and template together."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default template, if there is one."""

    @property
    def strip_left(self) -> int:
        """Blanks that decoding drops from the start of a text (1 for SentencePiece styles)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Control tokens written in the text are recognised as such.

        `add_special_tokens` adds what the tokenizer puts around a bare text (mostly a begin token);
        leave it off for rendered conversations, whose template has written them already.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`. Ids the vocabulary lacks (padded embedding rows) add nothing."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds; empty where the vocabulary has no such id.

        Raises ValueError for a negative id.
        """

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The conversation as text. `template_kwargs` reach the template (`enable_thinking`, ...).

        Raises ChatTemplateError, also for kwargs that would replace the template itself.
        """

    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Ids of `render_chat`, without further special tokens."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder in the Hugging Face layout, or of a `.gguf` file.

    Raises FileNotFoundError where nothing is, TokenizerError where no tokenizer can be built.
    """
    # Imported late: transformers takes seconds to import, and `peagle --help` must not wait for it.
    path = Path(path)
    if path.is_dir():
        from peagle_jax.text.hf_tokenizer import load_hf_tokenizer

        return load_hf_tokenizer(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder to load a tokenizer from")
    from peagle_jax.text.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(path)
