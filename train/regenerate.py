"""Conversations answered anew by the target itself, so that a drafter learns what it will serve.

Every assistant turn is replaced, in order, each behind the answers generated before it. The Magpie
way (arXiv 2406.08464) needs no prompts: given its own template up to where a user would write, the
target writes the user's turn too. Results are appended batch by batch, and a run that was killed
goes on behind the last whole line: each line says what made it, so that a file never holds answers
of two targets or settings.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from peagle_jax.decoding.params import SamplingParams
from peagle_jax.engine import Engine
from peagle_jax.text.tokenizer import ChatTemplateError, Tokenizer
from train.data.conversations import BadRow, Conversation, Place, Row, TokenRow
from train.identity import target_fingerprint
from train.recipe import differences

NAMED_ROWS = 20
"""Rows with a defect that are named; the others are counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regenerated:
    """Conversations written by this call, found from before, and left out with their reason.

    named: the first of those left out for a defect of their own, by file and line.
    """

    written: int
    found: int
    left_out: dict[str, int]
    named: tuple[str, ...] = ()


def regenerate(
    rows: Iterable[Row],
    engine: Engine,
    output: str | Path,
    params: SamplingParams,
    *,
    batch_size: int = 32,
    max_bad_rows: int = 100,
    progress: Callable[[int], None] | None = None,
) -> Regenerated:
    """Answer the user turns of every conversation in `rows`; append JSON lines to `output`.

    Row i is sampled under seed params.seed + i (greedy decoding needs none), so a run that goes on
    writes what an undisturbed one would have. A conversation whose answer was cut by the length
    limit or whose prompt is too long is written as far as it went, if it has an answer at all.

    Raises:
        ValueError: `output` holds lines that are not of this kind, were made by another target or
            other settings, or answer other prompts; or more malformed rows than allowed.
    """
    _check_room(engine, params)
    rows, output = list(rows), Path(output)
    done = finished_rows(output, made := _made(engine, params))
    _check_prompts(output, done, rows)
    losses = _Losses(max_bad_rows)
    written = 0
    with output.open("ab") as file:
        waiting = ((i, row) for i, row in enumerate(rows) if i not in done)
        for batch in _batched(waiting, batch_size):
            talks = []
            for index, row in batch:
                if isinstance(row, BadRow):
                    losses.bad(row)
                elif (reason := _unusable(row)) is not None:
                    losses.count(reason)
                else:
                    assert isinstance(row, Conversation)
                    talks.append(_Talk(index, row, seed=params.seed + index))
            written += _answer_and_append(talks, engine, params, batch_size, file, made, losses)
            if progress is not None:
                progress(written)
    return losses.result(written, len(done))


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
    Raises ValueError as `regenerate` does.
    """
    _check_room(engine, params)
    output = Path(output)
    done = finished_rows(output, made := _made(engine, params, magpie=max_prompt_tokens))
    opening = user_opening(engine.tokenizer)
    temperature = params.temperature or 1.0
    losses = _Losses(0)
    written = 0
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
                    losses.count("no prompt")
                    continue
                row = Conversation(
                    place=Place(file="magpie", line=index + 1),
                    messages=({"role": "user", "content": text},),
                )
                talks.append(_Talk(index, row, seed=params.seed + index))
            written += _answer_and_append(talks, engine, params, batch_size, file, made, losses)
            if progress is not None:
                progress(written)
    return losses.result(written, len(done))


def finished_rows(output: Path, made: Mapping[str, Any]) -> dict[int, str]:
    """Row numbers in a file of answers, and the digest of the prompts that each answers.

    A last line cut short by a kill is removed, once all the others are known to be of this kind.

    Raises:
        ValueError: a line that this command did not write, with its number, or one that another
            target or other settings than `made` wrote, with the difference. The file is untouched.
    """
    if not output.is_file():
        return {}
    content = output.read_bytes()
    *lines, tail = content.split(b"\n")
    done = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            row, prompt, saved = int(record["row"]), str(record["prompt"]), dict(record["made"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _foreign(output, number) from None
        different = differences(saved, made)
        if different:
            raise ValueError(
                f"{output} line {number}: answered under other settings: {'; '.join(different)}; "
                "give another file, or the settings of before."
            )
        done[row] = prompt
    if tail:
        opening = _opening(made)
        if not (tail.startswith(opening) or opening.startswith(tail)):
            raise _foreign(output, len(lines) + 1)
        with output.open("r+b") as file:
            file.truncate(len(content) - len(tail))
    return done


def _foreign(output: Path, line: int) -> ValueError:
    return ValueError(
        f"{output} line {line}: no answer of this version's peagle-train regenerate; nothing was "
        "changed. Give another file."
    )


def _opening(made: Mapping[str, Any]) -> bytes:
    """How each line of a run begins: what a line cut short is known by."""
    return json.dumps({"made": made})[:-1].encode()


def _made(engine: Engine, params: SamplingParams, **more: Any) -> dict[str, Any]:
    """What decides an answer beside its prompt, as JSON values; it stands in every line."""
    template = str(getattr(engine.tokenizer, "chat_template", None))
    usual = dataclasses.asdict(SamplingParams())
    named = ("temperature", "top_p", "max_tokens", "seed")
    asked = {
        name: value
        for name, value in dataclasses.asdict(params).items()
        if name in named or value != usual[name]
    }
    made = {
        "target": target_fingerprint(engine.target),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        **asked,
        **more,
    }
    return json.loads(json.dumps(made))


def _check_room(engine: Engine, params: SamplingParams) -> None:
    if (params.max_tokens or 0) >= engine.context_length:
        raise ValueError(
            f"max_tokens (--max-tokens) is {params.max_tokens}, which leaves no room for a prompt "
            f"in the target's context of {engine.context_length}; lower it."
        )


def _check_prompts(output: Path, done: Mapping[int, str], rows: Sequence[Row]) -> None:
    """Raise ValueError where answers that are there belong to other prompts than `rows`."""
    for index, prompt in sorted(done.items()):
        if index >= len(rows):
            raise ValueError(
                f"{output}: answers row {index + 1}, the sources have {len(rows)} rows; give "
                "another file, or the sources of before."
            )
        row = rows[index]
        if not isinstance(row, Conversation) or prompt_digest(row) != prompt:
            raise ValueError(
                f"{output}: its answer to row {index + 1} belongs to another prompt than "
                f"{row.place}; give another file, or the sources of before."
            )


def prompt_digest(row: Conversation) -> str:
    """Names what a conversation asks: its messages but the assistant's, and its tools."""
    asked = [message for message in row.messages if message["role"] != "assistant"]
    text = json.dumps([asked, row.tools], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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

    def __init__(self, index: int, row: Conversation, *, seed: int):
        self.index, self.row, self.seed = index, row, seed
        self.history: list[dict[str, Any]] = []
        self.answers = 0
        self.reasons: list[str] = []
        self.refused: str | None = None
        self._left = [m for m in row.messages if m["role"] != "assistant"]

    def next_prompt(self) -> list[dict[str, Any]] | None:
        """History up to the next user turn, None when all are answered."""
        while self._left:
            message = self._left.pop(0)
            self.history.append(message)
            if message["role"] == "user":
                return self.history
        return None

    def encode(self, engine: Engine) -> list[int]:
        """Ids of the history; with the conversation's tools where it has any."""
        if self.row.tools is None:
            return engine.encode(self.history)
        return engine.tokenizer.apply_chat_template(self.history, tools=list(self.row.tools))

    def answer(self, text: str, reason: str) -> None:
        self.history.append({"role": "assistant", "content": text})
        self.answers += 1
        self.reasons.append(reason)
        if reason != "stop":
            self._left = []

    def give_up(self, refused: str | None = None) -> None:
        """Drop the turn that cannot be answered, and all behind it."""
        self.history.pop()
        self._left, self.refused = [], refused

    def line(self, made: Mapping[str, Any]) -> dict[str, Any]:
        # `made` first: a line cut short is known by how it begins.
        line = {
            "made": made,
            "row": self.index,
            "prompt": prompt_digest(self.row),
            "messages": self.history,
            "finish_reasons": self.reasons,
        }
        return line if self.row.tools is None else {**line, "tools": list(self.row.tools)}


class _Losses:
    """Counts what is left out, and names what has a defect of its own."""

    def __init__(self, max_bad_rows: int):
        self._counts: dict[str, int] = {}
        self._named: list[str] = []
        self._bad, self._most = 0, max_bad_rows

    def count(self, reason: str) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def bad(self, row: BadRow) -> None:
        """Raises ValueError when there are too many."""
        self.name(row.reason, str(row))
        self._bad += 1
        if self._bad > self._most:
            raise ValueError(
                f"{self._bad} malformed rows, {self._most} are allowed (--max-bad-rows):\n  "
                + "\n  ".join(self._named)
            )

    def name(self, reason: str, text: str) -> None:
        self.count(reason)
        if len(self._named) < NAMED_ROWS:
            self._named.append(text)

    def result(self, written: int, found: int) -> Regenerated:
        return Regenerated(
            written=written, found=found, left_out=self._counts, named=tuple(self._named)
        )


def _answer_and_append(
    talks: Sequence[_Talk],
    engine: Engine,
    params: SamplingParams,
    batch_size: int,
    file: Any,
    made: Mapping[str, Any],
    losses: _Losses,
) -> int:
    """Answer a batch and append its lines; how many there are."""
    _answer(talks, engine, params, batch_size)
    for talk in talks:
        if talk.refused is not None:
            losses.name("refused by the template", f"{talk.row.place}: {talk.refused}")
        elif not talk.answers:
            losses.count("no answer")
    lines = [talk.line(made) for talk in talks if talk.answers]
    _append(file, lines)
    return len(lines)


def _answer(
    talks: Sequence[_Talk], engine: Engine, params: SamplingParams, batch_size: int
) -> None:
    """Answer all user turns: the first of every conversation together, then the second, ..."""
    open_talks = list(talks)
    while open_talks:
        asked = []
        for talk in open_talks:
            if talk.next_prompt() is None:
                continue
            try:
                ids = talk.encode(engine)
            except ChatTemplateError as error:
                talk.give_up(str(error))
                continue
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
