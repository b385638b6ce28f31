"""`peagle-train regenerate`: let the target answer the prompts itself."""

import argparse
import sys

from train.commands import positive


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


def run(args: argparse.Namespace) -> int:
    if bool(args.sources) == (args.magpie is not None):
        raise ValueError("give either sources or --magpie.")
    import peagle_jax
    from peagle_jax.decoding.params import SamplingParams
    from train.data.conversations import read_rows
    from train.regenerate import magpie, regenerate

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
        done = regenerate(read_rows(args.sources), engine, args.output, params, **options)
    print(f"\n{args.output}: {done.written} written, {done.found} were there", file=sys.stderr)
    for reason, count in done.left_out.items():
        print(f"  left out {count}: {reason}", file=sys.stderr)
    return 0
