"""A tiny run in a process of its own, to be killed: `python -m tests.train.crash_run FOLDER ...`.

`--kill save:3` kills it with SIGKILL right after the save of step 3 was started, `--kill step:3`
after step 3 was started. With `--coordinator` it is one of several processes.
"""

import argparse
import dataclasses
import os
import signal
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill", default="never:0")
    parser.add_argument("--data-axis", type=int, default=1)
    from train import distributed

    distributed.add_arguments(parser)
    args = parser.parse_args()
    distributed.join(args)
    train(args.folder, args.steps, args.kill, args.data_axis)


def train(folder: Path, steps: int, kill: str = "never:0", data_axis: int = 1) -> None:
    """Train `steps` steps, resuming where a run before was killed."""
    from tests.train import tiny_run
    from train.assemble import assemble
    from train.checkpoint import Checkpoints
    from train.distributed import is_first
    from train.loop import run_loop
    from train.progress import Log

    point, _, at = kill.partition(":")
    recipe = tiny_run.recipe(
        folder.parent / "rows",
        folder,
        data={"sequence_length": 22},
        train={"steps": steps, "global_batch": 8},
        output={"save_every": 1},
        mesh={"data": data_axis},
    )
    made = assemble(recipe, tiny_run.rule_target())
    run = made.run
    if point == "step":
        undisturbed = run.step

        def step(state, *rest):
            done = int(state.step)
            out = undisturbed(state, *rest)
            if done + 1 == int(at):
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        run = dataclasses.replace(run, step=step)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        if point == "save":
            save = checkpoints.save

            def killing(state, *rest, **options):
                save(state, *rest, **options)
                if int(state.step) == int(at):
                    os.kill(os.getpid(), signal.SIGKILL)

            checkpoints.save = killing
        state, position, first = made.state, None, 0
        if checkpoints.latest() is not None:
            state, record = checkpoints.restore(state, run.recipe, mesh=made.mesh)
            position, first = record.data, int(state.step)
        print(f"from step {first}", flush=True)
        with Log(folder, total_steps=steps, first_step=first, enabled=is_first()) as log:
            run_loop(run, state, checkpoints, log, resumed_data=position)


if __name__ == "__main__":
    main()
