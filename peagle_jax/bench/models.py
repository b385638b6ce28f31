"""One target with a head for each method that has one, for commands that compare methods."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.bench.measure import Arm
from peagle_jax.bench.peers import PEERS, PeerSession, load_peer
from peagle_jax.bench.session import Request, Session
from peagle_jax.checkpoints.checksums import file_sha256
from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.hub import ModelNotFoundError
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.shipped_heads import (
    heads_folder,
    is_packed_head,
    load_shipped_head,
)
from peagle_jax.decoding.generate import prompt_bucket
from peagle_jax.decoding.requests import Features
from peagle_jax.engine import Engine, cache_bucket
from peagle_jax.loading import find_drafter, find_target
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.products import store_output_major
from peagle_jax.models.target import Target
from peagle_jax.text.tokenizer import Tokenizer, load_tokenizer

NETWORKS = ("p-eagle", "eagle3")
WITHOUT_NETWORK = ("none", "prompt-lookup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Everything that a comparison decodes with; weights are loaded once.

    Attributes:
      path: where the target's files are; None for one that was made in memory.
      drafters: a head by the method that drafts with it.
      heads: the folder that each was read from; none for those that were made in memory.
      engines: an engine for each of the methods.
    """

    path: Path | None
    target: Target
    tokenizer: Tokenizer
    drafters: Mapping[str, Drafter]
    heads: Mapping[str, Path]
    engines: Mapping[str, Engine]


def available_methods(target: str, heads: Mapping[str, str]) -> tuple[str, ...]:
    """Methods that need no head, and those whose head is given, shipped or in the catalogue."""
    path, found = find_target(target), []
    for method in NETWORKS:
        # A head that is known but not here and cannot be fetched is not available.
        with contextlib.suppress(ModelNotFoundError):
            if method in heads or _head_folder(target, path, method, heads) is not None:
                found.append(method)
    return (*WITHOUT_NETWORK, *found)


def load_models(
    target: str,
    methods: Sequence[str],
    heads: Mapping[str, str],
    *,
    dtype: Any = None,
    context_length: int | None = None,
    force_method: bool = False,
) -> Models:
    """Load the target once and a head for each method of `methods` that needs one.

    heads: method -> folder or name of its head; the others' are looked up.

    Raises ValueError for a method without a head, and as `peagle_jax.load` does.
    """
    path = find_target(target)
    folders = {method: _head_folder(target, path, method, heads) for method in methods}
    for method, folder in folders.items():
        if method in NETWORKS and folder is None:
            raise ValueError(
                f"method {method} needs a head, and none comes with this package or is known for "
                f"{target}; give one with --drafter {method}=FOLDER, or leave the method out"
            )
    model, tokenizer = load_target(path, dtype=dtype), load_tokenizer(path)
    largest = model.config.max_positions
    if context_length is not None and context_length > largest:
        raise ValueError(
            f"--context-length {context_length} is above the {largest} positions that the target "
            "is configured for; lower it"
        )
    folders = {method: folder for method, folder in folders.items() if folder is not None}
    drafters = {method: _load_head(folder, model, method) for method, folder in folders.items()}
    for part in (model, *drafters.values()):
        store_output_major(part)
    return make_models(
        model,
        tokenizer,
        drafters,
        methods,
        path=path,
        heads=folders,
        context_length=context_length,
        force_method=force_method,
    )


def make_models(
    target: Target,
    tokenizer: Tokenizer,
    drafters: Mapping[str, Drafter],
    methods: Sequence[str],
    *,
    path: Path | None = None,
    heads: Mapping[str, Path] | None = None,
    context_length: int | None = None,
    force_method: bool = False,
) -> Models:
    """The same from parts in memory."""
    engines = {
        method: Engine(
            target,
            tokenizer,
            drafters.get(method),
            method=method,
            context_length=context_length,
            force_method=force_method,
        )
        for method in methods
        if method not in PEERS
    }
    engines.setdefault("none", Engine(target, tokenizer, None, context_length=context_length))
    return Models(
        path=path,
        target=target,
        tokenizer=tokenizer,
        drafters=dict(drafters),
        heads=dict(heads or {}),
        engines=engines,
    )


def head_facts(models: Models) -> dict[str, Any]:
    """Which head each method drafts with: its folder (a shipped one's name), sha256 by file."""
    return {
        method: {
            "head": folder.name if folder.parent == heads_folder() else str(folder),
            "sha256": {
                file.name: file_sha256(file) for file in sorted(folder.glob("*.safetensors"))
            },
        }
        for method, folder in models.heads.items()
    }


@contextlib.contextmanager
def session_maker(
    models: Models,
    requests: Sequence[Request],
    *,
    with_peers: bool = False,
    rounds_per_step: int = 1,
    refill: int = 1,
) -> Iterator[Any]:
    """A function (arm, concurrency) -> session for `measure`, all with the same cache length and
    prefill chunk. Peers run at concurrency 1 alone, and are loaded here, so that they lie on disk
    (as float32, in a folder that is deleted at the end) no longer than the block runs.
    """
    longest = max(len(one.prompt) + (one.params.max_tokens or 0) for one in requests)
    features = Features.of([one.params for one in requests])
    lengths = sorted(len(one.prompt) for one in requests)
    with contextlib.ExitStack() as stack:
        peer = None
        if with_peers:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="peagle-bench-"))
            peer = load_peer(_on_disk(models), Path(scratch))

        def make(arm: Arm, concurrency: int) -> Any:
            if arm.method in PEERS:
                stop_ids = models.engines["none"].stop_ids
                if concurrency > 1:
                    return None
                return PeerSession(peer, stop_ids, lookup_tokens=arm.k)
            engine = models.engines[arm.method]
            fn = engine.generate_fn(
                cache_length=min(cache_bucket(longest), engine.context_length),
                features=features,
                num_speculative_tokens=arm.k,
                method=arm.method,
            )
            # Most prompts in one pass; a chunk for the longest would burden all the others.
            middle = lengths[len(lengths) // 2]
            chunk = prompt_bucket(middle, fn.max_prefill_chunk, batch=concurrency)
            return Session(
                fn, concurrency, chunk=chunk, rounds_per_step=rounds_per_step, refill=refill
            )

        yield make


def _on_disk(models: Models) -> Path:
    if models.path is None:
        raise ValueError("the peers read the target from disk, and this one was made in memory")
    return models.path


def _head_folder(target: str, path: Path, method: str, heads: Mapping[str, str]) -> Path | None:
    if method not in NETWORKS:
        return None
    if method in heads:
        return find_drafter(target, path, heads[method])
    found = find_drafter(target, path, "auto", method=method)
    if found is not None and method == "eagle3" and not is_packed_head(found):
        return None  # the catalogue's heads are trained for parallel drafting
    return found


def _load_head(folder: Path, target: Target, method: str) -> Drafter:
    if is_packed_head(folder):
        return load_shipped_head(folder, target)
    parallel = True if method == "p-eagle" else None
    return load_drafter(folder, target=target, dtype=target.dtype, parallel_drafting=parallel)
