"""Every kernel at every real shape, as one list: what the kernel benchmarks and figures go over.

A case knows how to call its operation by implementation, what the call must move and compute, which
library does the same, and a tiny twin for machines without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import expand_batch, fill_hidden, short_query_attention
from pallas_kernels.expand_batch import drafting_method
from pallas_kernels.expand_batch import shapes as expand_shapes
from pallas_kernels.fill_hidden import shapes as fill_shapes
from pallas_kernels.interval_attention import shapes as interval_shapes
from pallas_kernels.short_query_attention import shapes as attention_shapes
from pallas_kernels.vocab_loss import shapes as vocab_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape.

    Attributes:
      kernel: the operation.
      shape: name of the shape.
      call: implementation -> function of the arguments (a tuple of pytrees).
      abstract: the arguments without values.
      make: seed -> arguments.
      moved_bytes: bytes that the call must read and write at least.
      flops: multiplications and additions of its matrix products.
      bound: what limits it: "bandwidth", "matrix" or "latency".
      libraries: name -> function of the same arguments; may raise where it does not support them.
      goal: what the H200 is to show.
      tiny: the same operation small enough to interpret.
    """

    kernel: str
    shape: str
    call: Callable[[str | None], Callable[..., Any]]
    abstract: tuple
    make: Callable[[int], tuple]
    moved_bytes: int
    flops: int = 0
    bound: str = "bandwidth"
    libraries: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    goal: str = ""
    tiny: Case | None = None


def _bytes(tree) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


# --- expand_batch ---


def _expand_case(shape: expand_shapes.Shape, tiny: Case | None) -> Case:
    def call(implementation):
        def expand(positional, arrays):
            return expand_batch(
                *positional, **arrays, **shape.keywords(), implementation=implementation
            )

        return expand

    abstract = expand_shapes.abstract_arguments(shape)
    method = drafting_method(shape.method, shape.drafts)
    rows = shape.target_rows + method.new_rows * shape.requests
    # Ids, positions, slots, two flags; with shift two maps of hidden states; rows to sample.
    written = (14 + 4 * method.shift) * rows + 4 * method.shift * shape.target_rows
    written += 4 * shape.requests * (method.sampled_rows + 1)
    return Case(
        kernel="expand_batch",
        shape=shape.name,
        call=call,
        abstract=abstract,
        make=lambda seed: expand_shapes.random_arguments(shape, seed),
        # The block table is read where rows are written, not as a whole.
        moved_bytes=_bytes(abstract[0]) + written + 4 * rows,
        bound="latency",
        goal="<= 10 us at 64 requests, >= 4x the reference under jit",
        tiny=tiny,
    )


_TINY_EXPAND = _expand_case(
    expand_shapes.Shape(name="tiny", decodes=2, drafts=3, max_length=64), None
)


# --- fill_hidden ---


def _fill_case(shape: fill_shapes.Shape, tiny: Case | None) -> Case:
    abstract = fill_shapes.abstract_arguments(shape)
    itemsize = jnp.dtype(shape.dtype).itemsize
    # Of each request, on average half of the verified rows are copied.
    copied = shape.requests * (shape.rows + 1) // 2
    return Case(
        kernel="fill_hidden",
        shape=shape.name,
        call=lambda implementation: (
            lambda *arrays: fill_hidden(*arrays, implementation=implementation)
        ),
        abstract=abstract,
        make=lambda seed: fill_shapes.random_arguments(shape, seed),
        moved_bytes=(copied + shape.draft_rows) * shape.hidden_size * itemsize
        + 5 * shape.draft_rows,
        bound="bandwidth" if shape.draft_rows > 4096 else "latency",
        goal=">= 85% of copy bandwidth from 256 MB on",
        tiny=tiny,
    )


_TINY_FILL = _fill_case(
    fill_shapes.Shape(name="tiny", requests=2, rows=4, drafts=3, hidden_size=96), None
)


# --- short_query_attention ---


def _attention_case(shape: attention_shapes.Shape, tiny: Case | None) -> Case:
    def call(implementation):
        def attend(positional, arrays):
            return short_query_attention(
                *positional, **arrays, **shape.keywords(), implementation=implementation
            )

        return attend

    def cudnn(positional, arrays):
        query, keys, values, positions = positional
        if arrays or shape.soft_cap or shape.window:
            raise NotImplementedError("cuDNN through jax.nn: no sinks, pages, rings, caps here")
        mask = positions[:, None, :, None] >= jnp.arange(shape.slots)[None, None, None, :]
        return jax.nn.dot_product_attention(
            query, keys, values, mask=mask, scale=shape.scale, implementation="cudnn"
        )

    abstract = attention_shapes.abstract_arguments(shape)
    keys = min(shape.slots, shape.window + shape.rows - 1) if shape.window else shape.slots
    pairs = shape.requests * shape.rows * min(keys, shape.window or keys)
    itemsize = jnp.dtype(shape.dtype).itemsize
    cache = 2 * shape.requests * keys * shape.kv_heads * shape.head_dim * itemsize
    return Case(
        kernel="short_query_attention",
        shape=shape.name,
        call=call,
        abstract=abstract,
        make=lambda seed: attention_shapes.random_arguments(shape, seed),
        moved_bytes=cache + 2 * _bytes(abstract[0][0]),
        flops=4 * pairs * shape.heads * shape.head_dim,
        libraries={"cuDNN": cudnn},
        goal=">= 70% of bandwidth at 64 x 8k and 1 x 128k keys",
        tiny=tiny,
    )


_TINY_ATTENTION = _attention_case(
    attention_shapes.Shape(
        name="tiny", requests=2, rows=3, heads=4, kv_heads=2, head_dim=16, slots=48, sinks=True
    ),
    None,
)


# --- training attention ---


def _interval_case(shape: interval_shapes.Shape, tiny: Case | None, *, backward: bool) -> Case:
    run = interval_shapes.gradients if backward else interval_shapes.attend
    abstract = (interval_shapes.abstract_arguments(shape),)

    def call(implementation):
        from pallas_kernels import dispatch

        def attend(arguments):
            with dispatch.forcing(implementation):
                return run(shape, arguments)

        return attend

    def make(seed: int) -> tuple:
        return (_interval_arguments(shape, seed),)

    # Mean pairs of a row: half of the prefix (anchors are spread evenly), or the window.
    rows = shape.mask_rows or shape.rows
    pairs = rows * min(shape.rows / 2, shape.window or shape.rows)
    factor = 3.5 if backward else 1
    return Case(
        kernel="rollout_attention" if shape.mask_rows else "document_attention",
        shape=shape.name + ("/gradients" if backward else ""),
        call=call,
        abstract=abstract,
        make=make,
        # Forward writes an array like q, backward one like each of its float arguments.
        moved_bytes=2 * _bytes(abstract) if backward else _bytes((abstract, abstract[0]["q"])),
        flops=int(factor * 4 * pairs * shape.heads * shape.head_dim),
        bound="matrix",
        libraries={} if shape.mask_rows or backward else {"cuDNN": _causal_cudnn},
        goal=">= 50% of the bf16 matrix rate forward at N = 8,192",
        tiny=tiny,
    )


def _causal_cudnn(arguments):
    return jax.nn.dot_product_attention(
        arguments["q"], arguments["k"], arguments["v"], is_causal=True, implementation="cudnn"
    )


def _interval_arguments(shape: interval_shapes.Shape, seed: int) -> dict[str, jax.Array]:
    """One document; rollouts of eight depths at anchors spread evenly, sorted."""
    abstract = interval_shapes.abstract_arguments(shape)
    key = jax.random.key(seed)
    arguments = {
        name: jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)
        for index, (name, leaf) in enumerate(abstract.items())
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    arguments["document_ids"] = jnp.zeros((1, shape.rows), jnp.int32)
    if shape.mask_rows:
        depths = min(8, shape.mask_rows)
        rollout = np.arange(shape.mask_rows) // depths
        anchors = rollout * (shape.rows - depths) // max(rollout.max(), 1)
        arguments["anchors"] = jnp.asarray(anchors, jnp.int32)[None]
        depth = np.arange(shape.mask_rows) % depths + 1
        arguments["depths"] = jnp.asarray(depth, jnp.int32)[None]
        arguments["valid"] = jnp.ones((1, shape.mask_rows), jnp.bool_)
    return arguments


@functools.cache
def _tiny_interval(mask_rows: int, backward: bool) -> Case:
    shape = interval_shapes.Shape(
        name="tiny", heads=2, kv_heads=1, head_dim=16, rows=64, mask_rows=mask_rows
    )
    return _interval_case(shape, None, backward=backward)


# --- vocab_loss ---


def _vocab_case(shape: vocab_shapes.Shape, tiny: Case | None) -> Case:
    abstract = vocab_shapes.abstract_arguments(shape)
    draft_vocab = shape.draft_vocab or shape.vocab
    # Both products once each for the losses and for the derivative, then dz times the head.
    products = 2 * (shape.hidden + shape.target_hidden) + shape.hidden * (1 + shape.head_trainable)

    def call(implementation):
        def losses(arguments):
            return vocab_shapes.losses_and_gradients(
                shape, arguments, implementation=implementation
            )

        return losses

    def make(seed: int) -> tuple:
        return (vocab_shapes.random_arguments(shape, seed),)

    return Case(
        kernel="vocab_loss",
        shape=shape.name,
        call=call,
        abstract=(abstract,),
        make=make,
        moved_bytes=_bytes(abstract),
        flops=2 * shape.rows * draft_vocab * products,
        bound="matrix",
        goal="no array of rows x vocabulary; faster than the reference",
        tiny=tiny,
    )


_TINY_VOCAB = _vocab_case(
    vocab_shapes.Shape(
        name="tiny", hidden=32, target_hidden=48, vocab=200, draft_vocab=90, rows=24
    ),
    None,
)


def all_cases() -> Iterator[Case]:
    """Every case, kernel by kernel."""
    for shape in expand_shapes.SHAPES:
        yield _expand_case(shape, _TINY_EXPAND)
    for shape in fill_shapes.SHAPES:
        yield _fill_case(shape, _TINY_FILL)
    for shape in attention_shapes.SHAPES:
        yield _attention_case(shape, _TINY_ATTENTION)
    for shape in interval_shapes.SHAPES:
        for backward in (False, True):
            tiny = _tiny_interval(24 if shape.mask_rows else 0, backward)
            yield _interval_case(shape, tiny, backward=backward)
    for shape in vocab_shapes.SHAPES:
        yield _vocab_case(shape, _TINY_VOCAB)


def select_cases(kernels: list[str] | None) -> list[Case]:
    """The cases of the named kernels, all by default; ValueError for a name without a case."""
    cases = list(all_cases())
    known = list(dict.fromkeys(case.kernel for case in cases))
    for kernel in kernels or []:
        if kernel not in known:
            raise ValueError(f"no cases for {kernel!r}; kernels are {', '.join(known)}")
    return [case for case in cases if not kernels or case.kernel in kernels]
