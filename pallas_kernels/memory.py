"""Masked loads and stores of the kernels, and a way to count what they move.

Kernels go through `load` and `store` here and nowhere else, so that a test can watch every access
of an interpreted run. Outside `observing` they are exactly Triton's masked accesses.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

# Called with ("load" | "store", label, number of unmasked elements) once for each executed access.
Observer = Callable[[str, str, int], None]

_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "observer", default=None
)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report every access of kernels traced AND run inside (interpreted) to `observer`.

    Call the kernel on fresh functions inside, and `jax.effects_barrier()` before reading a count.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def _report(kind: str, label: str, shape: tuple[int, ...], mask) -> None:
    observer = _observer.get()
    if observer is None:
        return
    elements = jnp.int32(math.prod(shape))
    if mask is not None:
        elements = jnp.sum(jnp.broadcast_to(mask, shape), dtype=jnp.int32)
    jax.debug.callback(lambda count: observer(kind, label, int(count)), elements)


def load(view, *, mask=None, other=None, label: str):
    """`view` (`ref.at[indices]`) where `mask`, elsewhere `other`. `label` names the operand."""
    value = plgpu.load(view, mask=mask, other=other)
    _report("load", label, value.shape, mask)
    return value


def store(view, value, *, mask=None, label: str) -> None:
    """Write `value` to `view` (`ref.at[indices]`) where `mask`, and nothing elsewhere."""
    plgpu.store(view, value, mask=mask)
    _report("store", label, value.shape, mask)
