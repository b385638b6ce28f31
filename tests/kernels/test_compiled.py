"""Every kernel inside a jitted program for every GPU of the table, at the real shapes of the
supported targets, and without spills. The launch parameters are those of the table."""

import collections

import pytest

from benchmarks.kernel_cases import Case, select_cases
from pallas_kernels import ahead_of_time
from pallas_kernels.devices import DEVICES
from tests.kernels.compile_for_gpu import needs_cuda_plugin, needs_kernel_figures

# The H100 compiles to the H200's code (same chip, same launch parameters: test_dispatch.py).
FIGURE_DEVICES = tuple(name for name in DEVICES if name != "h100")

# The cases that tests compile, by operation; all of an operation that is not named. A gradient
# holds the forward kernel too.
CHOSEN = {
    "document_attention": ("gpt-oss/depth-0/gradients",),
    "rollout_attention": (
        "gpt-oss/rollouts/gradients",
        "qwen3-coder/rollouts-chunk/gradients",
        "gemma-4-31b/rollouts-chunk/gradients",
    ),
}
# Those of GPUs other than the H200 in the quick tests: compiling takes long. The rest are slow.
QUICK = {
    "document_attention": (),
    "rollout_attention": ("gpt-oss/rollouts/gradients",),
    # Holds every kernel; the others differ in sizes and layouts.
    "vocab_loss": ("qwen3-coder/trained-head",),
}


def runs(kernel: str, devices, marks: list, whole: str | None = None) -> list:
    """(cases, device): all cases of an operation for the GPU `whole`, elsewhere the quick ones, and
    all as a slow test."""
    cases = select_cases([kernel])
    cases = [case for case in cases if case.shape in CHOSEN.get(kernel, (case.shape,))]
    quick = [case for case in cases if case.shape in QUICK.get(kernel, (case.shape,))]
    found = []
    for device in devices:
        some = cases if device == whole else quick
        if some:
            found.append(pytest.param(some, device, id=device, marks=marks))
        if some != cases:
            slow = [*marks, pytest.mark.slow]
            found.append(pytest.param(cases, device, id=f"{device}-all", marks=slow))
    return found


def expected_kernels(case: Case) -> list[str]:
    """The Pallas kernels of one call."""
    attention = ["forward"]
    if case.shape.endswith("/gradients"):
        attention += ["d_query", "d_keys"]
        attention += ["d_own_keys"] if case.kernel == "rollout_attention" else []
    loss = ["statistics", "derivative"]
    # Only this one's loss needs the acceptance before its derivative.
    loss += ["acceptance"] if case.shape == "qwen3-coder/trained-head" else []
    return {
        "rollout_attention": [f"interval_attention_{name}" for name in attention],
        "document_attention": [f"interval_attention_{name}" for name in attention],
        "vocab_loss": [f"vocab_loss_{name}" for name in loss],
    }.get(case.kernel, [case.kernel])


def pytest_generate_tests(metafunc):
    kernel = metafunc.cls.kernel
    if metafunc.function.__name__ == "test_no_spills":
        found = runs(kernel, FIGURE_DEVICES, needs_kernel_figures)
    else:
        found = runs(kernel, DEVICES, needs_cuda_plugin, whole="h200")
    metafunc.parametrize("cases, device", found)


class Compiled:
    """What holds for every operation; `kernel` is its name."""

    kernel: str

    def test_a_program_holds_each_kernel_once(self, cases, device):
        def program(*all_arguments):
            return [
                case.call(None)(*arguments)
                for case, arguments in zip(cases, all_arguments, strict=True)
            ]

        arguments = [case.abstract for case in cases]
        text = ahead_of_time.compile_for(program, device, *arguments).as_text()
        expected = collections.Counter(name for case in cases for name in expected_kernels(case))
        assert collections.Counter(ahead_of_time.kernel_calls(text)) == expected
        self.check_program(text, cases)

    def check_program(self, text: str, cases: list[Case]) -> None:
        """What else the compiled program must show."""

    def test_no_spills(self, cases, device):
        for case in cases:
            figures = ahead_of_time.kernel_figures(case.call(None), device, *case.abstract)
            assert {figure.kernel for figure in figures} == set(expected_kernels(case))
            for figure in figures:
                assert figure.spill_bytes == 0, figure
                assert figure.shared_memory_bytes <= DEVICES[device].shared_memory_per_block, figure


class TestExpandBatch(Compiled):
    kernel = "expand_batch"


class TestFillHidden(Compiled):
    kernel = "fill_hidden"


class TestShortQueryAttention(Compiled):
    kernel = "short_query_attention"


class TestDocumentAttention(Compiled):
    kernel = "document_attention"


class TestRolloutAttention(Compiled):
    kernel = "rollout_attention"


class TestVocabLoss(Compiled):
    kernel = "vocab_loss"

    def check_program(self, text, cases):
        for case in cases:
            [arguments] = case.abstract
            rows = arguments["weights"].size
            for vocab in {max(arguments[name].shape) for name in ("draft_head", "target_head")}:
                assert f"[{rows},{vocab}]" not in text, "an array of rows x vocabulary"
