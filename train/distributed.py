"""Several processes: joining them, agreeing between them, and writing once.

Launch one process per host (or per GPU) and let `jax.distributed` find the others:

    srun peagle-train fit RECIPE.toml --distributed                    (SLURM finds everything)
    peagle-train fit RECIPE.toml --distributed                         (Kubernetes, Open MPI too)
    peagle-train fit RECIPE.toml --coordinator HOST:PORT --process-count 2 --process-index 0
"""

import argparse
import os
import signal
from types import FrameType

import jax
import numpy as np


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `join` reads."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed", action="store_true", help="join by SLURM, Kubernetes or Open MPI"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="process 0, named by hand")
    group.add_argument("--process-count", type=int, help="with --coordinator")
    group.add_argument("--process-index", type=int, help="with --coordinator")


def join(args: argparse.Namespace) -> None:
    """Join the other processes, before any device is touched.

    Raises:
        ValueError: a coordinator without count and index, or these without a coordinator.
    """
    if args.coordinator is None and (args.process_count, args.process_index) != (None, None):
        raise ValueError("--process-count and --process-index need --coordinator.")
    if args.coordinator is not None:
        if args.process_count is None or args.process_index is None:
            raise ValueError("--coordinator needs --process-count and --process-index.")
        _prepare_cpu()
        jax.distributed.initialize(
            coordinator_address=args.coordinator,
            num_processes=args.process_count,
            process_id=args.process_index,
        )
    elif args.distributed:
        _prepare_cpu()
        jax.distributed.initialize()


def _prepare_cpu() -> None:
    """Processes on CPUs talk over gloo; nothing else is built in."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def is_first() -> bool:
    """Whether this process writes logs, recipes and pictures."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all must call it."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


class StopSignal:
    """Remembers SIGTERM and SIGINT while it is entered; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True
