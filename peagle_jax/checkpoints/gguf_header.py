"""The head of a GGUF file: metadata and the table of tensors, without touching tensor data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
`gguf.GGUFReader` reads the same, but makes a NumPy view per vocabulary entry (4.9 s for SmolLM2's
49,152 tokens where this takes 0.1 s) and keeps the file mapped; the tests compare the two.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_DIMS = 8  # the format names 4; a larger count is a damaged file


class GgufError(ValueError):
    """A GGUF file is damaged or unsupported; the message names the file and the key or tensor."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One row of the tensor table.

    `shape` is in NumPy order (slowest axis first), `offset` in bytes from the start of the file,
    `num_bytes` the packed size in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class _Reader:
    """Sequential reads that know what they were reading when the file ends."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self.path = path
        self.position = 0
        self.size = path.stat().st_size
        self.subject = "the header"

    def fail(self, problem: str) -> GgufError:
        return GgufError(f"{self.path}: {problem} (at {self.subject}, byte {self.position})")

    def take(self, count: int) -> bytes:
        # Checked first: a damaged length field must not ask for exabytes.
        if count > self.size - self.position:
            raise self.fail(
                f"file is truncated or damaged: {count} more bytes expected, "
                f"{self.size - self.position} left of {self.size}"
            )
        data = self._file.read(count)
        self.position += count
        return data

    def u32(self) -> int:
        return _U32.unpack(self.take(4))[0]

    def u64(self) -> int:
        return _U64.unpack(self.take(8))[0]

    def string(self) -> str:
        data = self.take(self.u64())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("a string is not valid UTF-8") from error

    def value_type(self) -> GGUFValueType:
        number = self.u32()
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.fail(f"unknown metadata type {number}") from error

    def value(self) -> Any:
        return self._value(self.value_type())

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            item, count = self.value_type(), self.u64()
            if item in _SCALARS:
                return self._scalars(item, count)
            return [self._value(item) for _ in range(count)]
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: GGUFValueType, count: int) -> list:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensor table of a GGUF file.

    Returns:
      metadata: key to plain Python value (str, int, float, bool, or a list of one of these).
      tensors: name to `GgufTensor`, in file order, each checked to lie inside the file.

    Raises:
      FileNotFoundError: no such file.
      GgufError: not GGUF, truncated, big-endian, another version, one part of a split model, a
        tensor type that this `gguf` package does not know, or a name twice.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path)
        _check_start(reader)
        num_tensors, num_keys = reader.u64(), reader.u64()
        metadata = _read_metadata(reader, num_keys)
        entries = [_read_tensor_entry(reader) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{path}: general.alignment is {alignment!r}; expected a positive int")
        data_start = -(-reader.position // alignment) * alignment
        return metadata, _place_tensors(entries, data_start, reader)


def _check_start(reader: _Reader) -> None:
    if reader.u32() != GGUF_MAGIC:
        raise GgufError(f"{reader.path}: not a GGUF file (its first four bytes are not 'GGUF')")
    version = reader.u32()
    if version & 0xFFFF == 0:
        raise GgufError(f"{reader.path}: big-endian GGUF is not supported; convert it first")
    if version not in (2, 3):
        raise GgufError(f"{reader.path}: GGUF version {version} is not supported (2 and 3 are)")


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        reader.subject = f"metadata entry {index} of {count}"
        key = reader.string()
        reader.subject = f"metadata key {key!r}"
        if key in metadata:
            raise reader.fail("key occurs twice")
        metadata[key] = reader.value()
    if metadata.get("split.count", 0) > 1:
        raise GgufError(
            f"{reader.path}: split.count is {metadata['split.count']}: this is one part of a split "
            "model; merge the parts into one file first"
        )
    return metadata


def _read_tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    reader.subject = "the tensor table"
    name = reader.string()
    reader.subject = f"tensor {name!r}"
    num_dims = reader.u32()
    if num_dims > _MAX_DIMS:
        raise reader.fail(f"{num_dims} dimensions; the file is damaged")
    dims = [reader.u64() for _ in range(num_dims)]
    return name, tuple(reversed(dims)), reader.u32(), reader.u64()


def _place_tensors(entries: list, data_start: int, reader: _Reader) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_number, offset in entries:
        where = f"{reader.path}: tensor {name!r}"
        if name in tensors:
            raise GgufError(f"{where} occurs twice")
        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise GgufError(f"{where} has the unknown type number {type_number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in shape:
            elements *= size
        if (shape[-1] if shape else 1) % block:
            raise GgufError(
                f"{where}: shape {shape} has rows that are not whole {kind.name} blocks of {block}"
            )
        tensor = GgufTensor(
            name=name,
            shape=shape,
            type=kind,
            offset=data_start + offset,
            num_bytes=elements // block * block_bytes,
        )
        if tensor.offset + tensor.num_bytes > reader.size:
            raise GgufError(
                f"{where} ends at byte {tensor.offset + tensor.num_bytes}, but the file has "
                f"{reader.size}: it is truncated (an interrupted download?)"
            )
        tensors[name] = tensor
    return tensors
