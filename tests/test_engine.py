"""The engine: prompts to text, stop strings, streaming, results, and errors at the edge."""

import dataclasses
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import engine as engine_module
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.engine import Engine, batch_bucket, cache_bucket
from peagle_jax.models.target import init_target
from peagle_jax.results import combine
from peagle_jax.testing import ByteTokenizer
from tests.chain_target import chain_target

TEXT = "ab\u00e9cd\U0001f600ef gh."
CYCLE = TEXT.encode()
METHODS = ("none", "prompt-lookup")


@pytest.fixture(scope="module")
def chain():
    return Engine(chain_target(TEXT), ByteTokenizer())


@pytest.fixture(scope="module")
def random_engine():
    config = dataclasses.replace(chain_target("ab").config, hidden_size=16)
    return Engine(init_target(config, jax.random.key(3)), ByteTokenizer(), num_speculative_tokens=4)


def spelled(start: int, count: int) -> bytes:
    return bytes(CYCLE[(start + i) % len(CYCLE)] for i in range(count))


def test_text_and_ids_of_a_known_chain(chain):
    [result] = chain.generate("a", SamplingParams(max_tokens=14), chat=False)
    assert bytes(result.token_ids) == spelled(1, 14)
    assert result.text == spelled(1, 14).decode()
    assert result.finish_reason == "length"
    assert result.prompt_token_ids == (CYCLE[0],)
    assert result.stats.num_output_tokens == 14 and result.stats.num_rounds == 13


def test_the_end_token_ends_and_is_no_text():
    engine = Engine(chain_target(TEXT, end_after="e"), ByteTokenizer())
    [result] = engine.generate("c", SamplingParams(max_tokens=30), chat=False)
    assert result.text == "d\U0001f600e"
    assert result.token_ids[-1] == ByteTokenizer.eos_id
    assert result.finish_reason == "stop"


STOPS = {
    "one token": "f",
    "across two tokens": "ef",
    "a character of four tokens": "\U0001f600",
    "into a character of two tokens": "b\u00e9",
    "the longer of two": ("h.ab", "h."),
    "not in the text": "zzz",
    "twice round the cycle": ".ab\u00e9cd\U0001f600ef gh.",
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_cut_as_in_decoding_token_by_token(chain, stop, method):
    stop = (stop,) if isinstance(stop, str) else stop
    length = 40
    whole = spelled(1, length)
    ends = [whole.find(s.encode()) + len(s.encode()) for s in stop if s.encode() in whole]
    params = SamplingParams(max_tokens=length, stop=stop)
    [result] = chain.generate("a", params, chat=False, method=method, num_speculative_tokens=5)
    if not ends:
        assert bytes(result.token_ids) == whole and result.finish_reason == "length"
        return
    assert bytes(result.token_ids) == whole[: min(ends)]
    first = min(stop, key=lambda s: (whole.find(s.encode()) + len(s.encode()), -len(s)))
    assert result.text == whole[: whole.find(first.encode())].decode()
    assert result.finish_reason == "stop"
    assert result.stats.num_output_tokens == min(ends)
    assert sum(d > 0 for d in result.draft_depths) == result.stats.acceptance.num_accepted_tokens


def test_a_stopped_row_leaves_its_neighbours_alone(chain):
    params = [
        SamplingParams(max_tokens=40, stop=("\u00e9",)),
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=7),
    ]
    results = chain.generate(["a", "c", " "], params, chat=False, max_batch_size=4)
    assert results[0].text == "b"
    assert bytes(results[1].token_ids) == spelled(CYCLE.index(b"c") + 1, 40)
    assert len(results[2].token_ids) == 7


@pytest.mark.parametrize("method", METHODS)
def test_streamed_pieces_join_to_the_text_and_break_no_character(chain, method):
    params = SamplingParams(max_tokens=33)
    pieces = list(chain.stream("a", params, chat=False, method=method, num_speculative_tokens=5))
    [whole] = chain.generate("a", params, chat=False)
    assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].result.text
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])
    assert tuple(piece.token_id for piece in pieces[:-1]) == whole.token_ids
    if method == "prompt-lookup":
        assert any(piece.draft_depth > 0 for piece in pieces)
        assert pieces[-1].stats.acceptance_length > 1


def test_chat_template_is_the_default(chain):
    tokenizer = ByteTokenizer()
    message = [{"role": "user", "content": "a"}]
    rendered = tokenizer.apply_chat_template(message)
    assert chain.encode("a") == chain.encode(message) == rendered
    assert chain.encode("a", chat=False) == [CYCLE[0]]
    assert chain.encode([7, 8]) == [7, 8]


def test_sampled_text_for_a_seed_is_that_of_plain_decoding_whoever_is_beside(random_engine):
    def params(seed):
        return SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)

    prompts = [[1, 2, 3], [9, 8, 9, 8, 9], [4]]
    alone = [random_engine.generate(p, params(i), method="none")[0] for i, p in enumerate(prompts)]
    together = random_engine.generate(
        prompts, [params(i) for i in range(3)], method="prompt-lookup", max_batch_size=4
    )
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    [other] = random_engine.generate(prompts[0], params(7), method="none")
    assert other.token_ids != alone[0].token_ids


def test_logprobs_are_of_the_raw_logits(random_engine):
    params = SamplingParams(max_tokens=6, logprobs=3, temperature=0.7, top_k=2, ignore_eos=True)
    [result] = random_engine.generate([5, 6, 7], params)
    ids = [*result.prompt_token_ids, *result.token_ids]
    target = random_engine.target
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None, :]
    hidden = target(jnp.asarray([ids], jnp.int32), positions).hidden
    expected = np.asarray(jax.nn.log_softmax(target.logits(hidden)[0], axis=-1))
    assert len(result.logprobs) == 6
    for place, one in enumerate(result.logprobs):
        row = expected[2 + place]
        assert one.token_id == ids[3 + place]
        assert one.logprob == pytest.approx(row[one.token_id], abs=1e-4)
        assert set(one.top) == set(np.argsort(-row)[:3].tolist())


def test_a_step_that_fails_spoils_no_later_call_I8(chain, monkeypatch):
    """The state is donated to the step that fails; nothing of it is used again."""
    params, fn = SamplingParams(max_tokens=14), chain.generate_fn(cache_length=256)
    compiled = fn.compiled

    def fails(values, state, num_rounds):
        compiled.step(values, state, np.int32(1))
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setitem(fn.__dict__, "compiled", dataclasses.replace(compiled, step=fails))
        with pytest.raises(RuntimeError, match="out of memory"):
            chain.generate("a", params, chat=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(chain.stream("a", params, chat=False))
    [result] = chain.generate("a", params, chat=False)
    assert bytes(result.token_ids) == spelled(1, 14)


def test_streams_side_by_side_share_no_cache_I8(chain):
    params = SamplingParams(max_tokens=9)
    streams = [chain.stream([CYCLE[start]], params) for start in (0, 3)]
    next(chain.stream([CYCLE[1]], params))  # one that nobody reads on
    pieces = list(zip(*streams, strict=True))
    for start, result in zip((0, 3), (piece.result for piece in pieces[-1]), strict=True):
        assert bytes(result.token_ids) == spelled(start + 1, 9)


def test_more_prompts_than_a_batch_come_back_in_order(chain):
    starts = [0, 3, 9, 11, 2]
    prompts = [[CYCLE[i]] for i in starts]
    results = chain.generate(prompts, SamplingParams(max_tokens=4), max_batch_size=2)
    assert [bytes(r.token_ids) for r in results] == [spelled(i + 1, 4) for i in starts]
    total = combine([r.stats for r in results])
    assert total.num_output_tokens == 20 and total.acceptance_length == 1.0


def test_programs_are_made_once(chain):
    before = len(chain._programs)
    for length in (1, 5, 9):
        chain.generate([CYCLE[0]] * length, SamplingParams(max_tokens=3))
    assert len(chain._programs) == before
    fn = chain.generate_fn(cache_length=256)
    assert fn.compiled.step._cache_size() <= 3  # batches of 1, 2 and 4 rows


def test_figures_hold_no_compilation(chain, monkeypatch):
    """Every program is compiled before the clock starts, and none while it runs."""
    k, compiled_by_then = 6, []
    fn = chain.generate_fn(cache_length=256, method="prompt-lookup", num_speculative_tokens=k)

    def reading():
        programs = fn.compiled.prefill, fn.compiled.step
        compiled_by_then.append([program._cache_size() for program in programs])
        return time.perf_counter()

    monkeypatch.setattr(engine_module, "time", types.SimpleNamespace(perf_counter=reading))
    [result] = chain.generate(
        [[CYCLE[0]]],
        SamplingParams(max_tokens=20),
        method="prompt-lookup",
        num_speculative_tokens=k,
    )
    assert result.stats.num_output_tokens == 20
    assert len(compiled_by_then) > 2 and all(found == [1, 1] for found in compiled_by_then)


BAD = {
    "empty text": ("", {}, "prompt is empty"),
    "no ids": ([], {}, "prompt is empty"),
    "id above": ([1, 999], {}, "prompt token 1 is 999, outside the vocabulary of 260"),
    "id below": ([-1], {}, "prompt token 0 is -1"),
    "too long": ([1] * 500, {"max_tokens": 20}, "500 tokens plus max_tokens 20.*context of 512"),
    "no room": ([1] * 512, {}, "512 tokens and the context 512"),
    "stop id": ([1], {"stop_token_ids": (260,)}, "stop_token_ids has id 260"),
    "bias id": ([1], {"logit_bias": {300: 1.0}}, "logit_bias has id 300"),
}


@pytest.mark.parametrize(("prompt", "fields", "message"), BAD.values(), ids=BAD)
def test_bad_requests_are_named(chain, prompt, fields, message):
    with pytest.raises(ValueError, match=message):
        chain.generate([prompt] if prompt == [] else prompt, SamplingParams(**fields))


def test_a_context_beyond_the_model_needs_the_override():
    target = chain_target("ab")
    with pytest.raises(ValueError, match="context_length 1024 is above the 512 positions"):
        Engine(target, ByteTokenizer(), context_length=1024)
    engine = Engine(target, ByteTokenizer(), context_length=1024, allow_longer_context=True)
    [result] = engine.generate([CYCLE[0]] * 600, SamplingParams(max_tokens=4))
    assert result.text == "baba"


def test_buckets():
    assert [cache_bucket(n) for n in (1, 256, 257, 5000)] == [256, 256, 512, 8192]
    assert [batch_bucket(n, 32) for n in (1, 2, 3, 9, 33)] == [1, 2, 4, 16, 32]
