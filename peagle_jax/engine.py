"""Text in, text out: a target, perhaps a drafter, and the compiled programs that decode with them.

    engine = peagle_jax.load("smollm2-135m")
    [answer] = engine.generate("Why is the sky blue?", SamplingParams(max_tokens=64))

The loop itself is `peagle_jax.decoding`, and knows ids alone. Here are prompts and chat templates,
stop strings, streaming, results, and the choice of program: one for each batch size, cache length,
method, K and feature set that was asked for, made at its first use.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.decoding.generate import GenerateFn, make_generate_fn, prompt_bucket
from peagle_jax.decoding.methods import MethodName, default_method
from peagle_jax.decoding.params import SamplingParams, check_request
from peagle_jax.decoding.requests import Features
from peagle_jax.decoding.state import DecodeState, FinishReason, finish
from peagle_jax.decoding.stats import request_stats
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from peagle_jax.results import GenerationResult, Stats, TokenLogprobs
from peagle_jax.text.stop_strings import TextStream
from peagle_jax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A user message, ids, or a conversation of messages with "role" and "content"."""

MIN_CACHE_LENGTH = 256
ROUNDS_PER_STEP = 4  # between looks at the text, where stop strings have to be searched


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """What one token added: its text may be empty while a character or stop string is open.

    `draft_depth` is the token's place among its round's accepted drafts (from 1), 0 for the
    target's own. `stats` are those of the answer so far. The last piece has `result`, and the text
    that was still held back.
    """

    text: str
    token_id: int | None
    draft_depth: int
    stats: Stats
    result: GenerationResult | None = None


class Engine:
    """Generates with one target and at most one drafter. `peagle_jax.load` makes it.

    Not thread-safe: calls share compiled programs, never caches.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        *,
        method: MethodName | None = None,
        num_speculative_tokens: int | None = None,
        context_length: int | None = None,
        allow_longer_context: bool = False,
        force_method: bool = False,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """context_length: most tokens of prompt and answer together; None is the target's own.
        method, num_speculative_tokens: defaults of the calls below. mesh: that of the parameters.

        Raises ValueError where the parts do not fit, or the context is beyond the target's.
        """
        largest = target.config.max_positions
        context_length = largest if context_length is None else context_length
        if context_length > largest and not allow_longer_context:
            raise ValueError(
                f"context_length {context_length} is above the {largest} positions that the target "
                "is configured for; lower it, or pass allow_longer_context=True"
            )
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.method: MethodName = default_method(drafter) if method is None else method
        self.num_speculative_tokens = num_speculative_tokens
        self.context_length = context_length
        self._allow_longer_context = allow_longer_context
        self._force_method = force_method
        self._mesh = mesh
        self._programs: dict[tuple, GenerateFn] = {}
        self._ready: set[tuple[GenerateFn, int, int]] = set()  # compiled for (batch, chunk)
        ids = {*target.config.eos_token_ids, *tokenizer.stop_ids}
        self.stop_ids = tuple(sorted(i for i in ids if i < target.config.vocab_size))

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Ids of a prompt. A str is one user turn under the chat template, or as it is with
        `chat=False`; a conversation always goes through the template; ids stay as they are.

        Raises ValueError for an empty prompt, ChatTemplateError where there is no template.
        """
        if not isinstance(prompt, str):
            prompt = list(prompt)
            if not prompt:
                raise ValueError("prompt is empty; give text, token ids or messages")
            if isinstance(prompt[0], Mapping):
                return self.tokenizer.apply_chat_template(prompt)
            return [int(token) for token in prompt]
        if not prompt:
            raise ValueError("prompt is empty; give text, token ids or messages")
        if chat:
            return self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        method: MethodName | None = None,
        chat: bool = True,
        max_batch_size: int = 32,
    ) -> list[GenerationResult]:
        """Answer prompts, `max_batch_size` at a time; one result for each, in order.

        Args:
          params: for all prompts, or one each; None is greedy with up to 256 tokens.
          num_speculative_tokens: K; None is the engine's, the head's own, or min(trained depth, 5).
          method: another way of drafting than the engine's ("none" decodes plainly).

        Raises: ValueError that names the request and the field that cannot be served.
        """
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        if not prompts:
            return []
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} SamplingParams")
        ids = [self.encode(prompt, chat=chat) for prompt in prompts]
        batch_size = batch_bucket(len(ids), max_batch_size)
        fn, chunk = self._program(ids, params, method, num_speculative_tokens, batch_size)
        results = []
        for start in range(0, len(ids), max_batch_size):
            part = slice(start, start + max_batch_size)
            size = batch_bucket(len(ids[part]), max_batch_size)
            batch = _Batch(self, fn, chunk, ids[part], params[part], size)
            batch.finish()
            results += batch.results()
        return results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_speculative_tokens: int | None = None,
        method: MethodName | None = None,
        chat: bool = True,
    ) -> Iterator[StreamPiece]:
        """One answer as it comes, a piece for each token. The last piece carries the result.

        Raises: as `generate`, at the first piece.
        """
        params = SamplingParams() if params is None else params
        ids = [self.encode(prompt, chat=chat)]
        fn, chunk = self._program(ids, [params], method, num_speculative_tokens)
        batch = _Batch(self, fn, chunk, ids, [params], 1)
        seen = 0
        while True:
            row = batch.rows[0]
            for index in range(seen, len(row.pieces)):
                yield StreamPiece(
                    text=row.pieces[index],
                    token_id=row.token_ids[index],
                    draft_depth=row.depths[index],
                    stats=batch.stats(0, index + 1),
                )
            seen = len(row.pieces)
            if row.done:
                result = batch.results()[0]
                yield StreamPiece(
                    text=row.rest, token_id=None, draft_depth=0, stats=result.stats, result=result
                )
                return
            batch.step(1)

    def generate_fn(
        self,
        *,
        cache_length: int,
        features: Features = Features(),  # noqa: B008 (frozen)
        num_speculative_tokens: int | None = None,
        method: MethodName | None = None,
    ) -> GenerateFn:
        """The pure functions behind `generate`, made once for each set of arguments."""
        method = self.method if method is None else method
        k = (
            self.num_speculative_tokens
            if num_speculative_tokens is None
            else num_speculative_tokens
        )
        key = (method, k, cache_length, features)
        if key not in self._programs:
            self._programs[key] = make_generate_fn(
                self.target,
                self.drafter,
                method,
                cache_length=cache_length,
                num_speculative_tokens=k,
                features=features,
                context_length=min(cache_length, self.context_length),
                allow_longer_context=self._allow_longer_context,
                eos_token_ids=self.stop_ids,
                force=self._force_method,
                mesh=self._mesh,
            )
        return self._programs[key]

    def _program(
        self,
        ids: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        method: MethodName | None,
        num_speculative_tokens: int | None,
        batch_size: int = 1,
    ) -> tuple[GenerateFn, int]:
        """The program and the prefill chunk that serve all of these requests."""
        vocab, context = self.target.config.vocab_size, self.context_length
        limits = []
        for row, (prompt, one) in enumerate(zip(ids, params, strict=True)):
            try:
                limits.append(check_request(prompt, one, vocab_size=vocab, context_length=context))
            except ValueError as error:
                where = f"request {row}: " if len(ids) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        fn = self.generate_fn(
            cache_length=min(cache_bucket(max(limits)), context),
            features=Features.of(params),
            num_speculative_tokens=num_speculative_tokens,
            method=method,
        )
        longest = max(map(len, ids))
        return fn, prompt_bucket(longest, fn.max_prefill_chunk, batch=batch_size)


def cache_bucket(length: int) -> int:
    """Cache slots for `length` tokens: the next power of two, at least MIN_CACHE_LENGTH."""
    return max(MIN_CACHE_LENGTH, 1 << (length - 1).bit_length())


def batch_bucket(size: int, largest: int) -> int:
    """Batch rows for `size` requests: the next power of two, at most `largest`."""
    return min(1 << (size - 1).bit_length(), largest)


def compile_without_running(
    fn: GenerateFn,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    batch_size: int,
    chunk: int,
) -> None:
    """Compile the programs of a batch with nothing to do, so that no later time holds it."""
    state = fn.init(prompts, params, batch_size=batch_size)
    nothing_left = state.prefilled + state.requests.prompt_length
    state = dataclasses.replace(state, prefilled=nothing_left)
    state = fn.compiled.prefill(fn.params, state, chunk=chunk)
    jax.block_until_ready(fn.compiled.step(fn.params, state, np.int32(0)))


@dataclasses.dataclass
class _Row:
    """One request on the host: its tokens so far and their text."""

    stream: TextStream
    pieces: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=list)
    round_drafts: list[int] = dataclasses.field(default_factory=list)
    num_rounds: int = 0
    rest: str = ""
    reason: FinishReason = FinishReason.RUNNING
    done: bool = False
    seconds: float = 0.0


class _Batch:
    """Requests that run together: the state on the device, and its text on the host."""

    def __init__(
        self,
        engine: Engine,
        fn: GenerateFn,
        chunk: int,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        batch_size: int,
    ):
        self.engine, self.fn, self.prompts, self.params = engine, fn, prompts, params
        self.rows = [
            _Row(TextStream(engine.tokenizer, one.stop, min_tokens=one.min_tokens))
            for one in params
        ]
        if (fn, batch_size, chunk) not in engine._ready:
            compile_without_running(fn, prompts, params, batch_size, chunk)
            engine._ready.add((fn, batch_size, chunk))
        self._started = time.perf_counter()
        state = fn.init(prompts, params, batch_size=batch_size)
        state = fn.compiled.prefill(fn.params, state, chunk=chunk)
        self.state: DecodeState = jax.block_until_ready(state)
        self.first_token_s = time.perf_counter() - self._started
        self._read()

    def finish(self) -> None:
        """Run to the end; in steps only where some text has to be searched for stop strings."""
        searched = any(one.stop for one in self.params)
        while not all(row.done for row in self.rows):
            self.step(ROUNDS_PER_STEP if searched else np.iinfo(np.int32).max)

    def step(self, num_rounds: int) -> None:
        self.state = self.fn.compiled.step(self.fn.params, self.state, np.int32(num_rounds))
        self._read()

    def _read(self) -> None:
        """Take the new tokens over, and end on the device what a stop string has ended."""
        state = self.state
        committed, reasons, rounds, tokens, depths, drafts = jax.device_get(
            (
                state.committed,
                state.finish_reason,
                state.num_rounds,
                state.tokens,
                state.draft_depth,
                state.round_drafts,
            )
        )
        seconds = time.perf_counter() - self._started
        stopped = np.zeros(len(committed), bool)
        for index, row in enumerate(self.rows):
            if row.done:
                continue
            start = len(self.prompts[index]) + len(row.token_ids)
            row.num_rounds, row.seconds = int(rounds[index]), seconds
            for place in range(start, int(committed[index])):
                token = int(tokens[index, place])
                row.token_ids.append(token)
                row.depths.append(int(depths[index, place]))
                row.round_drafts.append(int(drafts[index, place]))
                row.pieces.append(row.stream.push([] if self._hidden(index, token) else [token]))
                if row.stream.match is not None:
                    break
            row.reason = FinishReason(int(reasons[index]))
            if row.stream.match is not None:
                stopped[index] = row.reason == FinishReason.RUNNING
                row.reason = FinishReason.STOP
            row.done = row.reason != FinishReason.RUNNING
            if row.done:
                row.rest = row.stream.finish()
                if row.stream.match is not None:
                    row.reason = FinishReason.STOP
        if stopped.any():
            self.state = finish(state, jnp.asarray(stopped))

    def _hidden(self, index: int, token: int) -> bool:
        """Whether a token ends the output and is no text of it."""
        own = () if self.params[index].ignore_eos else self.engine.stop_ids
        return token in own or token in self.params[index].stop_token_ids

    def stats(self, index: int, num_tokens: int) -> Stats:
        """Figures of the first `num_tokens` output tokens of one row."""
        row = self.rows[index]
        return Stats(
            num_prompt_tokens=len(self.prompts[index]),
            num_output_tokens=num_tokens,
            num_rounds=row.num_rounds,
            acceptance=request_stats(
                row.depths[:num_tokens], row.round_drafts[:num_tokens], self.fn.method.num_drafts
            ),
            time_to_first_token_s=self.first_token_s,
            total_s=row.seconds,
        )

    def results(self) -> list[GenerationResult]:
        logprobs = self.state.logprobs
        if logprobs is not None:
            arrays = (logprobs.of_token, logprobs.top_values, logprobs.top_ids)
            logprobs = jax.device_get(arrays)
        return [
            GenerationResult(
                text=row.stream.text,
                token_ids=tuple(row.token_ids),
                prompt_token_ids=tuple(self.prompts[index]),
                finish_reason="stop" if row.reason == FinishReason.STOP else "length",
                draft_depths=tuple(row.depths),
                stats=self.stats(index, len(row.token_ids)),
                logprobs=self._logprobs(logprobs, index),
            )
            for index, row in enumerate(self.rows)
        ]

    def _logprobs(
        self, arrays: tuple[np.ndarray, ...] | None, index: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """Those of one row's output tokens, by the arrays of the state's Logprobs."""
        count = self.params[index].logprobs
        if arrays is None or count is None:
            return None
        tokens, start = self.rows[index].token_ids, len(self.prompts[index])
        places = slice(start, start + len(tokens))
        of_token, values, ids = (array[index, places] for array in arrays)
        return tuple(
            TokenLogprobs(
                token_id=token,
                logprob=float(of_token[place]),
                top=dict(
                    zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True)
                ),
            )
            for place, token in enumerate(tokens)
        )


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    first = next(iter(prompts), None)
    return isinstance(first, (int, np.integer, Mapping))
