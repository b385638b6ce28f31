"""Flags of `peagle bench`, and which of them do not go together. The command: bench.py."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle_jax.cli_flags import METHODS, UsageError, num_speculative_tokens, positive, whole_number

PEERS = ("transformers", "transformers-prompt-lookup")
MAX_CONCURRENCY = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--target", default="smollm2-135m", metavar="T", help="as in generate")
    add_head_flag(group)
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    group.add_argument(
        "--context-length", type=positive, metavar="N", help="most tokens of a request"
    )
    group.add_argument(
        "--force-method", action="store_true", help="draft in a way the head was not trained for"
    )
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--dataset",
        default="mt-bench",
        metavar="NAME",
        help="mt-bench, humaneval, speed-bench (with --dataset-path), or a JSONL file whose lines "
        "have `prompt` or `turns` (default mt-bench); of a conversation the first turn is used",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="the data set's file, your own copy")
    group.add_argument(
        "--num-prompts", type=positive, metavar="N", help="so many, spread over the data set"
    )
    group.add_argument(
        "--skip",
        type=_skipped,
        default=0,
        metavar="N",
        help="leave out the first N of these, to go on behind an interrupted run",
    )
    group.add_argument(
        "--methods",
        type=_methods,
        metavar="A,B",
        help=f"of {', '.join((*METHODS, *PEERS))}; default: all of ours that have a head",
    )
    group.add_argument(
        "-k",
        "--num-speculative-tokens",
        type=_list_of(num_speculative_tokens),
        default=[3, 5, 7, 11],
        metavar="K,K",
        help="draft tokens per round (default 3,5,7,11)",
    )
    group.add_argument(
        "--concurrency",
        type=_list_of(_concurrency),
        default=[1],
        metavar="N,N",
        help=f"requests in flight, 1 to {MAX_CONCURRENCY} (default 1)",
    )
    group.add_argument(
        "--repeats", type=positive, default=1, metavar="N", help="passes over the prompts"
    )
    group.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="default 128")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument(
        "--seed", type=int, default=0, help="prompt i is sampled with seed + i (default 0)"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="every answer has exactly --max-tokens tokens"
    )
    group.add_argument("--no-chat", action="store_true", help="no chat template around prompts")
    group.add_argument(
        "--rounds-per-step",
        type=positive,
        default=1,
        metavar="N",
        help="rounds between two looks for finished rows (default 1)",
    )
    group.add_argument(
        "--refill",
        type=positive,
        default=1,
        metavar="N",
        help="free rows to wait for before they take the next prompts (default 1: at once). A "
        "prefill pass runs all rows in flight, so more saves work where only acceptance matters",
    )
    group.add_argument(
        "--by-length",
        action="store_true",
        help="run the prompts in order of their length: the rows of a batch then need as many "
        "prefill passes as each other",
    )
    group.add_argument(
        "--block",
        type=positive,
        metavar="N",
        help="with more than one in flight, take turns after every N prompts (default: all), so "
        "that an interrupted run has the same prompts of every method",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object to standard output, no table"
    )
    group.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write results.json, table.md and pictures; kept up to date while it runs",
    )


def add_head_flag(group: Any) -> None:
    """--drafter METHOD=HEAD, for commands that compare methods."""
    group.add_argument(
        "--drafter",
        type=_head,
        action="append",
        default=[],
        metavar="METHOD=D",
        help="folder or name of the head of p-eagle or eagle3; may be given for each. "
        "Default: the head that comes with this package, or the catalogue's",
    )


def heads(arguments: argparse.Namespace) -> dict[str, str]:
    """Method -> head, as given. Raises UsageError where a method has two."""
    found = dict(arguments.drafter)
    if len(found) < len(arguments.drafter):
        raise UsageError("--drafter: a method was given two heads; give each method one")
    return found


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises UsageError for flags that are at odds, or that would go without effect."""
    heads(arguments)
    most, fewest = max(arguments.concurrency), min(arguments.concurrency)
    if arguments.dataset_path is not None and not Path(arguments.dataset_path).is_file():
        raise UsageError(f"--dataset-path {arguments.dataset_path}: no such file")
    if arguments.refill > fewest:
        raise UsageError(
            f"--refill {arguments.refill} is above --concurrency {fewest}: so many rows are never "
            "free; lower it, or measure that concurrency in another run"
        )
    for flag, value in (
        ("--block", arguments.block),
        ("--rounds-per-step", arguments.rounds_per_step > 1),
    ):
        if value and most == 1:
            raise UsageError(f"{flag} has no effect at --concurrency 1; leave it out")
    peers = [method for method in arguments.methods or () if method in PEERS]
    if peers and arguments.temperature:
        raise UsageError("--temperature: the transformers methods are measured greedily only")
    if peers and fewest > 1:
        raise UsageError(
            f"--methods {','.join(peers)}: transformers runs one request at a time; add 1 to "
            f"--concurrency {','.join(map(str, arguments.concurrency))}, or leave it out"
        )


def check_heads_are_used(arguments: argparse.Namespace, methods: Sequence[str]) -> None:
    """Raises UsageError for a head of a method that is not run."""
    for method in heads(arguments):
        if method not in methods:
            raise UsageError(
                f"--drafter {method}=...: {method} is not among --methods {','.join(methods)}"
            )


def check_count(arguments: argparse.Namespace, count: int) -> None:
    """Raises UsageError where `count` prompts are too few for --skip or --concurrency.

    What --skip leaves out counts: the rest of a run may be fewer than are in flight, as its last
    prompts would have been.
    """
    if arguments.skip >= count:
        raise UsageError(f"--skip {arguments.skip}: there are only {count} prompts")
    for rows in arguments.concurrency:
        if rows > count:
            raise UsageError(
                f"--concurrency {rows}: there are only {count} prompts, so that many are never in "
                "flight; lower it, or give more prompts"
            )
        if rows > 1 and arguments.block is not None and rows > arguments.block:
            raise UsageError(
                f"--concurrency {rows} is above --block {arguments.block}, so that many are never "
                "in flight; lower it, or make the blocks larger"
            )


def _list_of(kind: Any) -> Any:
    """Comma-separated values, each once, in the given order."""

    def values(text: str) -> list[Any]:
        return list(dict.fromkeys(kind(one.strip()) for one in text.split(",")))

    return values


def _methods(text: str) -> list[str]:
    known = (*METHODS, *PEERS)
    names = [one.strip() for one in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _head(text: str) -> tuple[str, str]:
    method, _, head = text.partition("=")
    if method not in ("p-eagle", "eagle3") or not head:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not METHOD=HEAD with a method of p-eagle, eagle3"
        )
    return method, head


def _skipped(text: str) -> int:
    return whole_number(text, 0)


def _concurrency(text: str) -> int:
    return whole_number(text, 1, MAX_CONCURRENCY)
