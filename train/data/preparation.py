"""`prepare`: from conversations to a prepared data set, with a report of what became of each row.

The stages are elsewhere: reading in `conversations`, masks in `template_mask`, truncation in
`pack`, storage in `prepared`. Here they are joined, and every row is accounted for.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.text.tokenizer import ChatTemplateError, Tokenizer
from train.data.conversations import BadRow, Conversation, Row, check_sources, read_rows
from train.data.pack import truncate, why_useless
from train.data.prepared import (
    PreparedData,
    PreparedWriter,
    open_prepared,
    read_manifest,
)
from train.data.template_mask import REASONING, mask_conversation

_NAMED_ROWS = 20
_RULES = 2  # counts up when the same sources and settings come out as other rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What decides how rows come out; all of it is part of the data set's digest.

    Attributes:
        max_length: tokens kept of a row.
        vocab_size: rows of the target's embedding; ids must be below it.
        reasoning: "keep" or "mask" (`template_mask`).
        template_kwargs: variables for the chat template; JSON values.
        draft_vocab_size: entries of the draft vocabulary; None stores none.
        max_bad_rows: malformed rows to skip before giving up.
    """

    max_length: int
    vocab_size: int
    reasoning: str = "keep"
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draft_vocab_size: int | None = None
    max_bad_rows: int = 100

    def __post_init__(self):
        if self.vocab_size < 1 or self.max_bad_rows < 0:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, max_bad_rows {self.max_bad_rows}; at least 1 "
                "and 0."
            )
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a training row needs 2 tokens.")
        if self.reasoning not in REASONING:
            raise ValueError(f"reasoning is {self.reasoning!r}; it must be one of {REASONING}.")
        if self.draft_vocab_size is not None and not (
            1 <= self.draft_vocab_size <= self.vocab_size
        ):
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be 1 to {self.vocab_size}."
            )


@dataclasses.dataclass
class Report:
    """What became of the rows read. One conversation may give several rows, or none.

    Attributes:
        rows_read: rows in the input, malformed ones included, blank lines not.
        rows_kept: rows written.
        malformed: input rows that could not be read or rendered; they are in `dropped` too.
        dropped: number of input rows, or of rows made from them, dropped for each reason.
        bad_rows: the first malformed rows, by file and line.
        truncated: rows kept with fewer tokens than they had.
        turns_skipped: assistant turns left unsupervised, for each reason.
        turns_without_stop: assistant turns whose template writes no stop token behind them.
        cut_answers: assistant turns cut by a length limit, whose stop token is not learned.
        lengths: tokens of the kept rows.
        supervised_tokens: tokens under the loss mask in kept rows.
    """

    rows_read: int = 0
    rows_kept: int = 0
    malformed: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bad_rows: list[str] = dataclasses.field(default_factory=list)
    truncated: int = 0
    turns_skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    turns_without_stop: int = 0
    cut_answers: int = 0
    lengths: list[int] = dataclasses.field(default_factory=list)
    supervised_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON form: length percentiles (50, 90, 99) and supervised fraction in place of lists."""
        tokens = sum(self.lengths)
        at = (50, 90, 99)
        lengths = (
            np.percentile(self.lengths, at, method="inverted_cdf") if self.lengths else [0] * 3
        )
        return {
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "malformed": self.malformed,
            "dropped": dict(self.dropped),
            "bad_rows": list(self.bad_rows),
            "truncated": self.truncated,
            "turns_skipped": dict(self.turns_skipped),
            "turns_without_stop": self.turns_without_stop,
            "cut_answers": self.cut_answers,
            "length_percentiles": {str(p): int(n) for p, n in zip(at, lengths, strict=True)},
            "tokens": tokens,
            "supervised_tokens": self.supervised_tokens,
            "supervised_fraction": self.supervised_tokens / tokens if tokens else 0.0,
        }


def prepare(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    folder: str | Path,
    settings: PrepareSettings,
    *,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[PreparedData, bool]:
    """Prepare `sources` in `folder`, unless it already holds exactly that.

    warn: told when what is there is damaged, and so built anew.

    Returns the data set and whether it was reused. The digest covers the sources' contents, the
    tokenizer with its template, and every setting, so a change of any of them rebuilds.

    Raises:
        ValueError: more malformed rows than allowed (the first are named), or no row left.
    """
    digest = _digest(check_sources(sources), tokenizer, settings)
    manifest = read_manifest(Path(folder))
    if manifest is not None and manifest.get("digest") == digest:
        try:
            data = open_prepared(folder)
            data.verify()
            return data, True
        except (ValueError, OSError) as error:
            warn(f"{error} Preparing anew.")
    report = Report()
    with PreparedWriter(folder, settings.vocab_size) as writer:
        for tokens, mask in _useful_rows(read_rows(sources), tokenizer, settings, report):
            writer.add(tokens, mask)
        if not report.rows_kept:
            raise ValueError(
                f"no row of {', '.join(map(str, sources))} is left to train on: "
                f"{report.rows_read} read, dropped {dict(report.dropped)}, "
                f"turns skipped {dict(report.turns_skipped)}."
            )
        data = writer.finish(
            digest=digest,
            settings=dataclasses.asdict(settings),
            report=report.as_dict(),
            draft_vocab_size=settings.draft_vocab_size,
        )
    return data, False


def _useful_rows(
    rows: Iterable[Row], tokenizer: Tokenizer, settings: PrepareSettings, report: Report
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Truncated, supervised rows; everything else is counted in the report."""
    for row in rows:
        report.rows_read += 1
        masked = _masked(row, tokenizer, settings, report)
        if isinstance(masked, BadRow):
            _count_bad(masked, settings, report)
            continue
        if not masked:
            report.dropped["no assistant turn to learn from"] += 1
        for tokens, mask in masked:
            short, short_mask = truncate(tokens, mask, settings.max_length)
            if reason := why_useless(short, short_mask):
                report.dropped[reason] += 1
                continue
            report.rows_kept += 1
            report.truncated += len(short) < len(tokens)
            report.lengths.append(len(short))
            report.supervised_tokens += int(short_mask.sum())
            yield short, short_mask


def _masked(
    row: Row, tokenizer: Tokenizer, settings: PrepareSettings, report: Report
) -> list[tuple[Any, Any]] | BadRow:
    """Ids and masks of an input row, or why it is malformed."""
    if isinstance(row, BadRow):
        return row
    if not isinstance(row, Conversation):
        pairs = [(row.tokens, row.loss_mask)]
    else:
        kwargs = dict(settings.template_kwargs)
        if row.tools is not None:
            kwargs["tools"] = list(row.tools)
        try:
            masked = mask_conversation(
                tokenizer,
                row.messages,
                reasoning=settings.reasoning,
                template_kwargs=kwargs,
                cut=row.cut,
            )
        except ChatTemplateError as error:
            return BadRow(place=row.place, reason="refused by the template", detail=str(error))
        report.turns_skipped.update(masked.skipped_turns)
        report.turns_without_stop += masked.turns_without_stop
        report.cut_answers += masked.cut_answers
        pairs = [(r.tokens, r.loss_mask) for r in masked.rows]
    for tokens, _ in pairs:
        if len(tokens) and max(tokens) >= settings.vocab_size:
            return BadRow(
                place=row.place,
                reason="bad token ids",
                detail=f"id {max(tokens)} is outside the vocabulary of {settings.vocab_size}",
            )
    return pairs


def _count_bad(row: BadRow, settings: PrepareSettings, report: Report) -> None:
    """Count a malformed row; raise ValueError when there are too many."""
    report.malformed += 1
    report.dropped[row.reason] += 1
    if len(report.bad_rows) < _NAMED_ROWS:
        report.bad_rows.append(str(row))
    if report.malformed > settings.max_bad_rows:
        raise ValueError(
            f"{report.malformed} malformed rows, {settings.max_bad_rows} are allowed "
            "(--max-bad-rows):\n  " + "\n  ".join(report.bad_rows)
        )


def _digest(sources: Sequence[Path], tokenizer: Tokenizer, settings: PrepareSettings) -> str:
    """SHA-256 over everything that the rows depend on."""
    files = [
        {"name": str(path), "sha256": file_sha256(path)}
        for source in sources
        for path in (sorted(p for p in source.rglob("*") if p.is_file()) or [source])
    ]
    content = {
        "sources": files,
        "tokenizer": tokenizer_digest(tokenizer),
        "rules": _RULES,
        "settings": dataclasses.asdict(settings),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over the vocabulary's bytes, special and stop ids, and the chat template."""
    seen = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token)
        seen.update(len(piece).to_bytes(4, "little") + piece)
    extra = [sorted(tokenizer.special_ids), sorted(tokenizer.stop_ids), tokenizer.chat_template]
    seen.update(json.dumps(extra).encode())
    return seen.hexdigest()
