"""`peagle demo`: a small chat model answers with every way of drafting; same text, other speed."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from peagle_jax.cli_flags import UsageError, num_speculative_tokens
from peagle_jax.commands.bench_flags import add_head_flag, heads
from peagle_jax.commands.progress import clear, show

TARGET = "smollm2-135m"
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and a loop that prints the "
    "first ten.",
)
MAX_TOKENS = 96
HEADER = ("method", "tokens", "tokens/s", "x plain", "acceptance length", "passes per token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="your own; may be repeated"
    )
    parser.add_argument(
        "--target", default=TARGET, metavar="T", help=f"as in generate (default {TARGET})"
    )
    add_head_flag(parser)
    parser.add_argument(
        "-k",
        "--num-speculative-tokens",
        type=num_speculative_tokens,
        metavar="K",
        help="draft tokens per round, 1 to 31; default: each head's own",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"default {MAX_TOKENS}"
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of accepted drafts"
    )


def run(arguments: argparse.Namespace) -> int:
    from peagle_jax.bench.models import NETWORKS, available_methods, load_models

    if arguments.max_tokens < 2:
        raise UsageError(f"--max-tokens must be at least 2, got {arguments.max_tokens}")
    if any(not prompt.strip() for prompt in arguments.prompt or ()):
        raise UsageError("--prompt is empty")
    given = heads(arguments)
    methods = available_methods(arguments.target, given)
    missing = [method for method in NETWORKS if method not in methods]
    if missing:
        print(
            f"No trained head for {arguments.target} comes with this version: left out: "
            f"{', '.join(missing)}.\nGive one with --drafter METHOD=FOLDER, or train one with "
            "peagle-train.\n"
        )
    return run_with(load_models(arguments.target, methods, given), arguments)


def run_with(models: Any, arguments: argparse.Namespace) -> int:
    """Warm up, stream one method's answers, time all of them in turns, compare."""
    from peagle_jax.bench.near_ties import top_two_gap
    from peagle_jax.bench.report import text_table
    from peagle_jax.bench.results import near_tie_bound
    from peagle_jax.decoding.params import SamplingParams

    prompts = arguments.prompt or list(PROMPTS)
    _check_context(models.engines["none"], prompts, arguments.max_tokens)
    params = SamplingParams(max_tokens=arguments.max_tokens)
    shown = next(m for m in ("p-eagle", "eagle3", "prompt-lookup") if m in models.engines)
    order = [m for m in ("none", "prompt-lookup", "eagle3", "p-eagle") if m in models.engines]

    started = time.perf_counter()
    try:
        for method in order:
            show(f"Compiling {method} ...")
            for prompt in prompts:
                _compile(models.engines[method], prompt, params, arguments.num_speculative_tokens)
    finally:
        clear()
    seconds = time.perf_counter() - started
    print(f"Compiled {len(order)} ways of decoding in {seconds:.0f} s (not in the times below).\n")

    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(f"Answers with {shown}{'; accepted draft tokens are green' if color else ''}:\n")
    for prompt in prompts:
        print(f"> {prompt}\n")
        engine = models.engines[shown]
        k = arguments.num_speculative_tokens
        _show(engine.stream(prompt, params, num_speculative_tokens=k), color)

    answers: dict[str, list[Any]] = {method: [] for method in order}
    for prompt in prompts:
        for method in order:
            [answer] = models.engines[method].generate(
                prompt, params, num_speculative_tokens=_k(method, arguments)
            )
            answers[method].append(answer)
    print(text_table(HEADER, _lines(answers)))
    print("tokens/s is of the tokens after the first; prefill is not in it (as it is in bench).\n")
    bound = near_tie_bound(models.target.dtype.name, params.temperature)
    return _compare(answers, top_two_gap(models.target), bound)


def _check_context(engine: Any, prompts: Sequence[str], max_tokens: int) -> None:
    """Raises UsageError for an answer that may not fit behind its prompt."""
    longest = max(len(engine.encode(prompt)) for prompt in prompts)
    if longest + max_tokens > engine.context_length:
        raise UsageError(
            f"--max-tokens {max_tokens}: with a prompt of {longest} tokens that is above the "
            f"context of {engine.context_length}"
        )


def _k(method: str, arguments: argparse.Namespace) -> int | None:
    return None if method == "none" else arguments.num_speculative_tokens


def _compile(engine: Any, prompt: str, params: Any, k: int | None) -> None:
    """Run a stream to its third piece: prefill and the decoding step are compiled then."""
    k = None if engine.method == "none" else k
    for index, _ in enumerate(engine.stream(prompt, params, num_speculative_tokens=k)):
        if index == 2:
            return


def _show(pieces: Any, color: bool) -> None:
    """The text as it comes."""
    for piece in pieces:
        green = color and piece.draft_depth > 0 and piece.text
        print(f"\x1b[32m{piece.text}\x1b[0m" if green else piece.text, end="", flush=True)
    print("\n")


def _lines(answers: dict[str, list[Any]]) -> list[tuple[str, ...]]:
    """One line of the table for each method, over all prompts."""
    from peagle_jax.results import combine

    lines, plain = [], _rate(answers["none"])
    for method, results in answers.items():
        stats = combine([result.stats for result in results])
        rate, later = _rate(results), stats.num_output_tokens - len(results)
        drafted = stats.acceptance.num_drafts > 0
        lines.append(
            (
                method,
                str(stats.num_output_tokens),
                f"{rate:.1f}" if rate else "-",
                f"{rate / plain:.2f}" if rate and plain else "-",
                f"{stats.acceptance_length:.2f}" if drafted else "-",
                f"{stats.num_rounds / later:.2f}" if later else "-",
            )
        )
    return lines


def _rate(results: Sequence[Any]) -> float | None:
    """Tokens after the first, over the seconds since the first; None where there are none."""
    stats = [result.stats for result in results]
    seconds = sum(one.total_s - one.time_to_first_token_s for one in stats)
    tokens = sum(one.num_output_tokens - 1 for one in stats)
    return tokens / seconds if tokens and seconds > 0 else None


def _compare(answers: dict[str, list[Any]], gap: Any, bound: float | None) -> int:
    """Say whether all outputs were identical, and if not where and how near the tie was.

    bound: what a near-tie is; None where that is not known, so that nothing is called a defect.
    """
    from peagle_jax.bench.results import NEAR_TIE, first_difference

    status, identical = 0, True
    for method, results in answers.items():
        for index, (result, plain) in enumerate(zip(results, answers["none"], strict=True)):
            step = first_difference(result.token_ids, plain.token_ids)
            if step is None:
                continue
            identical = False
            size = gap([*plain.prompt_token_ids, *plain.token_ids[:step]])
            if bound is None:
                verdict = f" (not judged: the bound of near-ties, {NEAR_TIE:g}, is for float32)"
            elif size < bound:
                verdict = " (a near-tie of float32)"
            else:
                verdict, status = ": THIS IS A DEFECT", 1
            print(
                f"{method}, prompt {index + 1}: token {step + 1} differs from plain decoding; its "
                f"two best logits were {size:.1e} apart{verdict}"
            )
    if identical:
        print("All outputs were identical, token by token.")
    return status
