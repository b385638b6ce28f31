"""Load a target: every parameter straight into its final sharding, slice by slice.

The whole plan is checked on configs and headers first. Then one parameter after the other is read;
the host holds one parameter at a time, and on the CPU backend that buffer becomes the array.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from peagle_jax.checkpoints.fields import CheckpointError, PathLike
from peagle_jax.checkpoints.hf_config import quantization, read_config, target_config
from peagle_jax.checkpoints.planner import Plan
from peagle_jax.checkpoints.shards import open_shards
from peagle_jax.checkpoints.sources import ArrayPlan, Index, Stored, assemble, read_parts
from peagle_jax.checkpoints.target_weights import TargetPlan, plan_target
from peagle_jax.models.config import TargetConfig
from peagle_jax.models.packed import PackedFp8, PackedMxfp4
from peagle_jax.models.target import Target

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))

# Called with the bytes made so far and the bytes in all.
Progress = Callable[[int, int], None]


def load_target(
    path: PathLike,
    *,
    config_file: str = "config.json",
    dtype: Any = None,
    mesh: Mesh | None = None,
    keep_packed: bool = False,
    progress: Progress | None = None,
) -> Target:
    """A target from a Hugging Face folder with safetensors, or from a llama-architecture GGUF.

    dtype: of parameters and computation, float32 or bfloat16; None means float32 on CPU and
    bfloat16 on a GPU. mesh: None puts everything on one device. keep_packed: leave block-FP8 and
    MXFP4 matrices packed on the device and unpack them inside jit, else unpack them here.

    Raises CheckpointError (a ValueError) naming file and key for whatever is missing, unknown,
    damaged, of a wrong shape or not supported; all but NaN scales before any weight is read.
    """
    config, plan = plan_checkpoint(path, config_file=config_file, keep_packed=keep_packed)
    dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: expected float32 or bfloat16")
    for first, second in plan.equal:
        _check_equal(first, second)
    loader = _Loader(plan=plan.parameters, mesh=mesh, progress=progress or _silent)
    target = Target(config, dtype=dtype, source=loader.parameter)
    left = sorted(set(plan.parameters) - loader.made)
    assert not left, f"the model asked for no parameter {left}"
    return target


def plan_checkpoint(
    path: PathLike, *, config_file: str = "config.json", keep_packed: bool = False
) -> tuple[TargetConfig, TargetPlan]:
    """Config and checked plan of a checkpoint; reads headers and metadata only."""
    file = Path(path)
    if file.suffix == ".gguf":
        from peagle_jax.checkpoints.gguf_weights import plan_gguf

        return plan_gguf(file)
    raw = read_config(file, config_file=config_file)
    config = target_config(raw)
    shards = open_shards(file if file.is_dir() else file.parent)
    return config, plan_target(config, shards, quantization(raw), keep_packed=keep_packed)


def default_dtype() -> np.dtype[Any]:
    """float32 on CPU, bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


@dataclasses.dataclass(kw_only=True)
class _Loader:
    """The source of a model's parameters; remembers which were made and how many bytes."""

    plan: dict[str, Plan]
    mesh: Mesh | None
    progress: Progress
    made: set[str] = dataclasses.field(default_factory=set)
    bytes_made: int = 0

    def parameter(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        plan = self.plan[name]
        assert plan.shape == shape, f"{name}: planned {plan.shape}, the model asks for {shape}"
        value = _parameter(plan, dtype, self._place(name, shape))
        jax.block_until_ready(value)
        self.made.add(name)
        self.bytes_made += sum(leaf.nbytes for leaf in jax.tree.leaves(value))
        self.progress(self.bytes_made, sum(_nbytes(p, dtype) for p in self.plan.values()))
        return value

    def _place(self, name: str, shape: tuple[int, ...]) -> "Place":
        """Sharding by shape and, for a packed piece, by which parameter axis each axis stands."""
        if self.mesh is None:
            device = jax.config.jax_default_device or jax.local_devices()[0]
            return lambda piece_shape, axes: SingleDeviceSharding(device)
        from peagle_jax.sharding import parameter_spec

        mesh, spec = self.mesh, parameter_spec(name, shape, self.mesh)
        names = (*spec, *[None] * (len(shape) - len(spec)))

        def place(piece_shape: tuple[int, ...], axes: tuple[int | None, ...]) -> Sharding:
            chosen = [None if axis is None else names[axis] for axis in axes]
            fits = [
                name if size % _mesh_size(mesh, name) == 0 else None
                for size, name in zip(piece_shape, chosen, strict=True)
            ]
            return NamedSharding(mesh, PartitionSpec(*fits))

        return place


# place(shape, axes) is the sharding of an array whose axes stand for those axes of the parameter.
Place = Callable[[tuple[int, ...], tuple[int | None, ...]], Sharding]


def _parameter(plan: Plan, dtype: Any, place: Place) -> Any:
    """The array of a plan, or its packed weight with both pieces sharded as the parameter is."""
    axes: tuple[int | None, ...] = tuple(range(len(plan.shape)))
    if isinstance(plan, ArrayPlan):
        return _array(plan, dtype, place(plan.shape, axes))
    main_axes = axes
    if plan.kind == "mxfp4":
        main_axes = (*axes[: plan.axis + 1], None, *axes[plan.axis + 1 :])
    pieces = [
        _array(array, array.pieces[0].source.dtype, place(array.shape, array_axes))
        for array, array_axes in ((plan.main, main_axes), (plan.scales, axes))
    ]
    if plan.kind == "mxfp4":
        return PackedMxfp4(*pieces, axis=plan.axis)
    return PackedFp8(*pieces, axis=plan.axis, block=plan.block)


def _array(plan: ArrayPlan, dtype: Any, sharding: Sharding) -> jax.Array:
    """One array under its sharding; shards that hold the same block share one read."""
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def block(index: Index) -> np.ndarray:
        cuts = tuple(cut.indices(size)[:2] for cut, size in zip(index, plan.shape, strict=True))
        if cuts not in blocks:
            blocks[cuts] = assemble(plan, tuple(slice(*cut) for cut in cuts), dtype)
        return blocks[cuts]

    return jax.make_array_from_callback(plan.shape, sharding, block)


def _nbytes(plan: Plan, dtype: Any) -> int:
    if isinstance(plan, ArrayPlan):
        return math.prod(plan.shape) * jnp.dtype(dtype).itemsize
    arrays = (plan.main, plan.scales)
    return sum(math.prod(a.shape) * a.pieces[0].source.dtype.itemsize for a in arrays)


def _mesh_size(mesh: Mesh, names: Any) -> int:
    """Number of shards along a PartitionSpec entry."""
    if names is None:
        return 1
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


def _check_equal(first: Stored, second: Stored) -> None:
    """A head stored beside the embedding that the config ties it to must be the same."""
    pairs = zip(read_parts(first, first.dtype), read_parts(second, second.dtype), strict=True)
    if first.dtype != second.dtype or any((a != b).any() for a, b in pairs):
        raise CheckpointError(
            f"{first.file.path}: tensor {first.name!r} differs from {second.name!r}, but config "
            "says tie_word_embeddings; set it to false if the head is to be used"
        )


def _silent(done: int, total: int) -> None:
    del done, total
