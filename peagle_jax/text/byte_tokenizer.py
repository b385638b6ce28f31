"""A tokenizer whose tokens are bytes: no files, every text round-trips. For tests and examples."""

import re
from collections.abc import Sequence
from typing import Any

from peagle_jax.text.chat_template import check_messages, check_template_kwargs, render_template
from peagle_jax.text.tokenizer import Messages

_SPECIALS = ("<|start|>", "<|end|>", "<|pad|>", "<|mask|>")
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, _SPECIALS)) + ")")
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are the bytes; 256 `<|start|>`, 257 `<|end|>`, 258 `<|pad|>`, 259 `<|mask|>`.

    A conversation is `<|start|>role\\ncontent<|end|>` per message. No token is added to bare text.
    """

    vocab_size = 260
    bos_id = 256
    eos_id = 257
    pad_id = 258
    mask_id = 259
    special_ids = frozenset(range(256, 260))
    stop_ids = frozenset({257})
    chat_template = _TEMPLATE
    strip_left = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in _SPECIAL_PATTERN.split(text):
            if piece in _SPECIALS:
                ids.append(256 + _SPECIALS.index(piece))
            else:
                ids.extend(piece.encode("utf-8"))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        if token_id < 256:
            return bytes([token_id])
        return _SPECIALS[token_id - 256].encode() if token_id < 260 else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        check_template_kwargs(template_kwargs)
        return render_template(
            _TEMPLATE,
            check_messages(messages),
            add_generation_prompt=add_generation_prompt,
            variables=template_kwargs,
        )

    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)
