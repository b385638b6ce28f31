"""Checks and choice of implementation for interval attention; its two users say what they mean.

`document_attention` and `rollout_attention` are the public operations.
"""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation
from pallas_kernels.interval_attention import reference


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
) -> tuple[Float[Array, "B M N D"], Float[Array, "B N M"]]:
    """See `reference.interval_attention`: output and log-sum-exp, both differentiable."""
    _check(q, k, v, own)
    del implementation
    run = functools.partial(reference.interval_attention, scale=scale)
    return run(q, k, v, first, last, own)


def _check(q, k, v, own) -> None:
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads do not divide among {kv_heads} key-value heads; "
            "q is [B, M, N, D], k and v are [B, n, KV, D] with N a multiple of KV"
        )
    arrays = {"k": k, "v": v}
    if own is not None:
        arrays |= {"own k": own[0], "own v": own[1]}
    for name, array in arrays.items():
        if array.dtype != q.dtype:
            raise ValueError(f"{name} is {array.dtype} but q is {q.dtype}; cast one of them")
