"""Download one wheel by name with pip, showing progress."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_POLL_SECONDS = 0.1
_SHOWN_LINES = 4

# pip reports an unreachable index as "no matching distribution"; its warnings tell the reason.
_UNREACHABLE = re.compile(r"connection broken by ['\"]?(.{1,200})")
_REASON = re.compile(
    r"Failed to (?:establish|resolve)[^\"')]*|[A-Za-z ]*timed? ?out|CERTIFICATE_VERIFY_FAILED"
    r"|Connection refused|Cannot connect to proxy",
    re.IGNORECASE,
)


def pip_download(requirement: str, folder: Path, *, title: str, expected_bytes: int) -> Path:
    """Download the wheel of `requirement`, without dependencies, into `folder`.

    pip's own settings (index, proxy, certificates, cache) apply. Progress goes to standard error,
    measured by the bytes that pip has written under `folder`.

    Raises RuntimeError with the last lines pip printed.
    """
    scratch, dest = folder / "pip-scratch", folder / "pip-wheel"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--retries=2", "--timeout=20", f"--dest={dest}", requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # so that its growth can be watched
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            _watch(process, folder, title, expected_bytes)
        finally:
            if process.poll() is None:  # interrupted: pip must not go on alone
                process.terminate()
                process.wait()
    wheels = list(dest.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(_problem(log.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _watch(process: subprocess.Popen, folder: Path, title: str, expected_bytes: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=expected_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_under(folder), expected_bytes))
            time.sleep(_POLL_SECONDS)
        if process.returncode == 0:
            progress.update(task, completed=expected_bytes)


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves files while we look
                continue
    return total


def _problem(log: str) -> str:
    if "No module named pip" in log:
        return "this Python has no pip (run: python -m ensurepip, or: uv pip install pip)"
    unreachable = _UNREACHABLE.search(log)
    if unreachable:
        reason = _REASON.search(unreachable.group(1)) or unreachable
        return f"no network, or the package index cannot be reached ({reason.group(0).strip()})"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return "; ".join(errors[-_SHOWN_LINES:]) or "pip failed without a message"
