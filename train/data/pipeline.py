"""Batches of packed sequences in an order that can be resumed, each process reading its own part.

Rows are packed once into sequences (`pack`); the sequences are shuffled anew each epoch and cut
into global batches; every process loads the contiguous part of each batch that is its own. So the
global order depends on neither the number of processes nor where a run was interrupted. Built on
grain. Nothing here imports jax: the caller passes its process index and count, and data workers
leave devices and distributed state alone.

The last, incomplete batch of an epoch is dropped, or with `drop_remainder=False` filled up with
empty sequences (document ids all PADDING), so that shapes never change.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from train.data.pack import STATES, Packing, Sample, lay_out, pack_rows


@runtime_checkable
class SampleSource(Protocol):
    """Random access to rows: `PreparedData` and `HiddenStore` are such."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64."""

    @property
    def digest(self) -> str:
        """Changes when any row changes."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sample: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """Some rows of a source, as a source."""

    source: SampleSource
    rows: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.source.lengths[self.rows]

    @property
    def digest(self) -> str:
        chosen = np.asarray(self.rows, np.int64).tobytes()
        return hashlib.sha256(self.source.digest.encode() + chosen).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Sample:
        return self.source[int(self.rows[row])]


def hold_out(source: SampleSource, count: int, *, seed: int = 0) -> tuple[Subset, Subset]:
    """Rows to train on, and `count` rows to validate on.

    Raises:
        ValueError: that leaves none to train on.
    """
    if not 0 <= count < len(source):
        raise ValueError(f"cannot hold out {count} of {len(source)} rows.")
    order = np.random.default_rng(seed).permutation(len(source))
    return (
        Subset(source=source, rows=np.sort(order[count:])),
        Subset(source=source, rows=np.sort(order[:count])),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How rows become batches.

    Attributes:
        sequence_length: slots of a packed sequence.
        global_batch: sequences of a batch, over all processes.
        seed: of packing and shuffling.
        pack: several rows per sequence; otherwise one.
        shuffle: a new order each epoch; otherwise the packed order.
        epochs: passes over the data; None goes on for ever.
        drop_remainder: what happens to the last, incomplete batch of an epoch.
        process_index, process_count: this process and how many share a batch.
        read_threads: threads that read ahead; 0 reads when asked.
    """

    sequence_length: int
    global_batch: int
    seed: int = 0
    pack: bool = True
    shuffle: bool = True
    epochs: int | None = 1
    drop_remainder: bool = True
    process_index: int = 0
    process_count: int = 1
    read_threads: int = 4

    def __post_init__(self):
        if self.global_batch < 1 or self.sequence_length < 2:
            raise ValueError(
                f"global_batch is {self.global_batch}, sequence_length {self.sequence_length}; "
                "at least 1 and 2."
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process {self.process_index} of {self.process_count} cannot be.")
        if self.global_batch % self.process_count:
            raise ValueError(
                f"global_batch is {self.global_batch}; it must be a multiple of the "
                f"{self.process_count} processes."
            )
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; give 1 or more, or None.")


class _LoadPart:
    """Row numbers of a global batch to this process's part of it, as arrays. Picklable."""

    def __init__(self, source: SampleSource, packing: Packing, config: PipelineConfig):
        self._source, self._bins, self._config = source, packing.bins, config

    def __call__(self, batch: np.ndarray) -> dict[str, np.ndarray]:
        config = self._config
        part = config.global_batch // config.process_count
        own = range(config.process_index * part, (config.process_index + 1) * part)
        sequences = []
        for place in own:
            rows = self._bins[batch[place]] if place < len(batch) else ()
            samples = [self._source[row] for row in rows]
            sequences.append(lay_out(samples, config.sequence_length))
        self._fill_states(sequences)
        return {name: np.stack([s[name] for s in sequences]) for name in sequences[0]}

    def _fill_states(self, sequences: list[dict[str, np.ndarray]]) -> None:
        """Empty sequences get states of zeros where the source has states."""
        example = self._source[0] if any(len(s) == 4 for s in sequences) else None
        if example is None:
            return
        for name in STATES:
            states = getattr(example, name)
            for sequence in sequences if states is not None else ():
                if name not in sequence:
                    shape = (self._config.sequence_length, *states.shape[1:])
                    sequence[name] = np.zeros(shape, states.dtype)


class Batches:
    """Iterator over this process's part of the global batches, with a position.

    Each item holds tokens, loss_mask, document_ids and positions [b, S], and of STATES what
    the source has, taps [b, S, A*H], last_hidden [b, S, H], target_tokens [b, S]; b is global_batch
    / process_count.
    """

    def __init__(self, dataset: Any, identity: str, packing: Packing, num_batches: int | None):
        self._iterator = iter(dataset)
        self._identity = identity
        self.packing = packing
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Position behind the last batch taken, as JSON values; `restore` goes back to it."""
        return {"identity": self._identity, "position": self._iterator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position saved by `state`, by any number of processes.

        Raises:
            ValueError: the position belongs to other data or another batch layout.
        """
        if state.get("identity") != self._identity:
            raise ValueError(
                "the saved data position belongs to other data, or to another sequence length, "
                "batch size, seed or packing; resume with the settings of the interrupted run."
            )
        self._iterator.set_state(dict(state["position"]))


def batches(source: SampleSource, config: PipelineConfig) -> Batches:
    """Batches of `source`. Rows longer than a sequence are left out: `Batches.packing.too_long`.

    Raises:
        ValueError: no complete batch in an epoch, or no row that fits.
    """
    packing = _packing(source, config)
    if not packing.bins:
        raise ValueError(
            f"none of the {len(source)} rows fits a sequence of {config.sequence_length} tokens."
        )
    if config.drop_remainder and len(packing.bins) < config.global_batch:
        raise ValueError(
            f"{len(packing.bins)} packed sequences do not fill a batch of {config.global_batch}; "
            "lower global_batch, or keep the remainder."
        )
    dataset = grain.MapDataset.range(len(packing.bins)).seed(config.seed)
    if config.shuffle:
        dataset = dataset.shuffle()
    dataset = dataset.batch(config.global_batch, drop_remainder=config.drop_remainder)
    per_epoch = len(dataset)
    dataset = dataset.repeat(config.epochs).map(_LoadPart(source, packing, config))
    threads = config.read_threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    identity = hashlib.sha256(
        json.dumps(
            [
                source.digest,
                config.sequence_length,
                config.global_batch,
                config.seed,
                config.pack,
                config.shuffle,
                config.drop_remainder,
            ]
        ).encode()
    ).hexdigest()
    return Batches(
        dataset.to_iter_dataset(options),
        identity,
        packing,
        None if config.epochs is None else per_epoch * config.epochs,
    )


def _packing(source: SampleSource, config: PipelineConfig) -> Packing:
    lengths = source.lengths
    if config.pack:
        return pack_rows(lengths, config.sequence_length, seed=config.seed)
    fits = lengths <= config.sequence_length
    return Packing(
        bins=tuple((int(row),) for row in np.flatnonzero(fits)),
        too_long=tuple(int(row) for row in np.flatnonzero(~fits)),
    )
