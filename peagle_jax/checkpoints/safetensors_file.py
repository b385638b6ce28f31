"""The safetensors format: headers, reads of whole tensors or of slices, and atomic writes.

Own reader because the library's NumPy side cannot read F8_E4M3 and maps whole files, whose pages
then count as resident. Here plain reads go into one buffer, bit for bit, and nothing stays open.
Which tensor belongs to which parameter is not known here; folders with several shards: shards.py.
"""

import dataclasses
import io
import json
import math
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.fields import CheckpointError, PathLike

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000
# Below this, one longer read that skips bytes costs less than several short ones.
_MIN_RUN = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor's row in a header. `start` counts bytes from the beginning of the file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """A file whose header was read and checked. Holds no handle and no mapping."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    def info(self, name: str) -> TensorInfo:
        """Header row of tensor `name`; CheckpointError where the file has none."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        *,
        view: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """Tensor `name`, or the block `index` of it, as a fresh array of the file's dtype.

        `view` regards the tensor as another row-major shape of as many elements, and `index` then
        cuts that shape (slices of step 1 with bounds). Only the bytes of the block are read, or
        little more where they lie in short runs.
        """
        info = self.info(name)
        shape = info.shape if view is None else view
        if math.prod(shape) != math.prod(info.shape):
            raise ValueError(
                f"{self.path}: tensor {name!r}: {info.shape} cannot be seen as {shape}"
            )
        cuts = tuple((0, size) for size in shape)
        if index is not None:
            cuts = tuple((cut.start, cut.stop) for cut in index)
        out = np.empty([stop - start for start, stop in cuts], info.dtype)
        if out.size:
            with self.path.open("rb", buffering=0) as file:
                _read_block(file, info, shape, cuts, out)
        return out


def open_safetensors(path: PathLike) -> SafetensorsFile:
    """Read and check the header of the file at `path`; no tensor is read.

    Raises CheckpointError, naming the file and where it applies the tensor, for a missing or
    truncated file, a header that is not one, an unknown dtype, or offsets that do not fit.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    size = file.stat().st_size
    with file.open("rb") as handle:
        head = handle.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER:
            raise CheckpointError(f"{file}: not a safetensors file (no header length)")
        text = handle.read(length)
    if len(text) < length:
        raise CheckpointError(f"{file}: truncated inside its header; copy or download it again")
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _info(file, name, row, 8 + length) for name, row in header.items()}
    end = max([info.start + info.nbytes for info in tensors.values()], default=8 + length)
    if end != size:
        problem = "truncated" if end > size else "longer than its header says"
        raise CheckpointError(
            f"{file}: {problem} ({size} bytes, the header needs {end}); copy or download it again"
        )
    return SafetensorsFile(path=file, tensors=tensors, metadata=metadata)


def read_header(path: PathLike) -> dict[str, TensorInfo]:
    """Tensor rows of the file's header by name, checked as in `open_safetensors`."""
    return open_safetensors(path).tensors


def _info(file: Path, name: str, row: Any, data_start: int) -> TensorInfo:
    try:
        dtype_name, shape, (begin, end) = row["dtype"], row["shape"], row["data_offsets"]
        good = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise CheckpointError(f"{file}: tensor {name!r}: damaged header entry {row!r}")
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype_name!r}; known are {', '.join(DTYPES)}"
        )
    info = TensorInfo(
        name=name, dtype=DTYPES[dtype_name], shape=tuple(shape), start=data_start + begin
    )
    if info.nbytes != end - begin:
        raise CheckpointError(
            f"{file}: tensor {name!r}: {dtype_name} {list(shape)} needs {info.nbytes} bytes, "
            f"its offsets hold {end - begin}"
        )
    return info


def _read_block(
    file: io.FileIO,
    info: TensorInfo,
    shape: tuple[int, ...],
    cuts: tuple[tuple[int, int], ...],
    out: np.ndarray,
) -> None:
    """Fill `out` with the block `cuts` of the row-major `shape` that starts at `info.start`.

    Axes before `axis` are walked one index at a time; each step is one read from the first to the
    last index of `axis`, with the whole of the axes after it, of which `out` keeps its part.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    axis = _run_axis(shape, cuts, info.dtype.itemsize)
    if not shape:
        _read_exactly(file, info, 0, out.reshape(1))
        return
    start, stop = cuts[axis]
    rest = tuple(slice(a, b) for a, b in cuts[axis + 1 :])
    whole = _is_whole(cuts[axis + 1 :], shape[axis + 1 :])
    buffer = None if whole else np.empty((stop - start, *shape[axis + 1 :]), info.dtype)
    for outer in np.ndindex(*out.shape[:axis]):
        first = sum(
            (cut[0] + i) * stride for cut, i, stride in zip(cuts, outer, strides, strict=False)
        )
        offset = first + start * strides[axis]
        if buffer is None:
            _read_exactly(file, info, offset, out[outer].reshape(-1))
        else:
            _read_exactly(file, info, offset, buffer.reshape(-1))
            out[outer] = buffer[(slice(None), *rest)]


def _is_whole(cuts: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> bool:
    return all(cut == (0, size) for cut, size in zip(cuts, shape, strict=True))


def _run_axis(shape: tuple[int, ...], cuts: tuple[tuple[int, int], ...], itemsize: int) -> int:
    """The axis at which one read begins: the innermost that is cut and gives long enough runs."""
    axis = 0
    for candidate in range(len(shape)):
        start, stop = cuts[candidate]
        run = (stop - start) * math.prod(shape[candidate + 1 :]) * itemsize
        if run >= _MIN_RUN and not _is_whole(cuts[candidate:], shape[candidate:]):
            axis = candidate
    return axis


def _read_exactly(file: io.FileIO, info: TensorInfo, offset: int, out: np.ndarray) -> None:
    """Fill the contiguous 1-d `out` from element `offset` of the tensor on."""
    file.seek(info.start + offset * info.dtype.itemsize)
    view = memoryview(out.view(np.uint8))
    while len(view):
        got = file.readinto(view)
        if not got:
            raise CheckpointError(
                f"{file.name}: the file ended inside tensor {info.name!r}; it was changed or cut"
            )
        view = view[got:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor to write that is made in parts: `parts()` yields arrays that follow each other.

    The parts' elements, in row-major order one after the other, are the tensor's.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: PathLike,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays (NumPy, JAX or LazyTensor) with their dtypes kept, then rename into place.

    A reader sees the old file or the new one, never half of it. Raises ValueError for a dtype
    that the format does not have, OSError where the folder cannot be written.
    """
    target = Path(path)
    lazy = {name: _lazy(name, value) for name, value in tensors.items()}
    # Widest items first keeps every tensor aligned, whatever the shapes.
    order = sorted(lazy, key=lambda name: (-lazy[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        item = lazy[name]
        header[name] = {
            "dtype": _NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                _write_parts(file, name, lazy[name])
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _lazy(name: str, value: Any) -> LazyTensor:
    if not isinstance(value, LazyTensor):
        array = np.asarray(value)
        value = LazyTensor(shape=array.shape, dtype=array.dtype, parts=lambda: iter([array]))
    if value.dtype not in _NAMES:
        raise ValueError(f"tensor {name!r}: safetensors has no dtype {value.dtype}")
    return value


def _write_parts(file: io.BufferedWriter, name: str, tensor: LazyTensor) -> None:
    written = 0
    for array in tensor.parts():
        if array.dtype != tensor.dtype:
            raise ValueError(f"tensor {name!r}: a part is {array.dtype}, not {tensor.dtype}")
        # A view as bytes: dtypes from ml_dtypes have no buffer protocol.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        file.write(memoryview(flat))
        written += flat.nbytes
    if written != tensor.nbytes:
        raise ValueError(f"tensor {name!r}: {written} bytes made, {tensor.nbytes} announced")
