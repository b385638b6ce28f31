"""From tensor names to array plans: shapes and dtypes checked on headers, before any byte is read.

Knows how a matrix may be stored (plain, block FP8, MXFP4), not which matrices a model has.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, NoReturn

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.hf_config import Quantization
from peagle_jax.checkpoints.shards import Shards
from peagle_jax.checkpoints.sources import (
    ArrayPlan,
    Fp8Matrix,
    Fp8Scales,
    GgufTensorView,
    Index,
    Mxfp4Scales,
    Mxfp4Tensor,
    Piece,
    Source,
    Stored,
    single,
)
from peagle_jax.models.packed import MXFP4_GROUP

_FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16))
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_SUFFIX = "_scale_inv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan:
    """A parameter that stays packed: its two arrays, and PackedFp8's or PackedMxfp4's statics."""

    kind: Literal["fp8", "mxfp4"]
    shape: tuple[int, ...]
    main: ArrayPlan
    scales: ArrayPlan
    axis: int
    block: int


Plan = ArrayPlan | PackedPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A stored matrix [rows, columns] that fills `box` of a parameter.

    `rows` and `columns` split its two axes; `axes` is the order in which the parameter has them.
    """

    key: str
    box: Index
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes plans from the tensors of one checkpoint.

    `keep_packed` leaves FP8 and MXFP4 matrices packed. Every method raises CheckpointError naming
    file and tensor where one is missing or has another shape or dtype than the config asks for.
    """

    shards: Shards
    quantization: Quantization | None
    keep_packed: bool = False

    def vector(
        self,
        key: str,
        stored: tuple[int, ...],
        view: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> ArrayPlan:
        """A plain tensor of shape `stored`, seen as `view`, with the axes put in order `axes`."""
        return single(self.plain(key, stored, view), axes)

    def joined(self, shape: tuple[int, ...], parts: Iterable[tuple[str, Index]]) -> ArrayPlan:
        """Vectors, each filling a box of the parameter in row-major order."""
        pieces = []
        for key, box in parts:
            view = tuple(cut.stop - cut.start for cut in box)
            source = self.plain(key, (math.prod(view),), view)
            pieces.append(Piece(box=box, source=source, axes=tuple(range(len(view)))))
        return ArrayPlan(shape=shape, pieces=tuple(pieces))

    def plain(self, key: str, stored: tuple[int, ...], view: tuple[int, ...] | None) -> Stored:
        """The source of a tensor that must have a floating-point dtype of 16 bits or more."""
        source = self._stored(key, stored, view)
        if source.dtype not in _FLOATS:
            self._fail(key, f"dtype {source.dtype}, expected bfloat16, float16 or float32")
        return source

    def matrix(self, shape: tuple[int, ...], parts: Iterable[Part], *, whole_axis: int) -> Plan:
        """A parameter made of matrices. `whole_axis` is the axis that every part fills wholly.

        With `keep_packed` the parameter stays packed where all of its parts are FP8.
        """
        parts = tuple(parts)
        if self.keep_packed and all(self._is_fp8(part.key) for part in parts):
            return self._packed_fp8(shape, parts, whole_axis)
        return ArrayPlan(
            shape=shape,
            pieces=tuple(
                Piece(box=part.box, source=self.linear(part), axes=part.axes) for part in parts
            ),
        )

    def linear(self, part: Part) -> Source:
        """The values of one matrix, unpacked if it is FP8."""
        stored, view = _sizes(part), (*part.rows, *part.columns)
        if not self._is_fp8(part.key):
            return self.plain(part.key, stored, view)
        return Fp8Matrix(
            values=self._stored(part.key, stored, view),
            scales=self._fp8_scales(part),
            rows=part.rows,
            columns=part.columns,
            block=self._block(part.key),
        )

    def mxfp4(self, name: str, head: tuple[int, ...], size: int, axes: tuple[int, ...]) -> Plan:
        """MXFP4 tensors `name`_blocks and `name`_scales of a weight seen as [*head, size].

        In the file the axes of `head` beyond the first (the expert) are one. `axes` moves the axes
        of [*head, size] to the parameter's order; packed, the groups take the place of `size`.
        """
        if size % MXFP4_GROUP:
            self._fail(f"{name}_blocks", f"{size} inputs, expected a multiple of {MXFP4_GROUP}")
        groups, half = size // MXFP4_GROUP, MXFP4_GROUP // 2
        file_head = (head[0], math.prod(head[1:]))
        blocks = self._stored(
            f"{name}_blocks", (*file_head, groups, half), (*head, groups, half), np.uint8
        )
        scales = Mxfp4Scales(
            stored=self._stored(f"{name}_scales", (*file_head, groups), (*head, groups), np.uint8)
        )
        values = Mxfp4Tensor(blocks=blocks, scales=scales)
        if not self.keep_packed:
            return single(values, axes)
        axis = axes.index(len(head))
        return PackedPlan(
            kind="mxfp4",
            shape=tuple(values.shape[a] for a in axes),
            main=single(blocks, (*axes[: axis + 1], len(head) + 1, *axes[axis + 1 :])),
            scales=single(scales, axes),
            axis=axis,
            block=MXFP4_GROUP,
        )

    def _packed_fp8(
        self, shape: tuple[int, ...], parts: tuple[Part, ...], whole_axis: int
    ) -> PackedPlan:
        """Values as stored; scales per block along `whole_axis`, per entry along the others."""
        values, scales, block = [], [], 0
        for part in parts:
            view = (*part.rows, *part.columns)
            source = self._stored(part.key, _sizes(part), view)
            values.append(Piece(box=part.box, source=source, axes=part.axes))
            by_row = part.axes[whole_axis] < len(part.rows)
            sizes = self._block(part.key)
            block = sizes[0] if by_row else sizes[1]
            # One scale per block along the whole axis, one per entry along the others.
            grid_view = [
                -(-n // block) if a == part.axes[whole_axis] else n for a, n in enumerate(view)
            ]
            grid = Fp8Scales(
                scales=self._fp8_scales(part),
                rows=tuple(grid_view[: len(part.rows)]),
                columns=tuple(grid_view[len(part.rows) :]),
                block=(1, sizes[1]) if by_row else (sizes[0], 1),
            )
            box = list(part.box)
            box[whole_axis] = slice(0, -(-shape[whole_axis] // block))
            scales.append(Piece(box=tuple(box), source=grid, axes=part.axes))
        grid_shape = list(shape)
        grid_shape[whole_axis] = -(-shape[whole_axis] // block)
        return PackedPlan(
            kind="fp8",
            shape=shape,
            main=ArrayPlan(shape=shape, pieces=tuple(values)),
            scales=ArrayPlan(shape=tuple(grid_shape), pieces=tuple(scales)),
            axis=whole_axis,
            block=block,
        )

    def _fp8_scales(self, part: Part) -> Stored:
        rows, columns = _sizes(part)
        block = self._block(part.key)
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        return self.plain(part.key + SCALE_SUFFIX, grid, None)

    def _is_fp8(self, key: str) -> bool:
        return self.shards.file(key).info(key).dtype == _FP8

    def _block(self, key: str) -> tuple[int, int]:
        if self.quantization is None or self.quantization.block_size is None:
            self._fail(
                key,
                "dtype F8_E4M3, but config.json names no quantization_config with quant_method "
                "'fp8' and weight_block_size",
            )
        return self.quantization.block_size

    def _stored(
        self,
        key: str,
        stored: tuple[int, ...],
        view: tuple[int, ...] | None,
        dtype: type | None = None,
    ) -> Stored:
        file = self.shards.file(key)
        info = file.info(key)
        if info.shape != stored:
            self._fail(key, f"shape {list(info.shape)}, the config asks for {list(stored)}")
        if dtype is not None and info.dtype != dtype:
            self._fail(key, f"dtype {info.dtype}, expected {np.dtype(dtype)}")
        return Stored(file=file, name=key, shape=stored if view is None else view)

    def _fail(self, key: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.shards.file(key).path}: tensor {key!r}: found {found}")


def stored_names(plans: Iterable[Plan]) -> set[str]:
    """Names of all file tensors that the plans read."""
    names: set[str] = set()
    for plan in plans:
        for array in (plan.main, plan.scales) if isinstance(plan, PackedPlan) else (plan,):
            for piece in array.pieces:
                names |= _source_names(piece.source)
    return names


def _source_names(source: Source) -> set[str]:
    if isinstance(source, Fp8Matrix):
        return {source.values.name, source.scales.name}
    if isinstance(source, Mxfp4Tensor):
        return {source.blocks.name, source.scales.stored.name}
    if isinstance(source, Mxfp4Scales):
        return {source.stored.name}
    if isinstance(source, Fp8Scales):
        return {source.scales.name}
    assert isinstance(source, Stored | GgufTensorView)
    return {source.name}


def _sizes(part: Part) -> tuple[int, int]:
    return math.prod(part.rows), math.prod(part.columns)
