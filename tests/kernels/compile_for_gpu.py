"""Helper of the compile tests: every kernel inside a jitted program, for every GPU of the table."""

import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.devices import DEVICES

DEVICE_NAMES = tuple(DEVICES)
# The H100 compiles to the H200's code (same chip, same launch parameters: test_launch.py).
FIGURE_DEVICES = tuple(name for name in DEVICE_NAMES if name != "h100")

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


def assert_compiles(function, device: str, arguments, kernels: tuple[str, ...]):
    """Compile `function(*arguments)` for `device` and find exactly `kernels` in the compiled text.

    `arguments` are arrays or ShapeDtypeStructs. Returns the compiled program.
    """
    compiled = ahead_of_time.compile_for(function, device, *arguments)
    found = ahead_of_time.kernel_calls(compiled.as_text())
    assert tuple(found) == tuple(kernels), f"{device}: the program holds {found}"
    return compiled


def assert_no_spills(function, device: str, arguments, allowed_bytes: int = 0):
    """No kernel of `function(*arguments)` spills registers on `device` (or at most what is allowed,
    with the reason written where the allowance is made). Returns the figures."""
    figures = ahead_of_time.kernel_figures(function, device, *arguments)
    assert figures, "the program holds no kernel"
    for figure in figures:
        limit = DEVICES[device].shared_memory_per_block
        assert figure.shared_memory_bytes <= limit, figure
        assert figure.spill_bytes <= allowed_bytes, figure
    return figures


def assert_all_compile(function_of, shapes, device: str, arguments_of, kernel: str):
    """All `shapes` of one kernel in one program for `device`: each call is there, once.

    `function_of(shape)` is called with `*arguments_of(shape)`, without values.
    """

    def program(*all_arguments):
        return [
            function_of(shape)(*arguments)
            for shape, arguments in zip(shapes, all_arguments, strict=True)
        ]

    arguments = [arguments_of(shape) for shape in shapes]
    return assert_compiles(program, device, arguments, (kernel,) * len(shapes))
