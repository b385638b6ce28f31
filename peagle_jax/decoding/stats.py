"""Acceptance statistics, counted from the records that the loop keeps for every output token.

Counting from the tokens that are really in the output makes the figures right when a stop id, the
length limit or a stop string cuts an accepted block short: what lies past the cut does not count.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceStats:
    """Counts over one or more requests.

    Attributes:
      num_drafts: rounds that had at least one draft.
      num_draft_tokens: drafts in all.
      num_accepted_tokens: drafts that are in the output; the target's own tokens do not count.
      num_accepted_per_position: the same for each position of the block, K of them.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / draft rounds; 1 when nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / drafts; None when nothing was drafted."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...] | None:
        """Share of draft rounds whose i-th draft was accepted; None when nothing was drafted."""
        if not self.num_drafts:
            return None
        return tuple(count / self.num_drafts for count in self.num_accepted_per_position)

    def as_dict(self) -> dict:
        """Everything above, ready for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_per_position": self.acceptance_rate_per_position,
        }


def request_stats(
    draft_depth: Sequence[int] | np.ndarray,
    round_drafts: Sequence[int] | np.ndarray,
    num_speculative_tokens: int,
) -> AcceptanceStats:
    """Statistics of one request from its output tokens' records (see DecodeState), cut anywhere.

    The first output token comes from prefill. A round's tokens have depths 1, 2, ..., a, 0.
    """
    depth = np.asarray(draft_depth, np.int64)
    drafts = np.asarray(round_drafts, np.int64)
    starts = np.zeros(depth.shape, bool)
    starts[1:] = (depth[1:] == 1) | ((depth[1:] == 0) & (depth[:-1] == 0))
    per_position = [int(np.sum(depth == i)) for i in range(1, num_speculative_tokens + 1)]
    return AcceptanceStats(
        num_drafts=int(np.sum(starts & (drafts > 0))),
        num_draft_tokens=int(np.sum(drafts[starts])),
        num_accepted_per_position=tuple(per_position),
    )


def merge_stats(parts: Iterable[AcceptanceStats]) -> AcceptanceStats:
    """The sum over requests, positions padded to the longest block."""
    parts = list(parts)
    width = max((len(part.num_accepted_per_position) for part in parts), default=0)
    per_position = np.zeros(width, np.int64)
    for part in parts:
        counts = np.asarray(part.num_accepted_per_position, np.int64)
        per_position[: len(counts)] += counts
    return AcceptanceStats(
        num_drafts=sum(part.num_drafts for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_per_position=tuple(per_position.tolist()),
    )
