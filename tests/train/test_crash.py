"""Runs killed with SIGKILL, and runs of several processes, against an undisturbed one."""

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train import tiny_run
from train.progress import read_log

ROOT = Path(__file__).parents[2]


def command(folder, *arguments):
    return [sys.executable, "-m", "tests.train.crash_run", str(folder), *map(str, arguments)]


def environment(devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def run(folder, *arguments, devices=1):
    return subprocess.run(
        command(folder, *arguments),
        env=environment(devices),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def losses(folder):
    return [(r["step"], r["loss"], r["gradient_norm"]) for r in read_log(folder)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    tiny_run.write_data(folder / "rows")
    return folder


@pytest.fixture(scope="module")
def undisturbed(base):
    done = run(base / "undisturbed")
    assert done.returncode == 0, done.stderr[-2000:]
    found = losses(base / "undisturbed")
    assert [step for step, *_ in found] == [1, 2, 3, 4, 5, 6]
    return found


@pytest.mark.timeout(3600)
def test_a_run_killed_in_a_save_and_in_a_step_goes_on_as_if_nothing_was_G5(base, undisturbed):
    folder = base / "killed"
    killed = run(folder, "--kill", "save:2")
    assert killed.returncode == -9, killed.stderr[-2000:]
    again = run(folder, "--kill", "step:4")
    assert again.returncode == -9, again.stderr[-2000:]
    assert again.stdout.split("\n")[0] in ("from step 1", "from step 2")
    last = run(folder)
    assert last.returncode == 0, last.stderr[-2000:]
    assert last.stdout.split("\n")[0] in ("from step 2", "from step 3")
    assert losses(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_at_random_moments(base, undisturbed):
    folder, draw = base / "random", random.Random(0)
    for _ in range(10):
        started = {"env": environment(), "cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command(folder), **started) as process:
            process.stdout.readline()  # the start is over, training begins
            time.sleep(draw.uniform(0, 3))
            process.kill()
    done = run(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_processes_of_four_devices_equal_one_of_eight_G8(base):
    one, two = base / "one", base / "two"
    alone = run(one, "--data-axis", 8, devices=8)
    assert alone.returncode == 0, alone.stderr[-2000:]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    several = [
        subprocess.Popen(
            command(two, "--data-axis", 8, "--coordinator", f"localhost:{port}",
                    "--process-count", 2, "--process-index", index),
            env=environment(4), cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=1800)[1] for process in several]
    assert [process.returncode for process in several] == [0, 0], errors
    for (step, *ours), (wanted_step, *wanted) in zip(losses(two), losses(one), strict=True):
        assert step == wanted_step
        assert ours == pytest.approx(wanted, rel=1e-5)
    # What two processes saved, one can open.
    resumed = run(two, "--data-axis", 8, "--steps", 6, devices=8)
    assert resumed.returncode == 0 and resumed.stdout.startswith("from step 6"), resumed.stderr
