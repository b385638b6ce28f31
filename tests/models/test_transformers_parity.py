"""Live transformers against our forward, on two random shapes per family that no golden file has.

transformers saves a random model to a folder; our loader reads it; logits, every hidden state and
cached decoding must agree. Needs torch (extra `parity`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.cache import init_cache

pytestmark = pytest.mark.parity

_LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=5e5,
)
_COMMON = dict(vocab_size=72, max_position_embeddings=4096, pad_token_id=0)
_WIDE = dict(hidden_size=40, num_attention_heads=8, num_key_value_heads=2)
_NARROW = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
_GEMMA = dict(
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=72,
    enable_moe_block=False,
    num_kv_shared_layers=0,
    attention_k_eq_v=True,
    final_logit_softcapping=20.0,
)
_FULL_LAST = ["sliding_attention", "full_attention"]

# id: (transformers class prefix, config fields)
SHAPES = {
    "llama_grouped": (
        "Llama",
        dict(**_WIDE, intermediate_size=56, num_hidden_layers=2, head_dim=12,
             rope_parameters=_LLAMA3),
    ),
    "llama_biased_tied": (
        "Llama",
        dict(**_NARROW, intermediate_size=32, num_hidden_layers=3, head_dim=8, mlp_bias=True,
             attention_bias=True, tie_word_embeddings=True),
    ),
    "qwen3_grouped": (
        "Qwen3",
        dict(**_WIDE, intermediate_size=56, num_hidden_layers=2, head_dim=16),
    ),
    "qwen3_tied": (
        "Qwen3",
        dict(**_NARROW, intermediate_size=32, num_hidden_layers=3, head_dim=10,
             tie_word_embeddings=True),
    ),
    "qwen3_moe_top3": (
        "Qwen3Moe",
        dict(**_WIDE, num_hidden_layers=2, head_dim=16, moe_intermediate_size=20, num_experts=5,
             num_experts_per_tok=3, norm_topk_prob=True),
    ),
    "qwen3_moe_not_renormalised": (
        "Qwen3Moe",
        dict(**_NARROW, num_hidden_layers=2, head_dim=8, moe_intermediate_size=12, num_experts=4,
             num_experts_per_tok=1, norm_topk_prob=False),
    ),
    "gpt_oss_window_5": (
        "GptOss",
        dict(**_WIDE, intermediate_size=24, num_hidden_layers=2, head_dim=16, sliding_window=5,
             num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt_oss_sliding_only": (
        "GptOss",
        dict(**_NARROW, intermediate_size=16, num_hidden_layers=2, head_dim=8, sliding_window=3,
             num_local_experts=3, num_experts_per_tok=3, layer_types=["sliding_attention"] * 2),
    ),
    "gemma4_grouped": (
        "Gemma4Text",
        dict(**_WIDE, **_GEMMA, intermediate_size=56, num_hidden_layers=2, head_dim=12,
             global_head_dim=16, num_global_key_value_heads=1, sliding_window=5,
             layer_types=_FULL_LAST),
    ),
    "gemma4_eleven_layers": (
        "Gemma4Text",
        dict(**{**_NARROW, "num_attention_heads": 2}, **_GEMMA, intermediate_size=24,
             num_hidden_layers=11, head_dim=8, global_head_dim=16, num_global_key_value_heads=2,
             sliding_window=4, layer_types=["sliding_attention"] * 5 + _FULL_LAST * 3),
    ),
}  # fmt: skip


def random_transformers_model(prefix, fields):
    """A float32 model in which no norm, bias, sink or scalar has its neutral initial value."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **fields})
    name = "Gemma4ForCausalLM" if prefix == "Gemma4Text" else f"{prefix}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        named = [*model.named_parameters(), *model.named_buffers()]
        for key, value in named:
            if "norm" in key or "layer_scalar" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif "bias" in key or "sinks" in key:
                value.copy_(0.5 * torch.randn_like(value))
            elif "inv_freq" not in key and value.is_floating_point() and value.ndim > 1:
                # The embedding scale of Gemma 4 is a buffer without axes and stays.
                value.copy_(torch.randn_like(value) * 1.5 * value.shape[-1] ** -0.5)
    return model.float().eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_our_forward_equals_transformers(shape, tmp_path):
    torch = pytest.importorskip("torch")
    model = random_transformers_model(*SHAPES[shape])
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(1, 72, (2, 14))
    with torch.no_grad():
        reference = model(torch.from_numpy(tokens), output_hidden_states=True)
    wanted = reference.logits.numpy()

    target = load_target(tmp_path, dtype=jnp.float32)
    graph, state = nnx.split(target)
    layers = target.config.num_layers
    cache = init_cache(
        target.config.layers, batch_size=2, num_slots=14, max_new_rows=9, dtype=jnp.float32
    )

    @jax.jit
    def run(state, tokens, positions, cache):
        target = nnx.merge(graph, state)
        full = target(tokens, positions, taps=tuple(range(layers)))
        first = target(tokens[:, :9], positions[:, :9], cache)
        second = target(tokens[:, 9:], positions[:, 9:], first.cache)
        cached = jnp.concatenate([first.hidden, second.hidden], axis=1)
        return target.logits(full.hidden), target.logits(cached), full.taps, full.hidden

    rows = jnp.broadcast_to(jnp.arange(14, dtype=jnp.int32)[None, :], (2, 14))
    full, cached, taps, final = run(state, jnp.asarray(tokens, jnp.int32), rows, cache)
    limit = 1e-4 * np.abs(wanted).max()
    np.testing.assert_allclose(full, wanted, rtol=0, atol=limit)
    np.testing.assert_allclose(cached, wanted, rtol=0, atol=limit)
    # transformers' last entry has passed the final norm, the others are the residual stream.
    for index, tap in enumerate(jnp.split(taps, layers, axis=-1)):
        hidden = reference.hidden_states[index].numpy()
        np.testing.assert_allclose(tap, hidden, rtol=0, atol=1e-4 * np.abs(hidden).max())
    hidden = reference.hidden_states[layers].numpy()
    np.testing.assert_allclose(final, hidden, rtol=0, atol=1e-4 * np.abs(hidden).max())
