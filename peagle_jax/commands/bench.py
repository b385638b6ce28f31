"""`peagle bench`: methods x K x concurrency on a data set, in turns, with table and pictures."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from peagle_jax.cli_flags import METHODS, UsageError
from peagle_jax.commands.bench_flags import (
    PEERS,
    add_arguments,
    check_count,
    check_flags,
    check_heads_are_used,
    heads,
)
from peagle_jax.commands.progress import clear, say, show

__all__ = ["add_arguments", "load", "run", "run_with"]

WITHOUT_K = ("none", "transformers")
_SECONDS_BETWEEN_WRITES = 10.0


def run(arguments: argparse.Namespace) -> int:
    """Everything that can be refused is refused before the models are loaded."""
    check_flags(arguments)
    from peagle_jax.bench.datasets import DatasetError, load_prompts
    from peagle_jax.bench.report import probe

    if arguments.output is not None:
        try:
            probe(arguments.output)
        except OSError as error:
            raise UsageError(f"--output {arguments.output}: cannot be written: {error}") from None
    try:
        prompts = load_prompts(
            arguments.dataset, path=arguments.dataset_path, num_prompts=arguments.num_prompts
        )
    except DatasetError as error:
        raise UsageError(str(error)) from None
    check_count(arguments, len(prompts))
    if arguments.methods is not None:
        check_heads_are_used(arguments, arguments.methods)
    return run_with(load(arguments), prompts, arguments)


def load(arguments: argparse.Namespace) -> Any:
    """The models for the methods that were asked for, or for all that have a head."""
    from peagle_jax.bench.models import available_methods, load_models

    given = heads(arguments)
    if arguments.methods is None:
        arguments.methods = list(available_methods(arguments.target, given))
        left_out = [method for method in METHODS if method not in arguments.methods]
        if left_out:
            say(f"left out, no head is at hand: {', '.join(left_out)} (--drafter METHOD=FOLDER)")
    return load_models(
        arguments.target,
        arguments.methods,
        given,
        dtype=arguments.dtype,
        context_length=arguments.context_length,
        force_method=arguments.force_method,
    )


def run_with(models: Any, prompts: Any, arguments: argparse.Namespace) -> int:
    """Measure and report. What ends the measuring early, an interrupt or an error, does not end
    the report."""
    from peagle_jax.bench.near_ties import top_two_gap
    from peagle_jax.bench.report import write_report
    from peagle_jax.bench.results import near_tie_bound

    requests = _requests(models, prompts, arguments)
    arms = _arms(arguments)
    bound = near_tie_bound(models.target.dtype.name, arguments.temperature)
    base = _facts(models, requests, arguments) | {"near_tie_bound": bound}
    _check_output(arguments, base)

    def report(measurements: Any, *, complete: bool, gap: Any = None) -> dict[str, Any]:
        return base | _results(measurements, arms, arguments, gap, bound, complete=complete)

    written = 0.0

    def keep(measurements: Any) -> None:
        nonlocal written
        _show_turn(measurements, len(requests) * arguments.repeats)
        if arguments.output and (
            not written or time.monotonic() - written > _SECONDS_BETWEEN_WRITES
        ):
            write_report(arguments.output, report(measurements, complete=False), pictures=False)
            written = time.monotonic()

    measurements, ended = _measure(models, requests, arms, arguments, keep)
    interrupted = isinstance(ended, KeyboardInterrupt)
    if not measurements:
        if ended is not None and not interrupted:
            raise ended
        say("interrupted; nothing was measured" if interrupted else "nothing was measured")
        return 130
    if interrupted:
        say("interrupted; what was measured is kept")
    # After an error the device may not be fit for more passes.
    judge = not arguments.temperature and (ended is None or interrupted)
    gap = top_two_gap(models.target) if judge else None
    final = report(measurements, complete=ended is None, gap=gap)
    _print(final, arguments)
    if arguments.output:
        for path in write_report(arguments.output, final, pictures=True):
            say(f"wrote {path}")
    if ended is not None and not interrupted:
        raise ended
    return 130 if interrupted else _status(final)


def _measure(
    models: Any,
    requests: list[Any],
    arms: list[Any],
    arguments: argparse.Namespace,
    keep: Callable[[Any], None],
) -> tuple[list[Any], BaseException | None]:
    """All that was measured, and what ended it early. keep: called with it after every turn."""
    from peagle_jax.bench.measure import measure
    from peagle_jax.bench.models import session_maker

    measurements: list[Any] = []
    try:
        with session_maker(
            models,
            requests,
            with_peers=any(arm.method in PEERS for arm in arms),
            rounds_per_step=arguments.rounds_per_step,
            refill=arguments.refill,
        ) as make:
            for measurements in measure(
                arms,
                make,
                requests,
                concurrency=arguments.concurrency,
                repeats=arguments.repeats,
                block=arguments.block,
            ):
                keep(measurements)
    except (KeyboardInterrupt, Exception) as error:
        return measurements, error
    finally:
        clear()
    return measurements, None


def _requests(models: Any, prompts: Any, arguments: argparse.Namespace) -> list[Any]:
    """Prompts as ids with their parameters; refuses those that the context cannot hold.

    Names and seeds go by the place among all prompts that were chosen, and the order by length is
    that of all of them: --skip leaves out the first of what would run without it.
    """
    from peagle_jax.bench.session import Request
    from peagle_jax.decoding.params import SamplingParams

    engine = models.engines["none"]
    unique = len({prompt.name for prompt in prompts}) == len(prompts)
    requests = []
    for index, prompt in enumerate(prompts):
        ids = tuple(engine.encode(prompt.text, chat=not arguments.no_chat))
        try:
            params = SamplingParams(
                temperature=arguments.temperature,
                seed=arguments.seed + index,
                max_tokens=arguments.max_tokens,
                ignore_eos=arguments.ignore_eos,
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        # Ids of a user's file may repeat; equality with plain decoding goes by name.
        name = prompt.name if unique else f"{index + 1}: {prompt.name}"
        requests.append(Request(name=name, prompt=ids, params=params))
    if arguments.by_length:
        requests.sort(key=lambda request: len(request.prompt))
    requests = requests[arguments.skip :]
    for request in requests:
        if len(request.prompt) + arguments.max_tokens > engine.context_length:
            raise UsageError(
                f"prompt {request.name} has {len(request.prompt)} tokens; with --max-tokens "
                f"{arguments.max_tokens} that is above the context of {engine.context_length}"
            )
    return requests


def _arms(arguments: argparse.Namespace) -> list[Any]:
    from peagle_jax.bench.measure import Arm

    return [
        Arm(method, k)
        for method in arguments.methods
        for k in ([None] if method in WITHOUT_K else arguments.num_speculative_tokens)
    ]


def _facts(models: Any, requests: list[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What stands in the report beside the results."""
    from peagle_jax.bench.environment import environment

    facts = environment() | {"dtype": models.target.dtype.name}
    peers = [method for method in arguments.methods if method in PEERS]
    if peers:
        facts["peers_dtype"] = "float32"
        if facts["dtype"] != "float32":
            say(f"{', '.join(peers)}: in float32, the others in {facts['dtype']}")
        if max(arguments.concurrency) > 1:
            say(f"{', '.join(peers)}: at concurrency 1 alone")
    return {"environment": facts, "settings": _settings(arguments, requests, models)}


def _settings(arguments: argparse.Namespace, requests: list[Any], models: Any) -> dict[str, Any]:
    """What was asked, so that the figures can be had again."""
    from peagle_jax.bench.models import head_facts

    return {
        "target": arguments.target,
        "dataset": _dataset_name(arguments),
        "drafters": heads(arguments),
        "heads": head_facts(models),
        "methods": arguments.methods,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "concurrency": arguments.concurrency,
        "num_prompts": len(requests),
        "num_prompt_tokens": sum(len(one.prompt) for one in requests),
        "prompts": [one.name for one in requests],
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


def _check_output(arguments: argparse.Namespace, base: dict[str, Any]) -> None:
    from peagle_jax.bench.report import check_free

    if arguments.output is not None:
        try:
            check_free(arguments.output, base)
        except ValueError as error:
            raise UsageError(f"--output {error}") from None


def _results(
    measurements: Sequence[Any],
    arms: Sequence[Any],
    arguments: argparse.Namespace,
    gap: Any,
    bound: float | None,
    *,
    complete: bool,
) -> dict[str, Any]:
    """The rows; of an incomplete run also those over the prompts that every arm has answered."""
    from peagle_jax.bench.measure import same_turns
    from peagle_jax.bench.results import rows

    name = _dataset_name(arguments)
    found = {"results": rows(measurements, name, gap, bound), "complete": complete}
    alone = max(arguments.concurrency) == 1
    expected = [arm for arm in arms if alone or arm.method not in PEERS]
    one_pass = len(arguments.concurrency) == arguments.repeats == 1
    if not complete and one_pass and len(measurements) == len(expected):
        same = same_turns(measurements)
        if same:
            records = same[0].records
            found["common"] = {
                "num_prompts": len(records),
                "num_prompt_tokens": sum(len(one.prompt) for one in records),
                "results": rows(same, name, gap, bound),
            }
    return found


def _print(final: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The JSON object, or the table and what one has to know to read it."""
    from peagle_jax.bench.report import HEADER, cells, text_table

    if arguments.json:
        print(json.dumps(final))
    else:
        print(text_table(HEADER, [cells(row) for row in final["results"]]))
        print("tokens/s is over the whole time, prefill included; warm-up and compilation are not.")
    if any(row.get("against_plain", {}).get("num_not_judged") for row in final["results"]):
        from peagle_jax.bench.results import NEAR_TIE

        say(
            "differences from plain decoding are not judged: the bound of near-ties, "
            f"{NEAR_TIE:g}, is for whole greedy runs in float32"
        )
    if "common" in final:
        count = final["common"]["num_prompts"]
        say(
            f"every method has the first {count} prompts: --skip {arguments.skip + count} with "
            "another --output goes on behind them, benchmarks.heads_evidence merges the two"
        )


def _status(final: dict[str, Any]) -> int:
    """1 where a way of drafting of ours gave another text than plain decoding; else 0."""
    ours = [row for row in final["results"] if row["method"] not in PEERS]
    if all(row.get("against_plain", {}).get("lossless") is not False for row in ours):
        return 0
    say("NOT LOSSLESS: outputs differ from plain decoding beyond what near-ties excuse")
    return 1


def _dataset_name(arguments: argparse.Namespace) -> str:
    if arguments.dataset_path is None:
        return arguments.dataset
    return f"{arguments.dataset} ({arguments.dataset_path})"


def _show_turn(measurements: Sequence[Any], total: int) -> None:
    concurrency = measurements[-1].concurrency
    now = [one for one in measurements if one.concurrency == concurrency]
    done = min(len(one.records) for one in now)
    show(f"{concurrency} in flight: {done} of {total} answers by each of {len(now)} arms")
