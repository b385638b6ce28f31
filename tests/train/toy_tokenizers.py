"""Byte-level tokenizers with small chat templates that imitate real ones."""

import re
from collections.abc import Sequence

from peagle_jax.text.chat_template import check_messages, check_template_kwargs, render_template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning is shown in the last turn only, as an empty block where there is none; with
# enable_thinking false the generation prompt closes an empty block itself.
QWEN = (
    "{% for m in messages %}{% set thoughts = m.reasoning_content or '' %}"
    "{% set answer = m.content %}"
    "{% if '</think>' in answer %}"
    "{% set thoughts = answer.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = answer.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + thoughts + '\n</think>\n\n' }}"
    "{% endif %}{{ answer + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
# The generation prompt ends in an empty thinking channel that history does not show.
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim "
    "+ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}"
)
# The generation prompt opens the reasoning block; history drops reasoning altogether.
OPEN_THINK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1].lstrip('\n') + '<|eos|>' }}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Analysis and final channels; earlier turns lose their analysis and end in <|end|>.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# No control tokens at all, nothing behind the answer.
PLAIN = (
    "{% for m in messages %}{{ m.role | upper + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class ToyTokenizer:
    """Ids 0..255 are bytes; then `specials` in order; then `merges`, ordinary longer tokens."""

    bos_id = None
    pad_id = None
    strip_left = 0

    def __init__(
        self,
        template: str,
        specials: Sequence[str] = (),
        stops: Sequence[str] = (),
        merges: Sequence[str] = (),
    ):
        self.chat_template = template
        self._pieces = [*specials, *merges]
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._pieces or ["\0"])) + ")")
        self.vocab_size = 256 + len(self._pieces)
        self.special_ids = frozenset(range(256, 256 + len(specials)))
        self.stop_ids = frozenset(256 + self._pieces.index(s) for s in stops)
        self.eos_id = min(self.stop_ids, default=None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.split(text):
            known = piece in self._pieces
            ids.extend([256 + self._pieces.index(piece)] if known else piece.encode())
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._pieces[token_id - 256].encode()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def render_chat(self, messages, *, add_generation_prompt=True, **template_kwargs) -> str:
        check_template_kwargs(template_kwargs)
        return render_template(
            self.chat_template,
            check_messages(messages),
            add_generation_prompt=add_generation_prompt,
            variables=template_kwargs,
        )

    def apply_chat_template(self, messages, *, add_generation_prompt=True, **template_kwargs):
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)


_IM = ("<|im_start|>", "<|im_end|>")
TOKENIZERS = {
    "chatml": ToyTokenizer(CHATML, _IM, _IM[1:]),
    "chatml_marked": ToyTokenizer(CHATML_MARKED, _IM, _IM[1:]),
    "chatml_merged": ToyTokenizer(CHATML, _IM, _IM[1:], merges=("\n\n",)),
    "qwen": ToyTokenizer(QWEN, (*_IM, "<think>", "</think>"), _IM[1:], merges=("\n\n",)),
    "gemma": ToyTokenizer(
        GEMMA, ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"), ("<turn|>",)
    ),
    "open_think": ToyTokenizer(OPEN_THINK, ("<|user|>", "<|assistant|>", "<|eos|>"), ("<|eos|>",)),
    "harmony": ToyTokenizer(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        ("<|return|>",),
    ),
    "plain": ToyTokenizer(PLAIN),
}
