"""Time of a call on the device, and the ceilings that it is compared with.

One program holds many calls on different buffers, so that Python's dispatch (tens of microseconds)
is paid once, the second-level cache does not hold what the next call reads, and XLA merges nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

WARM_UP_CALLS = 3
TIMED_CALLS = 10


def time_program(program: Callable, *arguments) -> float:
    """Median seconds of a jitted program, from call to finished result."""
    for _ in range(WARM_UP_CALLS):
        jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(TIMED_CALLS):
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def time_call(function: Callable, argument_sets: Sequence[tuple]) -> float:
    """Seconds of one call of `function`, from a program that calls it once per argument set."""
    program = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    return time_program(program, list(argument_sets)) / len(argument_sets)


def argument_sets(make: Callable[[int], tuple], least_bytes: int, most_bytes: int) -> list[tuple]:
    """Arguments on buffers of their own: more than `least_bytes` together, never `most_bytes`."""
    sets = [jax.tree.map(jnp.asarray, make(0))]
    size = max(sum(leaf.nbytes for leaf in jax.tree.leaves(sets[0])), 1)
    wanted = max(4, min(64, -(-least_bytes // size)))
    for seed in range(1, max(1, min(wanted, most_bytes // (2 * size)))):
        # Fresh values and fresh buffers; calls on equal operands would be merged.
        sets.append(jax.tree.map(jnp.asarray, make(seed)))
    return sets


def measure_copy_bandwidth(megabytes: int) -> float:
    """Bytes/s, read and written together, of the plainest copy there is."""
    size = megabytes * 2**20 // 4
    arrays = [jnp.full((size,), value, jnp.float32) for value in (1.0, 2.0)]
    seconds = time_call(lambda array: array + jnp.float32(1), [(array,) for array in arrays])
    return 2 * size * 4 / seconds


def measure_matrix_rate(size: int, dtype) -> float:
    """FLOP/s of a square matrix product with float32 accumulation."""
    keys = jax.random.split(jax.random.key(0), 3)
    left, *right = (jax.random.normal(key, (size, size), dtype) for key in keys)
    seconds = time_call(
        lambda factor: jnp.matmul(left, factor, preferred_element_type=jnp.float32).astype(dtype),
        [(factor,) for factor in right],
    )
    return 2 * size**3 / seconds
