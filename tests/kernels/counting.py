"""Count what an interpreted kernel loads and stores."""

import collections

import jax

from pallas_kernels import memory


def count_accesses(function, *arguments) -> tuple[object, dict[tuple[str, str], int]]:
    """Run `function` (traced anew, kernels interpreted) and count unmasked elements.

    Returns: its result, and {("load" | "store", operand): elements}.
    """
    counts: dict[tuple[str, str], int] = collections.Counter()

    def observe(kind: str, label: str, elements: int) -> None:
        counts[kind, label] += elements

    with memory.observing(observe):
        result = jax.jit(lambda *values: function(*values))(*arguments)
        jax.block_until_ready(result)
        jax.effects_barrier()
    return result, dict(counts)


def total(counts: dict[tuple[str, str], int]) -> int:
    """All elements loaded and stored."""
    return sum(counts.values())
