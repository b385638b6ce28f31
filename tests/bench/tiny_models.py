"""A known target with random heads of both kinds, for the commands that compare methods."""

import functools

from peagle_jax.bench.models import Models, make_models
from peagle_jax.models.config import DrafterConfig
from peagle_jax.testing import ByteTokenizer
from tests.chain_target import chain_target
from tests.models.drafter_configs import numpy_drafter

TEXT = "abcdefgh"
ALL = ("none", "prompt-lookup", "eagle3", "p-eagle")


@functools.cache
def tiny_models(methods: tuple[str, ...] = ALL) -> Models:
    """The chain target; made once for each set of methods, so that programs are shared."""
    target = chain_target(TEXT)
    fields = dict(
        vocab_size=target.config.vocab_size,
        draft_vocab_size=target.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        target_hidden_size=target.config.hidden_size,
        layers=target.config.layers,
        taps=(0, 1),
        max_positions=target.config.max_positions,
    )
    heads = {
        "p-eagle": DrafterConfig(**fields, mask_token_id=200, num_speculative_tokens=2),
        "eagle3": DrafterConfig(**fields, parallel_drafting=False, num_speculative_tokens=2),
    }
    drafters = {method: numpy_drafter(heads[method]) for method in methods if method in heads}
    return make_models(target, ByteTokenizer(), drafters, methods)
