"""Checks of arguments at the edge of an operation: what was expected, what came."""

from __future__ import annotations

import jax.numpy as jnp

KINDS = {"integer": jnp.integer, "floating": jnp.floating, "bool": jnp.bool_}


def check_arrays(operation: str, **expected) -> None:
    """ValueError that names the first argument that is not as expected.

    Each keyword is an argument: (array or None, shape, kind). In a shape, None stands for any size
    but zero; kind is a key of KINDS, or None for any dtype. An array that is None is left out.
    """
    for name, (array, shape, kind) in expected.items():
        if array is None:
            continue
        fits = len(array.shape) == len(shape) and all(
            size == wanted or (wanted is None and size > 0)
            for size, wanted in zip(array.shape, shape, strict=True)
        )
        if fits and (kind is None or jnp.issubdtype(array.dtype, KINDS[kind])):
            continue
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{operation}: {name} must be {'' if kind is None else kind + ' '}[{sizes}], "
            f"got {array.dtype} {list(array.shape)}"
        )
