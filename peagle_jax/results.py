"""What generation gives back: text, ids, why it ended, and the figures of speculation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one request, or of several summed.

    Attributes:
      num_prompt_tokens, num_output_tokens: tokens, the one that ended the output included.
      num_rounds: target passes after prefill; each verifies the drafts of one draft pass.
      num_draft_rounds: rounds with at least one draft token.
      num_draft_tokens: tokens drafted in all.
      accepted_per_position: draft rounds whose i-th draft was accepted and kept, by i.
      time_to_first_token_s: seconds until prefill was ready, of the slowest request where summed.
      total_s: seconds until the output was ready, compilation included where there was any.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_rounds: int
    num_draft_rounds: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    time_to_first_token_s: float
    total_s: float

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / draft rounds; 1 where nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / max(self.num_draft_rounds, 1)

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...] | None:
        """Share of draft rounds whose i-th draft was accepted; None where nothing was drafted."""
        if self.num_draft_rounds == 0:
            return None
        return tuple(count / self.num_draft_rounds for count in self.accepted_per_position)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens after the first, over the seconds since the first was ready."""
        seconds = self.total_s - self.time_to_first_token_s
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values, the derived figures included."""
        return {
            **dataclasses.asdict(self),
            "accepted_per_position": list(self.accepted_per_position),
            "acceptance_length": self.acceptance_length,
            "acceptance_rate_per_position": self.acceptance_rate_per_position
            and list(self.acceptance_rate_per_position),
            "output_tokens_per_s": self.output_tokens_per_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one output token under the raw logits, and of the most likely ones."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One answer. `token_ids` holds the stop token where one ended the output; `text` does not.

    `draft_depths` gives for each token the place of the accepted draft that it is (from 1), 0
    where it is the target's own token.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    draft_depths: tuple[int, ...]
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """What `peagle generate --json` prints."""
        content: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_json(),
        }
        if self.logprobs is not None:
            content["logprobs"] = [dataclasses.asdict(one) for one in self.logprobs]
        return content


def count_acceptance(
    draft_depths: Sequence[int], round_drafts: Sequence[int], num_positions: int
) -> tuple[int, int, tuple[int, ...]]:
    """(draft rounds, drafted tokens, accepted per position) of the tokens that were kept.

    Every round ends with a token of the target's own (depth 0), or with the last token kept. A
    stop inside a block drops the rest of it, so tokens past a stop do not count.
    """
    rounds = drafted = 0
    accepted = [0] * num_positions
    last = len(draft_depths) - 1
    for index, (depth, drafts) in enumerate(zip(draft_depths, round_drafts, strict=True)):
        if depth > 0:
            accepted[depth - 1] += 1
        if drafts > 0 and (depth == 0 or index == last):
            rounds += 1
            drafted += drafts
    return rounds, drafted, tuple(accepted)


def combine(stats: Sequence[Stats]) -> Stats:
    """The figures of several requests together; times are those of the slowest."""
    positions = max((len(one.accepted_per_position) for one in stats), default=0)

    def place(one: Stats, index: int) -> int:
        counts = one.accepted_per_position
        return counts[index] if index < len(counts) else 0

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in stats)

    return Stats(
        num_prompt_tokens=total("num_prompt_tokens"),
        num_output_tokens=total("num_output_tokens"),
        num_rounds=total("num_rounds"),
        num_draft_rounds=total("num_draft_rounds"),
        num_draft_tokens=total("num_draft_tokens"),
        accepted_per_position=tuple(
            sum(place(one, index) for one in stats) for index in range(positions)
        ),
        time_to_first_token_s=max((one.time_to_first_token_s for one in stats), default=0.0),
        total_s=max((one.total_s for one in stats), default=0.0),
    )
