"""The training loop: steps, logs, validation, checkpoints, and stopping in between.

It knows nothing of recipes or files of models: `assemble` makes what it runs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from train.checkpoint import Checkpoints, Record
from train.data.pipeline import Batches
from train.distributed import StopSignal, any_process
from train.feed import StatesFn, feed
from train.parameters import Params
from train.progress import Log
from train.rows import TargetHead
from train.step import StepMetrics, TrainState, all_finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a loop needs.

    Attributes:
        step, validate: jitted functions of `step.make_step` and `step.make_validation`.
        describe: sums to what is logged; must give "loss" and "estimated_acceptance_length".
        frozen, head: what stays as it is.
        batches: training batches, resumable. validation: makes the validation batches anew, or
            None without any.
        place: a process's part of a batch to global arrays. states: the target, where it runs.
        total_steps: after which training ends.
        recipe: resolved, for the checkpoints.
    """

    step: Callable[..., tuple[TrainState, StepMetrics]]
    validate: Callable[..., Any] | None
    describe: Callable[[Any], dict[str, Any]]
    frozen: Params
    head: TargetHead
    batches: Batches
    validation: Callable[[], Batches] | None
    place: Callable[[Mapping[str, np.ndarray]], dict[str, Array]]
    place_validation: Callable[[Mapping[str, np.ndarray]], dict[str, Array]]
    states: StatesFn | None
    total_steps: int
    recipe: Mapping[str, Any]
    learning_rate: Callable[[int], Any]
    save_every: int = 0
    validate_every: int = 0
    log_every: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """How a loop ended. interrupted: by a signal, with everything saved."""

    state: TrainState
    best: float | None
    interrupted: bool


def run_loop(
    run: Run,
    state: TrainState,
    checkpoints: Checkpoints,
    log: Log,
    *,
    best: float | None = None,
    resumed_data: Mapping[str, Any] | None = None,
) -> Finished:
    """Train from `state` to the end, or to SIGTERM, which saves and returns.

    best: highest validation acceptance length so far. resumed_data: position to go on from.

    Raises:
        ValueError: data exhausted before the last step, or a loss or a parameter that is not
            finite; nothing is saved then. A validation that fails is raised as it is, once the
            state is saved.
    """
    if resumed_data is not None:
        run.batches.restore(resumed_data)
    done, position = int(state.step), resumed_data
    waiting: tuple[int, StepMetrics] | None = None
    stopped = False
    with StopSignal() as signal:
        source = feed(run.batches, run.place, run.states)
        while done < run.total_steps and not stopped:
            item = next(source, None)
            if item is None:
                raise ValueError(
                    f"the data ended after {done} of {run.total_steps} steps; give more epochs."
                )
            batch, position = item
            state, metrics = run.step(state, run.frozen, run.head, batch)
            done += 1
            # The step before is looked at while this one runs, and its record counts up to it.
            waiting = _report(run, log, waiting)
            log.count(batch["tokens"].size)
            if done % run.log_every == 0 or done == run.total_steps:
                waiting = (done, metrics)
            stopped = any_process(signal.received)
            last, better = done == run.total_steps, False
            validating = run.validate is not None and (last or _due(run.validate_every, done))
            saving = stopped or last or _due(run.save_every, done)
            if validating or saving:
                waiting = _report(run, log, waiting)
                _check_finite(done, metrics)
                _check_state(done, state)
            if validating:
                try:
                    best, better = _validate(run, log, state, done, best)
                except Exception:
                    # The steps are sound; what cannot be validated must not cost them.
                    record = Record(recipe=run.recipe, data=position, best=best)
                    checkpoints.save(state, record)
                    checkpoints.wait()
                    raise
            if better or saving:
                record = Record(recipe=run.recipe, data=position, best=best)
                checkpoints.save(state, record, best=better)
        _report(run, log, waiting)
    checkpoints.wait()
    return Finished(state=state, best=best, interrupted=stopped and done < run.total_steps)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _report(run: Run, log: Log, waiting: tuple[int, StepMetrics] | None) -> None:
    """Write the record of a step, once it is there."""
    if waiting is None:
        return
    step, metrics = waiting
    _check_finite(step, metrics)
    values = run.describe(jax.device_get(metrics.sums))
    values["gradient_norm"] = float(metrics.gradient_norm)
    values["learning_rate"] = float(run.learning_rate(step - 1))
    log.write(step, values)


def _check_finite(step: int, metrics: StepMetrics) -> None:
    if not (np.isfinite(metrics.sums.loss) and np.isfinite(metrics.gradient_norm)):
        raise ValueError(
            f"step {step}: the loss is {float(metrics.sums.loss)}, the gradient's norm "
            f"{float(metrics.gradient_norm)}; stopped without saving. Lower the learning rate, or "
            "look for hidden states that are not finite."
        )


def _check_state(step: int, state: TrainState) -> None:
    # A finite loss does not say that the update behind it was.
    if not bool(all_finite(state)):
        raise ValueError(
            f"step {step}: parameters or moments are not finite; stopped without saving. Lower "
            "the learning rate, or raise optimizer.epsilon."
        )


def _validate(
    run: Run, log: Log, state: TrainState, step: int, best: float | None
) -> tuple[float | None, bool]:
    """The best acceptance length after validating, and whether it is this one."""
    total = None
    for batch, _ in feed(run.validation(), run.place_validation, run.states):
        sums = run.validate(state.learned, run.frozen, run.head, batch)
        total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    values = run.describe(jax.device_get(total))
    if not np.isfinite(values["loss"]):
        raise ValueError(
            f"step {step}: the validation's loss is {values['loss']}; look for hidden states of "
            "the validation rows that are not finite."
        )
    log.write(step, values, kind="validation")
    length = values["estimated_acceptance_length"]
    better = best is None or length > best
    return (length if better else best), better
