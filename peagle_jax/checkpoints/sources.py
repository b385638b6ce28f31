"""Pieces of a parameter and where their values come from: slices are read, unpacked, reordered.

A parameter is a box of pieces. Each piece says which part of the box it fills, the stored tensor
that holds it, seen with its axes split (heads, gate and up), and the order in which the box has
those axes. So any slice of any parameter is made from the bytes it needs, and no tensor is
transposed as a whole.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.gguf_file import GgufFile, unpermute_rotary_rows
from peagle_jax.checkpoints.safetensors_file import SafetensorsFile
from peagle_jax.models.packed import MXFP4_GROUP

Index = tuple[slice, ...]

# Bytes of float32 handled at once: small beside any model, and a block stays in the CPU's cache
# while it is transposed.
_CHUNK_BYTES = 1 << 22
_ALIGNMENT = 64

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


# Looking a byte up takes a third of the time of a cast.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@runtime_checkable
class Source(Protocol):
    """A stored tensor seen with shape `shape`; `read` gives a block of it as numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, index: Index) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A safetensors tensor as it is, seen with the axes of `shape`."""

    file: SafetensorsFile
    name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.file.info(self.name).dtype

    def read(self, index: Index) -> np.ndarray:
        return self.file.read(self.name, index, view=self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Matrix:
    """A float8_e4m3fn matrix [rows, columns] times one scale per block, in float32.

    The matrix is seen as [*rows, *columns]; `scales` is the file's grid [ceil(rows / block[0]),
    ceil(columns / block[1])], whose last blocks may be partial.
    """

    values: Stored
    scales: Stored
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    block: tuple[int, int]
    dtype: np.dtype[Any] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows, *self.columns)

    def read(self, index: Index) -> np.ndarray:
        spread = Fp8Scales(
            scales=self.scales, rows=self.rows, columns=self.columns, block=self.block
        )
        values = _E4M3[self.values.read(index).view(np.uint8)]
        values *= spread.read(index).astype(np.float32, copy=False)
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Scales:
    """An FP8 matrix's scales, seen as [*rows, *columns] and repeated over the entries they cover.

    `block` is how many entries of the view share a scale along rows and columns: 1 on the side
    that keeps one entry per block of the file.
    """

    scales: Stored
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows, *self.columns)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.scales.dtype

    def read(self, index: Index) -> np.ndarray:
        row, column = _flat(self.rows, index), _flat(self.columns, index[len(self.rows) :])
        grid = self.scales.read(_whole(self.scales.shape))
        out = grid[row // self.block[0]][:, column // self.block[1]]
        return out.reshape([cut.stop - cut.start for cut in index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Scales:
    """Exponent bytes [*head, G]; reading raises CheckpointError for 255, which stands for NaN."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.dtype

    def read(self, index: Index) -> np.ndarray:
        scales = self.stored.read(index)
        if (scales == 255).any():
            raise CheckpointError(
                f"{self.stored.file.path}: tensor {self.stored.name!r} holds the scale 255, which "
                "is NaN in MXFP4"
            )
        return scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor:
    """MXFP4 values [*head, 32 G], exact in float32: `blocks` is seen as [*head, G, 16]."""

    blocks: Stored
    scales: Mxfp4Scales
    dtype: np.dtype[Any] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], MXFP4_GROUP * self.scales.shape[-1])

    def read(self, index: Index) -> np.ndarray:
        *head, last = index
        groups = slice(last.start // MXFP4_GROUP, -(-last.stop // MXFP4_GROUP))
        blocks = self.blocks.read((*head, groups, slice(0, MXFP4_GROUP // 2)))
        scales = self.scales.read((*head, groups))
        # One table row per byte: low nibble first.
        pairs = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1)
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        values = pairs[blocks].reshape(*scales.shape, MXFP4_GROUP) * powers[..., None]
        values = values.reshape(*scales.shape[:-1], -1)
        first = last.start - groups.start * MXFP4_GROUP
        return values[..., first : first + last.stop - last.start]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensorView:
    """A GGUF tensor, dequantised to float32, seen with its row axis (and others) split.

    `heads`: the rows are that many heads in interleaved order, the product of the first axes of
    `shape`; each head's rows are put in half-split order.
    """

    file: GgufFile
    name: str
    shape: tuple[int, ...]
    heads: int | None = None
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def read(self, index: Index) -> np.ndarray:
        stored = self.file.tensor(self.name).shape
        if len(stored) < 2:  # small, and packed types allow no part of a single row
            rows = self.file.read(self.name)
            rows = unpermute_rotary_rows(rows, self.heads) if self.heads else rows
            return rows.reshape(self.shape)[index]
        entries = self.heads or stored[0]
        lead = next(n for n in range(len(self.shape) + 1) if math.prod(self.shape[:n]) == entries)
        flat = _flat(self.shape[:lead], index)
        first, last = int(flat[0]), int(flat[-1]) + 1
        per_entry = stored[0] // entries
        rows = self.file.read(self.name, start=first * per_entry, stop=last * per_entry)
        rows = unpermute_rotary_rows(rows, last - first) if self.heads else rows
        view = rows.reshape(last - first, *self.shape[lead:])
        view = view if len(flat) == last - first else view[flat - first]
        view = view[(slice(None), *index[lead:])]
        return view.reshape([cut.stop - cut.start for cut in index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a parameter filled from `source` with its axes in the order `axes`."""

    box: Index
    source: Source
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """How one array is made: pieces that cover it without overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def single(source: Source, axes: tuple[int, ...] | None = None) -> ArrayPlan:
    """The plan of an array that is one stored tensor with its axes in the order `axes`."""
    axes = tuple(range(len(source.shape))) if axes is None else axes
    shape = tuple(source.shape[axis] for axis in axes)
    return ArrayPlan(shape=shape, pieces=(Piece(box=_whole(shape), source=source, axes=axes),))


def assemble(plan: ArrayPlan, index: Index, dtype: Any) -> np.ndarray:
    """The block `index` of the planned array in `dtype`, reading only what it needs.

    Besides the result a few megabytes are held. The result is aligned so that the CPU backend can
    take it as it is.
    """
    out = _aligned_empty([cut.stop - cut.start for cut in index], np.dtype(dtype))
    for piece in plan.pieces:
        cuts = tuple(
            slice(max(want.start, box.start), min(want.stop, box.stop))
            for want, box in zip(index, piece.box, strict=True)
        )
        if any(cut.start >= cut.stop for cut in cuts):
            continue
        # From here on in the order of the source's axes.
        inverse = np.argsort(piece.axes)
        target = out[(*_relative(cuts, index), ...)].transpose(inverse)
        inside = _relative(cuts, piece.box)
        wanted = tuple(inside[axis] for axis in inverse)
        for chunk in _chunks(wanted):
            values = piece.source.read(chunk)
            target[_relative(chunk, wanted)] = values.astype(dtype, copy=False)
    return out


def read_parts(source: Source, dtype: Any) -> Iterator[np.ndarray]:
    """The whole of a source in row-major order, as blocks of a few megabytes of `dtype`."""
    for chunk in _chunks(_whole(source.shape)):
        yield source.read(chunk).astype(dtype, copy=False)


def _chunks(index: Index) -> Iterator[Index]:
    """Cut a block into blocks of about `_CHUNK_BYTES` of float32, in row-major order.

    Cut along the first axis of which a single entry is small enough, entry by entry along the
    axes before it.
    """
    sizes = [cut.stop - cut.start for cut in index]
    inner = [4 * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    axis = next((axis for axis, size in enumerate(inner) if size <= _CHUNK_BYTES), None)
    if axis is None or not math.prod(sizes):
        yield index
        return
    step = max(1, _CHUNK_BYTES // inner[axis])
    cut = index[axis]
    for outer in np.ndindex(*sizes[:axis]):
        head = _offset(index[:axis], outer)
        for start in range(cut.start, cut.stop, step):
            yield (*head, slice(start, min(start + step, cut.stop)), *index[axis + 1 :])


def _offset(cuts: Index, entry: tuple[int, ...]) -> Index:
    """One entry of a block, by its position in the block."""
    starts = [cut.start + i for cut, i in zip(cuts, entry, strict=True)]
    return tuple(slice(start, start + 1) for start in starts)


def _relative(inner: Index, outer: Index) -> Index:
    """A block in the coordinates of a block that holds it."""
    return tuple(
        slice(cut.start - frame.start, cut.stop - frame.start)
        for cut, frame in zip(inner, outer, strict=True)
    )


def _aligned_empty(shape: list[int], dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _whole(shape: tuple[int, ...]) -> Index:
    return tuple(slice(0, size) for size in shape)


def _flat(sizes: tuple[int, ...], index: Index) -> np.ndarray:
    """Row-major positions of the entries of a block, given as its cuts along `sizes`."""
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    return grid[tuple(index[: len(sizes)])].reshape(-1)
