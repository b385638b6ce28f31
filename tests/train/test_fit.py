"""Whole runs on a tiny target with a learnable rule: learning, resuming, stopping, exporting."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from peagle_jax.checkpoints.drafter_files import load_drafter
from tests.train import tiny_run
from train.assemble import assemble, open_data, pipeline_config
from train.capture import capture
from train.checkpoint import Checkpoints
from train.data.pipeline import batches
from train.data.prepared import open_prepared
from train.evaluate import evaluate, prompt_of
from train.export import trained_drafter
from train.loop import run_loop
from train.losses import Sums
from train.progress import Log, draw_curves, read_log

STEPS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Training and held-out rows."""
    base = tmp_path_factory.mktemp("fit")
    tiny_run.write_data(base / "rows", rows=384)
    tiny_run.write_data(base / "held-out", rows=8, seed=1)
    return base


@pytest.fixture(scope="module")
def made(folder):
    """One assembled run; its jitted programs serve all tests below."""
    recipe = tiny_run.recipe(
        folder / "rows",
        folder / "out",
        data={"validation": str(folder / "held-out")},
        train={"steps": STEPS},
    )
    return assemble(recipe, tiny_run.rule_target())


def fresh(made, folder, **changes):
    """The run with batches from the start."""
    recipe = tiny_run.recipe(folder / "rows", folder / "out")
    source, _ = open_data(recipe)
    return dataclasses.replace(
        made.run, batches=batches(source, pipeline_config(recipe)), **changes
    )


def start(made):
    """A copy of the first state, because steps donate theirs."""
    return jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, made.state)


def go(made, folder, where, steps, *, resume=False, **changes):
    """Run to `steps`; Finished and the log's records."""
    run = fresh(made, folder, total_steps=steps, validate=None, **changes)
    state, position, first = start(made), None, 0
    with Checkpoints(where / "checkpoints") as checkpoints:
        if resume:
            state, record = checkpoints.restore(state, run.recipe)
            position, first = record.data, int(state.step)
        with Log(where, total_steps=steps, first_step=first) as log:
            done = run_loop(run, state, checkpoints, log, resumed_data=position)
    return done, without_clock(read_log(where))


def without_clock(log):
    """The records less what no two runs share: processor seconds, which never go back."""
    seconds = [record.pop("cpu_seconds") for record in log]
    assert seconds == sorted(seconds)
    return log


def same(a, b):
    for x, y in zip(jax.tree.leaves(a.learned), jax.tree.leaves(b.learned), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(jax.tree.leaves(a.moments), jax.tree.leaves(b.moments), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_learnable_rule_is_learned_and_the_exported_head_drafts_by_it(made, folder, tmp_path):
    run = fresh(made, folder, log_every=20)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        with Log(tmp_path, total_steps=STEPS) as log:
            done = run_loop(run, start(made), checkpoints, log)
        assert checkpoints.has_best()
    held_out = [r for r in read_log(tmp_path) if r["kind"] == "validation"][-1]
    assert min(held_out["joint_acceptance"]) >= 0.95, held_out
    assert done.best >= 1 + 4 * 0.95
    assert draw_curves(tmp_path).stat().st_size > 1000

    from peagle_jax.checkpoints.drafter_export import save_drafter
    from peagle_jax.decoding.params import SamplingParams

    for layout in ("raw", "speculators"):
        save_drafter(trained_drafter(made, done.state), tmp_path / layout, layout)
    target = tiny_run.rule_target()
    drafter = load_drafter(tmp_path / "raw", target=target)
    assert drafter.config.num_depths == tiny_run.NUM_DEPTHS
    again = load_drafter(tmp_path / "speculators", target=target)
    np.testing.assert_array_equal(drafter.head.get_value(), again.head.get_value())
    data = open_prepared(folder / "held-out")
    prompts = [prompt_of(data[row]) for row in range(4)]
    params = SamplingParams(max_tokens=26, ignore_eos=True)
    (found,) = evaluate(target, drafter, prompts, [4], params=params, batch_size=4)
    assert found.stats.acceptance_length >= 4.5, found.stats
    assert found.tokens == 4 * 26


def test_an_interrupted_run_goes_on_bit_for_bit_E16(made, folder, tmp_path):
    straight, wanted = go(made, folder, tmp_path / "a", 6)
    go(made, folder, tmp_path / "b", 3)
    resumed, log = go(made, folder, tmp_path / "b", 6, resume=True)
    same(resumed.state, straight.state)
    assert log == wanted and [r["step"] for r in log] == [1, 2, 3, 4, 5, 6]
    # The learning rate goes on as well; warm-up is over 8 of 150 steps.
    rates = [r["learning_rate"] for r in log]
    assert rates == sorted(rates) and rates[0] > 0


def test_sigterm_saves_and_the_run_goes_on_E16(made, folder, tmp_path):
    _, wanted = go(made, folder, tmp_path / "a", 4)
    count = []

    def step(*arguments):
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return made.run.step(*arguments)

    stopped, log = go(made, folder, tmp_path / "b", 4, step=step)
    assert stopped.interrupted and int(stopped.state.step) == 2 and len(log) == 2
    done, log = go(made, folder, tmp_path / "b", 4, resume=True)
    assert not done.interrupted and log == wanted


def test_a_worse_model_never_becomes_the_best_E16(made, folder, tmp_path):
    def judged(joint):
        """A validation that finds this many of 10 rollouts right at depth 0, none deeper."""
        hits = np.array([joint, 0, 0, 0])
        total = np.array([10, 10, 10, 10])
        return lambda *arguments: Sums(np.float32(1), np.int32(1), hits, total, hits, total)

    def train(steps, joint, position, best, state):
        run = fresh(made, folder, total_steps=steps, validate=judged(joint))
        with Log(tmp_path, total_steps=2) as log:
            return run_loop(run, state, checkpoints, log, best=best, resumed_data=position)

    with Checkpoints(tmp_path / "c") as checkpoints:
        train(1, 9, None, None, start(made))
        state, record = checkpoints.restore(start(made), made.run.recipe)
        assert record.best == pytest.approx(1.9)
        done = train(2, 5, record.data, record.best, state)
        assert done.best == pytest.approx(1.9)
        assert checkpoints.latest() == 2
        found, _ = checkpoints.restore(start(made), made.run.recipe, best=True)
    assert int(found.step) == 1


def test_a_loss_that_is_not_finite_stops_without_saving_E18(made, folder, tmp_path):
    def step(state, frozen, head, batch):
        batch = {**batch, "taps": batch["taps"].at[..., 0].set(np.nan)}
        return made.run.step(state, frozen, head, batch)

    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        go(made, folder, tmp_path, 2, step=step)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() is None


def test_a_state_that_is_not_finite_is_never_saved_E18(made, folder, tmp_path):
    def step(state, *rest):
        state, metrics = made.run.step(state, *rest)
        learned = dict(state.learned)
        name = sorted(learned)[0]
        learned[name] = learned[name].at[(0,) * learned[name].ndim].set(np.inf)
        return state._replace(learned=learned), metrics

    with pytest.raises(ValueError, match="step 1: parameters or moments are not finite"):
        go(made, folder, tmp_path, 1, step=step)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() is None


@pytest.mark.parametrize("loss", [np.nan, np.inf, None])
def test_a_validation_that_fails_costs_no_steps_and_is_neither_best_nor_logged(
    made, folder, tmp_path, loss
):
    def validate(*arguments):
        if loss is None:
            raise MemoryError("no room")
        hits, total = np.array([9, 0, 0, 0]), np.array([10, 10, 10, 10])
        return Sums(np.float32(loss), np.int32(1), hits, total, hits, total)

    run = fresh(made, folder, total_steps=2, validate_every=1, validate=validate)
    error = (MemoryError, "no room") if loss is None else (ValueError, "step 1: the validation's")
    with Checkpoints(tmp_path / "c") as checkpoints:
        with Log(tmp_path, total_steps=2) as log, pytest.raises(error[0], match=error[1]):
            run_loop(run, start(made), checkpoints, log)
        assert checkpoints.latest() == 1 and not checkpoints.has_best()
    assert [record["kind"] for record in read_log(tmp_path)] == ["train"]
    assert "NaN" not in (tmp_path / "log.jsonl").read_text()


def test_stored_hidden_states_train_like_the_target_running_along(made, folder, tmp_path):
    data = open_prepared(folder / "rows")
    target = tiny_run.rule_target()
    store = capture(
        data, target, made.config.taps, tmp_path / "states", name="rule", dtype="float32"
    )
    assert len(store) == len(data)
    store.verify()
    head = np.asarray(target.head.get_value())
    for sample in (store[0], store[len(store) - 1]):
        assert (sample.target_tokens == (sample.last_hidden @ head).argmax(-1)).all()
    # Names are row numbers, so both sources have the same rows in the same order.
    recipe = tiny_run.recipe(folder / "rows", folder / "out")
    offline = dataclasses.replace(
        fresh(made, folder, total_steps=2, validate=None),
        batches=batches(store, pipeline_config(recipe)),
        states=None,
    )
    with Checkpoints(tmp_path / "c") as checkpoints, Log(tmp_path, total_steps=2) as log:
        found = run_loop(offline, start(made), checkpoints, log)
    online, _ = go(made, folder, tmp_path / "online", 2)
    for name, value in online.state.learned.items():
        np.testing.assert_allclose(found.state.learned[name], value, atol=1e-6, err_msg=name)

    # A capture that is called again has nothing left to do; one of other taps is refused.
    assert capture(
        data, target, made.config.taps, tmp_path / "states", name="rule", dtype="float32"
    ).digest == store.digest  # fmt: skip
    with pytest.raises(ValueError, match="use another folder"):
        capture(data, target, (1, 2, 3), tmp_path / "states", name="rule", dtype="float32")


def test_the_log_holds_what_a_run_is_judged_by(made, folder, tmp_path):
    _, log = go(made, folder, tmp_path, 1)
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record.pop("cpu_seconds") > 0 and record == log[0]
    assert len(record["accuracy"]) == len(record["joint_acceptance"]) == tiny_run.NUM_DEPTHS
    assert record["estimated_acceptance_length"] == pytest.approx(
        1 + sum(record["joint_acceptance"])
    )
    assert record["elements"] > 0 and record["gradient_norm"] > 0
