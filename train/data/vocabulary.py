"""Token counts and the draft vocabulary chosen from them. Heads and losses only see its maps."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Which target ids a drafter can propose.

    Attributes:
        d2t: int64 [Vd], offsets: draft id i means target id i + d2t[i]. Ids ascend.
        t2d: bool [V], True for kept target ids.
        coverage: share of the counted tokens that are kept.
    """

    d2t: np.ndarray
    t2d: np.ndarray
    coverage: float

    @property
    def target_ids(self) -> np.ndarray:
        """Target id of each draft id, int64 [Vd], ascending."""
        return np.arange(len(self.d2t), dtype=np.int64) + self.d2t


def count_tokens(tokens: np.ndarray, loss_mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs where the mask is True, int64 [V].

    Raises:
        ValueError: an id outside the vocabulary.
    """
    kept = np.asarray(tokens)[np.asarray(loss_mask, bool)]
    if kept.size and not (0 <= kept.min() and kept.max() < vocab_size):
        wrong = int(kept.max() if kept.max() >= vocab_size else kept.min())
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}.")
    return np.bincount(kept, minlength=vocab_size).astype(np.int64)


def choose_vocabulary(counts: np.ndarray, size: int) -> DraftVocabulary:
    """The `size` most frequent ids; equal counts go to the lower id, so unused ids fill up.

    Raises:
        ValueError: `size` is not between 1 and the target's vocabulary.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"the draft vocabulary cannot have {size} entries; the target has {vocab_size}."
        )
    # Stable, so equal counts keep ascending ids.
    by_count = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    kept = np.sort(by_count[:size])
    t2d = np.zeros(vocab_size, bool)
    t2d[kept] = True
    total = int(np.sum(counts))
    return DraftVocabulary(
        d2t=kept - np.arange(size, dtype=np.int64),
        t2d=t2d,
        coverage=float(np.sum(counts[kept]) / total) if total else 1.0,
    )
