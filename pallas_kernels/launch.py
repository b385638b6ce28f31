"""Launch parameters of every kernel: one table, by kernel, shape class and GPU.

A row under "any" serves every GPU without a row of its own. A shape class is a short word that the
kernel's own wrapper derives from the static shapes, so that no array is read.

Where the rows come from: `python -m benchmarks.kernels_compiled` (registers, spills, shared memory;
no GPU needed) rules out tiles that spill or do not fit, and `python -m benchmarks.kernels --tune
KERNEL` (a key of TABLE) times the others on the GPU at hand and prints the best row. No row was
timed so far; all were chosen by the compiled figures.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping

import jax

from pallas_kernels.devices import find_device, get_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is launched.

    Attributes:
      num_warps: warps (of 32 threads) in each block.
      num_stages: depth of Triton's software pipeline for loads in loops.
      blocks: block sizes by the name that the kernel gives them, each a power of two.
    """

    num_warps: int
    num_stages: int
    blocks: Mapping[str, int]

    def __post_init__(self):
        for name, value in {**self.blocks, "num_warps": self.num_warps}.items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"launch parameter {name}={value} must be a power of two")


# kernel -> shape class -> GPU ("any" for all others) -> parameters
TABLE: dict[str, dict[str, dict[str, Launch]]] = {
    "expand_batch": {
        # Rows of one request: K+1 verified rows become 2K draft rows, or a whole prompt chunk.
        "short": {"any": Launch(num_warps=1, num_stages=1, blocks={"rows": 32})},
        "long": {"any": Launch(num_warps=4, num_stages=1, blocks={"rows": 256})},
    },
    "fill_hidden": {
        # A block moves `rows` rows, `width` columns at a time.
        "few_rows": {"any": Launch(num_warps=4, num_stages=1, blocks={"rows": 4, "width": 512})},
        "many_rows": {"any": Launch(num_warps=4, num_stages=1, blocks={"rows": 4, "width": 1024})},
    },
    "short_query_attention": {
        # By the bytes of one key row. `rows` is the most packed query rows of a block.
        "32B": {"any": Launch(num_warps=4, num_stages=3, blocks={"rows": 64, "keys": 64})},
        "64B": {"any": Launch(num_warps=4, num_stages=3, blocks={"rows": 64, "keys": 64})},
        "128B": {"any": Launch(num_warps=4, num_stages=3, blocks={"rows": 64, "keys": 64})},
        "256B": {
            "any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64}),
            "a100": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 32}),
        },
        "512B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "1024B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 32, "keys": 32})},
        "2048B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 16, "keys": 16})},
    },
    # Training attention, by the bytes of one key row: a tile of rows against a block of keys.
    "interval_attention_forward": {
        "32B": {"any": Launch(num_warps=4, num_stages=3, blocks={"rows": 128, "keys": 64})},
        "64B": {"any": Launch(num_warps=4, num_stages=3, blocks={"rows": 128, "keys": 64})},
        "128B": {
            "any": Launch(num_warps=4, num_stages=3, blocks={"rows": 128, "keys": 64}),
            "a100": Launch(num_warps=8, num_stages=3, blocks={"rows": 128, "keys": 64}),
            "b200": Launch(num_warps=8, num_stages=3, blocks={"rows": 128, "keys": 64}),
        },
        "256B": {"any": Launch(num_warps=8, num_stages=3, blocks={"rows": 128, "keys": 64})},
        "512B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "1024B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 32, "keys": 32})},
        "2048B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 16, "keys": 16})},
    },
    "interval_attention_d_query": {
        "32B": {"any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "64B": {"any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "128B": {"any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "256B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "512B": {
            "any": Launch(num_warps=8, num_stages=2, blocks={"rows": 64, "keys": 32}),
            "a100": Launch(num_warps=8, num_stages=2, blocks={"rows": 32, "keys": 32}),
        },
        "1024B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 32, "keys": 16})},
        "2048B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 16, "keys": 16})},
    },
    "interval_attention_d_keys": {
        "32B": {"any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "64B": {"any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64})},
        "128B": {
            "any": Launch(num_warps=4, num_stages=2, blocks={"rows": 64, "keys": 64}),
            "a100": Launch(num_warps=4, num_stages=2, blocks={"rows": 32, "keys": 64}),
        },
        "256B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 32, "keys": 64})},
        "512B": {"any": Launch(num_warps=8, num_stages=2, blocks={"rows": 32, "keys": 32})},
        "1024B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 16, "keys": 32})},
        "2048B": {"any": Launch(num_warps=8, num_stages=1, blocks={"rows": 16, "keys": 16})},
    },
    # Tiles of the head products, by the head's dtype; `depth` is the inner block.
    "vocab_loss_statistics": {
        "bfloat16": {
            "any": Launch(
                num_warps=8, num_stages=3, blocks={"rows": 128, "columns": 64, "depth": 64}
            )
        },
        "float32": {
            "any": Launch(
                num_warps=8, num_stages=2, blocks={"rows": 64, "columns": 64, "depth": 32}
            )
        },
    },
    "vocab_loss_derivative": {
        "bfloat16": {
            "any": Launch(
                num_warps=8, num_stages=3, blocks={"rows": 128, "columns": 128, "depth": 64}
            ),
            "b200": Launch(
                num_warps=8, num_stages=3, blocks={"rows": 128, "columns": 64, "depth": 64}
            ),
        },
        "float32": {
            "any": Launch(
                num_warps=8, num_stages=2, blocks={"rows": 64, "columns": 64, "depth": 32}
            )
        },
    },
}


_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)
_seen: contextvars.ContextVar[set | None] = contextvars.ContextVar("seen", default=None)
_overrides: contextvars.ContextVar[Mapping[str, Launch]] = contextvars.ContextVar(
    "overrides", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def compiling_for(device: str) -> Iterator[None]:
    """Take the parameters of `device` ("h200", ...) while tracing, whatever GPU is at hand."""
    token = _target.set(get_device(device).name)
    try:
        yield
    finally:
        _target.reset(token)


@contextlib.contextmanager
def override(kernel: str, launch: Launch) -> Iterator[None]:
    """Use `launch` for `kernel` while tracing: for tuning, and to test every tile of the table."""
    token = _overrides.set({**_overrides.get(), kernel: launch})
    try:
        yield
    finally:
        _overrides.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[set[tuple[str, str]]]:
    """Collect the (kernel, shape class) of every look-up made while tracing inside."""
    seen: set[tuple[str, str]] = set()
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


@functools.cache
def _local_device() -> str | None:
    """The table's name of this process's GPU; None without one or with one it does not know."""
    if jax.default_backend() != "gpu":
        return None
    device = find_device(jax.devices()[0].device_kind)
    return device.name if device else None


def target_device() -> str | None:
    """The GPU whose parameters are wanted: `compiling_for`'s, else this process's, else None."""
    return _target.get() or _local_device()


def find_launch(kernel: str, shape_class: str) -> Launch:
    """The launch parameters of `kernel` for `shape_class` on the target device."""
    overrides, seen = _overrides.get(), _seen.get()
    if seen is not None:
        seen.add((kernel, shape_class))
    if kernel in overrides:
        return overrides[kernel]
    rows = TABLE[kernel][shape_class]
    return rows.get(target_device() or "any", rows["any"])


def all_launches(kernel: str) -> dict[str, Launch]:
    """Every distinct entry of `kernel`, by "class/GPU": the tiles that tests must cover."""
    return {
        f"{shape_class}/{device}": launch
        for shape_class, rows in TABLE[kernel].items()
        for device, launch in rows.items()
    }
