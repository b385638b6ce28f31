"""The stand-ins that users are given."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.testing import ByteTokenizer, count_compilations, dummy_target


def test_dummy_target_answers_the_byte_tokenizer():
    target = dummy_target(num_layers=1)
    tokens = jnp.asarray([ByteTokenizer().encode("hi")], jnp.int32)
    out = target(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :])
    logits = target.logits(out.hidden)
    assert logits.shape == (1, 2, ByteTokenizer.vocab_size) and logits.dtype == jnp.float32
    assert np.isfinite(logits).all()


def test_compilations_are_counted_once_per_shape():
    @jax.jit
    def double(x):
        return x + x

    x, y = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with count_compilations() as first:
        double(x)
        double(x)
        double(y)
    assert first.count == 2
    with count_compilations() as second:
        double(x)
    assert second.count == 0
    double(np.zeros(5, np.float32))
    assert second.count == 0, "nothing is counted after the block"
