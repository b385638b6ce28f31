"""The parameters of a batch of requests as arrays, one row each, and which features they need."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from peagle_jax.decoding import keys
from peagle_jax.decoding.params import RULES, Number, SamplingParams, check_request

MATCH, REJECTION, BLOCK = range(len(RULES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """What a decode program can do beyond greedy decoding: static, one program for each set.

    Attributes:
      sampled: temperature, top-k, top-p, min-p and the match rule.
      penalties: logit bias, the three penalties and the token minimum.
      draft_law: rejection and block verification, which keep the drafts' own distributions.
      logprobs: None for none, n for the log-probability of each token and of the n most likely.
    """

    sampled: bool = False
    penalties: bool = False
    draft_law: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        if self.draft_law and not self.sampled:
            raise ValueError("Features.draft_law needs Features.sampled")

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Features":
        """The smallest set that serves all of these requests."""
        asked = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            sampled=any(p.samples for p in params),
            penalties=any(p.edits_logits for p in params),
            draft_law=any(p.samples_drafts for p in params),
            logprobs=max(asked) if asked else None,
        )

    def covers(self, other: "Features") -> bool:
        """Whether a program with these features can serve what needs `other`."""
        logprobs = other.logprobs is None or (
            self.logprobs is not None and self.logprobs >= other.logprobs
        )
        return (
            logprobs
            and self.sampled >= other.sampled
            and self.penalties >= other.penalties
            and self.draft_law >= other.draft_law
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """A batch of requests; a row beyond the requests has prompt_length 0 and is born finished.

    Attributes:
      prompt_length: tokens of the prompt.
      limit: most tokens of prompt and output together.
      min_tokens: output tokens before any id of `stop_ids` may be drawn.
      stop_ids: ids that end the output; unused places hold the vocabulary size.
      num_drafts: most draft tokens per round.
      seeds: see `keys.seed_words`.
      temperature: 0 is greedy.
      top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
      rule: MATCH, REJECTION or BLOCK.
      draft_temperature: 0 where the drafts are argmax drafts.
      repetition_penalty: 1 is off. presence_penalty, frequency_penalty: 0 is off.
      bias: added to the logits; None in programs without `Features.penalties`.
    """

    prompt_length: Any  # Int[Array, "B"]
    limit: Any  # Int[Array, "B"]
    min_tokens: Any  # Int[Array, "B"]
    stop_ids: Any  # Int[Array, "B M"]
    num_drafts: Any  # Int[Array, "B"]
    seeds: Any  # UInt32[Array, "B 2"]
    temperature: Any  # Float[Array, "B"]
    top_k: Any  # Int[Array, "B"]
    top_p: Any  # Float[Array, "B"]
    min_p: Any  # Float[Array, "B"]
    rule: Any  # Int[Array, "B"]
    draft_temperature: Any  # Float[Array, "B"]
    repetition_penalty: Any  # Float[Array, "B"]
    presence_penalty: Any  # Float[Array, "B"]
    frequency_penalty: Any  # Float[Array, "B"]
    bias: Any = None  # Float[Array, "B V"] | None


def make_requests(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    batch_size: int,
    vocab_size: int,
    context_length: int,
    eos_token_ids: Sequence[int],
    num_speculative_tokens: int,
    features: Features,
    max_stop_ids: int,
) -> Requests:
    """Check every request and write it into one row.

    Raises: ValueError naming the request and field that is bad, or the feature that the program
      was not built with.
    """
    if len(prompts) != len(params):
        raise ValueError(f"{len(prompts)} prompts and {len(params)} SamplingParams")
    if not 0 < len(prompts) <= batch_size:
        raise ValueError(f"{len(prompts)} prompts do not fit a batch of {batch_size}")
    limits, stops = [], []
    for row, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        try:
            limits.append(
                check_request(prompt, one, vocab_size=vocab_size, context_length=context_length)
            )
            stops.append(_stop_ids(one, eos_token_ids, max_stop_ids))
            _check_features(one, features)
        except ValueError as error:
            raise ValueError(f"request {row}: {error}") from None

    def padded(values: Sequence, dtype: np.typing.DTypeLike, fill: Number) -> np.ndarray:
        rest = [fill] * (batch_size - len(prompts))
        return np.asarray([*values, *rest], dtype)

    stop_ids = np.full((batch_size, max_stop_ids), vocab_size, np.int32)
    for row, ids in enumerate(stops):
        stop_ids[row, : len(ids)] = ids
    bias = None
    if features.penalties:
        bias = np.zeros((batch_size, vocab_size), np.float32)
        for row, one in enumerate(params):
            for token, value in one.logit_bias.items():
                bias[row, token] = value
    most = num_speculative_tokens
    columns = dict(
        prompt_length=padded([len(p) for p in prompts], np.int32, 0),
        limit=padded(limits, np.int32, 0),
        min_tokens=padded([p.min_tokens for p in params], np.int32, 0),
        stop_ids=stop_ids,
        num_drafts=padded(
            [
                most if p.num_speculative_tokens is None else min(p.num_speculative_tokens, most)
                for p in params
            ],
            np.int32,
            0,
        ),
        seeds=np.concatenate(
            [
                keys.seed_words([p.seed for p in params]),
                np.zeros((batch_size - len(params), 2), np.uint32),
            ]
        ),
        temperature=padded([p.temperature for p in params], np.float32, 0),
        top_k=padded([min(p.top_k, vocab_size) for p in params], np.int32, 0),
        top_p=padded([p.top_p for p in params], np.float32, 1),
        min_p=padded([p.min_p for p in params], np.float32, 0),
        rule=padded([RULES.index(p.rule) for p in params], np.int32, MATCH),
        draft_temperature=padded([_draft_temperature(p) for p in params], np.float32, 0),
        repetition_penalty=padded([p.repetition_penalty for p in params], np.float32, 1),
        presence_penalty=padded([p.presence_penalty for p in params], np.float32, 0),
        frequency_penalty=padded([p.frequency_penalty for p in params], np.float32, 0),
        bias=bias,
    )
    return Requests(
        **{name: None if column is None else jnp.array(column) for name, column in columns.items()}
    )


def _draft_temperature(params: SamplingParams) -> Number:
    if not params.samples_drafts:
        return 0.0
    if params.draft_temperature is None:
        return params.temperature
    return params.draft_temperature


def _stop_ids(params: SamplingParams, eos_token_ids: Sequence[int], max_stop_ids: int) -> list[int]:
    ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
    if len(ids) > max_stop_ids:
        raise ValueError(
            f"stop_token_ids and the model's end ids are {len(ids)} ids, the program holds "
            f"{max_stop_ids}; raise max_stop_ids"
        )
    return ids


def _check_features(params: SamplingParams, features: Features) -> None:
    needed = Features.of([params])
    if not features.covers(needed):
        raise ValueError(
            f"asks for {needed}, the program was built with {features}; build it with "
            "Features.of(params)"
        )


def is_stop(requests: Requests, tokens: Int[Array, "B N"]) -> Array:
    """Which tokens are among the row's stop ids; bool [B, N]."""
    return jnp.any(tokens[:, :, None] == requests.stop_ids[:, None, :], axis=-1)
