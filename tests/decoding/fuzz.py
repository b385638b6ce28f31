"""Losslessness on random weights, prompts, lengths, stops and drafters.

Plain and speculative outputs are equal, and equal to the definition (tests/decoding/oracle.py).

`python -m tests.decoding.fuzz --draws 5000` runs it by hand and prints a summary; the tests run 200
draws of the same over the same static shapes. Everything but the shape is data of its programs.
"""

import argparse
import dataclasses
import functools
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.decoding.drafting import NetworkParams
from peagle_jax.decoding.generate import GenerateFn, make_generate_fn
from peagle_jax.decoding.methods import make_method
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features
from peagle_jax.decoding.rounds import Params
from peagle_jax.models.config import DrafterConfig
from tests.decoding import oracle, tiny
from tests.decoding.drafters import Behaviour, Mixed, MixedParams

METHODS = ("none", "prompt-lookup", "p-eagle", "eagle3")
EOS = (2,)
CACHE_LENGTH = 64
MAX_PROMPT = 20
MAX_OUTPUT = 32
CHUNK = 8  # prompts take up to three chunks
NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Shape:
    """One pair of programs: family, K, batch and features. All methods are in each of them."""

    family: str
    num_drafts: int
    batch: int
    features: Features
    drafter: DrafterConfig = tiny.drafter_config(layers=(tiny.LAYER,))

    def __str__(self) -> str:
        return f"{self.family}-{self.num_drafts}-{self.batch}"


_WINDOWED = tiny.drafter_config(
    layers=(dataclasses.replace(tiny.LAYER, window=20), tiny.LAYER), norm_before_residual=True
)
GREEDY = Features()
SAMPLED = Features(sampled=True)
ALL = Features(sampled=True, penalties=True, logprobs=2)
SHAPES = (
    Shape("llama", 16, 5, ALL),
    Shape("qwen3", 16, 5, SAMPLED),
    Shape("qwen3_moe", 16, 5, SAMPLED),
    Shape("gpt_oss", 16, 5, ALL, _WINDOWED),
    Shape("gemma4", 16, 5, SAMPLED, _WINDOWED),
    Shape("llama", 3, 1, GREEDY),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """`fields` are those of SamplingParams, which is not made while hypothesis draws: run-time type
    checks use the global random numbers, and hypothesis forbids that there."""

    prompt: list[int]
    fields: dict[str, Any]
    method: str
    behaviour: Behaviour

    @functools.cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)


@dataclasses.dataclass(frozen=True)
class Draw:
    shape: Shape
    target_seed: int
    drafter_seed: int
    requests: list[Request]


@dataclasses.dataclass(frozen=True)
class Runs:
    plain: GenerateFn
    mixed: GenerateFn


@functools.cache
def compiled(shape: Shape) -> Runs:
    """The two programs of a shape; weights of later draws replace those used here."""
    target = tiny.make_target(tiny.TARGETS[shape.family])
    common = dict(
        cache_length=CACHE_LENGTH,
        features=shape.features,
        max_prefill_chunk=CHUNK,
        eos_token_ids=EOS,
    )
    drafters = {
        "p-eagle": tiny.make_drafter(shape.drafter),
        "eagle3": tiny.make_drafter(tiny.AUTOREGRESSIVE),
    }
    made = [
        make_method(
            name, target.config, drafters.get(name), num_speculative_tokens=shape.num_drafts
        )
        for name in METHODS
    ]
    parts, values = zip(*made, strict=True)
    method = Mixed(parts, shape.num_drafts, tiny.VOCAB)
    return Runs(
        plain=make_generate_fn(target, None, "none", **common),
        mixed=make_generate_fn(target, None, method, method_params=values, **common),
    )


@functools.lru_cache(maxsize=64)
def _weights(shape: Shape, target_seed: int, drafter_seed: int):
    """Values of the target and of each method, for the programs of the shape."""
    runs = compiled(shape)
    parts = []
    for index, values in enumerate(runs.mixed.params.draft):
        if isinstance(values, NetworkParams):
            graph = runs.mixed.method.parts[index].graph
            network = tiny.new_values(values.network, drafter_seed + index)
            mask = None if values.mask is None else _fused_mask(graph, network)
            values = NetworkParams(network, mask)
        parts.append(values)
    return tiny.new_values(runs.plain.params.target, target_seed), tuple(parts)


@functools.partial(jax.jit, static_argnums=0)
def _fused_mask(graph, network):
    return nnx.merge(graph, network).fused_mask()


@dataclasses.dataclass
class Outcome:
    tokens: int = 0
    near_ties: int = 0
    accepted: int = 0


def check(draw: Draw) -> Outcome:
    """Run a draw plainly and speculatively; AssertionError where they differ without a near-tie."""
    shape = draw.shape
    runs = compiled(shape)
    target_params, parts = _weights(shape, draw.target_seed, draw.drafter_seed)
    prompts = [request.prompt for request in draw.requests]
    params = [request.params for request in draw.requests]

    def run(fn: GenerateFn, values: Params):
        one = dataclasses.replace(fn, params=values)
        one.__dict__["compiled"] = fn.compiled  # same programs, other weights
        state = one.run(prompts, params, batch_size=shape.batch, chunk=CHUNK)
        return one.outputs(state), state

    plain, plain_state = run(runs.plain, Params(target_params, None))
    truth = np.asarray(plain_state.tokens)
    raw = oracle.logits_of(runs.plain.target_graph, target_params, truth)
    wrong, gaps = oracle.follow(raw, prompts, plain, params, EOS)

    def column(values: list[int]) -> np.ndarray:
        return np.array([*values, *([0] * (shape.batch - len(values)))], np.int32)

    mixed_params = MixedParams(
        parts,
        column([METHODS.index(request.method) for request in draw.requests]),
        column([int(request.behaviour) for request in draw.requests]),
        truth,
    )
    spec, spec_state = run(runs.mixed, Params(target_params, mixed_params))
    outcome = Outcome(accepted=int(np.sum(np.asarray(spec_state.draft_depth) > 0)))
    for row, request in enumerate(draw.requests):
        outcome.tokens += len(plain[row])
        for name, differs in (
            ("definition", wrong[row]),
            ("speculative", _first_difference(plain[row], spec[row])),
        ):
            if differs is None:
                continue
            gap = min(gaps[row][: differs + 1], default=np.inf)
            assert gap < NEAR_TIE, (
                f"plain and {name} differ at step {differs} of request {row} (gap {gap:.3g}): "
                f"{plain[row]} against {spec[row]}; {request}; {draw}"
            )
            outcome.near_ties += 1
            break
        else:
            reasons = [int(s.finish_reason[row]) for s in (plain_state, spec_state)]
            assert reasons[0] == reasons[1] != 0, (reasons, draw)
            _check_records(spec_state, row, request, shape)
            if shape.features.logprobs is not None:
                _check_logprobs(plain_state, spec_state, raw, row)
    return outcome


def _first_difference(left: list[int], right: list[int]) -> int | None:
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    same = [a == b for a, b in pairs]
    return same.index(False) if False in same else min(len(left), len(right))


def _check_records(state, row: int, request: Request, shape: Shape) -> None:
    """The per-token records agree with what the drafter did."""
    start, end = len(request.prompt), int(state.committed[row])
    depth = np.asarray(state.draft_depth)[row, start:end]
    drafts = np.asarray(state.round_drafts)[row, start:end]
    assert np.all(depth <= drafts), (depth, drafts)
    assert np.all(drafts <= request.params.num_speculative_tokens)
    if request.behaviour == Behaviour.ERRS or request.method == "none" and request.behaviour == 0:
        assert not depth.any()
    if request.behaviour == Behaviour.AGREES and request.params.num_speculative_tokens:
        rounds = -(-(end - start - 1) // (request.params.num_speculative_tokens + 1))
        assert int(state.num_rounds[row]) == rounds, (depth, drafts)


def _check_logprobs(plain, spec, raw: np.ndarray, row: int) -> None:
    start, end = int(plain.requests.prompt_length[row]), int(plain.committed[row])
    wide = raw[row, start - 1 : end - 1].astype(np.float64)
    logprobs = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs = logprobs - wide.max(-1, keepdims=True)
    tokens = np.asarray(plain.tokens)[row, start:end]
    expected = logprobs[np.arange(end - start), tokens]
    best = -np.sort(-logprobs, axis=-1)[:, :2]
    for state in (plain, spec):
        of_token, top = np.asarray(state.logprobs.of_token), np.asarray(state.logprobs.top_values)
        np.testing.assert_allclose(of_token[row, start:end], expected, atol=1e-3)
        np.testing.assert_allclose(top[row, start:end], best, atol=1e-3)


@st.composite
def draws(draw: st.DrawFn, shapes: tuple[Shape, ...]) -> Draw:
    shape = draw(st.sampled_from(shapes))
    count = draw(st.integers(1, shape.batch))
    return Draw(
        shape,
        draw(st.integers(0, 2**16)),
        draw(st.integers(0, 2**16)),
        [draw(_requests(shape)) for _ in range(count)],
    )


@st.composite
def _requests(draw: st.DrawFn, shape: Shape) -> Request:
    alphabet = st.integers(0, draw(st.sampled_from([3, tiny.VOCAB - 1])))
    prompt = draw(st.lists(alphabet, min_size=1, max_size=MAX_PROMPT))
    max_tokens = draw(st.integers(1, MAX_OUTPUT))
    fields = dict(
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, tiny.VOCAB - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
        num_speculative_tokens=draw(st.integers(0, shape.num_drafts)),
    )
    if shape.features.sampled:
        fields |= dict(
            temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0])),
            top_k=draw(st.sampled_from([0, 0, 1, 5, 39])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        )
    if shape.features.penalties:
        fields |= dict(
            repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
            presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
            min_tokens=draw(st.integers(0, max_tokens)),
            logit_bias=draw(
                st.dictionaries(
                    st.integers(0, tiny.VOCAB - 1), st.sampled_from([-3.0, 2.0]), max_size=3
                )
            ),
        )
    return Request(
        prompt,
        fields,
        draw(st.sampled_from(METHODS)),
        draw(st.sampled_from(list(Behaviour))),
    )


def run_draws(
    count: int, shapes: tuple[Shape, ...] = SHAPES, *, seconds: float = np.inf
) -> Counter:
    """`count` hypothesis draws, fewer where `seconds` run out; the sum of their outcomes."""
    total, end = Counter(), time.time() + seconds

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(draws(shapes))
    def one(draw: Draw) -> None:
        if time.time() > end:
            return
        outcome = check(draw)
        total.update(
            draws=1,
            requests=len(draw.requests),
            tokens=outcome.tokens,
            accepted_drafts=outcome.accepted,
            near_ties=outcome.near_ties,
            **{f"draws of {draw.shape}": 1},
        )

    one()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=np.inf, help="stop drawing after these")
    arguments = parser.parse_args()
    start = time.time()
    total = run_draws(arguments.draws, seconds=arguments.seconds)
    for name, value in sorted(total.items()):
        print(f"{name}: {value}")
    print(f"seconds: {time.time() - start:.0f}")
    print("plain and speculative outputs were equal in every draw")


if __name__ == "__main__":
    main()
