"""Read training rows: conversations or token ids, from JSONL, JSON or Hugging Face datasets.

Every row comes out in one of three forms, with the file and line it came from; a row that cannot be
read is a value too, so that the caller decides how many to tolerate. Rendering conversations to
tokens is in `template_mask`.

Accepted rows (one JSON object each):
    {"messages": [{"role": "user", "content": "hi"}, ...]}            also "conversations"
    {"conversations": [{"from": "human", "value": "hi"}, ...]}        ShareGPT
    {"input_ids": [...], "loss_mask": [...]}                          token ids
    {"ids": [...], "prompt_tokens": 17}                               token ids, answer at the end
A conversation may carry "tools" (a list, or one as JSON text), which reaches the chat template, and
"finish_reasons", one for each assistant turn: one cut by the "length" limit has no end to learn.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of roles as they are found in data sets, and ours."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which data sets and chat templates keep a message's reasoning text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row came from; lines count from 1. In a JSON list or a data set: the row number."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages with keys "role" and "content" (text), others as found.

    cut: indices of assistant messages that were cut by a length limit.
    """

    place: Place
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    cut: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRow:
    """Ready token ids, int32 [N], and their loss mask, bool [N]."""

    place: Place
    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used: a short reason to count by, and a sentence for people."""

    place: Place
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}"


Row = Conversation | TokenRow | BadRow

# What decoding raises: bad bytes or JSON, a number of too many digits, lists within lists for ever.
_NOT_JSON = (ValueError, RecursionError)


class _Unusable(Exception):
    """A row's defect, on its way to a BadRow."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_rows(paths: Iterable[str | Path]) -> Iterator[Row]:
    """Rows of all files in order.

    A path is a `.jsonl` file, a `.json` file with a list, or a folder with a Hugging Face data set
    (needs the package `datasets`).

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file that is of none of these kinds, or a folder without `datasets` installed.
    """
    for path in check_sources(paths):
        if path.is_dir():
            yield from _parsed(str(path), enumerate(_dataset_rows(path), start=1))
        elif path.suffix == ".json":
            yield from _parsed(str(path), enumerate(_json_list(path), start=1))
        else:
            yield from _jsonl_rows(path)


def check_sources(paths: Iterable[str | Path]) -> list[Path]:
    """The paths, all of which are there and of a kind that `read_rows` reads.

    Raises FileNotFoundError and ValueError as it does, before anything slow is done.
    """
    found = [Path(path) for path in paths]
    for path in found:
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such file or folder; expected a .jsonl file, a .json file with a "
                "list, or the folder of a Hugging Face data set"
            )
        if not path.is_dir() and path.suffix not in (".json", ".jsonl", ".ndjson"):
            raise ValueError(
                f"{path}: unknown kind of file; expected .jsonl, .json (a list) or a folder"
            )
    return found


def _jsonl_rows(path: Path) -> Iterator[Row]:
    """Lines end at a line feed and nowhere else: U+2028 and its like may stand inside strings."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            place = Place(file=str(path), line=number)
            try:
                value = json.loads(raw.decode("utf-8"))
            except _NOT_JSON as error:
                yield BadRow(place=place, reason="not JSON", detail=f"not JSON: {error}")
                continue
            yield parse_row(value, place)


def _json_list(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except _NOT_JSON as error:
        raise ValueError(f"{path}: not JSON: {error}; use .jsonl for one row a line") from error
    if not isinstance(value, list):
        raise ValueError(f"{path}: expected a list of rows, found {type(value).__name__}")
    return value


def _dataset_rows(folder: Path) -> Iterator[Any]:
    """Rows of a data set folder: one written by `save_to_disk`, or parquet or arrow files."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"{folder}: reading a data set folder needs the package `datasets` "
            "(pip install datasets); or convert it to .jsonl"
        ) from error
    if (folder / "dataset_dict.json").is_file():
        raise ValueError(
            f"{folder}: holds several splits; name one of its folders: "
            + ", ".join(sorted(str(p.parent) for p in folder.glob("*/dataset_info.json")))
        )
    if (folder / "state.json").is_file():
        try:
            yield from datasets.load_from_disk(str(folder))
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{folder}: cannot be read as a saved data set: {why}") from error
        return
    for kind in ("parquet", "arrow"):
        files = sorted(str(p) for p in folder.rglob(f"*.{kind}"))
        for file in files:
            try:
                yield from datasets.load_dataset(kind, data_files=[file], split="train")
            except Exception as error:  # datasets and pyarrow have many, and no base of their own
                why = " ".join(str(error.__cause__ or error).split())
                raise ValueError(f"{file}: cannot be read as {kind}: {why}") from error
        if files:
            return
    raise ValueError(f"{folder}: no state.json, *.parquet or *.arrow below it")


def _parsed(file: str, rows: Iterable[tuple[int, Any]]) -> Iterator[Row]:
    for line, value in rows:
        yield parse_row(value, Place(file=file, line=line))


def parse_row(value: Any, place: Place) -> Row:
    """One decoded JSON value as a row; a BadRow tells what is wrong with it."""
    try:
        if not isinstance(value, Mapping):
            raise _Unusable("not an object", f"expected an object, found {type(value).__name__}")
        for key in ("input_ids", "ids"):
            if value.get(key) is not None:
                return _token_row(value, key, place)
        for key in ("messages", "conversations", "conversation"):
            if value.get(key) is not None:
                messages, tools = _messages(value[key], key), _tools(value.get("tools"))
                _check_text([*messages, *(tools or ())])
                cut = _cut(value.get("finish_reasons"), messages)
                return Conversation(place=place, messages=messages, tools=tools, cut=cut)
        raise _Unusable(
            "unknown form",
            f"has keys {sorted(map(str, value))}; expected messages, conversations or input_ids",
        )
    except _Unusable as defect:
        return BadRow(place=place, reason=defect.reason, detail=defect.detail)
    except RecursionError:
        return BadRow(place=place, reason="nested too deeply", detail="values nested too deeply")


def _token_row(value: Mapping[str, Any], key: str, place: Place) -> TokenRow:
    ids = value[key]
    if not _integers(ids) or any(i < 0 for i in ids):
        raise _Unusable("bad token ids", f"{key} must be a list of integers from 0 on")
    if value.get("loss_mask") is not None:
        mask = value["loss_mask"]
        if not _is_list(mask) or any(m not in (0, 1) for m in mask):
            raise _Unusable("bad loss mask", "loss_mask must be a list of 0 and 1")
        if len(mask) != len(ids):
            raise _Unusable(
                "bad loss mask", f"loss_mask has {len(mask)} entries, {key} has {len(ids)}"
            )
    elif type(value.get("prompt_tokens")) is int:
        prompt = value["prompt_tokens"]
        if not 0 <= prompt <= len(ids):
            raise _Unusable("bad loss mask", f"prompt_tokens is {prompt} of {len(ids)} tokens")
        mask = [0] * prompt + [1] * (len(ids) - prompt)
    else:
        raise _Unusable("bad loss mask", f"{key} without loss_mask or prompt_tokens")
    return TokenRow(
        place=place, tokens=np.asarray(ids, np.int32), loss_mask=np.asarray(mask, np.bool_)
    )


def _integers(value: Any) -> bool:
    return _is_list(value) and all(
        isinstance(i, int) and not isinstance(i, bool) and i < 2**31 for i in value
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _tools(value: Any) -> tuple[Any, ...] | None:
    """Tools as a list; data set tables hold them as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except _NOT_JSON as error:
            raise _Unusable("bad tools", f"tools are text, but not JSON: {error}") from None
    if value is None or value == "":
        return None
    if not _is_list(value):
        kind = type(value).__name__
        raise _Unusable("bad tools", f"tools must be a list, or one as JSON text; found {kind}")
    return tuple(value) or None


def _cut(reasons: Any, messages: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Indices of the assistant messages whose finish reason is "length"."""
    if reasons is None:
        return frozenset()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not _is_list(reasons) or len(reasons) != len(answers):
        raise _Unusable(
            "bad finish reasons",
            f"finish_reasons must be a list with one for each of {len(answers)} assistant turns",
        )
    pairs = zip(answers, reasons, strict=True)
    return frozenset(index for index, reason in pairs if reason == "length")


def _check_text(value: Any) -> None:
    """Raise _Unusable for text that is no Unicode: lone surrogates, which no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _Unusable("not Unicode text", f"text that is no Unicode: {error}") from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in value:
            _check_text(item)


def _messages(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    if not _is_list(value):
        raise _Unusable("unknown form", f"{key} must be a list of messages")
    if not value:
        raise _Unusable("empty conversation", f"{key} is empty")
    return tuple(_message(message, index) for index, message in enumerate(value))


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message with our role names, text content and reasoning under all its names."""
    if not isinstance(message, Mapping):
        raise _Unusable("unknown form", f"message {index} is not an object")
    # Absent keys and null mean the same; data set tables fill in nulls.
    plain = {k: v for k, v in message.items() if v is not None}
    role = plain.pop("role", plain.pop("from", None))
    if role is None:
        raise _Unusable("no role", f"message {index} has neither role nor from")
    if not isinstance(role, str) or role not in ROLES:
        raise _Unusable("unknown role", f"message {index} has role {role!r}")
    content = plain.pop("content", plain.pop("value", None))
    if content is None and not (plain.get("tool_calls") or _reasoning(plain)):
        raise _Unusable("no content", f"message {index} has neither content nor value")
    rest = {k: v for k, v in plain.items() if k not in ("from", "value")}
    if reasoning := _reasoning(plain):
        rest.update(dict.fromkeys(REASONING_KEYS, reasoning))
    return {"role": ROLES[role], "content": _text(content, index), **rest}


def _reasoning(message: Mapping[str, Any]) -> str | None:
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str) and message[key]:
            return message[key]
    return None


def _text(content: Any, index: int) -> str:
    """Content as text; a list of text parts is joined, None (a tool call) is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if _is_list(content) and all(
        isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in content
    ):
        return "".join(p["text"] for p in content)
    raise _Unusable("not text", f"message {index} has content that is not text")
