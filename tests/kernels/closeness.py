"""How close kernels and references must come to a float64 oracle."""

import numpy as np


def tolerance(expected, length: int, dtype=np.float32) -> float:
    """2e-6 of the largest |expected|, growing with the square root of the `length` of the reduction
    beyond 64, and at least 2e-6 itself; in bfloat16 a hundredth of the largest."""
    largest = float(np.max(np.abs(expected), initial=0.0))
    if np.dtype(dtype) != np.float32:
        return 1e-2 * largest
    return max(2e-6, 2e-6 * largest * max(1.0, (length / 64) ** 0.5))
