"""`peagle-train evaluate`: acceptance length by real generation on held-out prompts."""

import argparse
import json
import sys
from pathlib import Path

from peagle_jax.cli_flags import num_speculative_tokens
from train.commands import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", help="folder of the drafter")
    parser.add_argument("--target", required=True, help="folder, .gguf file or name of the target")
    parser.add_argument("--data", required=True, help="prepared data set whose prompts to answer")
    parser.add_argument(
        "-k", type=num_speculative_tokens, nargs="+", default=[1, 2, 3, 4, 5, 7], metavar="K"
    )
    parser.add_argument("--prompts", type=positive, default=80, help="rows of the data set to use")
    parser.add_argument("--max-tokens", type=positive, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--method", choices=("p-eagle", "eagle3"))
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")


def run(args: argparse.Namespace) -> int:
    from peagle_jax.checkpoints.drafter_files import load_drafter
    from peagle_jax.checkpoints.load import load_target
    from peagle_jax.decoding.params import SamplingParams
    from peagle_jax.loading import find_target
    from train.data.prepared import open_prepared
    from train.evaluate import evaluate, prompts_of

    data = open_prepared(args.data)
    prompts, skipped = prompts_of(data, args.prompts)
    if skipped:
        print(f"{args.data}: {len(skipped)} rows passed over; {skipped[0]}", file=sys.stderr)
    if not prompts:
        raise ValueError(f"{args.data}: no row with a prompt and an answer to evaluate on.")
    target = load_target(find_target(args.target))
    drafter = load_drafter(args.drafter, target=target)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    done = evaluate(
        target,
        drafter,
        prompts,
        args.k,
        params=params,
        method=args.method,
        batch_size=args.batch_size,
    )
    print(f"{'K':>3} {'acceptance length':>18}  accepted at each position")
    for one in done:
        rates = one.stats.acceptance_rate_per_position or ()
        text = " ".join(f"{rate:.2f}" for rate in rates)
        print(f"{one.num_speculative_tokens:>3} {one.stats.acceptance_length:>18.3f}  {text}")
    if args.json:
        content = json.dumps([one.as_dict() for one in done], indent=1)
        Path(args.json).write_text(content + "\n", encoding="utf-8")
    return 0
