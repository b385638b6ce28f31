"""Checks, derivative and choice of implementation for interval attention.

`document_attention` and `rollout_attention` are the public operations; they say which intervals.
"""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_arrays
from pallas_kernels.dispatch import Implementation, select
from pallas_kernels.interval_attention import reference, triton


class _Setting(NamedTuple):
    scale: float
    implementation: Implementation | None
    name: str


def interval_attention(
    q: Float[Array, "B M N D"],
    k: Float[Array, "B n KV D"],
    v: Float[Array, "B n KV D"],
    first: Int[Array, "B M"],
    last: Int[Array, "B M"],
    own: tuple[Array, Array, Array, Array] | None = None,
    *,
    scale: float,
    implementation: Implementation | None = None,
    name: str = "interval_attention",
) -> tuple[Float[Array, "B M N D"], Float[Array, "B N M"]]:
    """See `reference.interval_attention`: output and log-sum-exp, both differentiable.

    What is kept for the backward direction is the inputs and the two results.
    """
    _check(name, q, k, v, own)
    return _attend(_Setting(scale, implementation, name), q, k, v, first, last, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setting: _Setting, q, k, v, first, last, own):
    run = select(
        functools.partial(reference.interval_attention, scale=setting.scale),
        functools.partial(triton.forward, scale=setting.scale),
        setting.implementation,
        name=setting.name,
        unsupported=triton.unsupported_reason(q),
    )
    return run(q, k, v, first, last, own)


def _forward(setting, q, k, v, first, last, own):
    out, lse = _attend(setting, q, k, v, first, last, own)
    return (out, lse), (q, k, v, first, last, own, out, lse)


def _backward(setting, kept, cotangents):
    run = select(
        functools.partial(reference.backward, scale=setting.scale),
        functools.partial(triton.backward, scale=setting.scale),
        setting.implementation,
        name=setting.name,
        unsupported=triton.unsupported_reason(kept[0]),
    )
    d_q, d_k, d_v, d_own_k, d_own_v = run(*kept, *cotangents)
    own = None if d_own_k is None else (d_own_k, d_own_v, None, None)
    return d_q, d_k, d_v, None, None, own


_attend.defvjp(_forward, _backward)


def _check(name: str, q, k, v, own) -> None:
    check_arrays(name, q=(q, (None,) * 4, "floating"))
    batch, rows, heads, size = q.shape
    check_arrays(name, k=(k, (batch, None, None, size), None))
    kv_heads = k.shape[2]
    own_shape = (batch, rows, kv_heads, size)
    own_k, own_v = (None, None) if own is None else own[:2]
    check_arrays(
        name, v=(v, k.shape, None), own_k=(own_k, own_shape, None), own_v=(own_v, own_shape, None)
    )
    if heads % kv_heads:
        raise ValueError(
            f"{name}: {heads} query heads do not divide among {kv_heads} key-value heads; "
            "q is [B, M, N, D], k and v are [B, n, KV, D] with N a multiple of KV"
        )
    for argument, array in {"k": k, "v": v, "own_k": own_k, "own_v": own_v}.items():
        if array is not None and array.dtype != q.dtype:
            raise ValueError(
                f"{name}: {argument} is {array.dtype} but q is {q.dtype}; cast one of them"
            )
