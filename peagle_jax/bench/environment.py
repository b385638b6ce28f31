"""What stands behind a figure: machine, versions, revision and command, as plain JSON values."""

import os
import pathlib
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("peagle-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "torch")


def environment() -> dict[str, Any]:
    """Machine, devices, versions, git revision (None outside a checkout) and command."""
    import jax

    devices = jax.devices()
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "python": platform.python_version(),
        **{name: _installed(name) for name in _PACKAGES},
        "revision": _revision(),
        "command": command_line(sys.orig_argv),
    }


def command_line(words: list[str]) -> str:
    """A command line as it would be typed: a console script by its name alone."""
    interpreter, *rest = words
    if rest and pathlib.Path(rest[0]).is_absolute():
        return shlex.join([pathlib.Path(rest[0]).name, *rest[1:]])
    return shlex.join([pathlib.Path(interpreter).name, *rest])


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str | None:
    """The processor's name as Linux gives it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def _revision() -> str | None:
    """The commit of the checkout that this file is part of, with + where it has changes."""
    folder = pathlib.Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            asked = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        return asked.stdout.strip() if asked.returncode == 0 else None

    if git("ls-files", "--error-unmatch", pathlib.Path(__file__).name) is None:
        return None  # an installed copy inside someone else's checkout
    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return commit and commit + ("+" if changed else "")
