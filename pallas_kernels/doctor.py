"""What this machine runs: versions, devices, the CUDA plugin, an implementation per operation.

The facts behind `peagle doctor`. Nothing here compiles or allocates more than jax's start does.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping

import jax

from pallas_kernels import ahead_of_time, dispatch
from pallas_kernels.devices import find_device

OPERATIONS = (
    "expand_batch",
    "fill_hidden",
    "short_query_attention",
    "rollout_attention",
    "document_attention",
    "vocab_loss",
)
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "numpy",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found; every field prints as it is.

    Attributes:
      versions: package -> version, "not installed" where it is missing; Python among them.
      backend: jax's default platform ("cpu", "gpu", ...).
      devices: one line per device of that platform.
      cuda_plugin: whether programs run on NVIDIA GPUs here, and if not, why.
      ahead_of_time: whether programs can be compiled for GPUs that are not here, and if not, why.
      implementations: operation -> implementation that runs by default in this process.
      reason: why those run.
      problems: what should be mended, one sentence each; empty when all is well.
    """

    versions: Mapping[str, str]
    backend: str
    devices: tuple[str, ...]
    cuda_plugin: str
    ahead_of_time: str
    implementations: Mapping[str, str]
    reason: str
    problems: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Look at this process and machine. Raises nothing: what is wrong is in `problems`."""
    backend = jax.default_backend()
    problems: list[str] = []
    try:
        chosen = dispatch.process_choice()
    except ValueError as error:
        chosen = None
        problems.append(str(error))
    implementation, reason = _default_implementation(backend, chosen, problems)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    plugin = _cuda_plugin(backend, versions, problems)
    compiling = ahead_of_time.unavailable_reason()
    return Diagnosis(
        versions=versions,
        backend=backend,
        devices=tuple(_device_line(device) for device in jax.devices()),
        cuda_plugin=plugin,
        ahead_of_time="available" if compiling is None else f"not available: {compiling}",
        implementations=dict.fromkeys(OPERATIONS, implementation),
        reason=reason,
        problems=tuple(problems),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_line(device: jax.Device) -> str:
    known = find_device(device.device_kind)
    note = ""
    if device.platform == "gpu":
        note = f" (device table: {known.name})" if known else " (not in the device table)"
    return f"{device.id}: {device.device_kind}{note}"


def _default_implementation(backend: str, chosen: str | None, problems: list[str]):
    """The implementation that None stands for here, and why."""
    if chosen is not None:
        reason = f"{dispatch.ENVIRONMENT_VARIABLE}={chosen}"
        if chosen == "triton" and backend != "gpu":
            problems.append(
                f"{reason}, and the platform is {backend!r}: every operation will refuse to run; "
                f"unset it, or set {dispatch.ENVIRONMENT_VARIABLE}=interpret"
            )
        return chosen, reason
    if backend != "gpu":
        return "reference", f"the platform is {backend!r}; kernels are for NVIDIA GPUs"
    for device in jax.devices():
        capability = float(getattr(device, "compute_capability", 0.0))
        if capability < 8.0:
            problems.append(
                f"{device.device_kind} has compute capability {capability}; the kernels need 8.0 "
                f"(A100) or later: set {dispatch.ENVIRONMENT_VARIABLE}=reference"
            )
    return "triton", "the platform is an NVIDIA GPU"


def _cuda_plugin(backend: str, versions: Mapping[str, str], problems: list[str]) -> str:
    if backend == "gpu":
        return "usable, in use"
    if not ahead_of_time.cuda_plugin_installed():
        return "not installed (pip install 'peagle-jax[cuda12]')"
    plugin, jaxlib = versions["jax-cuda12-plugin"], versions["jaxlib"]
    if plugin != jaxlib:
        problems.append(
            f"jax-cuda12-plugin {plugin} and jaxlib {jaxlib} must have the same version: "
            "pip install -U 'peagle-jax[cuda12]'"
        )
        return f"installed ({plugin}), but not for jaxlib {jaxlib}"
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"installed ({plugin}), not usable: {str(error).splitlines()[0]}"
    return "usable, not in use (another platform was asked for)"


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text, one fact a line."""
    lines = [f"{name:<22} {version}" for name, version in diagnosis.versions.items()]
    lines += ["", f"{'platform':<22} {diagnosis.backend}"]
    lines += [f"{'device':<22} {line}" for line in diagnosis.devices]
    lines += [
        f"{'CUDA plugin':<22} {diagnosis.cuda_plugin}",
        f"{'compiling for GPUs':<22} {diagnosis.ahead_of_time}",
        "",
        f"implementations ({diagnosis.reason}):",
    ]
    lines += [f"  {name:<22} {chosen}" for name, chosen in diagnosis.implementations.items()]
    lines += ["", *(f"problem: {problem}" for problem in diagnosis.problems)]
    return "\n".join(lines).rstrip()
