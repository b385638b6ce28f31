"""The objective against a public library's loss and gradients (tests/data/peagle)."""

from pathlib import Path

import pytest

from tests.golden import training as golden_training

FOLDERS = Path(__file__).parents[1] / "data" / "peagle"


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("case_a", "structured, 2 chunks"),
        ("case_b", "Algorithm 1, S = 2"),
        ("case_c", "structured, 4 chunks"),
        pytest.param("case_c2", "structured, 2 chunks", marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_counts_of_the_public_library(case, mode, monkeypatch):
    monkeypatch.setattr(golden_training, "MODES", {mode: golden_training.MODES[mode]})
    compared = 0
    for what, found, allowed in golden_training.check(FOLDERS / case, heads=(True,)):
        assert found <= allowed, what
        compared += 1
    assert compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("case", ["case_a", "case_b", "case_c", "case_c2"])
def test_every_partition_mode_gives_the_public_library_s_numbers(case):
    for what, found, allowed in golden_training.check(FOLDERS / case):
        assert found <= allowed, what


def test_plain_gradient_of_the_loss_is_the_one_of_the_chunked_scan():
    case = golden_training.read_case(FOLDERS / "case_b")
    assert golden_training.check_plain_gradient(case) < 1e-5
