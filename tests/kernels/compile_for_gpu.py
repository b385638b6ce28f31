"""Marks of the tests that compile for GPUs which are not there."""

import pytest

from pallas_kernels import ahead_of_time

_reason = ahead_of_time.unavailable_reason()
_figures_reason = ahead_of_time.figures_unavailable_reason()
needs_cuda_plugin = [
    pytest.mark.compile_gpu,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]
needs_kernel_figures = [
    pytest.mark.compile_gpu,
    pytest.mark.skipif(_figures_reason is not None, reason=str(_figures_reason)),
]
