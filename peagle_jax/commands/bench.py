"""`peagle bench`: methods x K x concurrency on a data set, in turns, with table and pictures."""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from peagle_jax.cli_flags import METHODS, UsageError, num_speculative_tokens

PEERS = ("transformers", "transformers-prompt-lookup")
WITHOUT_K = ("none", "transformers")
MAX_CONCURRENCY = 128
_SECONDS_BETWEEN_WRITES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--target", default="smollm2-135m", metavar="T", help="as in generate")
    add_head_flag(group)
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    group.add_argument("--context-length", type=int, metavar="N", help="most tokens of a request")
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
        "--num-prompts", type=_positive, metavar="N", help="so many, spread over the data set"
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
        "--repeats", type=_positive, default=1, metavar="N", help="passes over the prompts"
    )
    group.add_argument("--max-tokens", type=_positive, default=128, metavar="N", help="default 128")
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
        type=_positive,
        default=1,
        metavar="N",
        help="rounds between two looks for finished rows (default 1)",
    )
    group.add_argument(
        "--refill",
        type=_positive,
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
        type=_positive,
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


def run(arguments: argparse.Namespace) -> int:
    if arguments.dataset_path is not None and not Path(arguments.dataset_path).is_file():
        raise UsageError(f"--dataset-path {arguments.dataset_path}: no such file")
    from peagle_jax.bench.datasets import DatasetError, load_prompts

    try:
        prompts = load_prompts(
            arguments.dataset, path=arguments.dataset_path, num_prompts=arguments.num_prompts
        )
    except DatasetError as error:
        raise UsageError(str(error)) from None
    if arguments.skip >= len(prompts):
        raise UsageError(f"--skip {arguments.skip}: there are only {len(prompts)} prompts")
    return run_with(load(arguments), prompts[arguments.skip :], arguments)


def load(arguments: argparse.Namespace) -> Any:
    """The models for the methods that were asked for, or for all that have a head."""
    from peagle_jax.bench.models import available_methods, load_models

    heads = dict(arguments.drafter)
    if arguments.methods is None:
        arguments.methods = list(available_methods(arguments.target, heads))
        left_out = [method for method in METHODS if method not in arguments.methods]
        if left_out:
            _say(f"left out, no head is at hand: {', '.join(left_out)} (--drafter METHOD=FOLDER)")
    return load_models(
        arguments.target,
        arguments.methods,
        heads,
        dtype=arguments.dtype,
        context_length=arguments.context_length,
        force_method=arguments.force_method,
    )


def run_with(models: Any, prompts: Any, arguments: argparse.Namespace) -> int:
    """Measure and report. An interrupt ends the measuring, not the report."""
    from peagle_jax.bench.environment import environment
    from peagle_jax.bench.measure import measure
    from peagle_jax.bench.models import session_maker
    from peagle_jax.bench.near_ties import top_two_gap
    from peagle_jax.bench.report import HEADER, cells, content, text_table, write_report
    from peagle_jax.bench.results import rows

    requests = _requests(models, prompts, arguments)
    arms = _arms(arguments)
    facts = environment() | {"dtype": models.target.dtype.name}
    settings = _settings(arguments, requests)
    measurements: list[Any] = []
    complete = False

    def report(gap: Any = None) -> dict[str, Any]:
        table = rows(measurements, _dataset_name(arguments), gap)
        return content(facts, table, complete=complete, settings=settings)

    with contextlib.ExitStack() as stack:
        make = stack.enter_context(
            session_maker(
                models,
                requests,
                with_peers=any(arm.method in PEERS for arm in arms),
                rounds_per_step=arguments.rounds_per_step,
                refill=arguments.refill,
            )
        )
        turns = measure(
            arms,
            make,
            requests,
            concurrency=arguments.concurrency,
            repeats=arguments.repeats,
            block=arguments.block,
        )
        written = time.monotonic()
        try:
            for measurements in turns:
                last = measurements[-1]
                _say_turn(measurements, len(requests) * arguments.repeats, last.concurrency)
                if arguments.output and time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                    write_report(arguments.output, report(), pictures=False)
                    written = time.monotonic()
            complete = True
        except KeyboardInterrupt:
            _say("\ninterrupted; what was measured is kept")
        _clear_line()
    if not measurements:
        _say("nothing was measured")
        return 130
    final = report(None if arguments.temperature else top_two_gap(models.target))
    if arguments.output:
        for path in write_report(arguments.output, final, pictures=True):
            _say(f"wrote {path}")
    if arguments.json:
        print(json.dumps(final))
    else:
        print(text_table(HEADER, [cells(row) for row in final["results"]]))
        print("Warm-up and compilation are not in these times.")
    return 0 if complete else 130


def _requests(models: Any, prompts: Any, arguments: argparse.Namespace) -> list[Any]:
    """Prompts as ids with their parameters; refuses those that the context cannot hold."""
    from peagle_jax.bench.session import Request
    from peagle_jax.decoding.params import SamplingParams

    engine = models.engines["none"]
    requests = []
    for index, prompt in enumerate(prompts):
        ids = tuple(engine.encode(prompt.text, chat=not arguments.no_chat))
        if len(ids) + arguments.max_tokens > engine.context_length:
            raise UsageError(
                f"prompt {prompt.name} has {len(ids)} tokens; with --max-tokens "
                f"{arguments.max_tokens} that is above the context of {engine.context_length}"
            )
        try:
            params = SamplingParams(
                temperature=arguments.temperature,
                seed=arguments.seed + index,
                max_tokens=arguments.max_tokens,
                ignore_eos=arguments.ignore_eos,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        requests.append(Request(name=prompt.name, prompt=ids, params=params))
    names = [request.name for request in requests]
    if len(set(names)) < len(names):  # ids of a user's file may repeat; equality goes by name
        requests = [
            Request(name=f"{i}: {one.name}", prompt=one.prompt, params=one.params)
            for i, one in enumerate(requests, start=1)
        ]
    if arguments.by_length:
        requests.sort(key=lambda request: len(request.prompt))
    return requests


def _arms(arguments: argparse.Namespace) -> list[Any]:
    from peagle_jax.bench.measure import Arm

    if arguments.temperature and any(method in PEERS for method in arguments.methods):
        raise UsageError("--temperature: the transformers methods are measured greedily only")
    return [
        Arm(method, k)
        for method in arguments.methods
        for k in ([None] if method in WITHOUT_K else arguments.num_speculative_tokens)
    ]


def _settings(arguments: argparse.Namespace, requests: list[Any]) -> dict[str, Any]:
    """What was asked, so that the figures can be had again."""
    return {
        "target": arguments.target,
        "drafters": dict(arguments.drafter),
        "methods": arguments.methods,
        "num_prompts": len(requests),
        "num_prompt_tokens": sum(len(one.prompt) for one in requests),
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "ignore_eos": arguments.ignore_eos,
        "chat_template": not arguments.no_chat,
        "repeats": arguments.repeats,
        "rounds_per_step": arguments.rounds_per_step,
        "refill": arguments.refill,
        "by_length": arguments.by_length,
        "block": arguments.block,
        "skipped": arguments.skip,
        "warm_up": "each program once on two tokens, before the times",
    }


def _dataset_name(arguments: argparse.Namespace) -> str:
    if arguments.dataset_path is None:
        return arguments.dataset
    return f"{arguments.dataset} ({arguments.dataset_path})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_turn(measurements: list[Any], total: int, concurrency: int) -> None:
    """One line that is overwritten, on a terminal only."""
    if not sys.stderr.isatty():
        return
    now = [one for one in measurements if one.concurrency == concurrency]
    done = min(len(one.records) for one in now)
    text = f"{concurrency} in flight: {done} of {total} answers by each of {len(now)} arms"
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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


def _whole(text: str, low: int, high: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer {limits}")
    return value


def _positive(text: str) -> int:
    return _whole(text, 1, None)


def _skipped(text: str) -> int:
    return _whole(text, 0, None)


def _concurrency(text: str) -> int:
    return _whole(text, 1, MAX_CONCURRENCY)
