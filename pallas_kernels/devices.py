"""The NVIDIA GPUs this project is compiled for: what each one has, as one table.

Launch parameters, compile tests, memory plans and benchmarks read it; it touches no device.
"""

from __future__ import annotations

import dataclasses

GIB = 1024**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU model. Sizes in bytes, rates in bytes/s or dense FLOP/s (NVIDIA's data sheets).

    Attributes:
      name: short name, the key of `DEVICES`.
      kind: a part of jax's `device_kind` that tells this model from the others.
      compute_capability: (major, minor).
      multiprocessors: number of SMs.
      float32_lanes: float32 units in each SM.
      memory_bytes: device memory that XLA is told about.
      memory_bandwidth: peak of the device memory, bytes/s.
      l2_bytes: second-level cache.
      clock_hz: boost clock.
      shared_memory_per_multiprocessor: shared memory of one SM.
      shared_memory_per_block: the most that one block may use (opt-in).
      bfloat16_rate: matrix units, dense, float32 accumulation.
      float8_rate: the same for 8-bit floats; None where the matrix units have none.
      tensor_float32_rate: the same for float32 operands rounded to TF32.
      link_bandwidth: NVLink, both directions together, bytes/s.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    float32_lanes: int
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    clock_hz: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int
    bfloat16_rate: float
    float8_rate: float | None
    tensor_float32_rate: float
    link_bandwidth: int


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            kind="A100",
            compute_capability=(8, 0),
            multiprocessors=108,
            float32_lanes=64,
            memory_bytes=85_100_068_864,
            memory_bandwidth=2_039_040_000_000,
            l2_bytes=41_943_040,
            clock_hz=1_410_000_000,
            shared_memory_per_multiprocessor=167_936,
            shared_memory_per_block=166_912,
            bfloat16_rate=312e12,
            float8_rate=None,
            tensor_float32_rate=156e12,
            link_bandwidth=600_000_000_000,
        ),
        Device(
            name="h100",
            kind="H100",
            compute_capability=(9, 0),
            multiprocessors=132,
            float32_lanes=128,
            memory_bytes=84_929_347_584,
            memory_bandwidth=3_352_320_000_000,
            l2_bytes=52_428_800,
            clock_hz=1_980_000_000,
            shared_memory_per_multiprocessor=233_472,
            shared_memory_per_block=232_448,
            bfloat16_rate=989.4e12,
            float8_rate=1978.9e12,
            tensor_float32_rate=494.7e12,
            link_bandwidth=900_000_000_000,
        ),
        Device(
            name="h200",
            kind="H200",
            compute_capability=(9, 0),
            multiprocessors=132,
            float32_lanes=128,
            memory_bytes=151_397_597_184,
            memory_bandwidth=4_800_000_000_000,
            l2_bytes=52_428_800,
            clock_hz=1_980_000_000,
            shared_memory_per_multiprocessor=233_472,
            shared_memory_per_block=232_448,
            bfloat16_rate=989.4e12,
            float8_rate=1978.9e12,
            tensor_float32_rate=494.7e12,
            link_bandwidth=900_000_000_000,
        ),
        Device(
            name="b200",
            kind="B200",
            compute_capability=(10, 0),
            multiprocessors=148,
            float32_lanes=128,
            memory_bytes=191_514_411_008,
            memory_bandwidth=7_672_320_000_000,
            l2_bytes=132_644_864,
            clock_hz=1_965_000_000,
            shared_memory_per_multiprocessor=233_472,
            shared_memory_per_block=232_448,
            bfloat16_rate=2250e12,
            float8_rate=4500e12,
            tensor_float32_rate=1125e12,
            link_bandwidth=1_800_000_000_000,
        ),
    )
}


def find_device(device_kind: str) -> Device | None:
    """The table's entry for jax's `device_kind` (such as "NVIDIA H200"), None where it has none."""
    for device in DEVICES.values():
        if device.kind.lower() in device_kind.lower():
            return device
    return None


def get_device(name: str) -> Device:
    """The entry called `name`; ValueError with the known names otherwise."""
    if name not in DEVICES:
        raise ValueError(f"unknown GPU {name!r}; the device table knows {', '.join(DEVICES)}")
    return DEVICES[name]
