"""Where arrays live on a mesh: one table from parameter names to logical axes to mesh axes.

Models, drafters, caches and optimizer states are all placed by this table. No mesh (None) means
one device and the same code. Collectives are left to the compiler, which sees the shardings.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from peagle_jax.models.cache import KVCache
from peagle_jax.models.packed import PackedFp8, PackedMxfp4

MESH_AXES = ("data", "fsdp", "tensor", "sequence", "expert")

# Logical axis -> mesh axes. `fsdp` shards parameters by their hidden axis and rows by batch.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("sequence",),
    "vocab": ("tensor",),
    "hidden": ("fsdp",),
    "kv_heads": ("tensor",),
    "inner": ("tensor",),
    "experts": ("expert",),
}

# Parameter name -> one logical axis per array axis; None is never sharded. Names not listed
# (norms and other short vectors) are replicated.
PARAMETER_AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "hidden"),
    "head": ("hidden", "vocab"),
    "qkv": ("hidden", "kv_heads", None, None),
    "qkv_bias": ("kv_heads", None, None),
    "o": ("kv_heads", None, None, "hidden"),
    "sinks": ("kv_heads", None),
    "gate_up": ("hidden", None, "inner"),
    "gate_up_bias": (None, "inner"),
    "down": ("inner", "hidden"),
    "experts_gate_up": ("experts", "hidden", None, "inner"),
    "experts_gate_up_bias": ("experts", None, "inner"),
    "experts_down": ("experts", "inner", "hidden"),
    "experts_down_bias": ("experts", None),
    "fc": (None, "hidden"),
}

CACHE_AXES = ("batch", None, "kv_heads", None)


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    expert: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with all five axes, sharding left to the compiler (Auto).

    Raises ValueError when the sizes do not multiply to the number of devices (`devices`, or as
    many of `jax.devices()` as are needed).
    """
    shape = (data, fsdp, tensor, sequence, expert)
    needed = math.prod(shape)
    found = list(jax.devices()[:needed] if devices is None else devices)
    if min(shape) < 1 or len(found) != needed:
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise ValueError(f"mesh {sizes} needs {needed} devices, found {len(found)}")
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=found
    )


def check_rules(rules: Mapping[str, tuple[str, ...]] = RULES) -> None:
    """Raise ValueError where an array would use a mesh axis twice, or one that is not there."""
    for logical, axes in rules.items():
        unknown = [axis for axis in axes if axis not in MESH_AXES]
        if unknown:
            raise ValueError(f"rule {logical!r} names mesh axes {unknown}, known are {MESH_AXES}")
    for name, logical_axes in {**PARAMETER_AXES, "cache": CACHE_AXES}.items():
        used = [axis for logical in logical_axes if logical for axis in rules.get(logical, ())]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise ValueError(
                f"{name} {logical_axes} would be sharded twice over mesh axes {twice}; change the "
                "rules of one of its logical axes"
            )


def spec_of(
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, tuple[str, ...]] = RULES,
) -> PartitionSpec:
    """The mesh axes of each array axis; an axis that they do not divide is replicated."""
    parts: list[Any] = []
    for logical, size in zip(logical_axes, shape, strict=True):
        axes = tuple(a for a in rules.get(logical or "", ()) if mesh.shape.get(a, 1) > 1)
        ways = math.prod(mesh.shape[axis] for axis in axes)
        parts.append(axes if axes and size % ways == 0 else None)
    return PartitionSpec(*[part[0] if part and len(part) == 1 else part for part in parts])


def parameter_spec(
    name: str,
    shape: Sequence[int],
    mesh: Mesh,
    rules: Mapping[str, tuple[str, ...]] = RULES,
) -> PartitionSpec:
    """Partition of the parameter called `name` (its last part counts, as in "layers.3.qkv")."""
    logical = PARAMETER_AXES.get(name.rsplit(".", 1)[-1])
    if logical is None or len(logical) != len(shape):
        return PartitionSpec()
    return spec_of(logical, shape, mesh, rules)


def shardings(tree: Any, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES) -> Any:
    """A NamedSharding for every leaf of a state of parameters, or of a tree around such states.

    Leaves may be arrays or ShapeDtypeStructs; the innermost known parameter name on a leaf's path
    decides, so optimizer moments go with their parameters. Caches go by `cache_shardings`.
    """
    check_rules(rules)

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        name = next((n for n in map(_key_name, reversed(path)) if n in PARAMETER_AXES), "")
        spec = parameter_spec(name, leaf.shape, mesh, rules)
        if isinstance(leaf, PackedFp8):
            values, scales = (_named(spec, a.shape, mesh) for a in (leaf.values, leaf.scales))
            return PackedFp8(values, scales, leaf.axis, leaf.block)
        if isinstance(leaf, PackedMxfp4):
            padded = [*spec, *[None] * (len(leaf.shape) - len(spec))]
            split = PartitionSpec(*padded[: leaf.axis + 1], None, *padded[leaf.axis + 1 :])
            blocks = _named(split, leaf.blocks.shape, mesh)
            return PackedMxfp4(blocks, _named(spec, leaf.scales.shape, mesh), leaf.axis)
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(
        place, tree, is_leaf=lambda leaf: isinstance(leaf, PackedFp8 | PackedMxfp4)
    )


def cache_shardings(
    cache: KVCache, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES
) -> KVCache:
    """Shardings of a cache, as a KVCache of NamedShardings."""

    def place(leaf: Any) -> NamedSharding:
        axes = CACHE_AXES[: len(leaf.shape)]
        return NamedSharding(mesh, spec_of(axes, leaf.shape, mesh, rules))

    return jax.tree.map(place, cache)


def batch_sharding(
    shape: Sequence[int], mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES
) -> NamedSharding:
    """Sharding of an array whose first axis is the batch."""
    axes = ["batch"] + [None] * (len(shape) - 1)
    return NamedSharding(mesh, spec_of(axes, shape, mesh, rules))


def constrain(
    x: jax.Array,
    *logical_axes: str | None,
    rules: Mapping[str, tuple[str, ...]] = RULES,
) -> jax.Array:
    """Tell the compiler where an activation lives; nothing without a mesh in context.

    The mesh is the one of `jax.set_mesh`. Without this hint the compiler may follow the weights
    instead and gather a batch that was sharded over `fsdp`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    axes = [*logical_axes, *[None] * (x.ndim - len(logical_axes))]
    return jax.lax.with_sharding_constraint(x, spec_of(axes, x.shape, mesh, rules))


def _named(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """`spec`, without the axes that do not divide a packed piece's shorter axis."""
    parts = []
    for part, size in zip(spec, shape, strict=False):
        axes = (part,) if isinstance(part, str) else part or ()
        parts.append(part if size % math.prod(mesh.shape[a] for a in axes) == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def _key_name(key: Any) -> str:
    """The name in one step of a tree path (attribute, mapping key), "" for an index."""
    name = getattr(key, "key", getattr(key, "name", ""))
    return name if isinstance(name, str) else ""
