"""Token ids and loss masks of conversations: which tokens did the assistant generate?

No template marks are needed. For each assistant turn two texts are rendered: the generation prompt
that serving would put before it, and the conversation up to and including it. What the second adds
to the first is the turn's span; its stop token belongs to it, what the template writes after that
does not. A turn whose text is a token prefix of a later turn's row is supervised there; one that
the template rewrites in later history (dropped reasoning, another end token) gets a row of its
own. So the model sees, before every span, exactly the ids it sees in service.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from peagle_jax.text.tokenizer import Tokenizer
from train.data.conversations import REASONING_KEYS

REASONING = ("keep", "mask")
"""What may become of reasoning text: learned, or left out of the loss."""

# Two answers that share no character at either end: what their renderings share is the template's.
_PROBES = ("Alpha probe one", "7even chances left")

REASONING_TAGS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))
"""Marks between which chat models reason inside plain content."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedRow:
    """Ids of one row and True where the assistant generated the token."""

    tokens: list[int]
    loss_mask: list[bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConversation:
    """Rows of one conversation, and the assistant turns that are supervised in none of them."""

    rows: tuple[MaskedRow, ...]
    skipped_turns: tuple[str, ...]
    turns_without_stop: int
    cut_answers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn:
    """One assistant turn in the context that serving gives it."""

    tokens: list[int]
    start: int
    masked: frozenset[int]
    stopped: bool


class _NoSpan(Exception):
    """Why a turn's span cannot be found; becomes an entry of `skipped_turns`."""


def mask_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    reasoning: str = "keep",
    template_kwargs: Mapping[str, Any] | None = None,
    cut: Collection[int] = (),
) -> MaskedConversation:
    """Rows whose loss masks cover what the assistant generates, and nothing else.

    Args:
        messages: role and content; reasoning text under `REASONING_KEYS` or between tags.
        reasoning: "mask" leaves reasoning text in the row but takes it out of the loss.
        template_kwargs: variables for the template (tools, enable_thinking, ...).
        cut: indices of assistant messages that a length limit cut: the stop token that the
            template writes behind them is not learned, as nobody generated it.

    Raises:
        ChatTemplateError: the template refuses the conversation.
    """
    if reasoning not in REASONING:
        raise ValueError(f"reasoning is {reasoning!r}; it must be 'keep' or 'mask'.")
    kwargs = dict(template_kwargs or {})
    rows: list[tuple[list[int], list[bool]]] = []
    skipped: list[str] = []
    without_stop = cut_answers = 0
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # Last turn first: its row is the longest, and most earlier turns are prefixes of it.
    for index in reversed(indices):
        try:
            turn = _find_turn(tokenizer, messages[: index + 1], reasoning, kwargs, index in cut)
        except _NoSpan as problem:
            skipped.append(str(problem))
            continue
        without_stop += not turn.stopped and index not in cut
        cut_answers += index in cut
        mask = [i >= turn.start and i not in turn.masked for i in range(len(turn.tokens))]
        for tokens, row_mask in rows:
            if tokens[: len(turn.tokens)] == turn.tokens:
                for i in range(turn.start, len(turn.tokens)):
                    row_mask[i] = mask[i]
                break
        else:
            rows.append((turn.tokens, mask))
    return MaskedConversation(
        rows=tuple(MaskedRow(tokens=t, loss_mask=m) for t, m in reversed(rows)),
        skipped_turns=tuple(reversed(skipped)),
        turns_without_stop=without_stop,
        cut_answers=cut_answers,
    )


def _find_turn(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    reasoning: str,
    kwargs: Mapping[str, Any],
    cut: bool,
) -> _Turn:
    """The last message's span after the prompt that serving would give."""
    if len(messages) == 1:
        raise _NoSpan("assistant turn without anything before it")
    prompt = tokenizer.render_chat(messages[:-1], add_generation_prompt=True, **kwargs)
    text = _continuation(tokenizer, messages, prompt, kwargs)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    joined = tokenizer.encode(prompt + text, add_special_tokens=False)
    if joined[: len(prompt_ids)] == prompt_ids:
        span = joined[len(prompt_ids) :]
    else:
        # A token of the joined text would straddle the boundary, which serving never crosses.
        span = tokenizer.encode(text, add_special_tokens=False)
    stops = [i for i, token in enumerate(span) if token in tokenizer.stop_ids]
    stopped = bool(stops) and not tokenizer.decode(span[stops[-1] + 1 :]).strip()
    if stopped:
        span = span[: stops[-1] + (not cut)]
    if not span:
        raise _NoSpan("assistant turn of which the template renders nothing")
    masked: frozenset[int] = frozenset()
    if reasoning == "mask":
        masked = _reasoning_tokens(tokenizer, messages, prompt, text, span, kwargs)
    start = len(prompt_ids)
    return _Turn(
        tokens=prompt_ids + span,
        start=start,
        masked=frozenset(start + i for i in masked),
        stopped=stopped,
    )


def _continuation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    kwargs: Mapping[str, Any],
) -> str:
    """The text that the last message adds to the generation prompt.

    Where the rendered turn does not begin with the prompt, the prompt ends in more than the turn's
    header (an empty thinking block, say). The header is then what two probe answers share, and the
    turn's text behind its header follows the whole prompt.
    """
    rendered = tokenizer.render_chat(messages, add_generation_prompt=False, **kwargs)
    if rendered.startswith(prompt):
        return rendered[len(prompt) :]
    first, second = (
        tokenizer.render_chat(
            [*messages[:-1], {"role": "assistant", "content": probe}],
            add_generation_prompt=False,
            **kwargs,
        )
        for probe in _PROBES
    )
    header = os.path.commonprefix([first, second])
    if not (prompt.startswith(header) and rendered.startswith(header)):
        raise _NoSpan("assistant turn that the template does not begin with its generation prompt")
    text = rendered[len(header) :]
    extra = prompt[len(header) :]
    for opening, closing in REASONING_TAGS:
        if extra.count(opening) > extra.count(closing):
            thoughts = _reasoning_of(messages[-1])
            if thoughts is None:
                raise _NoSpan(
                    f"assistant turn without reasoning, where the generation prompt opens {opening}"
                )
            return f"{thoughts.strip()}\n{closing}\n\n{text}"
    return text


def _reasoning_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    text: str,
    span: list[int],
    kwargs: Mapping[str, Any],
) -> frozenset[int]:
    """Indices in `span` of tokens that lie in the reasoning text.

    The message is rendered with two other reasonings; what both renderings share stands before and
    behind the reasoning, whatever marks the template uses. Tokens are placed by their bytes.
    """
    if _reasoning_of(messages[-1]) is None:
        return frozenset()
    first, second = (
        _continuation(
            tokenizer, [*messages[:-1], _with_reasoning(messages[-1], probe)], prompt, kwargs
        )
        for probe in _PROBES
    )
    if first == second:
        return frozenset()  # The template leaves reasoning out.
    before = os.path.commonprefix([first, second])
    behind = os.path.commonprefix([first[::-1], second[::-1]])[::-1]
    if not (text.startswith(before) and text.endswith(behind)):
        raise _NoSpan("assistant turn whose reasoning text cannot be told apart")
    begin = len(before.encode())
    end = len(text.encode()) - len(behind.encode())
    pieces = [tokenizer.token_bytes(token) for token in span]
    if not text.encode().startswith(b"".join(pieces)):
        raise _NoSpan(
            "assistant turn whose tokens do not spell its text, so reasoning has no place"
        )
    inside, at = set(), 0
    for index, piece in enumerate(pieces):
        if begin <= at and at + len(piece) <= end and piece:
            inside.add(index)
        at += len(piece)
    return frozenset(inside)


def _reasoning_of(message: Mapping[str, Any]) -> str | None:
    for key in REASONING_KEYS:
        if message.get(key):
            return message[key]
    match = _inline(message)
    return match["inner"] if match else None


def _with_reasoning(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The message with its reasoning replaced where it has it."""
    present = {key: text for key in REASONING_KEYS if message.get(key)}
    if present:
        return {**message, **present}
    match = _inline(message)
    content = message["content"]
    start, end = match.span("inner")
    return {**message, "content": content[:start] + text + content[end:]}


def _inline(message: Mapping[str, Any]) -> re.Match[str] | None:
    for opening, closing in REASONING_TAGS:
        pattern = f"{re.escape(opening)}(?P<inner>.+?){re.escape(closing)}"
        if match := re.search(pattern, message["content"], re.DOTALL):
            return match
    return None
