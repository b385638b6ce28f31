"""What one request asks of the sampler, checked before anything runs. No arrays here."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

Rule = Literal["match", "rejection", "block"]
Number = int | float
RULES: tuple[Rule, ...] = ("match", "rejection", "block")

MAX_SPECULATIVE_TOKENS = 31
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-30  # below it float32 has no normal numbers left to divide by


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The order in which the fields act on the logits is that of `peagle_jax.decoding.logits`.

    Attributes:
      temperature: 0 is greedy (argmax, the lowest id wins a tie); else logits are divided by it.
      top_k: keep the k largest logits and everything tied with the last of them; 0 is off.
      top_p: keep the fewest tokens whose probability reaches this; the one that crosses stays.
      min_p: drop tokens below this share of the most likely token's probability; 0 is off.
      seed: every random draw of the request is a function of it and of positions, nothing else.
      repetition_penalty: divides positive and multiplies negative logits of ids that occur in the
        prompt or the output; 1 is off.
      presence_penalty: subtracted once from ids that occur in the output.
      frequency_penalty: subtracted per occurrence in the output.
      logit_bias: added to the logits of these ids, before everything else.
      stop: strings that end the text; judged by the engine, the pure loop knows no text.
      stop_token_ids: ids that end the output, beside the model's own end ids.
      max_tokens: most output tokens; None is as many as the context holds.
      min_tokens: no id that would end the output is drawn before this many tokens.
      ignore_eos: the model's own end ids do not end the output.
      logprobs: None for none, n for the log-probability of each token and of the n most likely.
      rule: how drafts are checked when sampling. "match" (the default) draws the target's own
        token with noise keyed by (seed, position) and accepts drafts that equal it, so the text for
        a seed is that of plain decoding; "rejection" and "block" are rejection sampling and block
        verification of drafts that are sampled themselves.
      draft_temperature: under "rejection" and "block", the temperature at which drafts are drawn;
        None is `temperature`, 0 takes the most likely draft (q is then one-hot).
      num_speculative_tokens: drafts per round for this request; None is all that the program
        drafts, 0 none. Data of the program, never a new one.
    """

    temperature: Number = 0.0
    top_k: int = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    seed: int = 0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Mapping[int, Number] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    rule: Rule = "match"
    draft_temperature: Number | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        _temperature("temperature", self.temperature)
        _integer("top_k", self.top_k, low=0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _integer("seed", self.seed, low=0, high=2**64 - 1)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias id", token, low=0)
            _number(f"logit_bias of id {token}", bias)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {self.stop!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.draft_temperature is not None:
            _temperature("draft_temperature", self.draft_temperature)
        if self.num_speculative_tokens is not None:
            _integer(
                "num_speculative_tokens",
                self.num_speculative_tokens,
                low=0,
                high=MAX_SPECULATIVE_TOKENS,
            )

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before temperature: bias, penalties or a token minimum."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
        )

    @property
    def samples(self) -> bool:
        return self.temperature > 0.0

    @property
    def samples_drafts(self) -> bool:
        """Whether verification needs the law of the drafts (any rule but match, when sampling)."""
        return self.samples and self.rule != "match"


def check_request(
    prompt: Sequence[int], params: SamplingParams, *, vocab_size: int, context_length: int
) -> int:
    """Check one request against the model; return the most tokens that prompt and output may hold.

    The context counts stored tokens, prompt and output together: a prompt of context - 1 tokens
    leaves room for exactly one, with and without speculation.

    Raises: ValueError that names the field, what was found and what is allowed.
    """
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it needs at least one token (such as the bos token)")
    for index, token in enumerate(prompt):
        if not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"prompt token {index} is {token}, outside the vocabulary of {vocab_size}"
            )
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in ids:
            if token >= vocab_size:
                raise ValueError(f"{name} has id {token}, outside the vocabulary of {vocab_size}")
    room = context_length - len(prompt)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the context {context_length}: no room for "
            "one output token; shorten the prompt or raise the context length"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise ValueError(
            f"prompt of {len(prompt)} tokens plus max_tokens {params.max_tokens} is above the "
            f"context of {context_length}; lower max_tokens to at most {room}"
        )
    if params.min_tokens > room:
        raise ValueError(
            f"prompt of {len(prompt)} tokens plus min_tokens {params.min_tokens} is above the "
            f"context of {context_length}"
        )
    return len(prompt) + (room if params.max_tokens is None else params.max_tokens)


def check_num_speculative_tokens(value: int, *, name: str = "num_speculative_tokens") -> int:
    """The value itself, if it is a count of drafts that a program can have (1 to 31)."""
    _integer(name, value, low=1, high=MAX_SPECULATIVE_TOKENS)
    return value


def _temperature(name: str, value: Number) -> None:
    _number(name, value, low=0.0)
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(
            f"{name} must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {value!r}"
        )


def _number(
    name: str,
    value: Number,
    *,
    low: Number = -math.inf,
    high: Number = math.inf,
    open_low: bool = False,
) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or value < low or value > high or (open_low and value == low):
        raise ValueError(f"{name} must be {_range(low, high, open_low)}, got {value!r}")


def _integer(name: str, value: int, *, low: int, high: int | None = None) -> None:
    ok = hasattr(value, "__index__") and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        bound = math.inf if high is None else high
        raise ValueError(f"{name} must be an integer, {_range(low, bound, False)}, got {value!r}")


def _range(low: Number, high: Number, open_low: bool) -> str:
    if low == -math.inf and high == math.inf:
        return "a finite number"
    if high == math.inf:
        return f"{'above' if open_low else 'at least'} {low:g}"
    return (
        f"{'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
    )
