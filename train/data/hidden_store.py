"""Target hidden states on disk: sharded, checksummed safetensors files, checked on every read.

A folder of `*.safetensors` shards. Each holds many samples one after the other:

    tokens int32 [T] · loss_mask bool [T] · taps [T, A*H] · last_hidden [T, H]
    target_tokens int32 [T], the target's greedy token at each row, where the store says so

and in its metadata the store's description and the table of its samples (name, first row, rows,
CRC-32 of their bytes). Shards appear whole or not at all, and need no index beside them, so that
several processes can write into one folder and a capture can go on after a kill. Who computes the
states: the capture command. Arrays are NumPy; float types may be those of `ml_dtypes`.
"""

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from peagle_jax.checkpoints.safetensors_file import (
    SafetensorsFile,
    open_safetensors,
    write_safetensors,
)
from train.data.pack import Sample

FORMAT = "peagle-jax hidden states 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What all samples of a store have in common.

    Attributes:
        target: name of the target model, for people and error messages.
        tap_layers: tapped layers in convention T (layers executed), ascending.
        hidden_size: width of one tapped state and of the last hidden state.
        dtype: NumPy name of the states' type ("bfloat16", "float32", ...).
        last_hidden: "normed" when behind the target's final norm, "residual" when before it.
        target_tokens: whether the target's greedy tokens are there, or training computes them.
        fingerprint: of the target (`identity`), vocab_size: its ids; rows: digest of the prepared
            rows that were captured. None in a store that does not say.
    """

    target: str
    tap_layers: tuple[int, ...]
    hidden_size: int
    dtype: str = "bfloat16"
    last_hidden: str = "normed"
    target_tokens: bool = False
    fingerprint: str | None = None
    vocab_size: int | None = None
    rows: str | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the arrays of a shard."""
        more = ("target_tokens",) if self.target_tokens else ()
        return ("tokens", "loss_mask", "taps", "last_hidden", *more)

    @property
    def taps_width(self) -> int:
        return len(self.tap_layers) * self.hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where a sample lies."""

    shard: SafetensorsFile
    start: int
    rows: int
    crc: int


class HiddenWriter:
    """Appends samples to a store; a shard is written when it is full, and at the end.

    Use as a context manager: leaving it without an error writes the last shard. Samples of an
    unfinished shard are lost with the process and simply not in `written` of the next one.
    """

    def __init__(
        self, folder: str | Path, info: StoreInfo, *, shard_rows: int = 65_536, prefix: str = "p0"
    ):
        """`prefix` must differ between processes that write into one folder.

        Raises:
            ValueError: the folder holds states of another description.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._info, self._shard_rows, self._prefix = info, shard_rows, prefix
        self._samples: list[tuple[str, dict[str, np.ndarray]]] = []
        self._rows = 0
        self.written: set[str] = set()
        if any(self._folder.glob("*.safetensors")):
            there = open_store(self._folder)
            if there.info != info:
                raise ValueError(
                    f"{folder}: holds other states ({differences(there.info, info)}); use another "
                    "folder."
                )
            self.written.update(there.names)

    def __enter__(self) -> "HiddenWriter":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()

    def add(
        self,
        name: str,
        tokens: np.ndarray,
        loss_mask: np.ndarray,
        taps: np.ndarray,
        last_hidden: np.ndarray,
        target_tokens: np.ndarray | None = None,
    ) -> None:
        """Append the sample `name`; target_tokens where the store's description says so.

        Raises:
            ValueError: naming the sample: a name already there, target tokens missing or not
                asked for, states that are not finite, or of another width, number of rows or dtype.
        """
        if name in self.written:
            raise ValueError(f"sample {name!r} is in the store already.")
        sample = {
            "tokens": np.asarray(tokens, np.int32),
            "loss_mask": np.asarray(loss_mask, np.bool_),
            "taps": np.asarray(taps),
            "last_hidden": np.asarray(last_hidden),
        }
        if (target_tokens is not None) != self._info.target_tokens:
            wants = "needs" if self._info.target_tokens else "has no"
            raise ValueError(f"sample {name!r}: the store {wants} target_tokens.")
        if target_tokens is not None:
            sample["target_tokens"] = np.asarray(target_tokens, np.int32)
        _check(f"sample {name!r}", sample, self._info)
        self._samples.append((name, sample))
        self.written.add(name)
        self._rows += len(tokens)
        if self._rows >= self._shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write the samples that wait into a shard of their own."""
        if not self._samples:
            return
        table, start = [], 0
        for name, sample in self._samples:
            rows = len(sample["tokens"])
            table.append([name, start, rows, _crc(sample)])
            start += rows
        joined = {
            tensor: np.concatenate([sample[tensor] for _, sample in self._samples])
            for tensor in self._info.tensors
        }
        metadata = {
            "format": FORMAT,
            "store": json.dumps(dataclasses.asdict(self._info)),
            "samples": json.dumps(table),
        }
        write_safetensors(self._free_name(), joined, metadata)
        self._samples, self._rows = [], 0

    def _free_name(self) -> Path:
        number = 0
        while (path := self._folder / f"{self._prefix}-{number:05d}.safetensors").exists():
            number += 1
        return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStore:
    """An open store. Samples are in order of their names, whoever wrote them."""

    folder: Path
    info: StoreInfo
    names: tuple[str, ...]
    entries: Mapping[str, _Entry]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        return self.read(self.names[index])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.asarray([self.entries[name].rows for name in self.names], np.int64)

    @functools.cached_property
    def digest(self) -> str:
        """Names the samples and their contents."""
        rows = [(name, self.entries[name].rows, self.entries[name].crc) for name in self.names]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def row_name(self, index: int) -> str:
        return f"{self.folder} sample {self.names[index]!r}"

    def read(self, name: str) -> Sample:
        """Sample `name`, checked.

        Raises:
            ValueError: naming sample and file: the checksum differs, a state is not finite, or the
                number of rows or the width is not what the store says.
        """
        entry = self.entries[name]
        where = f"{entry.shard.path}: sample {name!r}"
        place = slice(entry.start, entry.start + entry.rows)
        sample = {}
        for tensor in self.info.tensors:
            shape = entry.shard.info(tensor).shape
            if not shape or shape[0] < place.stop:
                raise ValueError(
                    f"{where}: {tensor} has shape {list(shape)}, rows {place.start} to "
                    f"{place.stop} are needed."
                )
            sample[tensor] = entry.shard.read(
                tensor, (place, *(slice(0, size) for size in shape[1:]))
            )
        _check(where, sample, self.info)
        if _crc(sample) != entry.crc:
            raise ValueError(f"{where}: checksum differs; the file is damaged, capture it again.")
        return Sample(**sample)

    def check_tokens(self, vocab_size: int, mask_token_id: int | None) -> None:
        """Raise ValueError for a token outside the vocabulary, or one that is the mask token."""
        shards = {entry.shard.path: entry.shard for entry in self.entries.values()}
        for path, shard in shards.items():
            tokens = shard.read("tokens")
            if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab_size):
                raise ValueError(
                    f"{path}: token ids from {tokens.min()} to {tokens.max()}, the target's "
                    f"vocabulary has {vocab_size}; capture data prepared for this target."
                )
            count = int((tokens == mask_token_id).sum()) if mask_token_id is not None else 0
            if count:
                raise ValueError(
                    f"mask token {mask_token_id} occurs {count} times in {path}; choose an id that "
                    "no text uses."
                )

    def verify(self) -> None:
        """Read and check every sample. Raises ValueError naming the first damaged one."""
        for name in self.names:
            self.read(name)


def open_store(folder: str | Path) -> HiddenStore:
    """Open the store in `folder`; reads the shards' headers only.

    Raises:
        ValueError: no shard, a file that is no shard, shards of different descriptions, or a
            sample that is there twice.
    """
    folder = Path(folder)
    info: StoreInfo | None = None
    entries: dict[str, _Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shard = open_safetensors(path)
        if shard.metadata.get("format") != FORMAT:
            raise ValueError(f"{path}: not a shard of hidden states (format {FORMAT!r}).")
        own = json.loads(shard.metadata["store"])
        own = StoreInfo(**{**own, "tap_layers": tuple(own["tap_layers"])})
        if info is not None and own != info:
            raise ValueError(f"{path}: unlike the other shards ({differences(info, own)}).")
        info = own
        for name, start, rows, crc in json.loads(shard.metadata["samples"]):
            if name in entries:
                raise ValueError(
                    f"{path}: sample {name!r} is also in {entries[name].shard.path.name}."
                )
            entries[name] = _Entry(shard=shard, start=start, rows=rows, crc=crc)
    if info is None:
        raise ValueError(f"{folder}: no *.safetensors shard of hidden states.")
    return HiddenStore(folder=folder, info=info, names=tuple(sorted(entries)), entries=entries)


def differences(there: StoreInfo, now: StoreInfo) -> str:
    """In what two descriptions differ: "name is X, not Y", joined."""
    pairs = zip(dataclasses.asdict(there).items(), dataclasses.asdict(now).values(), strict=True)
    return "; ".join(f"{name} is {old!r}, not {new!r}" for (name, old), new in pairs if old != new)


def _check(where: str, sample: Mapping[str, np.ndarray], info: StoreInfo) -> None:
    rows = len(sample["tokens"])
    shapes = {
        "tokens": (rows,),
        "loss_mask": (rows,),
        "taps": (rows, info.taps_width),
        "last_hidden": (rows, info.hidden_size),
    }
    if info.target_tokens:
        shapes["target_tokens"] = (rows,)
    for tensor, shape in shapes.items():
        if sample[tensor].shape != shape:
            raise ValueError(
                f"{where}: {tensor} has shape {list(sample[tensor].shape)}, "
                f"expected {list(shape)} (rows, width)."
            )
    for tensor in ("taps", "last_hidden"):
        states = sample[tensor]
        if states.dtype.name != info.dtype:
            raise ValueError(f"{where}: {tensor} is {states.dtype.name}, expected {info.dtype}.")
        finite = np.isfinite(states).all(axis=1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            raise ValueError(f"{where}: {tensor} is not finite in row {row}.")


def _crc(sample: Mapping[str, np.ndarray]) -> int:
    crc = 0
    for values in sample.values():
        # As bytes: dtypes from ml_dtypes have no buffer protocol.
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        crc = zlib.crc32(memoryview(flat), crc)
    return crc
