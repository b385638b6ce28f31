"""Every golden checkpoint, full pass, taps and cached decoding (tests/data/targets/README.md)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peagle_jax.checkpoints.hf_config import read_target_config
from tests.golden.report import Case, show
from tests.golden.targets import check_folder

FOLDERS = sorted(p for p in (Path(__file__).parents[1] / "data/targets").iterdir() if p.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_targets_are_met_under_both_config_files_D19(folder):
    """Every tap, the last layer's too, is the reference's residual stream.

    The two configs are equal as data, so that one computation stands for both.
    """
    assert read_target_config(folder, config_file="config_hub.json") == read_target_config(folder)
    case = check_folder(folder, "config.json")
    assert case.passed, case.line()


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "qwen3_moe_fp8_partial"])
def test_packed_weights_give_the_same_numbers(name):
    folder = next(folder for folder in FOLDERS if folder.name == name)
    case = check_folder(folder, "config.json", keep_packed=True)
    assert case.passed, case.line()


def test_the_report_fails_on_a_passed_limit_and_on_nan(capsys):
    good = Case(name="good", errors={"logits": (1e-5, 1e-3)})
    bad = Case(name="bad", errors={"logits": (2e-3, 1e-3)})
    nan = Case(name="nan", errors={"logits": (float("nan"), 1e-3)})
    assert [show([case], as_json=False) for case in (good, bad, nan)] == [0, 1, 1]
    assert show([], as_json=False) == 2, "no case at all is no success"
    capsys.readouterr()
    assert show([good, bad], as_json=True) == 1
    assert [case["passed"] for case in json.loads(capsys.readouterr().out)] == [True, False]


@pytest.mark.slow
def test_the_command_names_a_folder_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", "targets", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "nowhere" in done.stdout
