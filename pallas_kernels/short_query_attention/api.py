"""`short_query_attention`: argument checks, choice of implementation, meshes, derivative."""

import dataclasses
import functools

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.checks import check_arrays
from pallas_kernels.short_query_attention.reference import short_query_attention_reference
from pallas_kernels.short_query_attention.triton import (
    short_query_attention_triton,
    unsupported_reason,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Statics:
    """What is fixed at trace time (hashable: it is a static argument of the custom derivative)."""

    scale: float
    window: int | None
    soft_cap: float | None

    def keywords(self) -> dict:
        return dataclasses.asdict(self)


def short_query_attention(
    query: Float[Array, "B T N D"],
    keys: Float[Array, "P S KV D"],
    values: Float[Array, "P S KV D"],
    query_positions: Int[Array, "B T"],
    *,
    block_table: Int[Array, "B M"] | None = None,
    key_positions: Int[Array, "B R"] | None = None,
    num_valid: Int[Array, "B"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
    soft_cap: float | None = None,
    sharding: dispatch.KernelSharding | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N D"]:
    """Attention of a few new rows per request (verify, draft, prefill chunks) over its cache.

    Write the rows' own keys and values first, then attend. In JAX, per head:
    `s = where(visible, soft_cap * tanh(scale * q @ k.T / soft_cap), -inf)`, then
    `softmax(concat([s, sink]))[:-1] @ v`, in float32.

    A slot is visible to a row when its position is at most the row's, more than the row's minus
    `window`, and the slot holds something. A row that sees nothing gives zero.

    Args:
      query: query heads, those of one key-value head adjacent (N = KV * group).
      keys, values: the cache: contiguous [B, S, KV, D], or with `block_table` pages
        [pages, page size, KV, D]. Slots that no row may see can hold anything, even NaN.
      query_positions: absolute position of each row; -1 marks a padding row, whose output is zero.
      block_table: the page of each S-th part of a request's positions; entries outside the pages
        hold nothing.
      key_positions: for contiguous ring caches, the position in each slot, -1 for none. None: slot
        s holds position s.
      num_valid: slots at or past it hold nothing. None: all up to the row's position do.
      scale: factor of the scores; head_dim ** -0.5 by default.
      window: number of keys that a row sees, itself included; None for all.
      sinks: one logit per query head that takes part in the softmax and adds nothing.
      soft_cap: bound of the scaled scores.
      sharding: a mesh over whose axes requests and heads are split. Pages are whole on every shard
        of the request axes; a block table is split with its requests.
      implementation: see `pallas_kernels.dispatch`.

    Returns: the mixed values, in query's dtype. Differentiable in query, keys, values and sinks by
      way of the reference (slower: every block is visited).

    Raises: ValueError for shapes that do not fit together, and for a window or cap not above zero.
    """
    _check(query, keys, values, query_positions, block_table, key_positions, num_valid, sinks)
    if window is not None and window < 1:
        raise ValueError(f"short_query_attention: window {window} lets a row see nothing; use None")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"short_query_attention: soft_cap {soft_cap} must be positive, or None")
    statics = _Statics(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=window,
        soft_cap=soft_cap,
    )
    chosen = dispatch.resolve(implementation)
    optional = (block_table, key_positions, num_valid, sinks)

    def of_shard(query, keys, values, query_positions, optional):
        return _attend(query, keys, values, query_positions, optional, statics, chosen)

    if sharding is None:
        return of_shard(query, keys, values, query_positions, optional)
    batch, heads = sharding.batch, sharding.heads
    cache = P(batch if block_table is None else None, None, heads, None)
    specs = (P(batch), P(batch), P(batch), P(heads))
    split = dispatch.sharded(
        of_shard,
        sharding,
        in_specs=(
            P(batch, None, heads, None),
            cache,
            cache,
            P(batch),
            tuple(
                None if array is None else spec for array, spec in zip(optional, specs, strict=True)
            ),
        ),
        out_specs=P(batch, None, heads, None),
    )
    return split(query, keys, values, query_positions, optional)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(query, keys, values, query_positions, optional, statics, implementation):
    keywords = statics.keywords()
    run = dispatch.select(
        functools.partial(short_query_attention_reference, **keywords),
        functools.partial(short_query_attention_triton, **keywords),
        implementation,
        name="short_query_attention",
        unsupported=unsupported_reason(query.shape[-1], query.dtype),
    )
    return run(query, keys, values, query_positions, *optional)


def _attend_forward(query, keys, values, query_positions, optional, statics, implementation):
    out = _attend(query, keys, values, query_positions, optional, statics, implementation)
    return out, (query, keys, values, query_positions, optional)


def _attend_backward(statics, implementation, residuals, cotangent):
    query, keys, values, query_positions, (*tables, sinks) = residuals

    def forward(query, keys, values, sinks):
        return short_query_attention_reference(
            query,
            keys,
            values,
            query_positions,
            *tables,
            sinks,
            **statics.keywords(),
            static_bounds=True,
        )

    _, transpose = jax.vjp(forward, query, keys, values, sinks)
    *of_inputs, of_sinks = transpose(cotangent)
    return *of_inputs, None, (None, None, None, of_sinks)


_attend.defvjp(_attend_forward, _attend_backward)


def _check(query, keys, values, query_positions, block_table, key_positions, num_valid, sinks):
    """ValueError that names the argument, what was expected and what came."""

    def fail(argument: str, expected: str, found) -> None:
        raise ValueError(f"short_query_attention: {argument} must be {expected}, got {found}")

    check_arrays(
        "short_query_attention",
        query=(query, (None,) * 4, "floating"),
        keys=(keys, (None,) * 4, None),
    )
    batch, rows, heads, size = query.shape
    if keys.shape != values.shape:
        fail("values", f"shaped like keys {keys.shape}", values.shape)
    if keys.shape[3] != size:
        fail("keys", f"of head_dim {size} like the query", keys.shape)
    if keys.dtype != query.dtype or values.dtype != query.dtype:
        fail("keys and values", f"{query.dtype} like the query", (keys.dtype, values.dtype))
    if heads % keys.shape[2]:
        fail("query heads", f"a multiple of the {keys.shape[2]} key-value heads", heads)
    if block_table is None and keys.shape[0] != batch:
        fail("keys", f"a cache of {batch} requests (or pages, with a block_table)", keys.shape)
    if block_table is not None and key_positions is not None:
        fail("key_positions", "None with a block_table", key_positions.shape)
    check_arrays(
        "short_query_attention",
        query_positions=(query_positions, (batch, rows), "integer"),
        block_table=(block_table, (batch, None), "integer"),
        key_positions=(key_positions, (batch, keys.shape[1]), "integer"),
        num_valid=(num_valid, (batch,), "integer"),
        sinks=(sinks, (heads,), "floating"),
    )
