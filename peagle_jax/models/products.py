"""Products of rows with a parameter, and how a matrix lies in memory for them.

On a CPU a product of 2 to 24 rows, the verify pass of a small batch, is a case of its own: XLA's
product rearranges the whole matrix first, which costs several times more than reading it. A
multiply and a sum over a matrix stored [out, in] reads it once for eight rows, and gives a row of
three to eight the same bits however many run beside it. Two rows are two products of one row, which
are fast, unless the matrix is too large for caches. Figures: `benchmarks/few_rows.py`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

FEW_ROWS = 24
TILE = 8  # rows that one sweep over the matrix serves, a vector of them; fewer are filled up
CACHED = 2**24  # bytes of a matrix that is read a second time from cache

TURNED = {"qkv": 1, "o": 3, "gate_up": 1, "down": 1, "fc": 1, "head": 1}
"""Parameters that `store_output_major` turns, and how many of their first axes are the input's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """A matrix [*in, *out] stored as [out, in].

    values: [O, I], an array or what stands for it in a mapped tree. shape: the parameter's own.
    """

    values: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def dequantize(self, dtype: Any) -> Array:
        """The parameter in its own shape, for everything but products."""
        return self.values.T.reshape(self.shape).astype(dtype)


def product(
    x: Float[Array, "*rows_and_in"],
    matrix: Float[Array, "*in_and_out"] | OutputMajor,
    contracted: int,
    *,
    dtype: Any = None,
) -> Float[Array, "*rows_and_out"]:
    """Contract the last `contracted` axes of `x` with the first of `matrix`.

    dtype: of the result; None is x's.
    """
    rows = x.shape[: x.ndim - contracted]
    if isinstance(matrix, OutputMajor):
        flat = x.reshape(math.prod(rows), matrix.values.shape[1])
        out = _rows_product(flat, matrix.values.astype(x.dtype), dtype)
        return out.reshape(*rows, *matrix.shape[contracted:])
    dims = (tuple(range(len(rows), x.ndim)), tuple(range(contracted)))
    return _contract(x, matrix, dims, dtype)


def store_output_major(model: nnx.Module) -> None:
    """Turn a model's matrices to [out, in] where that is of use: float32 on a single CPU device.

    In place and one after the other, so that no second copy of the model is needed.
    """
    for path, parameter in nnx.iter_graph(model):
        contracted = TURNED.get(str(path[-1])) if path else None
        if contracted is None or not isinstance(parameter, nnx.Param):
            continue
        value = parameter.get_value()
        if _is_float32_on_one_cpu(value):
            inputs = math.prod(value.shape[:contracted])
            turned = OutputMajor(value.reshape(inputs, -1).T, value.shape)
            parameter.set_value(turned)


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Full precision for float32 (a GPU would use TF32 unasked), the default for the rest."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _rows_product(x: Float[Array, "R I"], matrix: Float[Array, "O I"], dtype: Any) -> Array:
    def dot(x: Array, matrix: Array) -> Array:
        return _contract(x, matrix, ((1,), (1,)), dtype)

    if x.dtype != jnp.float32 or not 2 <= x.shape[0] <= FEW_ROWS:
        return dot(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=_few_rows, default=dot)


def _contract(x: Array, matrix: Array, dims: Any, dtype: Any) -> Array:
    return jax.lax.dot_general(
        x,
        matrix,
        (dims, ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def _few_rows(x: Float32[Array, "R I"], matrix: Float32[Array, "O I"]) -> Float32[Array, "R O"]:
    rows = x.shape[0]
    if rows == 2 and matrix.nbytes <= CACHED:
        return jnp.stack([_contract(matrix, row, ((1,), (0,)), None) for row in x])
    x = jnp.pad(x, ((0, -rows % TILE), (0, 0)))
    # Fused with what comes before or behind, the sum would lose its vector instructions.
    x, matrix = jax.lax.optimization_barrier((x, matrix))
    out = jnp.sum(matrix[None] * x[:, None], axis=-1)
    return jax.lax.optimization_barrier(out)[:rows]


def _is_float32_on_one_cpu(value: Any) -> bool:
    if not isinstance(value, jax.Array) or value.dtype != jnp.float32:
        return False
    return len(value.devices()) == 1 and next(iter(value.devices())).platform == "cpu"
