"""Compile programs for NVIDIA GPUs that are not there, and read what became of their kernels.

Needs the CUDA plugin (`jax[cuda12]`), no GPU, and a process whose backend is the CPU. The figures
of `kernel_figures` use jax internals that exist up to 0.10; they are kept in this one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.devices import get_device
from pallas_kernels.launch import compiling_for

# Autotuning would need the GPU.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}


def unavailable_reason() -> str | None:
    """Why programs cannot be compiled for a GPU here; None where they can."""
    if not cuda_plugin_installed():
        return "the CUDA plugin is not installed (pip install 'peagle-jax[cuda12]')"
    return None


def cuda_plugin_installed() -> bool:
    """Whether jax's CUDA plugin is there, usable or not."""
    return _find_module("jax_plugins.xla_cuda12") is not None


def _find_module(name: str):
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is missing
        return None


def figures_unavailable_reason() -> str | None:
    """Why registers and spills of a kernel cannot be read here; None where they can."""
    if unavailable_reason():
        return unavailable_reason()
    if jax.__version_info__ >= (0, 11):
        return f"jax {jax.__version__} has no public way to a kernel's PTX (0.10 has one)"
    if _ptxas() is None:
        return "ptxas was not found (it comes with nvidia-cuda-nvcc-cu12)"
    return None


def _ptxas() -> str | None:
    bundled = _find_module("nvidia.cuda_nvcc")
    if bundled and bundled.submodule_search_locations:
        path = pathlib.Path(next(iter(bundled.submodule_search_locations)), "bin", "ptxas")
        if path.exists():
            return str(path)
    return shutil.which("ptxas")


def target_config(name: str) -> str:
    """XLA's description of the GPU `name`, as a protocol buffer in text form."""
    device = get_device(name)
    major, minor = device.compute_capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: {device.shared_memory_per_multiprocessor}
  shared_memory_per_block_optin: {device.shared_memory_per_block}
  core_count: {device.multiprocessors}  fpus_per_core: {device.float32_lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {device.memory_bandwidth}  l2_cache_size: {device.l2_bytes}
  clock_rate_ghz: {device.clock_hz / 1e9}
  device_memory_size: {device.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "NVIDIA {device.kind}"
"""


def abstract_mesh(
    name: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("gpu",)
) -> Mesh:
    """A mesh of GPUs `name` in one node, without the GPUs."""
    gpus = 1
    for size in shape:
        gpus *= size
    # "hosts of a partition x processes x GPUs of a process"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(name), topology=f"1x1x{gpus}"
    )
    return topologies.make_mesh(topology, shape, axes)


@contextlib.contextmanager
def lowering_for(name: str, mesh: Mesh):
    """Within it, Pallas lowers for the GPU `name`, with that GPU's launch parameters."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling_for(name))
        # jax from 0.12 on wants to be told the device; 0.10 assumes Hopper.
        if hasattr(jax.sharding, "AbstractDevice"):
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield


def _placed(arguments, mesh: Mesh):
    """Arrays or ShapeDtypeStructs -> ShapeDtypeStructs, replicated on the mesh unless they say."""

    def place(leaf):
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, arguments)


def compile_for(function: Callable, name: str, *arguments, mesh: Mesh | None = None):
    """Compile `function` (of arrays, not jitted yet) for the GPU `name`.

    Args:
      function: a pure function of pytrees of arrays.
      name: a name of the device table.
      arguments: arrays or `ShapeDtypeStruct`s, with shardings if `mesh` is given.
      mesh: `abstract_mesh(name, ...)`; one GPU by default.

    Returns: jax's Compiled (as_text, memory_analysis, cost_analysis).
    """
    mesh = abstract_mesh(name) if mesh is None else mesh
    # A function of its own for each device: jit's cache does not know the launch parameters.
    fresh = jax.jit(lambda *values: function(*values))
    with lowering_for(name, mesh):
        lowered = fresh.lower(*_placed(arguments, mesh))
    with _not_cached():
        return lowered.compile(compiler_options=COMPILER_OPTIONS)


@contextlib.contextmanager
def _not_cached():
    """Keep programs for absent GPUs out of the persistent cache: it could not load them again."""
    name, never = "jax_persistent_cache_min_compile_time_secs", 1e9
    before = getattr(jax.config, name)
    jax.config.update(name, never)
    try:
        yield
    finally:
        jax.config.update(name, before)


def kernel_calls(compiled_text: str) -> list[str]:
    """The names of the Pallas kernels in a compiled program's text, in order, repeats included."""
    names = []
    for line in compiled_text.splitlines():
        if "__gpu$xla.gpu.triton" in line or "triton_kernel_call" in line:
            found = re.search(r'op_name="[^"]*?([\w.]+)/pallas_call', line)
            names.append(found.group(1) if found else "?")
    return names


def count_launches(compiled_text: str) -> int:
    """How many kernels a compiled program without loops launches, Pallas kernels among them.

    Every instruction of the entry counts but those that only name or regroup buffers.
    """
    entry = compiled_text[compiled_text.index("\nENTRY ") :].split("\n}")[0]
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"}
    kinds = re.findall(r"^\s+(?:ROOT )?\S+ = (?:\([^()]*\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    return sum(kind not in free for kind in kinds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """What ptxas says of one kernel. Registers are per thread, bytes per thread or per block."""

    kernel: str
    device: str
    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    num_warps: int
    grid: tuple[int, int, int]


def kernel_figures(function: Callable, name: str, *arguments) -> list[KernelFigures]:
    """PTX and ptxas figures of each distinct Pallas kernel in `function`, for the GPU `name`.

    Raises: RuntimeError with `figures_unavailable_reason()` where they cannot be had.
    """
    reason = figures_unavailable_reason()
    if reason:
        raise RuntimeError(f"no kernel figures: {reason}")
    import jax_plugins.xla_cuda12  # noqa: F401  registers the compiler
    import jaxlib.gpu_triton  # noqa: F401
    from jax._src.lib.mlir import ir

    mesh = abstract_mesh(name)
    fresh = jax.jit(lambda *values: function(*values))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    with lowering_for(name, mesh):
        module = fresh.trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    figures = {}
    for operation in _custom_calls(module.operation):
        if "__gpu$xla.gpu.triton" not in str(operation.attributes["call_target_name"]):
            continue
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        key = ir.StringAttr(config["ir"]).value_bytes
        if key not in figures:
            figures[key] = _figures_of(config, key, name)
    return list(figures.values())


def _custom_calls(operation):
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                if op.operation.name == "stablehlo.custom_call":
                    yield op
                yield from _custom_calls(op.operation)


def _figures_of(config, bytecode: bytes, name: str) -> KernelFigures:
    from jax._src.lib.mlir import ir

    def integer(key):
        return ir.IntegerAttr(config[key]).value

    major, minor = get_device(name).compute_capability
    registers, spilled, shared_memory = _compile_kernel(
        bytecode, f"{major}.{minor}", integer("num_warps"), integer("num_stages")
    )
    return KernelFigures(
        kernel=ir.StringAttr(config["name"]).value,
        device=name,
        registers=registers,
        spill_bytes=spilled,
        shared_memory_bytes=shared_memory,
        num_warps=integer("num_warps"),
        grid=(integer("grid_x"), integer("grid_y"), integer("grid_z")),
    )


@functools.cache  # GPUs of one compute capability share their code
def _compile_kernel(
    bytecode: bytes, capability: str, num_warps: int, num_stages: int
) -> tuple[int, int, int]:
    """Triton's module -> registers per thread, spilled bytes per thread, shared bytes per block."""
    from jax._src.lib import triton

    result = triton.compile(
        "cuda", bytecode, capability, num_warps=num_warps, num_ctas=1, num_stages=num_stages
    )
    arch = re.search(r"\.target (sm_\w+)", result.asm).group(1)
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "kernel.ptx")
        ptx.write_text(result.asm)
        report = subprocess.run(
            [_ptxas(), f"-arch={arch}", "-v", str(ptx), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    return (
        int(registers.group(1)),
        sum(int(count) for count in spills.groups()),
        result.smem_bytes,
    )
