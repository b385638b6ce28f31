"""Which implementation of an operation runs: the kernel, its reference, or the interpreted kernel.

None (the default) leaves it to the platform that the program is *lowered* for: the kernel on NVIDIA
GPUs, the reference elsewhere. It always works, and a program compiled for a GPU where there is none
holds the kernel. A named implementation runs or fails with the reason, never something else.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh

Implementation = Literal["triton", "reference", "interpret"]
IMPLEMENTATIONS: tuple[str, ...] = ("triton", "reference", "interpret")
ENVIRONMENT_VARIABLE = "PEAGLE_KERNELS"

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("forced", default=None)


@contextlib.contextmanager
def forcing(implementation: Implementation | None) -> Iterator[None]:
    """Within it, `implementation` stands for every operation that is not given one by name.

    It is read while a program is traced, as is the environment variable: a function that jit has
    traced before keeps what it was traced with.
    """
    token = _forced.set(_checked(implementation, "forcing"))
    try:
        yield
    finally:
        _forced.reset(token)


def _checked(implementation: str | None, source: str) -> str | None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{source}: {implementation!r} is no implementation; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}, or none at all to decide by platform"
        )
    return implementation


def process_choice() -> str | None:
    """What the process asks for: `forcing`, else the environment variable, else None."""
    forced = _forced.get()
    if forced is not None:
        return forced
    value = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
    if value in ("", "auto"):
        return None
    return _checked(value, f"environment variable {ENVIRONMENT_VARIABLE}")


def resolve(implementation: Implementation | None) -> str | None:
    """The choice for one call: its own argument, else the process's; None decides by platform.

    A process that asks for interpretation turns "triton" into "interpret", so that code which names
    the kernel can be tested on a CPU.
    """
    chosen = _checked(implementation, "implementation")
    process = process_choice()
    if chosen is None:
        return process
    if chosen == "triton" and process == "interpret":
        return "interpret"
    return chosen


def select(
    reference: Callable,
    triton: Callable,
    implementation: Implementation | None,
    *,
    name: str = "",
    unsupported: str | None = None,
) -> Callable:
    """The function that runs the chosen implementation; call it with the array arguments only.

    Args:
      reference: function of the arrays, in jnp.
      triton: function of the arrays with a keyword `interpret: bool`; same outputs.
      implementation: see `resolve`.
      name: the operation, for the error message.
      unsupported: why the kernel cannot take these shapes; None where it can. The default then is
        the reference everywhere.

    Raises: NotImplementedError where a kernel was asked for by name that cannot take the shapes.
    Raises (while lowering): NotImplementedError where "triton" was asked for by name and the
      program is lowered for anything but CUDA.
    """
    chosen = resolve(implementation)
    if chosen == "reference" or (chosen is None and unsupported):
        return reference
    if unsupported:
        raise NotImplementedError(
            f"{name}: implementation {chosen!r} was asked for, and {unsupported}; "
            "leave implementation=None to use the reference there"
        )
    compiled = functools.partial(triton, interpret=False)
    if chosen == "interpret":
        return functools.partial(triton, interpret=True)
    otherwise = reference
    if chosen == "triton":
        otherwise = _refusing(reference, name or getattr(reference, "__name__", "the operation"))

    def by_platform(*arrays):
        return jax.lax.platform_dependent(*arrays, cuda=compiled, default=otherwise)

    return by_platform


# --- the branch of a named kernel that no platform but CUDA may take ---

_refuse_p = Primitive("peagle_kernel_unavailable")
_refuse_p.def_abstract_eval(lambda value, **_: value)
_refuse_p.def_impl(lambda value, *, name: _raise_unavailable(name, jax.default_backend()))


def _raise_unavailable(name: str, platform: str):
    raise NotImplementedError(
        f"{name}: implementation 'triton' was asked for, and this program is lowered for "
        f"{platform!r}; the kernel runs on NVIDIA GPUs only. Leave implementation=None to use the "
        f"reference there, or set {ENVIRONMENT_VARIABLE}=interpret to interpret the kernel."
    )


def _lower_refusal(context, value, *, name: str):
    platforms = context.platforms or context.module_context.platforms
    _raise_unavailable(name, ", ".join(platforms))


mlir.register_lowering(_refuse_p, _lower_refusal)
ad.deflinear2(_refuse_p, lambda cotangent, value, *, name: [cotangent])
batching.primitive_batchers[_refuse_p] = lambda values, axes, *, name: (
    _refuse_p.bind(*values, name=name),
    axes[0],
)


def _refusing(reference: Callable, name: str) -> Callable:
    def refused(*arrays):
        outputs = reference(*arrays)
        return jax.tree.map(lambda value: _refuse_p.bind(value, name=name), outputs)

    return refused


# --- meshes ---


@dataclasses.dataclass(frozen=True)
class KernelSharding:
    """How the operands of a kernel lie on a mesh.

    A kernel is opaque to XLA's partitioner, so under a mesh it must run inside `shard_map`, once
    per shard.

    Attributes:
      mesh: the device mesh, or its abstract one within `jax.set_mesh`.
      batch: mesh axis (or axes) of the request dimension; None where it is not sharded.
      heads: mesh axis of the key-value heads (query heads go with them); None where not sharded.
    """

    mesh: Mesh | AbstractMesh
    batch: str | tuple[str, ...] | None = None
    heads: str | tuple[str, ...] | None = None


def sharded(
    function: Callable,
    sharding: KernelSharding | None,
    in_specs: Any,
    out_specs: Any,
) -> Callable:
    """`function` once per shard of `sharding.mesh`; `function` itself where `sharding` is None.

    `in_specs` and `out_specs` are trees of PartitionSpec, as for `jax.shard_map`.
    """
    if sharding is None:
        return function
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # Outputs of a pallas_call carry no type that says over which axes they vary.
        check_vma=False,
    )
