"""Real shapes of `fill_hidden`, for tests and benchmarks: heads of the supported targets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: `requests` requests that each verified `drafts`+1 rows; more are a prompt chunk."""

    name: str
    requests: int
    rows: int
    drafts: int
    hidden_size: int
    dtype: str = "bfloat16"

    @property
    def draft_rows(self) -> int:
        return self.requests * (self.rows + self.drafts - 1)


SHAPES = (
    Shape(name="gpt-oss-20b/decode-1", requests=1, rows=8, drafts=7, hidden_size=2880),
    Shape(name="gpt-oss-20b/decode-64", requests=64, rows=8, drafts=7, hidden_size=2880),
    Shape(name="gpt-oss-120b/prefill", requests=4, rows=8192, drafts=5, hidden_size=2880),
    Shape(name="qwen3-coder-30b/decode-64", requests=64, rows=6, drafts=5, hidden_size=2048),
    Shape(name="gemma-4-31b/decode-64", requests=64, rows=8, drafts=7, hidden_size=5376),
    Shape(name="gemma-4-31b/prefill", requests=1, rows=16384, drafts=7, hidden_size=5376),
)


def abstract_arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of `fill_hidden` without values: what a compile test lowers with."""
    rows = shape.draft_rows
    return (
        jax.ShapeDtypeStruct((shape.requests * shape.rows, shape.hidden_size), shape.dtype),
        jax.ShapeDtypeStruct((shape.hidden_size,), shape.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.bool_),
    )


def random_arguments(shape: Shape, seed: int) -> tuple[jax.Array, ...]:
    """Arguments as the generate loop makes them: accepted rows, mask rows, padding per request."""
    generator = np.random.default_rng(seed)
    per_request = shape.rows + shape.drafts - 1
    accepted = generator.integers(1, shape.rows + 1, size=(shape.requests, 1))
    if shape.rows > shape.drafts + 1:
        accepted[:] = shape.rows
    row = np.arange(per_request)[None, :]
    copied = row < accepted
    is_mask = ~copied & (row < accepted + shape.drafts - 1)
    source = np.where(copied, row + np.arange(shape.requests)[:, None] * shape.rows, -1)
    key = jax.random.key(seed)
    hidden, mask_hidden = (
        jax.random.normal(jax.random.fold_in(key, index), argument.shape, jnp.float32)
        for index, argument in enumerate(abstract_arguments(shape)[:2])
    )
    return (
        hidden.astype(shape.dtype),
        mask_hidden.astype(shape.dtype),
        jnp.asarray(source.reshape(-1), jnp.int32),
        jnp.asarray(is_mask.reshape(-1)),
    )
