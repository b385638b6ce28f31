"""Real shapes of `short_query_attention`, for tests and benchmarks: targets and their heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call. `rows` new rows per request; `length` positions are filled of `slots`.

    `page_size` None means a contiguous cache; `ring` a cache of `slots` slots that wraps around.
    """

    name: str
    requests: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    page_size: int | None = None
    ring: bool = False
    dtype: str = "bfloat16"

    def keywords(self) -> dict:
        """The static keywords of the call."""
        return {"window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}


_GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64}
_QWEN = {"heads": 32, "kv_heads": 4, "head_dim": 128}
_GEMMA_SLIDING = {"heads": 32, "kv_heads": 16, "head_dim": 256, "scale": 1.0}
_GEMMA_FULL = {"heads": 32, "kv_heads": 4, "head_dim": 512, "scale": 1.0}

SHAPES = (
    Shape(
        name="gpt-oss/full-verify-64x8k",
        requests=64,
        rows=8,
        slots=8192,
        sinks=True,
        **_GPT_OSS,
    ),
    Shape(
        name="gpt-oss/full-verify-1x128k",
        requests=1,
        rows=8,
        slots=131072,
        sinks=True,
        **_GPT_OSS,
    ),
    Shape(
        name="gpt-oss/sliding-ring-64",
        requests=64,
        rows=8,
        slots=256,
        window=128,
        sinks=True,
        ring=True,
        **_GPT_OSS,
    ),
    Shape(name="gpt-oss/draft-64x8k", requests=64, rows=14, slots=8192, **_GPT_OSS),
    Shape(
        name="gpt-oss/paged-verify-64x8k",
        requests=64,
        rows=8,
        slots=8192,
        page_size=16,
        sinks=True,
        **_GPT_OSS,
    ),
    Shape(name="qwen3-coder/verify-64x8k", requests=64, rows=6, slots=8192, **_QWEN),
    Shape(name="qwen3-coder/draft-1x128k", requests=1, rows=10, slots=131072, **_QWEN),
    Shape(
        name="gemma-4-31b/sliding-verify-16x8k",
        requests=16,
        rows=8,
        slots=8192,
        window=1024,
        **_GEMMA_SLIDING,
    ),
    Shape(name="gemma-4-31b/full-verify-16x8k", requests=16, rows=8, slots=8192, **_GEMMA_FULL),
    Shape(name="gemma-4-31b/full-draft-1x32k", requests=1, rows=14, slots=32768, **_GEMMA_FULL),
    Shape(name="qwen3-coder/plain-decode-64x8k", requests=64, rows=1, slots=8192, **_QWEN),
    Shape(name="llama-soft-cap/64-rows", requests=4, rows=64, slots=4096, soft_cap=50.0, **_QWEN),
)


def abstract_arguments(shape: Shape) -> tuple[tuple, dict]:
    """Positional and array keyword arguments without values, for compile tests."""
    blocks = shape.slots // (shape.page_size or shape.slots)
    if shape.page_size is None:
        cache = (shape.requests, shape.slots, shape.kv_heads, shape.head_dim)
    else:
        cache = (shape.requests * blocks, shape.page_size, shape.kv_heads, shape.head_dim)
    rows = (shape.requests, shape.rows)
    positional = (
        jax.ShapeDtypeStruct((*rows, shape.heads, shape.head_dim), shape.dtype),
        jax.ShapeDtypeStruct(cache, shape.dtype),
        jax.ShapeDtypeStruct(cache, shape.dtype),
        jax.ShapeDtypeStruct(rows, jnp.int32),
    )
    keywords = {}
    if shape.page_size is not None:
        keywords["block_table"] = jax.ShapeDtypeStruct((shape.requests, blocks), jnp.int32)
    if shape.ring:
        keywords["key_positions"] = jax.ShapeDtypeStruct((shape.requests, shape.slots), jnp.int32)
    if shape.sinks:
        keywords["sinks"] = jax.ShapeDtypeStruct((shape.heads,), shape.dtype)
    return positional, keywords


def random_arguments(shape: Shape, seed: int, length: int | None = None) -> tuple[tuple, dict]:
    """The same with values: every request's cache filled up to `length` (default: all slots)."""
    generator = np.random.default_rng(seed)
    positional, keywords = abstract_arguments(shape)
    length = (4 * shape.slots if shape.ring else shape.slots) if length is None else length
    key = jax.random.key(seed)
    arrays = [
        jax.random.normal(jax.random.fold_in(key, index), argument.shape, argument.dtype)
        for index, argument in enumerate(positional[:3])
    ]
    positions = np.arange(length - shape.rows, length, dtype=np.int32)
    arrays.append(jnp.asarray(np.broadcast_to(positions, (shape.requests, shape.rows))))
    values = {}
    if "block_table" in keywords:
        table = keywords["block_table"].shape
        values["block_table"] = jnp.asarray(
            generator.permutation(table[0] * table[1]).reshape(table), jnp.int32
        )
    if "key_positions" in keywords:
        held = np.arange(length - shape.slots, length, dtype=np.int32)
        ring = np.empty(shape.slots, np.int32)
        ring[held % shape.slots] = held
        values["key_positions"] = jnp.asarray(
            np.broadcast_to(ring, keywords["key_positions"].shape)
        )
    if "sinks" in keywords:
        values["sinks"] = jax.random.normal(
            jax.random.fold_in(key, 9), (shape.heads,), keywords["sinks"].dtype
        )
    return tuple(arrays), values
