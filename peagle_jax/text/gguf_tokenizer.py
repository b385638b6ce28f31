"""The tokenizer inside a GGUF file, built from the file's own vocabulary, merges and rule name.

transformers can build one too, but ignores `tokenizer.ggml.pre` and so cuts blanks before digits
otherwise than the model was trained with.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from gguf.constants import TokenType
from tokenizers import AddedToken, decoders, models

from peagle_jax.checkpoints.gguf_file import open_gguf
from peagle_jax.text.chat_template import check_messages, check_template_kwargs, render_template
from peagle_jax.text.pretokenizers import RULES, PreRule
from peagle_jax.text.stop_ids import template_stop_ids
from peagle_jax.text.token_bytes import TokenBytes
from peagle_jax.text.tokenizer import ChatTemplateError, Messages, TokenizerError

# GGUF files have no generation config, so the ids that publishers list there are known by name.
# Harmony's <|end|> is not one: it closes a channel and the answer goes on.
_END_NAMES = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<turn|>",
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PREFIX = "tokenizer.ggml."


class GgufTokenizer:
    """A byte-level BPE tokenizer with the interface of `peagle_jax.text.Tokenizer`."""

    def __init__(self, metadata: Mapping[str, Any], *, source: str):
        """`metadata` as of `GgufFile.metadata`; `source` is the file that errors name.

        Raises TokenizerError naming file and key: another tokenizer model, an unknown
        pre-tokenizer rule, missing or inconsistent lists, an id outside the vocabulary.
        """
        self._source = source
        self._metadata = metadata
        model = self._require("model", str)
        if model != "gpt2":
            raise TokenizerError(
                f"{source}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) can be "
                "read from GGUF. Use the model's Hugging Face folder"
            )
        rule = self._rule()
        self._tokens: list[str] = self._require("tokens", list)
        kinds = self._token_kinds()
        self.vocab_size = len(self._tokens)
        self.special_ids = frozenset(i for i, k in enumerate(kinds) if k == TokenType.CONTROL)
        self.bos_id = self._id("bos_token_id")
        self.eos_id = self._id("eos_token_id")
        self.pad_id = self._id("padding_token_id")
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._backend = self._build_backend(rule, kinds)
        self._bytes = TokenBytes(self._backend, source=source)
        self.strip_left = self._bytes.strip_left
        self._add_bos = bool(metadata.get(_PREFIX + "add_bos_token", rule.add_bos))
        if self._add_bos and self.bos_id is None:
            raise TokenizerError(
                f"{source}: a begin token is asked for (tokenizer.ggml.add_bos_token), but "
                "tokenizer.ggml.bos_token_id is missing"
            )
        self.stop_ids = self._named_stop_ids() | template_stop_ids(
            self.render_chat, self.encode, self.special_ids
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object; it adds no begin token by itself."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self._add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._bytes.text(ids, skip=self.special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        check_template_kwargs(template_kwargs)
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self._source}: metadata key 'tokenizer.chat_template' is missing; pass plain "
                "text instead of messages"
            )
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        special = {name: self._tokens[i] for name, i in names.items() if i is not None}
        return render_template(
            self.chat_template,
            check_messages(messages),
            add_generation_prompt=add_generation_prompt,
            variables={**special, **template_kwargs},
        )

    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)

    def _error(self, key: str, problem: str) -> TokenizerError:
        full = _PREFIX + key
        return TokenizerError(f"{self._source}: metadata key {full!r} {problem}")

    def _require(self, key: str, kind: type) -> Any:
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {value!r:.60}"
            raise self._error(key, f"{found}; expected {kind.__name__}")
        return value

    def _rule(self) -> PreRule:
        name = self._require("pre", str)
        if name not in RULES:
            raise self._error(
                "pre",
                f"names the pre-tokenizer rule {name!r}, which is not known here (known: "
                f"{', '.join(RULES)}). Guessing would split text wrongly; use the model's Hugging "
                "Face folder",
            )
        return RULES[name]()

    def _token_kinds(self) -> list[int]:
        kinds = self._require("token_type", list)
        if len(kinds) != len(self._tokens):
            raise self._error(
                "token_type", f"has {len(kinds)} entries for {len(self._tokens)} tokens"
            )
        if len(set(self._tokens)) != len(self._tokens):
            seen: set[str] = set()
            twice = next(t for t in self._tokens if t in seen or seen.add(t))
            raise self._error("tokens", f"lists {twice!r} twice")
        return kinds

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(_PREFIX + key)
        if value is not None and not 0 <= value < len(self._tokens):
            raise self._error(key, f"is {value}, outside the {len(self._tokens)} tokens")
        return value

    def _named_stop_ids(self) -> frozenset[int]:
        keyed = (self._id(key) for key in _END_KEYS)
        named = (i for i in self.special_ids if self._tokens[i] in _END_NAMES)
        return frozenset(i for i in (*keyed, *named) if i is not None)

    def _build_backend(self, rule: PreRule, kinds: list[int]) -> tokenizers.Tokenizer:
        merges = []
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        for index, line in enumerate(self._require("merges", list)):
            left, blank, right = line.partition(" ")
            if not blank or not {left, right, left + right} <= vocabulary.keys():
                raise self._error("merges", f"entry {index} is {line!r}: not two tokens that join")
            merges.append((left, right))
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges)
        )
        backend.pre_tokenizer = rule.splitter
        backend.decoder = decoders.ByteLevel()
        for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
            added = [
                AddedToken(token, special=special, normalized=False)
                for token, found in zip(self._tokens, kinds, strict=True)
                if found == kind
            ]
            (backend.add_special_tokens if special else backend.add_tokens)(added)
        return backend


def load_gguf_tokenizer(path: str | Path) -> GgufTokenizer:
    """The tokenizer of a `.gguf` file. Raises GgufError or TokenizerError naming file and key."""
    return GgufTokenizer(open_gguf(path).metadata, source=str(path))
