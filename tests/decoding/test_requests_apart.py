"""A request's output depends on itself alone: not on slot, neighbours, batch, K or drafter."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.decoding.rounds import Params
from tests.decoding import programs, tiny
from tests.decoding.drafters import MixedParams
from tests.decoding.programs import sampling

LONG, SHORT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3]
HOT = sampling(temperature=1.0, seed=42)


def outputs(prompts, params, **fields):
    return programs.run_plain(prompts, params, **fields)[0]


def test_swapping_slots_swaps_outputs_B8():
    params = [sampling(temperature=0.0, seed=1), sampling(temperature=1.0, top_k=3, seed=2)]
    straight, _ = programs.compare([SHORT, LONG], params)
    swapped, _ = programs.compare([LONG, SHORT], params[::-1])
    assert swapped == straight[::-1]


def test_a_seed_gives_its_text_for_every_k_and_neighbour_B9():
    alone = outputs([SHORT], [HOT])
    assert outputs([SHORT], [HOT]) == alone
    neighbour = sampling(temperature=2.0, seed=7)
    together, _ = programs.compare([LONG, SHORT], [neighbour, HOT])
    assert together[1] == alone[0]
    for count in (0, 2, 5):
        one = sampling(temperature=1.0, seed=42, num_speculative_tokens=count)
        assert programs.compare([SHORT], [one])[0] == alone
    others = outputs([SHORT] * 5, [sampling(temperature=1.0, seed=seed) for seed in range(43, 48)])
    assert len({tuple(output) for output in [*others, alone[0]]}) == 6


def test_equal_rows_of_the_head_give_the_lower_id_B13():
    """Ids 4 and 9 have the same embedding and head row, so their logits tie exactly."""
    target = tiny.make_target(programs.target().config)
    table, head = target.embedding.get_value(), target.head.get_value()
    target.embedding.set_value(table.at[9].set(table[4]))
    target.head.set_value(head.at[:, 9].set(head[:, 4]))
    values = nnx.state(target)
    params = [sampling(logit_bias={4: 30.0, 9: 30.0})]
    fn = programs.plain()

    def run(fn, values, draft):
        own = Params(values, draft)
        state = fn.compiled.prefill(own, fn.init([SHORT], params, batch_size=5), chunk=8)
        return fn.compiled.step(own, state, np.int32(100))

    plain = run(fn, values, None)
    output = fn.outputs(plain)[0]
    assert 4 in output and 9 not in output
    for drafted in (4, 9):
        truth = jnp.full_like(plain.tokens, drafted)
        mixed = MixedParams((), jnp.zeros(5, jnp.int32), jnp.full(5, 3, jnp.int32), truth)
        assert fn.outputs(run(programs.scripted(8), values, mixed))[0] == output


def test_unequal_prompts_alone_and_together_C13():
    params = [sampling(), sampling()]
    together, state = programs.compare([SHORT, LONG], params)
    assert together == [*outputs([SHORT], params[:1]), *outputs([LONG], params[1:])]
    assert np.asarray(state.requests.prompt_length)[:2].tolist() == [3, 11]


def test_penalties_count_drafts_of_the_block_B11():
    """A bias makes the model love id 5, which is in the prompt of some rows."""
    love = {5: 4.0}
    params = [
        sampling(logit_bias=love),
        sampling(logit_bias=love, repetition_penalty=3.0),
        sampling(logit_bias=love, presence_penalty=2.0),
        sampling(logit_bias=love, frequency_penalty=2.0),
        sampling(logit_bias=love, repetition_penalty=1.3, presence_penalty=2.0, temperature=1.0),
    ]
    found, _ = programs.compare([[5, 1], [5, 1], [5, 1], [2, 1], [5, 2]], params)
    counts = [output.count(5) for output in found]
    assert counts[0] == 20 > max(counts[1:]) and min(counts) > 0


def test_admitted_rows_decode_as_if_alone():
    """A finished row of a running batch is refilled; its neighbour does not notice."""
    fn = programs.plain()
    prompts, params = [SHORT, LONG], [sampling(max_tokens=3), HOT]
    state = fn.init(prompts, params, batch_size=5)
    state = fn.compiled.prefill(fn.params, state, chunk=programs.CHUNK)
    state = fn.compiled.step(fn.params, state, np.int32(6))
    assert bool(state.finished[0]) and not bool(state.finished[1])
    late = sampling(repetition_penalty=1.3, temperature=0.7, seed=5)
    state = fn.admit(state, [0, 3], [LONG[:5], SHORT], [late, HOT])
    state = fn.compiled.prefill(fn.params, state, chunk=programs.CHUNK)
    state = fn.compiled.step(fn.params, state, np.int32(100))
    found = fn.outputs(state)
    assert found == [
        *outputs([LONG[:5]], [late]),
        *outputs([LONG], [HOT]),
        *outputs([SHORT], [HOT]),
    ]
