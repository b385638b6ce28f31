"""Truncate rows, choose which share a training sequence, and lay them side by side."""

import dataclasses
from collections.abc import Sequence

import numpy as np

PADDING = -1
"""Document id of the slots behind the last document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One row before the shift; the states are there in offline training only.

    tokens int32 [N], loss_mask bool [N], taps [N, A*H] and last_hidden [N, H] in a float type,
    target_tokens int32 [N], the target's greedy token at each row.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    taps: np.ndarray | None = None
    last_hidden: np.ndarray | None = None
    target_tokens: np.ndarray | None = None


STATES = ("taps", "last_hidden", "target_tokens")
"""Fields of a sample that offline training alone has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Bins of row numbers that fit one sequence, and the rows too long for any."""

    bins: tuple[tuple[int, ...], ...]
    too_long: tuple[int, ...]


def truncate(
    tokens: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first `max_length` tokens and their mask: int32 and bool, of one length.

    Raises:
        ValueError: ids and mask have different lengths.
    """
    ids = np.asarray(tokens, np.int32)
    mask = np.asarray(loss_mask, np.bool_)
    if ids.shape != mask.shape:
        raise ValueError(f"{len(ids)} tokens, but a loss mask of {len(mask)} entries.")
    return ids[:max_length], mask[:max_length]


def why_useless(tokens: np.ndarray, loss_mask: np.ndarray) -> str | None:
    """Why a row can teach nothing, or None. Its first token is never an input row's token."""
    if len(tokens) < 2:
        return "fewer than two tokens"
    if not loss_mask[1:].any():
        return "no supervised token"
    return None


def pack_rows(
    lengths: Sequence[int] | np.ndarray, capacity: int, *, seed: int, open_bins: int = 64
) -> Packing:
    """Rows in random order, each into the fullest of the open bins that has room.

    A function of its arguments alone, so that every process and every resumed run gets the same
    bins. Sorting by length would pack a little tighter, but would put like with like.

    Args:
        lengths: tokens of each row.
        capacity: tokens of a sequence.
        open_bins: bins kept open at a time; the fullest is closed for a new one.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.random.default_rng(seed).permutation(len(lengths))
    closed: list[tuple[int, ...]] = []
    bins: list[list[int]] = []
    room = np.zeros(open_bins, np.int64)
    too_long = []
    for row in order:
        length = int(lengths[row])
        if length > capacity:
            too_long.append(int(row))
            continue
        left = np.where(room[: len(bins)] >= length, room[: len(bins)], capacity + 1)
        best = int(left.argmin()) if len(bins) else 0
        if not bins or left[best] > capacity:
            if len(bins) < open_bins:
                best = len(bins)
                bins.append([])
            else:
                best = int(room.argmin())
                closed.append(tuple(bins[best]))
                bins[best] = []
            room[best] = capacity
        bins[best].append(int(row))
        room[best] -= length
    closed.extend(tuple(b) for b in bins)
    return Packing(bins=tuple(closed), too_long=tuple(sorted(too_long)))


def lay_out(samples: Sequence[Sample], capacity: int) -> dict[str, np.ndarray]:
    """Samples side by side in one sequence of `capacity` slots, padded behind.

    Returns tokens int32, loss_mask bool, document_ids int32 (0, 1, ..; PADDING), positions int32
    (from 0 in each document), and of STATES what the samples have.

    Raises:
        ValueError: the samples do not fit.
    """
    total = sum(len(s.tokens) for s in samples)
    if total > capacity:
        raise ValueError(f"{total} tokens do not fit a sequence of {capacity}.")
    out = {
        "tokens": np.zeros(capacity, np.int32),
        "loss_mask": np.zeros(capacity, np.bool_),
        "document_ids": np.full(capacity, PADDING, np.int32),
        "positions": np.zeros(capacity, np.int32),
    }
    for name in STATES:
        if samples and getattr(samples[0], name) is not None:
            states = getattr(samples[0], name)
            out[name] = np.zeros((capacity, *states.shape[1:]), states.dtype)
    at = 0
    for document, sample in enumerate(samples):
        place = slice(at, at + len(sample.tokens))
        out["tokens"][place] = sample.tokens
        out["loss_mask"][place] = sample.loss_mask
        out["document_ids"][place] = document
        out["positions"][place] = np.arange(len(sample.tokens))
        for name in STATES:
            if name in out:
                out[name][place] = getattr(sample, name)
        at = place.stop
    return out
