"""The safetensors files of a checkpoint folder, one or several with an index, as one name table.

Only the folder itself is looked at: published repositories carry copies in other layouts below it.
"""

import dataclasses
import re
from pathlib import Path

from peagle_jax.checkpoints.fields import CheckpointError, PathLike, read_json
from peagle_jax.checkpoints.safetensors_file import SafetensorsFile, open_safetensors

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """All tensors of a folder: which file holds each. `where` is what an error names."""

    where: str
    files: dict[str, SafetensorsFile]

    def file(self, name: str) -> SafetensorsFile:
        """The file with tensor `name`; CheckpointError where there is none."""
        if name not in self.files:
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing")
        return self.files[name]


def open_shards(folder: PathLike) -> Shards:
    """Read every header of a checkpoint folder (or of one .safetensors file); no tensor is read.

    Raises CheckpointError naming the file for a missing shard, a damaged one, an index that
    disagrees with the shards, or a folder without safetensors.
    """
    path = Path(folder)
    if path.is_file():
        return _of_files(str(path), [open_safetensors(path)])
    if (path / SINGLE_NAME).is_file():
        return _of_files(str(path / SINGLE_NAME), [open_safetensors(path / SINGLE_NAME)])
    if (path / INDEX_NAME).is_file():
        return _indexed(path)
    numbered = sorted(path.glob("model-*-of-*.safetensors"))
    if numbered:
        _check_numbers(path, numbered)
        return _of_files(str(path), [open_safetensors(file) for file in numbered])
    found = ", ".join(sorted(file.name for file in path.glob("*.*"))[:8]) or "nothing"
    raise CheckpointError(
        f"{path}: no {SINGLE_NAME} and no {INDEX_NAME} (found {found}); only safetensors and GGUF "
        "are read"
    )


def _of_files(where: str, opened: list[SafetensorsFile]) -> Shards:
    files: dict[str, SafetensorsFile] = {}
    for file in opened:
        for name in file.tensors:
            if name in files:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is also in {files[name].path.name}"
                )
            files[name] = file
    return Shards(where=where, files=files)


def _indexed(path: Path) -> Shards:
    index = path / INDEX_NAME
    table = read_json(index).child("weight_map").raw
    opened = []
    for shard in sorted(set(table.values())):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: weight_map names {shard!r}, expected a file name")
        if not (path / shard).is_file():
            tensor = next(name for name, file in table.items() if file == shard)
            raise CheckpointError(
                f"{path / shard}: missing shard; {INDEX_NAME} says that it holds {tensor!r}"
            )
        opened.append(open_safetensors(path / shard))
    shards = _of_files(str(index), opened)
    for name, shard in table.items():
        if name not in shards.files or shards.files[name].path.name != shard:
            raise CheckpointError(
                f"{path / shard}: tensor {name!r} is missing ({INDEX_NAME} places it there)"
            )
    for name, file in shards.files.items():
        if name not in table:
            raise CheckpointError(f"{file.path}: tensor {name!r} is not in {INDEX_NAME}")
    return shards


def _check_numbers(path: Path, numbered: list[Path]) -> None:
    """Without an index the names themselves must be complete: 1 to n of n."""
    totals = {re.sub(r".*-of-(\d+)\.safetensors", r"\1", file.name) for file in numbered}
    total = max(totals)
    names = [
        f"model-{number:05d}-of-{total}.safetensors"
        for number in range(1, int(total) + 1 if total.isdecimal() else 1)
    ]
    present = [file.name for file in numbered]
    for name in names:
        if name not in present:
            raise CheckpointError(f"{path / name}: missing shard (there is no {INDEX_NAME} either)")
    if names != present:
        raise CheckpointError(f"{path}: several sets of shards and no {INDEX_NAME}: {present}")
