"""Which layout the weights of a decoder should have on a CPU: the products of SmolLM2, alone.

    JAX_PLATFORMS=cpu python -m benchmarks.layouts [--repeats 9]

Thirty layers of projections with random weights (no attention, no norms), float32, one and eight
rows, in turns in one run: matrices stored [in, out] or [out, in]; query, key, value and gate, up in
one product each or apart; layers unrolled in the program or scanned over stacked weights; matrices
cut into panels of 16 columns and summed by XLA's own loops, which pays for two rows to twelve.
Prints milliseconds per pass and seconds to compile; writes layouts.json.
"""

import argparse
import pathlib
import time
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks.report import alternate, environment, median, write_json

LAYERS, HIDDEN, INNER, QUERY, KEY = 30, 576, 1536, 576, 192
VOCAB = 49152
PANEL = 16
Layout = Literal["[in, out]", "[out, in]", "panels"]


def weights(key: jax.Array, *, fused: bool, layout: Layout) -> list[dict[str, jax.Array]]:
    """The matrices of every layer."""
    if fused:
        sizes = {"qkv": (HIDDEN, QUERY + 2 * KEY), "gate_up": (HIDDEN, 2 * INNER)}
    else:
        sizes = {"q": (HIDDEN, QUERY), "k": (HIDDEN, KEY), "v": (HIDDEN, KEY)}
        sizes |= {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER)}
    sizes |= {"o": (QUERY, HIDDEN), "down": (INNER, HIDDEN)}

    def one(layer: int, index: int, shape: tuple[int, int]) -> jax.Array:
        matrix = jax.random.normal(jax.random.fold_in(key, 10 * layer + index), shape) * 0.05
        if layout == "panels":
            return matrix.reshape(shape[0], -1, PANEL).transpose(1, 0, 2).copy()
        return matrix.T.copy() if layout == "[out, in]" else matrix

    return [
        {name: one(layer, i, shape) for i, (name, shape) in enumerate(sizes.items())}
        for layer in range(LAYERS)
    ]


def layer_pass(x: jax.Array, layer: dict[str, jax.Array], *, layout: Layout) -> jax.Array:
    """The products of one layer, chained so that none can be left out."""

    def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
        if layout == "panels":
            parts = (x[None, :, :, None] * matrix[:, None]).sum(2)  # [out / 16, rows, 16]
            return parts.transpose(1, 0, 2).reshape(len(x), -1)
        axis = 1 if layout == "[out, in]" else 0
        return jax.lax.dot_general(x, matrix, (((1,), (axis,)), ((), ())))

    if "qkv" in layer:
        q, k, v = jnp.split(product(x, layer["qkv"]), [QUERY, QUERY + KEY], axis=1)
        gate_up = product(x + 1.0, layer["gate_up"])
        gate, up = jnp.split(gate_up, 2, axis=1)
    else:
        q, k, v = (product(x, layer[name]) for name in "qkv")
        gate, up = (product(x + 1.0, layer[name]) for name in ("gate", "up"))
    mixed = q * jnp.tile(k + v, (1, QUERY // KEY))
    x = x + jnp.tanh(product(mixed, layer["o"]))
    return x + jnp.tanh(product(jax.nn.silu(gate) * up, layer["down"]))


def variant(rows: int, *, fused: bool, layout: Layout, scanned: bool):
    """A compiled pass and its seconds of compilation."""
    layers = weights(jax.random.key(0), fused=fused, layout=layout)
    x = jnp.ones((rows, HIDDEN))
    if scanned:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

        def run(x, layers):
            body = lambda x, layer: (layer_pass(x, layer, layout=layout), None)  # noqa: E731
            return jax.lax.scan(body, x, layers)[0]

    else:

        def run(x, layers):
            for layer in layers:
                x = layer_pass(x, layer, layout=layout)
            return x

    started = time.perf_counter()
    compiled = jax.jit(run).lower(x, layers).compile()
    seconds = time.perf_counter() - started
    return lambda: jax.block_until_ready(compiled(x, layers)), seconds


def head_variant(rows: int, *, transposed: bool):
    """The head's product alone, [H, V] or the tied [V, H]."""
    shape = (VOCAB, HIDDEN) if transposed else (HIDDEN, VOCAB)
    matrix = jax.random.normal(jax.random.key(1), shape)
    x = jnp.ones((rows, HIDDEN))
    axis = 1 if transposed else 0
    run = jax.jit(lambda x, m: jax.lax.dot_general(x, m, (((1,), (axis,)), ((), ()))))
    return lambda: jax.block_until_ready(run(x, matrix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    runs, compile_s = {}, {}
    for rows in (1, 6, 8):
        for fused, layout, scanned in (
            (True, "[in, out]", False),
            (False, "[in, out]", False),
            (True, "[out, in]", False),
            (False, "[out, in]", False),
            (True, "[in, out]", True),
            (True, "panels", False),
        ):
            if layout == "panels" and rows == 1:
                continue  # seven hundred milliseconds: XLA does not vectorise it
            name = " ".join(
                (
                    f"{rows} rows,",
                    "fused" if fused else "apart",
                    layout,
                    "scanned" if scanned else "unrolled",
                )
            )
            runs[name], compile_s[name] = variant(rows, fused=fused, layout=layout, scanned=scanned)
        for transposed in (False, True):
            name = f"{rows} rows, head {'[V, H]' if transposed else '[H, V]'}"
            runs[name] = head_variant(rows, transposed=transposed)
    seconds = {name: median(times) for name, times in alternate(runs, arguments.repeats).items()}
    for name, value in seconds.items():
        compiled = f"   compiled in {compile_s[name]:.1f} s" if name in compile_s else ""
        print(f"{name:<36} {1e3 * value:7.1f} ms{compiled}")
    results = {"seconds": seconds, "compile_seconds": compile_s}
    output = pathlib.Path(__file__).with_suffix(".json")
    write_json(output, {"environment": environment(), "results": results})


if __name__ == "__main__":
    main()
