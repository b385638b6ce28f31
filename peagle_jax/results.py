"""What generation gives back: text, ids, why it ended, and the figures of speculation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from peagle_jax.decoding.stats import AcceptanceStats, merge_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one request, or of several together.

    Attributes:
      num_prompt_tokens, num_output_tokens: tokens, the one that ended the output included.
      num_rounds: target passes after prefill; each verifies the drafts of one draft pass.
      acceptance: what was drafted and accepted.
      time_to_first_token_s: seconds until prefill was ready, of the slowest request where several.
      total_s: seconds until the output was ready. Neither holds compilation, which comes before.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_rounds: int
    acceptance: AcceptanceStats
    time_to_first_token_s: float
    total_s: float

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / draft rounds; 1 where nothing was drafted."""
        return self.acceptance.acceptance_length

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...] | None:
        """Share of draft rounds whose i-th draft was accepted; None where nothing was drafted."""
        return self.acceptance.acceptance_rate_per_position

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens after the first, over the seconds since the first was ready."""
        seconds = self.total_s - self.time_to_first_token_s
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values, the derived figures included."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_rounds": self.num_rounds,
            **self.acceptance.as_dict(),
            "time_to_first_token_s": self.time_to_first_token_s,
            "total_s": self.total_s,
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


def combine(stats: Sequence[Stats]) -> Stats:
    """The figures of several requests together; times are those of the slowest."""
    return Stats(
        num_prompt_tokens=sum(one.num_prompt_tokens for one in stats),
        num_output_tokens=sum(one.num_output_tokens for one in stats),
        num_rounds=sum(one.num_rounds for one in stats),
        acceptance=merge_stats(one.acceptance for one in stats),
        time_to_first_token_s=max((one.time_to_first_token_s for one in stats), default=0.0),
        total_s=max((one.total_s for one in stats), default=0.0),
    )
