"""Acceptance length by real generation, per number of drafts, on held-out prompts.

This is the product's own decoding loop on the target and the drafter, not an estimate from training
sums.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from peagle_jax.decoding.generate import make_generate_fn
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.stats import AcceptanceStats, merge_stats, request_stats
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from train.data.pack import Sample
from train.data.pipeline import SampleSource

_SLOTS = 64  # cache lengths are rounded up to this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What generation with K drafts gave. tokens: generated, over all prompts."""

    num_speculative_tokens: int
    prompts: int
    tokens: int
    stats: AcceptanceStats

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompts": self.prompts,
            "tokens": self.tokens,
            **self.stats.as_dict(),
        }


def prompt_of(sample: Sample) -> list[int]:
    """The tokens of a row before the first one that the assistant generated.

    Raises:
        ValueError: the row starts with a generated token, or has none.
    """
    supervised = np.flatnonzero(sample.loss_mask)
    if not len(supervised) or supervised[0] == 0:
        raise ValueError("a row without a prompt, or without an answer.")
    return [int(token) for token in sample.tokens[: supervised[0]]]


def prompts_of(data: SampleSource, count: int) -> tuple[list[list[int]], list[str]]:
    """The prompts of the first `count` rows that have one, and what the rows passed over lack."""
    prompts: list[list[int]] = []
    skipped = []
    for row in range(len(data)):
        if len(prompts) == count:
            break
        try:
            prompts.append(prompt_of(data[row]))
        except ValueError as error:
            skipped.append(f"row {row}: {error}")
    return prompts, skipped


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    num_speculative_tokens: Sequence[int],
    *,
    params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    method: str | None = None,
    batch_size: int = 8,
    eos_token_ids: Sequence[int] | None = None,
) -> list[Evaluation]:
    """Generate answers with each number of drafts K and count what was accepted.

    Raises:
        ValueError: no prompt, or a prompt and answer beyond the target's context.
    """
    if not prompts:
        raise ValueError("no prompts to evaluate on.")
    longest, context = max(map(len, prompts)), target.config.max_positions
    most = longest + (params.max_tokens or 256)
    if most > context:
        raise ValueError(
            f"a prompt of {longest} tokens and an answer of {most - longest} (--max-tokens) do "
            f"not fit the target's context of {context}; lower --max-tokens to at most "
            f"{context - longest}."
        )
    done = []
    for count in num_speculative_tokens:
        generate = make_generate_fn(
            target,
            drafter,
            method,
            cache_length=min(-(-(most + count + 1) // _SLOTS) * _SLOTS, context),
            num_speculative_tokens=count,
            eos_token_ids=eos_token_ids,
        )
        parts, tokens = [], 0
        for start in range(0, len(prompts), batch_size):
            own = list(prompts[start : start + batch_size])
            state = generate.run(own, [params] * len(own), batch_size=batch_size)
            depths, drafts = np.asarray(state.draft_depth), np.asarray(state.round_drafts)
            lengths = np.asarray(state.requests.prompt_length)
            ends = np.asarray(state.committed)
            for row in range(len(own)):
                answer = slice(int(lengths[row]), int(ends[row]))
                parts.append(request_stats(depths[row, answer], drafts[row, answer], count))
                tokens += answer.stop - answer.start
        done.append(
            Evaluation(
                num_speculative_tokens=count,
                prompts=len(prompts),
                tokens=tokens,
                stats=merge_stats(parts),
            )
        )
    return done
