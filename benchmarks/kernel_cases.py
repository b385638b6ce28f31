"""Every kernel at every real shape, as one list: what the kernel benchmarks and figures go over.

A case knows how to call its operation by implementation, what a call must move and compute, which
libraries do the same or nearly, and a tiny twin for machines without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_libraries
from benchmarks.kernel_libraries import Library
from pallas_kernels import dispatch, expand_batch, fill_hidden, short_query_attention
from pallas_kernels.expand_batch import drafting_method
from pallas_kernels.expand_batch import shapes as expand_shapes
from pallas_kernels.expand_batch.triton import shape_class as expand_class
from pallas_kernels.fill_hidden import shapes as fill_shapes
from pallas_kernels.fill_hidden.triton import shape_class as fill_class
from pallas_kernels.interval_attention import intervals
from pallas_kernels.interval_attention import shapes as interval_shapes
from pallas_kernels.interval_attention.triton import shape_class as interval_class
from pallas_kernels.short_query_attention import shapes as attention_shapes
from pallas_kernels.short_query_attention.triton import shape_class as attention_class
from pallas_kernels.vocab_loss import shapes as vocab_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one call must do at least.

    Attributes:
      moved_bytes: bytes read and written, each once.
      flops: multiplications and additions of its matrix products.
    """

    moved_bytes: int
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape.

    Attributes:
      kernel: the operation.
      shape: name of the shape.
      call: implementation -> function of the arguments (a tuple of pytrees).
      abstract: the arguments without values.
      make: seed -> arguments.
      work: arguments -> what the call must do.
      launches: the entries of the launch table that it reads, kernel -> shape class.
      bound: what limits it: "bandwidth", "matrix" or "latency".
      libraries: name -> the nearest kernel of a library.
      tiny: the same operation small enough to interpret.
    """

    kernel: str
    shape: str
    call: Callable[[str | None], Callable[..., Any]]
    abstract: tuple
    make: Callable[[int], tuple]
    work: Callable[[tuple], Work]
    launches: Mapping[str, str]
    bound: str = "bandwidth"
    libraries: Mapping[str, Library] = dataclasses.field(default_factory=dict)
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
    rows_per_request = max(shape.drafts + 1, shape.chunk) + method.new_rows
    return Case(
        kernel="expand_batch",
        shape=shape.name,
        call=call,
        abstract=abstract,
        make=lambda seed: expand_shapes.random_arguments(shape, seed),
        # The block table is read where rows are written, not as a whole.
        work=lambda arguments: Work(moved_bytes=_bytes(arguments[0]) + written + 4 * rows),
        launches={"expand_batch": expand_class(rows_per_request)},
        bound="latency",
        tiny=tiny,
    )


_TINY_EXPAND = _expand_case(
    expand_shapes.Shape(name="tiny", decodes=2, drafts=3, max_length=64), None
)


# --- fill_hidden ---


def _fill_case(shape: fill_shapes.Shape, tiny: Case | None) -> Case:
    def work(arguments):
        _, mask_hidden, source, is_mask = arguments
        copied = int(jnp.sum((source >= 0) & ~is_mask))
        # Each copied row in, each draft row out, the mask row once; a source and a flag per row.
        rows = copied + shape.draft_rows + 1
        return Work(moved_bytes=rows * mask_hidden.nbytes + source.nbytes + is_mask.nbytes)

    return Case(
        kernel="fill_hidden",
        shape=shape.name,
        call=lambda implementation: (
            lambda *arrays: fill_hidden(*arrays, implementation=implementation)
        ),
        abstract=fill_shapes.abstract_arguments(shape),
        make=lambda seed: fill_shapes.random_arguments(shape, seed),
        work=work,
        launches={"fill_hidden": fill_class(shape.draft_rows)},
        bound="bandwidth" if shape.draft_rows > 4096 else "latency",
        libraries={"torch": kernel_libraries.torch_fill()},
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

    def dense(positional, arrays):
        query, keys, values, positions = positional
        if "block_table" in arrays:
            raise NotImplementedError("no library takes pages; see the contiguous twin")
        held = arrays.get("key_positions", jnp.arange(shape.slots, dtype=jnp.int32)[None])
        held, row = held[:, None, None, :], positions[:, None, :, None]
        mask = (held >= 0) & (held <= row)
        if shape.window is not None:
            mask &= held > row - shape.window
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        return kernel_libraries.Dense(
            query=query,
            keys=keys,
            values=values,
            mask=mask,
            scale=scale,
            soft_cap=shape.soft_cap,
        )

    def work(arguments):
        keys = min(shape.slots, shape.window + shape.rows - 1) if shape.window else shape.slots
        pairs = shape.requests * shape.rows * min(keys, shape.window or keys)
        query, cache, *_ = arguments[0]
        row = shape.kv_heads * shape.head_dim * cache.dtype.itemsize
        return Work(
            moved_bytes=2 * shape.requests * keys * row + 2 * query.nbytes,
            flops=4 * pairs * shape.heads * shape.head_dim,
        )

    itemsize = jnp.dtype(shape.dtype).itemsize
    return Case(
        kernel="short_query_attention",
        shape=shape.name,
        call=call,
        abstract=attention_shapes.abstract_arguments(shape),
        make=lambda seed: attention_shapes.random_arguments(shape, seed),
        work=work,
        launches={"short_query_attention": attention_class(shape.head_dim, itemsize)},
        libraries=kernel_libraries.attention(dense, sinks=shape.sinks),
        tiny=tiny,
    )


_TINY_ATTENTION = _attention_case(
    attention_shapes.Shape(
        name="tiny", requests=2, rows=3, heads=4, kv_heads=2, head_dim=16, slots=48, window=9
    ),
    None,
)


# --- training attention ---


def _interval_case(shape: interval_shapes.Shape, tiny: Case | None, *, backward: bool) -> Case:
    run = interval_shapes.gradients if backward else interval_shapes.attend
    abstract = (interval_shapes.abstract_arguments(shape),)

    def call(implementation):
        def attend(arguments):
            with dispatch.forcing(implementation):
                return run(shape, arguments)

        return attend

    def work(arguments):
        # Forward writes an array like q, backward one like each of its float arguments.
        [x] = arguments
        written = x if backward else x["q"]
        # Two products of rows and keys forward; backward those again to recompute the weights
        # and five to seven more, counted as 2.5 times forward, as is usual.
        factor = 3.5 if backward else 1
        pairs = count_pairs(shape, x)
        return Work(
            moved_bytes=_bytes(x) + _bytes(written),
            flops=int(factor * 4 * pairs * shape.heads * shape.head_dim),
        )

    cls = interval_class(shape.head_dim, jnp.dtype(shape.dtype).itemsize)
    kernels = ("forward", "d_query", "d_keys") if backward else ("forward",)
    return Case(
        kernel="rollout_attention" if shape.mask_rows else "document_attention",
        shape=shape.name + ("/gradients" if backward else ""),
        call=call,
        abstract=abstract,
        make=lambda seed: (_interval_arguments(shape, seed),),
        work=work,
        launches={f"interval_attention_{kernel}": cls for kernel in kernels},
        bound="matrix",
        libraries={}
        if backward
        else kernel_libraries.attention(functools.partial(_dense_interval, shape)),
        tiny=tiny,
    )


def _intervals(shape: interval_shapes.Shape, x):
    """Visible intervals of the rows: (first, last) of the prefix, and of own rows if there are."""
    if not shape.mask_rows:
        return intervals.document_intervals(x["document_ids"], shape.window), None
    rows = (x[name] for name in ("anchors", "depths", "valid", "document_ids"))
    found = intervals.rollout_intervals(*rows, shape.window)
    return found[:2], found[2:]


def count_pairs(shape: interval_shapes.Shape, x: dict[str, jax.Array]) -> int:
    """Pairs of a row and a key that it may see."""
    parts = [part for part in _intervals(shape, x) if part is not None]
    return sum(int(np.sum(np.asarray(last - first + 1, np.int64))) for first, last in parts)


def _dense_interval(shape: interval_shapes.Shape, x) -> kernel_libraries.Dense:
    """The same attention with an explicit mask, or as causal where it is that."""
    keys, values, mask = x["k"], x["v"], None
    if shape.mask_rows:
        columns = shape.rows + shape.mask_rows
        if shape.mask_rows * columns > 2**27:
            raise NotImplementedError(
                f"its mask of {shape.mask_rows} x {columns} takes "
                f"{shape.mask_rows * columns / 1e9:.1f} GB; see the chunked shapes"
            )
        keys = jnp.concatenate([keys, x["own_k"]], axis=1)
        values = jnp.concatenate([values, x["own_v"]], axis=1)
        masks = []
        for (first, last), size in zip(
            _intervals(shape, x), (shape.rows, shape.mask_rows), strict=True
        ):
            column = jnp.arange(size, dtype=jnp.int32)[None, None]
            masks.append((first[..., None] <= column) & (column <= last[..., None]))
        mask = jnp.concatenate(masks, axis=2)[:, None]
    elif shape.window is not None:
        raise NotImplementedError("written for whole documents; no shape has a window here")
    return kernel_libraries.Dense(
        query=x["q"],
        keys=keys,
        values=values,
        mask=mask,
        scale=shape.head_dim**-0.5,
        soft_cap=None,
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
        abstract=(vocab_shapes.abstract_arguments(shape),),
        make=make,
        work=lambda arguments: Work(
            moved_bytes=_bytes(arguments), flops=2 * shape.rows * draft_vocab * products
        ),
        launches={
            f"vocab_loss_{kernel}": jnp.dtype(shape.dtype).name
            for kernel in ("statistics", "derivative")
        },
        bound="matrix",
        libraries=kernel_libraries.vocab_loss(shape),
        tiny=tiny,
    )


_TINY_VOCAB = _vocab_case(
    vocab_shapes.Shape(
        name="tiny", hidden=32, target_hidden=48, vocab=200, draft_vocab=90, rows=24
    ),
    None,
)


# --- the list ---


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


def stand_in(kernel: str, shape_class: str) -> Case:
    """A case that reads a launch entry which no real shape reads: other head widths, float32."""
    if kernel.startswith("vocab_loss"):
        shape = vocab_shapes.Shape(
            name=f"stand-in-{shape_class}",
            hidden=1024,
            target_hidden=1024,
            vocab=32_768,
            rows=2048,
            dtype=shape_class,
        )
        return _vocab_case(shape, None)
    row_bytes = int(shape_class.removesuffix("B"))
    dtype = "bfloat16" if row_bytes <= 1024 else "float32"
    heads = {
        "heads": 16,
        "kv_heads": 4,
        "head_dim": row_bytes // jnp.dtype(dtype).itemsize,
        "dtype": dtype,
    }
    name = f"stand-in-{shape_class}"
    if kernel == "short_query_attention":
        shape = attention_shapes.Shape(name=name, requests=16, rows=8, slots=8192, **heads)
        return _attention_case(shape, None)
    shape = interval_shapes.Shape(name=name, rows=4096, mask_rows=4096, **heads)
    return _interval_case(shape, None, backward=kernel != "interval_attention_forward")
