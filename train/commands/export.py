"""`peagle-train export`: write a trained drafter for serving."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="folder of the run (output.folder of its recipe)")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--layout", choices=("raw", "speculators"), default="raw")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument(
        "--verifier", help="name of the target, written into the speculators layout"
    )
    parser.add_argument(
        "--target", help="where the run's target is now; default: where its recipe says"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a drafter's folder")


def run(args: argparse.Namespace) -> int:
    from train.export import export_run

    path = export_run(
        args.run,
        args.output,
        which=args.which,
        layout=args.layout,
        dtype=args.dtype,
        verifier=args.verifier,
        target=args.target,
        overwrite=args.overwrite,
    )
    print(path)
    return 0
