"""`peagle generate`: one prompt, streamed; accepted draft tokens in colour on a terminal."""

import argparse
import json
import sys
from typing import Any

from peagle_jax.cli_flags import UsageError, add_model_flags, add_sampling_flags, sampling_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to say; - reads standard input")
    add_model_flags(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    group.add_argument("--no-chat", action="store_true", help="no chat template around the prompt")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of accepted drafts"
    )


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    engine = load_engine(arguments)
    if arguments.json:
        [result] = engine.generate(prompt, params, chat=not arguments.no_chat)
        print(json.dumps(result.as_json()))
        return 0
    pieces = engine.stream(prompt, params, chat=not arguments.no_chat)
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    if color:
        _stream_in_color(pieces)
    else:
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
    return 0


def load_engine(arguments: argparse.Namespace) -> Any:
    """The engine that the model flags name. Raises UsageError where they contradict each other."""
    from peagle_jax.loading import load

    drafter = arguments.drafter
    if arguments.speculative_config is not None:
        named = [
            flag
            for flag, value in (("--drafter", drafter), ("--method", arguments.method))
            if value is not None
        ]
        if named:
            raise UsageError(f"--speculative-config and {named[0]} say the same thing; give one")
        drafter = arguments.speculative_config
    return load(
        arguments.target,
        drafter="auto" if drafter is None else drafter,
        method=arguments.method,
        num_speculative_tokens=arguments.num_speculative_tokens,
        dtype=arguments.dtype,
        keep_packed=arguments.keep_packed,
        context_length=arguments.context_length,
        allow_longer_context=arguments.allow_longer_context,
        force_method=arguments.force_method,
    )


def _stream_in_color(pieces: Any) -> None:
    """Accepted draft tokens in green as they come; the figures below, updated with each token."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    text = Text()
    with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
        for piece in pieces:
            text.append(piece.text, style="green" if piece.draft_depth else "")
            stats = piece.stats
            footer = f"\n{stats.num_output_tokens} tokens"
            if stats.acceptance.num_drafts:
                footer += f", acceptance length {stats.acceptance_length:.2f}"
            live.update(Text.assemble(text, (footer, "dim")))
