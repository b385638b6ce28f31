"""transformers on the same weights, threads and prompts, as sessions of the same benchmark.

Greedy, float32, one sequence at a time: plain generation and prompt-lookup. Needs torch (the extra
`parity`); nothing here is imported before a peer is asked for.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle_jax.bench.session import Clock, Record, Request, Run
from peagle_jax.decoding.stats import AcceptanceStats

PEERS = ("transformers", "transformers-prompt-lookup")


class PeerError(RuntimeError):
    """A peer cannot run here; the message says why and what to do."""


def load_peer(target: Path, scratch: Path) -> Any:
    """transformers' model of the target at `target` (a folder or a .gguf file), float32.

    What transformers may not read as it is (GGUF, packed weights) is converted into `scratch`
    first, by the reader that the target itself came through, so that the weights are the same.

    Raises PeerError without torch.
    """
    try:
        import torch
    except ImportError:
        raise PeerError(
            "the peers need torch, which is not installed; pip install 'peagle-jax[parity]', or "
            "leave the transformers methods out"
        ) from None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from peagle_jax.checkpoints.convert import convert_target

    logging.disable_progress_bar()
    folder = convert_target(target, scratch / "target", dtype="float32")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # each request says what ends it
    return model


class PeerSession:
    """One way of generating with transformers; serves requests one after the other."""

    def __init__(
        self,
        model: Any,
        stop_ids: Sequence[int],
        *,
        lookup_tokens: int | None = None,
        clock: Clock = time.perf_counter,
    ):
        """lookup_tokens: drafts per round of prompt-lookup; None is plain generation."""
        self.model, self.stop_ids, self.lookup_tokens = model, list(stop_ids), lookup_tokens
        self.clock = clock
        self.unfinished: Run | None = None  # as in Session

    def warm_up(self, requests: Sequence[Request]) -> float:
        """The first request once, untimed; the seconds."""
        try:
            return self.run(requests[:1]).seconds
        finally:
            self.unfinished = None  # answers of a warm-up are none

    def run(self, requests: Sequence[Request]) -> Run:
        """Serve the requests in order. Raises PeerError for one that is not greedy."""
        records: list[Record] = []
        started = self.clock()
        try:
            for request in requests:
                records.append(self._record(request))
        except BaseException:
            self.unfinished = Run(records=tuple(records), seconds=self.clock() - started)
            raise
        self.unfinished = None
        return Run(records=tuple(records), seconds=self.clock() - started)

    def _record(self, request: Request) -> Record:
        import torch

        params = request.params
        if params.temperature:
            raise PeerError("the peers decode greedily; leave them out with a temperature")
        options: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": False}
        # Not min_new_tokens: it forbids the end token, and the text is to be that of ours, which
        # has it and goes on.
        stop_ids = [] if params.ignore_eos else self.stop_ids
        if self.lookup_tokens is not None:
            options["prompt_lookup_num_tokens"] = self.lookup_tokens
        watch = _Watch(self.clock)
        ids = torch.tensor([request.prompt])
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self.model.register_forward_hook(count)
        try:
            started = self.clock()
            with torch.inference_mode():
                output = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    eos_token_id=stop_ids or None,
                    pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
                    streamer=watch,
                    **options,
                )
            ended = self.clock()
        finally:
            hook.remove()
        return Record(
            name=request.name,
            prompt=request.prompt,
            token_ids=tuple(output[0, len(request.prompt) :].tolist()),
            num_rounds=passes - 1,  # the first pass is the prompt's
            # transformers does not tell how many drafts it made.
            acceptance=AcceptanceStats() if self.lookup_tokens is None else None,
            first_token_s=(ended if watch.first is None else watch.first) - started,
            total_s=ended - started,
        )


class _Watch:
    """Notes when the first new token came, through transformers' streamer interface."""

    def __init__(self, clock: Clock):
        self._clock, self._calls = clock, 0
        self.first: float | None = None

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call hands over the prompt
            self.first = self._clock()

    def end(self) -> None:
        pass
