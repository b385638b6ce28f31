"""Real shapes of training attention, for tests and benchmarks: drafters of the supported targets.

A drafter takes its head counts from its target. Sequences of 8,192 rows, eight depths kept with
probability 0.8 per depth: about 26,000 mask rows, here in one chunk or in eight.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One training row: `rows` depth-0 rows, `mask_rows` mask rows (0: depth-0 attention alone)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 8192
    mask_rows: int = 0
    window: int | None = None
    dtype: str = "bfloat16"


_GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64}
_QWEN = {"heads": 32, "kv_heads": 4, "head_dim": 128}
_GEMMA = {"heads": 32, "kv_heads": 16, "head_dim": 256}

SHAPES = (
    Shape(name="gpt-oss/depth-0", **_GPT_OSS),
    Shape(name="gpt-oss/rollouts", mask_rows=26_112, **_GPT_OSS),
    Shape(name="gpt-oss/rollouts-window", mask_rows=26_112, window=2048, **_GPT_OSS),
    Shape(name="qwen3-coder/depth-0", **_QWEN),
    Shape(name="qwen3-coder/rollouts-chunk", mask_rows=3264, **_QWEN),
    Shape(name="gemma-4-31b/depth-0", **_GEMMA),
    Shape(name="gemma-4-31b/rollouts-chunk", mask_rows=3264, **_GEMMA),
)


def abstract_arguments(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `attend` without values."""

    def array(rows, heads):
        return jax.ShapeDtypeStruct((1, rows, heads, shape.head_dim), shape.dtype)

    def integers(rows):
        return jax.ShapeDtypeStruct((1, rows), jnp.int32)

    arguments = {
        "q": array(shape.mask_rows or shape.rows, shape.heads),
        "k": array(shape.rows, shape.kv_heads),
        "v": array(shape.rows, shape.kv_heads),
        "document_ids": integers(shape.rows),
    }
    if shape.mask_rows:
        arguments |= {
            "own_k": array(shape.mask_rows, shape.kv_heads),
            "own_v": array(shape.mask_rows, shape.kv_heads),
            "anchors": integers(shape.mask_rows),
            "depths": integers(shape.mask_rows),
            "valid": jax.ShapeDtypeStruct((1, shape.mask_rows), jnp.bool_),
        }
    return arguments


def attend(shape: Shape, arguments: dict[str, Array]) -> Float[Array, "B M N D"]:
    """The operation of `shape` on its arguments."""
    from pallas_kernels.document_attention import document_attention
    from pallas_kernels.rollout_attention import rollout_attention

    scale = shape.head_dim**-0.5
    x = arguments
    if not shape.mask_rows:
        return document_attention(
            x["q"], x["k"], x["v"], x["document_ids"], scale=scale, window=shape.window
        )
    rows = (x[name] for name in ("anchors", "depths", "valid", "document_ids"))
    arrays = (x[name] for name in ("q", "k", "v", "own_k", "own_v"))
    return rollout_attention(*arrays, *rows, scale=scale, window=shape.window)


def gradients(shape: Shape, arguments: dict[str, Array]) -> dict[str, Array]:
    """Gradients of the summed output by every float argument: all kernels of both directions."""
    floats = {k: x for k, x in arguments.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {k: x for k, x in arguments.items() if k not in floats}

    def total(floats):
        return jnp.sum(attend(shape, floats | rest).astype(jnp.float32) ** 2)

    return jax.grad(total)(floats)
