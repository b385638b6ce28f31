"""`peagle-train prepare`: conversations to tokenised rows with loss masks."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from train.commands import positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", help=".jsonl, .json list, or Hugging Face data set folder"
    )
    parser.add_argument("--target", required=True, help="folder, .gguf file or name of the target")
    parser.add_argument("--output", required=True, help="folder to write the data set to")
    parser.add_argument("--max-length", type=positive, default=8192, help="tokens kept of a row")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        help="rows of the target's embedding; default: from the target's config.json or GGUF "
        "header, else from its tokenizer",
    )
    parser.add_argument("--draft-vocab-size", type=positive, help="default: no draft vocabulary")
    parser.add_argument(
        "--reasoning",
        choices=("keep", "mask"),
        default="keep",
        help="whether reasoning text is learned (it stays in the rows either way)",
    )
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="variable for the chat template, such as enable_thinking=false; may be repeated",
    )
    parser.add_argument("--mask-token-id", type=whole, help="fail when this id occurs in the rows")
    parser.add_argument(
        "--max-bad-rows", type=whole, default=100, help="malformed rows to skip before giving up"
    )


def run(args: argparse.Namespace) -> int:
    from peagle_jax.loading import find_target
    from peagle_jax.text.tokenizer import load_tokenizer
    from train.data.conversations import check_sources
    from train.data.preparation import PrepareSettings, prepare

    check_sources(args.sources)
    target = find_target(args.target)
    tokenizer = load_tokenizer(target)
    settings = PrepareSettings(
        max_length=args.max_length,
        vocab_size=args.vocab_size or _vocab_size(target) or tokenizer.vocab_size,
        reasoning=args.reasoning,
        template_kwargs=_template_kwargs(args.template_arg),
        draft_vocab_size=args.draft_vocab_size,
        max_bad_rows=args.max_bad_rows,
    )
    data, reused = prepare(
        args.sources,
        tokenizer,
        args.output,
        settings,
        warn=lambda text: print(text, file=sys.stderr),
    )
    if args.mask_token_id is not None:
        data.check_mask_token(args.mask_token_id)
    if reused:
        print(f"{args.output}: already prepared from the same sources and settings")
    _print_report(data.manifest["report"])
    if args.draft_vocab_size is not None:
        coverage = data.draft_vocabulary(args.draft_vocab_size).coverage
        print(f"draft vocabulary of {args.draft_vocab_size} covers {coverage:.2%} of the answers")
    return 0


def _vocab_size(target: str | Path) -> int | None:
    if Path(target).suffix == ".gguf":
        from peagle_jax.checkpoints.gguf_config import read_gguf_config

        return read_gguf_config(Path(target)).vocab_size
    path = Path(target) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _template_kwargs(pairs: list[str]) -> dict[str, Any]:
    from peagle_jax.text.chat_template import check_template_kwargs

    kwargs = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"--template-arg {pair!r}: expected NAME=JSON.")
        try:
            kwargs[name] = json.loads(value)
        except json.JSONDecodeError:
            kwargs[name] = value
    check_template_kwargs(kwargs)
    return kwargs


def _print_report(report: dict[str, Any]) -> None:
    lengths = report["length_percentiles"]
    print(f"rows read {report['rows_read']}, kept {report['rows_kept']}")
    print(f"truncated {report['truncated']}, malformed {report['malformed']}")
    for reason, count in report["dropped"].items():
        print(f"  dropped {count}: {reason}")
    for row in report["bad_rows"]:
        print(f"    {row}")
    for reason, count in report["turns_skipped"].items():
        print(f"  unsupervised turns {count}: {reason}")
    if report["turns_without_stop"]:
        print(f"  turns without a stop token: {report['turns_without_stop']}")
    if report["cut_answers"]:
        print(f"  answers cut by a length limit, their end not learned: {report['cut_answers']}")
    print(
        f"tokens {report['tokens']}, supervised {report['supervised_fraction']:.1%}; row length "
        f"median {lengths['50']}, 90% {lengths['90']}, 99% {lengths['99']}"
    )
