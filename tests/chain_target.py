"""A target that spells a text of distinct bytes over and over: known output, no training."""

import jax.numpy as jnp
import numpy as np

from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.target import Target
from peagle_jax.testing import ByteTokenizer

_HIDDEN = 64


def chain_target(text: str, *, end_after: str | None = None) -> Target:
    """After each byte of `text` comes the next one, and the first after the last.

    The bytes must be distinct. After the byte of `end_after`, if given, comes the end token.
    The layer adds nothing to the residual stream, so the output depends on the last token alone;
    what follows a token outside the text is left open.
    """
    chain = list(text.encode())
    assert len(set(chain)) == len(chain), "the bytes of a chain must be distinct"
    successor = np.full(ByteTokenizer.vocab_size, chain[0])
    for here, there in zip(chain, [*chain[1:], chain[0]], strict=True):
        successor[here] = there
    if end_after is not None:
        successor[end_after.encode()[-1]] = ByteTokenizer.eos_id
    config = TargetConfig(
        family="llama",
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=16,
        layers=(LayerConfig(num_heads=2, num_kv_heads=1, head_dim=8, rope=RopeConfig()),),
        max_positions=512,
        norm_eps=1e-5,
        norm_cast="before_weight",
    )
    generator = np.random.default_rng(0)
    embedding = generator.normal(size=(config.vocab_size, _HIDDEN)).astype(np.float32)
    # Row t of the transition matrix has its one at t's successor: logits are highest there.
    transition = np.zeros((config.vocab_size, config.vocab_size), np.float32)
    transition[np.arange(config.vocab_size), successor] = 1.0
    head = np.linalg.pinv(embedding[chain]) @ transition[chain]
    arrays = {"embedding": embedding, "head": 20 * head}

    def source(name, shape, dtype):
        if name in arrays:
            return jnp.asarray(arrays[name], dtype)
        last = name.rsplit(".", 1)[-1]
        return (jnp.ones if last.endswith("norm") else jnp.zeros)(shape, dtype)

    return Target(config, source=source)
