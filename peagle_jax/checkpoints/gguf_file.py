"""GGUF files: metadata as a plain dict, tensors dequantised to float32 one at a time.

Not here: which tensor goes to which parameter, and the model's config.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float

from peagle_jax.checkpoints.gguf_header import GgufError, GgufTensor, read_header

__all__ = ["GgufError", "GgufFile", "GgufTensor", "open_gguf", "unpermute_rotary_rows"]

# Elements dequantised at a time: enough to keep NumPy busy, small beside any model.
_SLAB = 1 << 21


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An opened GGUF file. Holds no file handle and no mapping; `read` opens the file anew."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def require(self, key: str, kind: type) -> Any:
        """`metadata[key]`, which must be of type `kind` (int, float, str, bool or list).

        An int passes for a float. Raises GgufError naming file and key.
        """
        if key not in self.metadata:
            raise GgufError(f"{self.path}: metadata key {key!r} is missing")
        value = self.metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            shown = f"{value!r:.60}"
            raise GgufError(
                f"{self.path}: metadata key {key!r} is {shown}; expected {kind.__name__}"
            )
        return value

    def require_architecture(self, name: str) -> None:
        """Raises GgufError unless `general.architecture` is `name`."""
        found = self.require("general.architecture", str)
        if found != name:
            raise GgufError(
                f"{self.path}: general.architecture is {found!r}; only {name!r} GGUF files can be "
                "loaded. Use the model's safetensors folder instead"
            )

    def tensor(self, name: str) -> GgufTensor:
        """Table row of tensor `name`. Raises GgufError where the file has none."""
        if name not in self.tensors:
            raise GgufError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]

    def read(
        self, name: str, *, start: int = 0, stop: int | None = None
    ) -> Float[np.ndarray, "..."]:
        """Tensor `name`, or the items `start` to `stop` of its first axis, as float32.

        Reads the packed bytes with plain file reads (no mapping whose pages would stay resident)
        and dequantises in slabs, so that the peak is the result plus a few megabytes. A fresh,
        writable array.

        Raises:
          GgufError: no such tensor, or a type that `gguf.quants.dequantize` does not cover.
          IndexError: `start`/`stop` outside the first axis.
        """
        tensor = self.tensor(name)
        rows = tensor.shape[0] if tensor.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"{self.path}: tensor {name!r} has {rows} rows, not {start}:{stop}")
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        row_size = int(np.prod(tensor.shape[1:], dtype=np.int64))
        if len(tensor.shape) == 1 and (start, stop) != (0, rows) and block > 1:
            raise GgufError(f"{self.path}: tensor {name!r} is one packed row; read it whole")
        total = (stop - start) * row_size
        out = np.empty(total, np.float32)
        slab = max(block, _SLAB // block * block)
        with self.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset + start * row_size // block * block_bytes)
            for begin in range(0, total, slab):
                end = min(begin + slab, total)
                packed = _read_exactly(file, (end - begin) // block * block_bytes, self.path, name)
                out[begin:end] = self._dequantize(packed, tensor)
        return out.reshape((stop - start, *tensor.shape[1:]) if tensor.shape else ())

    def _dequantize(self, packed: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        # Rows of the real shape would be a few hundred elements, and the library loops over them
        # in Python; the codecs work block by block, so any regrouping gives the same numbers.
        blocks = packed.size // block_bytes
        per_row = next(n for n in (256, 64, 16, 4, 1) if blocks % n == 0)
        if tensor.type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            per_row = blocks
        try:
            return dequantize(packed.reshape(-1, per_row * block_bytes), tensor.type).reshape(-1)
        except NotImplementedError as error:
            raise GgufError(
                f"{self.path}: tensor {tensor.name!r} has type {tensor.type.name}, which the gguf "
                "package cannot dequantise"
            ) from error


def _read_exactly(file: Any, count: int, path: Path, name: str) -> np.ndarray:
    data = np.empty(count, np.uint8)
    view = memoryview(data)
    while len(view):
        got = file.readinto(view)
        if not got:
            raise GgufError(f"{path}: file ended inside tensor {name!r}; it was changed or cut")
        view = view[got:]
    return data


def open_gguf(path: str | Path) -> GgufFile:
    """Read the head of a GGUF file; every tensor is checked to lie inside the file.

    Raises FileNotFoundError, or GgufError naming the file and the key or tensor at fault.
    """
    path = Path(path)
    metadata, tensors = read_header(path)
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def unpermute_rotary_rows(
    weight: Float[np.ndarray, "rows *columns"], num_heads: int
) -> Float[np.ndarray, "rows *columns"]:
    """Rows of a llama-architecture `attn_q` or `attn_k` in the order of Hugging Face files.

    GGUF llama files store each head's rows interleaved (0, D/2, 1, D/2+1, ...), for rotary
    embedding of neighbouring pairs; this gives the half-split order (0, 1, ..., D-1) back. For
    `attn_k` pass the number of key heads. Biases (one axis) work alike.

    Raises ValueError where the rows are not `num_heads` heads of even size.
    """
    rows = weight.shape[0]
    if num_heads < 1 or rows % (2 * num_heads):
        raise ValueError(f"{rows} rows are not {num_heads} heads of an even size")
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
