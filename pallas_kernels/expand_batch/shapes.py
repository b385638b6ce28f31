"""Real shapes of `expand_batch`, for tests and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expand_batch.layout import CacheLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: `decodes` requests of K+1 rows after `prefills` requests of `chunk` rows."""

    name: str
    decodes: int
    drafts: int
    prefills: int = 0
    chunk: int = 0
    method: str = "p_eagle"
    page_size: int | None = 16
    max_length: int = 8192

    @property
    def requests(self) -> int:
        return self.decodes + self.prefills

    @property
    def target_rows(self) -> int:
        return self.decodes * (self.drafts + 1) + self.prefills * self.chunk

    def keywords(self) -> dict:
        """The static keywords of the call."""
        page = self.page_size or self.max_length
        return {
            "method": self.method,
            "num_speculative_tokens": self.drafts,
            "mask_token_id": 201020,
            "max_query_len": max(self.drafts + 1, self.chunk),
            "cache": CacheLayout(
                page_size=page,
                num_slots=self.requests * self.max_length,
                max_length=self.max_length,
            ),
        }


SHAPES = (
    Shape(name="decode-1-k7", decodes=1, drafts=7),
    Shape(name="decode-64-k7", decodes=64, drafts=7),
    Shape(name="decode-64-k5-contiguous", decodes=64, drafts=5, page_size=None),
    Shape(name="decode-256-k7-pard", decodes=256, drafts=7, method="pard"),
    Shape(name="mixed-32-and-4x2048", decodes=32, drafts=7, prefills=4, chunk=2048),
    Shape(name="eagle3-decode-64", decodes=64, drafts=5, method="eagle3"),
)


def abstract_arguments(shape: Shape) -> tuple[tuple, dict]:
    """Positional and array keyword arguments without values, for compile tests."""
    positional = tuple(
        jax.ShapeDtypeStruct((size,), jnp.int32)
        for size in (
            shape.target_rows,
            shape.target_rows,
            shape.requests,
            shape.requests + 1,
            shape.requests,
        )
    )
    if shape.page_size is None:
        return positional, {}
    pages = shape.max_length // shape.page_size
    return positional, {"block_table": jax.ShapeDtypeStruct((shape.requests, pages), jnp.int32)}


def random_arguments(shape: Shape, seed: int) -> tuple[tuple, dict]:
    """The same with values: random acceptances, whole chunks, shuffled pages."""
    generator = np.random.default_rng(seed)
    lengths = np.array([shape.chunk] * shape.prefills + [shape.drafts + 1] * shape.decodes)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rejected = generator.integers(0, shape.drafts + 1, size=shape.requests)
    rejected[: shape.prefills] = 0
    room = shape.max_length - max(shape.drafts + 1, shape.chunk) - 2 * shape.drafts
    first = generator.integers(0, max(room, 1), size=shape.requests)
    positions = np.concatenate(
        [start + np.arange(length) for start, length in zip(first, lengths, strict=True)]
    )
    arrays = (
        generator.integers(1, 200000, size=shape.target_rows),
        positions,
        generator.integers(1, 200000, size=shape.requests),
        starts,
        starts[1:] - 1 - rejected,
    )
    positional = tuple(jnp.asarray(array, jnp.int32) for array in arrays)
    if shape.page_size is None:
        return positional, {}
    pages = shape.max_length // shape.page_size
    table = generator.permutation(shape.requests * pages).reshape(shape.requests, pages)
    return positional, {"block_table": jnp.asarray(table, jnp.int32)}
