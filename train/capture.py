"""Run the target over a prepared data set and store its hidden states for offline training."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from peagle_jax.models.target import Target
from train.data.hidden_store import HiddenStore, HiddenWriter, StoreInfo, open_store
from train.data.pack import Sample, lay_out
from train.data.prepared import PreparedData
from train.feed import target_states
from train.identity import target_fingerprint
from train.rows import TargetHead, target_head
from train.warm_start import check_taps

_SMALLEST = 64  # tokens that padded lengths are multiples of, at least


def capture(
    data: PreparedData,
    target: Target,
    taps: tuple[int, ...],
    folder: str | Path,
    *,
    name: str,
    dtype: str = "bfloat16",
    batch_size: int = 8,
    shard_rows: int = 65_536,
    process_index: int = 0,
    process_count: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> HiddenStore | None:
    """Store taps, normed last hidden states and greedy tokens of rows not in `folder` yet.

    Rows run in batches of similar length; each process takes every process_count-th row. A capture
    that was killed goes on where its last shard ended. None where no process has stored any yet.

    Raises:
        ValueError: the folder holds states of other rows, another target, taps or dtype; the rows
            are of another vocabulary than the target's; or the target has no such taps.
    """
    data.check_vocabulary(target.config.vocab_size)
    check_taps(taps, target.config.num_layers)
    info = StoreInfo(
        target=name,
        tap_layers=taps,
        hidden_size=target.config.hidden_size,
        dtype=dtype,
        last_hidden="normed",
        target_tokens=True,
        fingerprint=target_fingerprint(target),
        vocab_size=target.config.vocab_size,
        rows=data.rows_digest,
    )
    run, head = target_states(target, taps), target_head(target)
    greedy = functools.partial(jax.jit(TargetHead.greedy_tokens), head)
    kind = np.dtype(jax.numpy.dtype(dtype))
    with HiddenWriter(folder, info, shard_rows=shard_rows, prefix=f"p{process_index}") as writer:
        own = [
            row
            for row in range(process_index, len(data), process_count)
            if _name(row) not in writer.written
        ]
        done = 0
        for rows, length in _batches(data.lengths, own, batch_size):
            samples = [data[row] for row in rows]
            taps_of, hidden_of, tokens_of = _states(run, greedy, samples, length, batch_size)
            for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
                size = len(sample.tokens)
                writer.add(
                    _name(row),
                    sample.tokens,
                    sample.loss_mask,
                    taps_of[place, :size].astype(kind),
                    hidden_of[place, :size].astype(kind),
                    tokens_of[place, :size],
                )
            done += len(rows)
            if progress is not None:
                progress(done, len(own))
    # A process may have no row of its own, and be the first to end.
    return open_store(folder) if any(Path(folder).glob("*.safetensors")) else None


def _name(row: int) -> str:
    return f"{row:09d}"


def _batches(
    lengths: np.ndarray, rows: list[int], batch_size: int
) -> Iterator[tuple[list[int], int]]:
    """Rows of similar length together, with the padded length of each batch."""
    ordered = sorted(rows, key=lambda row: (int(lengths[row]), row))
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        longest = int(lengths[part[-1]])
        # Eight lengths to each doubling: few programs, and at most an eighth of padding.
        unit = max(_SMALLEST, 1 << max(0, longest.bit_length() - 4))
        yield part, -(-longest // unit) * unit


def _states(
    run: Callable, greedy: Callable, samples: list[Sample], length: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Taps, last hidden states and greedy tokens on the host, one sequence per sample."""
    rows = [lay_out([sample], length) for sample in samples]
    rows += [lay_out([], length)] * (batch_size - len(samples))
    arrays = (
        np.stack([row[field] for row in rows])[None]
        for field in ("tokens", "document_ids", "positions")
    )
    taps, hidden = run(*(jax.numpy.asarray(values) for values in arrays))
    return np.asarray(taps[0]), np.asarray(hidden[0]), np.asarray(greedy(hidden[0]))
