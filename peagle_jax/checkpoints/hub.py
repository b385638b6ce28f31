"""From a model's name to its files: a path, a folder nearby, the hub cache, the hub itself."""

from pathlib import Path

from peagle_jax.checkpoints.fields import PathLike

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


class ModelNotFoundError(ValueError):
    """No files for a model name; the message says where was looked and what to do."""


def find_model(name: PathLike, *, beside: PathLike | None = None, download: bool = True) -> Path:
    """The folder (or file) with the model called `name`.

    Looks at `name` as a path, next to the folder `beside` (as owner/model, or model alone), in the
    cache of huggingface_hub ($HF_HOME), and last, with `download`, on the hub itself.

    Raises ModelNotFoundError where nothing has it, or the hub cannot be reached.
    """
    found = local_folder(name, beside=beside)
    if found is not None:
        return found
    if not _is_hub_name(name):
        raise ModelNotFoundError(f"{name}: no such file or folder, and no hub name (owner/model)")
    looked = (
        f"{name}: not on this machine (looked for the path, beside the target, in the hub cache)"
    )
    if not download:
        raise ModelNotFoundError(f"{looked}; download it with `hf download {name}`")
    return _download(str(name), looked)


def local_folder(name: PathLike, *, beside: PathLike | None = None) -> Path | None:
    """Where `name` lies on this machine, or None; as `find_model`, without the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _is_hub_name(name):
        return None
    if beside is not None:
        folder = Path(beside).absolute()
        for root in folder.parents[:2]:
            for candidate in (root / str(name), root / Path(name).name):
                if (candidate / "config.json").is_file():
                    return candidate
    return _cached(str(name))


def _is_hub_name(name: PathLike) -> bool:
    parts = str(name).split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _download(name: str, looked: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except GatedRepoError:
        problem = "the hub asks for access first: accept its terms there and run `hf auth login`"
    except RepositoryNotFoundError:
        problem = "the hub has no such model (or it needs `hf auth login`)"
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        problem = (
            f"the hub cannot be reached ({type(error).__name__}); fetch it where there is a "
            f"network with `hf download {name} --local-dir FOLDER` and give the folder's path"
        )
    raise ModelNotFoundError(f"{looked}; {problem}")
