"""Which public drafter belongs to which public target, and how each pair was verified.

So that a user who names a target need not name its head. Finding the files of a name: hub.py.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from peagle_jax.checkpoints.fields import CheckpointError, PathLike, read_json
from peagle_jax.checkpoints.hub import local_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One head of one target; `head` None says that the target has no known public head.

    target, head: names on the hub. num_depths: tokens the head was trained to draft in one pass,
    where known. taps: tapped target layers, convention T; what the head's own config.json says
    goes before this. verified: what the entry rests on.
    """

    target: str
    head: str | None
    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    num_layers: int | None = None
    num_depths: int | None = None
    taps: tuple[int, ...] | None = None
    long_context: bool = False
    verified: str
    note: str = ""


_CARD = "model card; its files were not opened here"
_NAME = "listed by its publisher; card, config and weights not seen"

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        target="openai/gpt-oss-20b",
        head="amazon/gpt-oss-20b-p-eagle",
        num_layers=4,
        num_depths=10,
        taps=(2, 12, 21),
        verified=(
            "model card, and tensor names, shapes and taps as loaded by aws-neuron/nkipy, which "
            "reports parity with vLLM; its files were not opened here"
        ),
    ),
    CatalogueEntry(
        target="openai/gpt-oss-20b",
        head="amazon/gpt-oss-20b-p-eagle-long-context",
        taps=(2, 12, 21),
        long_context=True,
        verified=f"{_CARD}; taps assumed as in the other head",
        note="recommended by its card from 10,000 tokens of context",
    ),
    CatalogueEntry(
        target="openai/gpt-oss-120b",
        head="amazon/gpt-oss-120b-p-eagle",
        num_layers=4,
        num_depths=8,
        taps=(2, 18, 33),
        verified=f"{_CARD}; taps are the usual ones for 36 layers",
    ),
    CatalogueEntry(
        target="openai/gpt-oss-120b",
        head="amazon/gpt-oss-120b-p-eagle-long-context",
        num_layers=4,
        num_depths=8,
        taps=(2, 18, 33),
        long_context=True,
        verified=f"{_CARD}; taps are the usual ones for 36 layers",
    ),
    CatalogueEntry(
        target="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        head="amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE",
        taps=(2, 24, 45),
        verified=(
            "served in the tests of vllm-project/vllm-ascend with 8 draft tokens; config and "
            "weights not seen, taps are the usual ones for 48 layers"
        ),
    ),
    CatalogueEntry(
        target="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        head="amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE-long-context",
        taps=(2, 24, 45),
        long_context=True,
        verified=f"{_NAME}; taps are the usual ones for 48 layers",
    ),
    CatalogueEntry(
        target="Qwen/Qwen3-8B",
        head="RedHatAI/Qwen3-8B-speculator.peagle",
        num_layers=4,
        num_depths=4,
        taps=(2, 18, 33),
        verified=(
            "model card, and the values of its config.json (speculators layout, mask token 151669) "
            "as quoted in public; its files were not opened here"
        ),
    ),
    CatalogueEntry(
        target="google/gemma-4-31B-it",
        head=None,
        verified=(
            "none found: one report of such a head in use (vllm-project/vllm issue 42004), no "
            "published weights"
        ),
        note="train one with peagle-train",
    ),
)


class NoKnownDrafterError(ValueError):
    """The catalogue knows no public head for a target; the message says what to do."""


def lookup(target: PathLike) -> tuple[CatalogueEntry, ...]:
    """The heads known for a target, given by its hub name or a folder of it; () where unknown.

    A folder is known by its last two names (openai/gpt-oss-20b), by its last one, by the hub
    cache's naming, or by `_name_or_path` in its config.json. An entry with head None says that
    the target is known to have none. Heads for ordinary context come first.
    """
    names = _names(target)
    found = [entry for entry in CATALOGUE if _matches(entry.target, names)]
    return tuple(sorted(found, key=lambda entry: entry.long_context))


def find_head(target: PathLike, *, long_context: bool = False) -> CatalogueEntry:
    """The one head to use with a target.

    Raises NoKnownDrafterError where there is none, with what to do instead.
    """
    entries = lookup(target)
    heads = [entry for entry in entries if entry.head is not None]
    if not heads:
        known = "has no known public head" if entries else "is not in the catalogue"
        note = f" ({entries[0].verified})" if entries else ""
        raise NoKnownDrafterError(
            f"{target} {known}{note}; name a drafter with --drafter, train one with peagle-train, "
            "or decode without one (--method none or prompt-lookup)"
        )
    fitting = [entry for entry in heads if entry.long_context == long_context]
    return (fitting or heads)[0]


def rows(*, beside: PathLike | None = None) -> list[dict[str, str]]:
    """The catalogue as rows of a table; `files` is where a head lies on this machine, if anywhere.

    beside: a target's folder, next to which heads may lie. Nothing is downloaded.
    """
    table = []
    for entry in CATALOGUE:
        folder = local_folder(entry.head, beside=beside) if entry.head else None
        table.append(
            {
                "target": entry.target,
                "head": entry.head or "no known public head",
                "method": entry.method if entry.head else "",
                "layers": _text(entry.num_layers),
                "tokens per pass": _text(entry.num_depths),
                "taps": ", ".join(str(tap) for tap in entry.taps or ()),
                "context": "long" if entry.long_context else "",
                "files": str(folder) if folder else "",
                "verified": entry.verified,
                "note": entry.note,
            }
        )
    return table


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _matches(target: str, names: list[str]) -> bool:
    """Whether one of `names` is the target's, with or without its owner; case does not matter."""
    full = target.lower()
    return any(name.lower() in (full, full.rpartition("/")[2]) for name in names)


def _names(target: PathLike) -> list[str]:
    """What a target may be called, judging by its name or folder."""
    text = str(target).rstrip("/")
    path = Path(target)
    if not path.exists():
        return [text]
    path = path.resolve() if path.name in (".", "..", "") else path.absolute()
    folder = path if path.is_dir() else path.parent
    names = ["/".join(folder.parts[-2:]), folder.name]
    for part in folder.parts:
        if part.startswith("models--"):
            names.append(part.removeprefix("models--").replace("--", "/"))
    if (folder / "config.json").is_file():
        try:
            name = read_json(folder / "config.json").raw.get("_name_or_path")
        except CheckpointError:
            name = None
        if isinstance(name, str) and name:
            names.append(name)
    return names
