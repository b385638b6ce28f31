"""`peagle-train capture`: store the target's hidden states for offline training."""

import argparse
import sys

from train import distributed
from train.commands import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="prepared data set")
    parser.add_argument("--target", required=True, help="folder, .gguf file or name of the target")
    parser.add_argument(
        "--output", required=True, help="folder of the store; goes on if it is there"
    )
    parser.add_argument(
        "--taps", type=int, nargs="+", help="convention T; default 2, L // 2, L - 3"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--shard-rows", type=positive, default=65_536, help="tokens of a shard")
    distributed.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    distributed.join(args)
    import jax

    from peagle_jax.checkpoints.load import load_target
    from peagle_jax.loading import find_target
    from train.capture import capture
    from train.data.prepared import open_prepared
    from train.warm_start import default_taps

    data = open_prepared(args.data)
    data.verify()
    target = load_target(find_target(args.target))
    taps = tuple(args.taps) if args.taps else default_taps(target.config.num_layers)

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} rows", end="", file=sys.stderr, flush=True)

    store = capture(
        data,
        target,
        taps,
        args.output,
        name=args.target,
        dtype=args.dtype,
        batch_size=args.batch_size,
        shard_rows=args.shard_rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        progress=progress,
    )
    print(f"\n{args.output}: {len(store) if store else 0} rows", file=sys.stderr)
    return 0
