"""Small stand-ins for a model and a tokenizer, and counting of compilations, for users' tests."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.target import Target, init_target
from peagle_jax.text.byte_tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "Compilations", "count_compilations", "dummy_target"]


def dummy_target(
    seed: int = 0, *, num_layers: int = 7, vocab_size: int = ByteTokenizer.vocab_size
) -> Target:
    """A tiny llama with random weights, float32: every interface of a real target, no meaning.

    Seven layers are the least at which the default taps (2, L//2, L-3) are three layers in order.
    """
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    config = TargetConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        layers=(layer,) * num_layers,
        max_positions=1024,
        norm_eps=1e-5,
        norm_cast="before_weight",
        tied_embeddings=True,
    )
    return init_target(config, jax.random.key(seed), jnp.float32)


@dataclasses.dataclass
class Compilations:
    """How many programs were compiled so far (or fetched from a compilation cache)."""

    count: int = 0


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count every program that jax compiles inside the block, whoever asks for it.

    ```
    with count_compilations() as compilations:
        step(state)
    assert compilations.count == 0
    ```
    """
    seen = Compilations()

    def listen(event: str, duration: float, **_: object) -> None:
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            seen.count += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
