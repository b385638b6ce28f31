"""Conversations answered anew by the target itself, so that a drafter learns what it will serve.

Every assistant turn is replaced, in order, each behind the answers generated before it. The Magpie
way (arXiv 2406.08464) needs no prompts: given its own template up to where a user would write, the
target writes the user's turn too. Results are appended batch by batch, and a run that was killed
goes on behind the last whole line.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from peagle_jax.decoding.params import SamplingParams
from peagle_jax.engine import Engine
from peagle_jax.text.tokenizer import Tokenizer
from train.data.conversations import BadRow, Conversation, Row, TokenRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regenerated:
    """Conversations written by this call, found from before, and left out with their reason."""

    written: int
    found: int
    left_out: dict[str, int]


def regenerate(
    rows: Iterable[Row],
    engine: Engine,
    output: str | Path,
    params: SamplingParams,
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> Regenerated:
    """Answer the user turns of every conversation in `rows`; append JSON lines to `output`.

    Row i is sampled under seed params.seed + i (greedy decoding needs none), so a run that goes on
    writes what an undisturbed one would have. A conversation whose answer was cut by the length
    limit or whose prompt is too long is written as far as it went, if it has an answer at all.

    Raises:
        ValueError: `output` holds lines that are not of this kind.
    """
    output = Path(output)
    done = finished_rows(output)
    left_out: dict[str, int] = {}
    written = 0
    with output.open("ab") as file:
        waiting = ((i, row) for i, row in enumerate(rows) if i not in done)
        for batch in _batched(waiting, batch_size):
            talks = []
            for index, row in batch:
                reason = _unusable(row)
                if reason is not None:
                    left_out[reason] = left_out.get(reason, 0) + 1
                else:
                    talks.append(_Talk(index, row.messages, seed=params.seed + index))
            _answer(talks, engine, params, batch_size)
            lines = []
            for talk in talks:
                if talk.answers:
                    lines.append(talk.line())
                else:
                    left_out["no answer"] = left_out.get("no answer", 0) + 1
            _append(file, lines)
            written += len(lines)
            if progress is not None:
                progress(written)
    return Regenerated(written=written, found=len(done), left_out=left_out)


def magpie(
    count: int,
    engine: Engine,
    output: str | Path,
    params: SamplingParams,
    *,
    batch_size: int = 32,
    max_prompt_tokens: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Regenerated:
    """`count` conversations of one turn whose prompts the target invents.

    Prompts are sampled at temperature 1 where `params` is greedy, or all would be the same.
    """
    output = Path(output)
    done = finished_rows(output)
    opening = user_opening(engine.tokenizer)
    temperature = params.temperature or 1.0
    written, left_out = 0, {}
    with output.open("ab") as file:
        waiting = (i for i in range(count) if i not in done)
        for indices in _batched(waiting, batch_size):
            asked = [
                dataclasses.replace(
                    params,
                    temperature=temperature,
                    max_tokens=max_prompt_tokens,
                    seed=params.seed + index,
                )
                for index in indices
            ]
            found = engine.generate(
                [opening] * len(indices), asked, method="none", max_batch_size=batch_size
            )
            talks = []
            for index, result in zip(indices, found, strict=True):
                text = result.text.strip()
                # A prompt that did not end would be answered in the middle of a sentence.
                if not text or result.finish_reason != "stop":
                    left_out["no prompt"] = left_out.get("no prompt", 0) + 1
                    continue
                message = {"role": "user", "content": text}
                talks.append(_Talk(index, (message,), seed=params.seed + index))
            _answer(talks, engine, params, batch_size)
            lines = [talk.line() for talk in talks if talk.answers]
            _append(file, lines)
            written += len(lines)
            if progress is not None:
                progress(written)
    return Regenerated(written=written, found=len(done), left_out=left_out)


def finished_rows(output: Path) -> set[int]:
    """Row numbers in a file of answers; a last line cut short by a kill is removed from it.

    Raises:
        ValueError: a line that this command did not write, with its number.
    """
    if not output.is_file():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with output.open("r+b") as file:
            file.truncate(len(whole))
    done = set()
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            done.add(int(json.loads(line)["row"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{output} line {number}: no answer of peagle-train regenerate; give another file."
            ) from None
    return done


def user_opening(tokenizer: Tokenizer) -> list[int]:
    """The template's ids up to where the first user message begins.

    Raises:
        ValueError: the template writes nothing before it.
    """
    first, second = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in ("7", "q")
    )
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    if same == 0:
        raise ValueError("the chat template has nothing before a user's message; Magpie needs it.")
    return list(first[:same])


class _Talk:
    """A conversation on its way: the messages so far and what is still to be asked."""

    def __init__(self, row: int, messages: Sequence[dict[str, Any]], *, seed: int):
        self.row, self.seed = row, seed
        self.history: list[dict[str, Any]] = []
        self.answers = 0
        self.reasons: list[str] = []
        self._left = [m for m in messages if m["role"] != "assistant"]

    def next_prompt(self) -> list[dict[str, Any]] | None:
        """History up to the next user turn, None when all are answered."""
        while self._left:
            message = self._left.pop(0)
            self.history.append(message)
            if message["role"] == "user":
                return self.history
        return None

    def answer(self, text: str, reason: str) -> None:
        self.history.append({"role": "assistant", "content": text})
        self.answers += 1
        self.reasons.append(reason)
        if reason != "stop":
            self._left = []

    def give_up(self) -> None:
        """Drop the turn that cannot be answered, and all behind it."""
        self.history.pop()
        self._left = []

    def line(self) -> dict[str, Any]:
        return {"row": self.row, "messages": self.history, "finish_reasons": self.reasons}


def _answer(
    talks: Sequence[_Talk], engine: Engine, params: SamplingParams, batch_size: int
) -> None:
    """Answer all user turns: the first of every conversation together, then the second, ..."""
    open_talks = list(talks)
    while open_talks:
        asked = []
        for talk in open_talks:
            prompt = talk.next_prompt()
            if prompt is None:
                continue
            ids = engine.encode(prompt)
            if len(ids) + (params.max_tokens or 0) > engine.context_length:
                talk.give_up()
                continue
            asked.append((talk, ids))
        if asked:
            own = [dataclasses.replace(params, seed=talk.seed) for talk, _ in asked]
            results = engine.generate([ids for _, ids in asked], own, max_batch_size=batch_size)
            for (talk, _), result in zip(asked, results, strict=True):
                talk.answer(result.text, result.finish_reason)
        open_talks = [talk for talk, _ in asked]


def _unusable(row: Row) -> str | None:
    if isinstance(row, BadRow):
        return row.reason
    if isinstance(row, TokenRow):
        return "token ids, no messages"
    assert isinstance(row, Conversation)
    if not any(m["role"] == "user" for m in row.messages):
        return "no user turn"
    if any(m["role"] == "tool" or m.get("tool_calls") for m in row.messages):
        return "tool calls cannot be answered anew"
    return None


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


def _append(file: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Append whole lines and have them on disk before the next batch starts."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write(text.encode("utf-8"))
    file.flush()
    os.fsync(file.fileno())
