"""`peagle-train regenerate`: let the target answer the prompts itself."""

import argparse
import sys
from pathlib import Path

from train.commands import positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", help="conversations, as for prepare")
    parser.add_argument("--magpie", type=positive, metavar="N", help="invent N prompts instead")
    parser.add_argument("--target", required=True, help="folder, .gguf file or name of the target")
    parser.add_argument("--drafter", default="auto", help='head to speed it up; "none" for none')
    parser.add_argument("--output", required=True, help=".jsonl file; goes on if it is there")
    parser.add_argument("--max-tokens", type=positive, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument(
        "--max-bad-rows", type=whole, default=100, help="malformed rows to skip before giving up"
    )


def run(args: argparse.Namespace) -> int:
    if bool(args.sources) == (args.magpie is not None):
        raise ValueError("give either sources or --magpie.")
    import peagle_jax
    from peagle_jax.decoding.params import SamplingParams
    from train.data.conversations import check_sources, read_rows
    from train.regenerate import magpie, regenerate

    # Before the target is loaded, which may take minutes.
    for path in check_sources(args.sources):
        if Path(args.output).exists() and path.samefile(args.output):
            raise ValueError(f"--output {args.output} is one of the sources; give another file.")
    rows = list(read_rows(args.sources))
    if not rows and args.magpie is None:
        raise ValueError(f"{', '.join(args.sources)}: no row to answer.")
    drafter = None if args.drafter == "none" else args.drafter
    engine = peagle_jax.load(args.target, drafter=drafter)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )

    def progress(count: int) -> None:
        print(f"\r{count} conversations", end="", file=sys.stderr, flush=True)

    options = {"batch_size": args.batch_size, "progress": progress}
    if args.magpie is not None:
        done = magpie(args.magpie, engine, args.output, params, **options)
    else:
        options["max_bad_rows"] = args.max_bad_rows
        done = regenerate(rows, engine, args.output, params, **options)
    print(f"\n{args.output}: {done.written} written, {done.found} were there", file=sys.stderr)
    for reason, count in done.left_out.items():
        print(f"  left out {count}: {reason}", file=sys.stderr)
    for row in done.named:
        print(f"    {row}", file=sys.stderr)
    if not done.written and not done.found:
        raise ValueError(f"{args.output}: nothing could be answered; see what was left out.")
    return 0
