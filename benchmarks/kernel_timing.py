"""Time of a call on the device, and the ceilings that it is compared with.

One program holds many calls on different buffers, so that Python's dispatch (tens of microseconds)
is paid once and the second-level cache does not hold what the next call reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

WARM_UP_CALLS = 3
TIMED_CALLS = 10
# So many calls share one dispatch, unless each is long enough by itself.
CALLS = 64
LONG_CALL_BYTES = 64 * 2**20


def time_program(program: Callable, *arguments) -> float:
    """Median seconds of a program, from call to finished result."""
    for _ in range(WARM_UP_CALLS):
        jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(TIMED_CALLS):
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def repeated(function: Callable, rounds: int) -> Callable:
    """A program of a list of argument sets: `rounds` times `function` on each, one after the other.

    Barriers keep XLA from merging calls, from overlapping them and from computing less than whole
    outputs. It returns one number of each output, so that few buffers go back to the host.
    """

    def program(sets):
        sets, numbers = list(sets), []
        for call in range(rounds * len(sets)):
            outputs = function(*sets[call % len(sets)])
            after = (call + 1) % len(sets)
            outputs, sets[after] = jax.lax.optimization_barrier((outputs, sets[after]))
            for leaf in jax.tree.leaves(outputs):
                numbers.append(jnp.ravel(leaf)[:1].astype(jnp.float32))
        return jnp.concatenate(numbers)

    return program


def rounds_of(sets: Sequence[tuple]) -> int:
    """How often each set is used, so that a dispatch is shared by enough calls."""
    if _size(sets[0]) >= LONG_CALL_BYTES:
        return 1
    return -(-CALLS // len(sets))


def time_call(function: Callable, sets: Sequence[tuple]) -> float:
    """Seconds of one call of `function`, the sets of arguments taken in turns."""
    rounds = rounds_of(sets)
    program = jax.jit(repeated(function, rounds))
    return time_program(program, list(sets)) / (rounds * len(sets))


def time_torch(prepare: Callable, sets: Sequence[tuple]) -> float:
    """Seconds of one call of the functions that `prepare` makes of each set (see `Library`)."""
    import torch

    calls = [prepare(*arguments) for arguments in sets]
    rounds = rounds_of(sets)

    def program():
        for call in calls * rounds:
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return time_program(program) / (rounds * len(sets))


def _size(tree) -> int:
    return max(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), 1)


def argument_sets(make: Callable[[int], tuple], least_bytes: int, most_bytes: int) -> list[tuple]:
    """Arguments on buffers of their own: more than `least_bytes` together, never `most_bytes`.

    At least 4 sets, and at most 64. Sets so small that 64 of them do not fill `least_bytes` (calls
    of that size are bound by latency) are 16, to keep the arguments of the program few.
    """
    sets = [jax.tree.map(jnp.asarray, make(0))]
    size = _size(sets[0])
    wanted = 16 if 64 * size < least_bytes else max(4, -(-least_bytes // size))
    for seed in range(1, max(1, min(wanted, most_bytes // size))):
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
        lambda left, right: jnp.matmul(left, right, preferred_element_type=jnp.float32).astype(
            dtype
        ),
        [(left, factor) for factor in right],
    )
    return 2 * size**3 / seconds
