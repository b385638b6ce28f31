"""The kernel benchmarks run without a GPU, and the committed figures cover every kernel."""

import json

from benchmarks import kernels, kernels_compiled
from benchmarks.kernel_cases import select_cases
from pallas_kernels.devices import DEVICES
from tests.kernels.compile_for_gpu import needs_kernel_figures


def test_interprets_tiny_shapes_and_compares(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert kernels.main(["--kernels", "fill_hidden", "--output", str(path)]) == 0
    assert "not speeds" in capsys.readouterr().out
    [row] = json.loads(path.read_text())["rows"]
    assert row["kernel"] == "fill_hidden" and row["difference"] == 0


def test_an_unknown_kernel_is_bad_usage(capsys):
    assert kernels.main(["--kernels", "flash"]) == 2
    assert "no cases for 'flash'; kernels are expand_batch" in capsys.readouterr().err


def test_every_case_has_a_tiny_twin():
    assert all(case.tiny is not None for case in select_cases(None))


def committed_rows() -> list[dict]:
    return kernels_compiled.read_page(kernels_compiled.OUTPUT)


def test_the_committed_page_covers_every_case_on_every_device():
    found = {(row["operation"], row["shape"], row["device"]) for row in committed_rows()}
    expected = {
        (case.kernel, case.shape, device) for case in select_cases(None) for device in DEVICES
    }
    assert found == expected, "run python -m benchmarks.kernels_compiled"


def test_the_committed_page_explains_every_spill():
    for row in committed_rows():
        explained = (row["kernel"], row["device"]) in kernels_compiled.SPILL_REASONS
        assert row["spill_bytes"] == 0 or explained, row


class TestFigures:
    pytestmark = needs_kernel_figures

    def test_the_committed_figures_are_those_of_today(self, capsys):
        """One kernel stands for all: the whole page takes minutes."""
        assert kernels_compiled.main(["--json", "--kernels", "fill_hidden"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {"kernel", "device", "shape", "registers", "spill_bytes", "shared_memory_bytes"} <= (
            rows[0].keys()
        )
        committed = [row for row in committed_rows() if row["operation"] == "fill_hidden"]
        assert rows == committed, "run python -m benchmarks.kernels_compiled"
