"""transformers as a peer: the same weights give the same tokens, and the same is counted."""

import jax.numpy as jnp
import pytest

from peagle_jax.bench.measure import Arm
from peagle_jax.bench.models import make_models, session_maker
from peagle_jax.bench.peers import PeerError, PeerSession
from peagle_jax.bench.session import Request
from peagle_jax.checkpoints.load import load_target
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.testing import ByteTokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"),
]

TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random llama, written by transformers and read by us."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.eos_id,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    target = load_target(folder, dtype=jnp.float32)
    return make_models(target, ByteTokenizer(), {}, ("none",), path=folder)


def requests():
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = [(1, 2, 3, 4, 1, 2, 3), (50, 60, 50, 60, 50)]
    return [Request(name=str(i), prompt=p, params=params) for i, p in enumerate(prompts)]


def test_the_same_tokens_and_the_same_counts(models):
    with session_maker(models, requests(), with_peers=True) as make:
        runs = {}
        arms = (Arm("none", None), Arm("transformers", None), Arm("transformers-prompt-lookup", 3))
        for arm in arms:
            session = make(arm, 1)
            assert session.warm_up(requests()) > 0
            runs[arm.method] = session.run(requests())
        assert make(arms[1], 2) is None
    expected = [record.token_ids for record in runs["none"].records]
    for run in runs.values():
        assert [record.token_ids for record in run.records] == expected
        for record in run.records:
            assert 0 < record.first_token_s < record.total_s <= run.seconds
    assert [record.num_rounds for record in runs["transformers"].records] == [TOKENS - 1] * 2
    lookup = [record.num_rounds for record in runs["transformers-prompt-lookup"].records]
    assert all(1 <= rounds <= TOKENS - 1 for rounds in lookup)
    lookup = runs["transformers-prompt-lookup"].records
    assert {record.acceptance for record in lookup} == {None}


def test_an_ignored_end_is_written_and_gone_beyond(models):
    """Whatever token comes second, called the end."""
    with session_maker(models, requests(), with_peers=True) as make:
        session = make(Arm("transformers", None), 1)
        whole = session.run(requests()[:1]).records[0].token_ids
        session.stop_ids = [whole[1]]
        assert session.run(requests()[:1]).records[0].token_ids == whole
        params = SamplingParams(max_tokens=TOKENS)
        ending = [Request(name="0", prompt=requests()[0].prompt, params=params)]
        ended = session.run(ending).records[0].token_ids
        assert ended == whole[: whole.index(whole[1]) + 1]


def test_a_sampled_request_is_refused():
    pytest.importorskip("torch")
    params = SamplingParams(temperature=1.0, max_tokens=2)
    sampled = Request(name="0", prompt=(1,), params=params)
    with pytest.raises(PeerError, match="decode greedily"):
        PeerSession(None, [0]).run([sampled])
