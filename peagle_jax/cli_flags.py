"""Flags that several commands share, and how their values become parameters."""

import argparse
import json
from typing import Any

from peagle_jax.decoding.params import MAX_SPECULATIVE_TOKENS, RULES, SamplingParams

METHODS = ("p-eagle", "eagle3", "prompt-lookup", "none")


class UsageError(ValueError):
    """Flags whose values cannot be served; the message names the flag and what is allowed."""


def whole_number(text: str, low: int, high: int | None = None) -> int:
    """An integer in a range, or an argparse error that names the value and the range."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer {limits}")
    return value


def positive(text: str) -> int:
    """An integer above 0."""
    return whole_number(text, 1)


def num_speculative_tokens(text: str) -> int:
    """K."""
    return whole_number(text, 1, MAX_SPECULATIVE_TOKENS)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Target, drafter, how to draft, how to load."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        default="smollm2-135m",
        metavar="T",
        help="a folder, a .gguf file, a hub name, or smollm2-135m (the default, fetched once)",
    )
    group.add_argument(
        "--drafter", metavar="D", help="a folder or hub name; without it the catalogue decides"
    )
    group.add_argument("--method", choices=METHODS, help="how to draft; default: the drafter's way")
    group.add_argument(
        "-k",
        "--num-speculative-tokens",
        type=num_speculative_tokens,
        metavar="K",
        help="draft tokens per round, 1 to 31; default: the head's own",
    )
    group.add_argument(
        "--speculative-config", metavar="JSON", help="vLLM's object, instead of the three above"
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    group.add_argument(
        "--context-length", type=positive, metavar="N", help="most tokens of a request"
    )
    group.add_argument(
        "--allow-longer-context",
        action="store_true",
        help="serve beyond the positions that the target is configured for",
    )
    group.add_argument(
        "--keep-packed",
        action="store_true",
        help="leave MXFP4 and FP8 weights packed on the device",
    )
    group.add_argument(
        "--force-method", action="store_true", help="draft in a way the head was not trained for"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of SamplingParams, with its default."""
    default = SamplingParams()
    group = parser.add_argument_group("sampling")
    numbers: list[tuple[str, type, str]] = [
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "0 is off"),
        ("top_p", float, "1 is off"),
        ("min_p", float, "0 is off"),
        ("seed", int, "text for a seed is always the same"),
        ("max_tokens", int, "most output tokens"),
        ("min_tokens", int, "no end before this many"),
        ("repetition_penalty", float, "1 is off"),
        ("presence_penalty", float, "0 is off"),
        ("frequency_penalty", float, "0 is off"),
    ]
    for name, kind, text in numbers:
        flag = "--" + name.replace("_", "-")
        value = getattr(default, name)
        group.add_argument(flag, type=kind, default=value, help=f"{text} (default {value})")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: of the N most likely"
    )
    group.add_argument("--logit-bias", type=_bias, default={}, metavar="JSON", help='{"id": bias}')
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end at these ids"
    )
    group.add_argument("--ignore-eos", action="store_true", help="the model's end does not end it")
    group.add_argument("--rule", choices=RULES, default=default.rule, help="how drafts are checked")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for. Raises UsageError naming the field."""
    same = (
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
        *("logit_bias", "ignore_eos", "rule"),
    )
    try:
        return SamplingParams(
            **{name: getattr(arguments, name) for name in same},
            stop=tuple(arguments.stop),
            stop_token_ids=tuple(arguments.stop_token_ids),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _bias(text: str) -> dict[int, float]:
    try:
        content: Any = json.loads(text)
        return {int(token): float(value) for token, value in content.items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object of ids and numbers"
        ) from None
