"""A prepared data set on disk: tokenised rows, token counts, draft vocabulary, manifest.

    manifest.json                 format, settings and their digest, report, checksums of the files
    tokens.bin, loss_mask.bin     all rows one after the other, int32 and bool
    offsets.npy                   int64 [rows + 1], where each row begins
    token_counts.npy              int64 [V], occurrences in all rows
    supervised_counts.npy         int64 [V], occurrences under the loss mask
    draft_vocabulary.safetensors  d2t int64 [Vd] (offsets), t2d bool [V]; where one was asked for

The folder appears under its name only when it is complete. How rows are made: `preparation`.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.checkpoints.safetensors_file import open_safetensors, write_safetensors
from train.data.pack import Sample
from train.data.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens

FORMAT = "peagle-jax prepared data 1"
_MANIFEST = "manifest.json"
_VOCABULARY = "draft_vocabulary.safetensors"
_FILES = {
    _MANIFEST, _VOCABULARY, "tokens.bin", "loss_mask.bin", "offsets.npy", "token_counts.npy",
    "supervised_counts.npy",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """An open prepared data set; rows are read from the files as they are asked for."""

    folder: Path
    manifest: Mapping[str, Any]
    offsets: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Sample:
        place = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return Sample(
            tokens=np.array(self.tokens[place]), loss_mask=np.array(self.loss_mask[place])
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def digest(self) -> str:
        """Names the sources and settings that the rows were made from."""
        return self.manifest["digest"]

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def rows_digest(self) -> str:
        """Names the rows themselves, wherever and by whatever settings they were made."""
        files = self.manifest["files"]
        sums = [files[name]["sha256"] for name in ("tokens.bin", "loss_mask.bin", "offsets.npy")]
        return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where the rows were prepared for a vocabulary of another size."""
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"{self.folder}: token ids of a vocabulary of {self.vocab_size}, the target has "
                f"{vocab_size}; prepare the data for this target."
            )

    def row_name(self, row: int) -> str:
        return f"{self.folder} row {row}"

    def token_counts(self) -> np.ndarray:
        """Occurrences of each id in all rows, int64 [V]."""
        return np.load(self.folder / "token_counts.npy")

    def supervised_counts(self) -> np.ndarray:
        """Occurrences of each id under the loss mask, int64 [V]."""
        return np.load(self.folder / "supervised_counts.npy")

    def draft_vocabulary(self, size: int) -> DraftVocabulary:
        """The stored draft vocabulary, which must have `size` entries.

        Raises:
            ValueError: none is stored, or one of another size.
        """
        path = self.folder / _VOCABULARY
        if not path.is_file():
            raise ValueError(
                f"{self.folder}: prepared without a draft vocabulary; "
                f"run peagle-train prepare with --draft-vocab-size {size}."
            )
        file = open_safetensors(path)
        d2t, t2d = file.read("d2t"), file.read("t2d")
        if len(d2t) != size:
            raise ValueError(
                f"{path}: a draft vocabulary of {len(d2t)} entries, {size} are wanted; "
                f"run peagle-train prepare with --draft-vocab-size {size}."
            )
        counts = self.supervised_counts()
        coverage = float(counts[t2d].sum() / max(1, counts.sum()))
        return DraftVocabulary(d2t=d2t, t2d=t2d, coverage=coverage)

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise ValueError where the id is out of range or occurs in the rows."""
        if not 0 <= mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask token {mask_token_id} is outside the vocabulary of {self.vocab_size}."
            )
        count = int(self.token_counts()[mask_token_id])
        if count:
            raise ValueError(
                f"mask token {mask_token_id} occurs {count} times in {self.folder}; "
                "choose an id that no text uses."
            )

    def verify(self) -> None:
        """Compare every file with its checksum. Raises ValueError naming the damaged file."""
        for name, entry in self.manifest["files"].items():
            if file_sha256(self.folder / name) != entry["sha256"]:
                raise ValueError(f"{self.folder / name}: checksum differs; prepare the data again.")


def open_prepared(folder: str | Path) -> PreparedData:
    """Open the data set in `folder`, checking the manifest and the sizes of its files.

    Raises:
        ValueError: no prepared data set, another format, or a file of another size.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is not None and not {"digest", "files", "vocab_size"} <= set(manifest):
        raise ValueError(f"{folder / _MANIFEST}: damaged; prepare the data again.")
    if manifest is None:
        raise ValueError(f"{folder}: no prepared data set (no {_MANIFEST} of {FORMAT!r}).")
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(
                f"{path}: {found}, the manifest says {entry['bytes']}; prepare the data again."
            )
    return PreparedData(
        folder=folder,
        manifest=manifest,
        offsets=np.load(folder / "offsets.npy"),
        tokens=np.memmap(folder / "tokens.bin", np.int32, "r"),
        loss_mask=np.memmap(folder / "loss_mask.bin", np.bool_, "r"),
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared data set, or None where there is none that can be read."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


class PreparedWriter:
    """Writes rows into a folder beside `folder` and renames it at the end.

    Use as a context manager and call `finish` inside; without it nothing appears.
    """

    def __init__(self, folder: str | Path, vocab_size: int):
        """Raises ValueError where `folder` holds anything but a prepared data set."""
        self._target = Path(folder)
        if self._target.exists() and not _replaceable(self._target):
            raise ValueError(f"{self._target}: exists and is no prepared data set; not replaced.")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._part = self._target.with_name(f".{self._target.name}.{uuid.uuid4().hex[:8]}.part")
        self._part.mkdir()
        self._tokens = (self._part / "tokens.bin").open("wb")
        self._loss_mask = (self._part / "loss_mask.bin").open("wb")
        self._offsets = [0]
        self.token_counts = np.zeros(vocab_size, np.int64)
        self.supervised_counts = np.zeros(vocab_size, np.int64)

    def __enter__(self) -> "PreparedWriter":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._loss_mask.close()
        shutil.rmtree(self._part, ignore_errors=True)

    def add(self, tokens: np.ndarray, loss_mask: np.ndarray) -> None:
        """Append one row. Raises ValueError for an id outside the vocabulary."""
        vocab_size = len(self.token_counts)
        counts = count_tokens(tokens, np.ones(len(tokens), bool), vocab_size)
        self.token_counts += counts
        self.supervised_counts += count_tokens(tokens, loss_mask, vocab_size)
        self._tokens.write(np.ascontiguousarray(tokens, np.int32).tobytes())
        self._loss_mask.write(np.ascontiguousarray(loss_mask, np.bool_).tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))

    def finish(
        self,
        *,
        digest: str,
        settings: Mapping[str, Any],
        report: Mapping[str, Any],
        draft_vocab_size: int | None,
    ) -> PreparedData:
        """Write what is left, put the folder in place (an older data set goes) and open it."""
        for file in (self._tokens, self._loss_mask):
            file.flush()
            os.fsync(file.fileno())
        np.save(self._part / "offsets.npy", np.asarray(self._offsets, np.int64))
        np.save(self._part / "token_counts.npy", self.token_counts)
        np.save(self._part / "supervised_counts.npy", self.supervised_counts)
        if draft_vocab_size is not None:
            chosen = choose_vocabulary(self.supervised_counts, draft_vocab_size)
            write_safetensors(self._part / _VOCABULARY, {"d2t": chosen.d2t, "t2d": chosen.t2d})
        manifest = {
            "format": FORMAT,
            "digest": digest,
            "settings": dict(settings),
            "report": dict(report),
            "vocab_size": len(self.token_counts),
            "rows": len(self._offsets) - 1,
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(self._part.iterdir())
            },
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        with (self._part / _MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(self._part, self._target)
        return open_prepared(self._target)


def _replaceable(folder: Path) -> bool:
    """Whether a folder is empty or holds a prepared data set alone, be it a damaged one."""
    if not folder.is_dir():
        return False
    there = {path.name for path in folder.iterdir()}
    return not there or (_MANIFEST in there and there <= _FILES)


def _put_in_place(part: Path, target: Path) -> None:
    """Rename `part` to `target`; killed in between, there is no `target`, never half of one."""
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)
