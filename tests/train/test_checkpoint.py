"""Checkpoints: what comes back, on which devices, and what is never picked."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from peagle_jax.sharding import make_mesh
from train.checkpoint import Checkpoints, Record
from train.step import init_state

RECIPE = {"train": {"seed": 0}, "objective": {"ratio": 0.8}, "mesh": {"data": 1}}


def make_state(step=0, mesh=None):
    rng = np.random.default_rng(0)
    learned = {
        "head": jnp.asarray(rng.standard_normal((8, 16)), jnp.float32),
        "layers.0.qkv": jnp.asarray(rng.standard_normal((8, 2, 4, 4)), jnp.float32),
        "norm": jnp.asarray(rng.standard_normal(8), jnp.float32),
    }
    state = init_state(learned, optax.adamw(1e-3), jax.random.key(5), mesh)
    return state._replace(step=state.step + jnp.int32(step))


def record(best=None):
    return Record(recipe=RECIPE, data={"position": 7}, best=best)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a.learned), jax.tree.leaves(b.learned), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(jax.tree.leaves(a.moments), jax.tree.leaves(b.moments), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_everything_comes_back_keys_included_G4(tmp_path):
    state = make_state(step=3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, record(best=1.5))
        checkpoints.wait()
        found, saved = checkpoints.restore(make_state(), RECIPE)
    same(found, state)
    assert int(found.step) == 3 and saved.best == 1.5 and saved.data == {"position": 7}
    draws = [jax.random.uniform(jax.random.fold_in(s.key, i), (2,)) for s in (state, found)
             for i in range(3)]  # fmt: skip
    np.testing.assert_array_equal(np.stack(draws[:3]), np.stack(draws[3:]))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_of_eight_devices_opens_on_fewer_G1(tmp_path, devices):
    state = make_state(step=2, mesh=make_mesh(fsdp=4, tensor=2))
    assert len(state.learned["layers.0.qkv"].sharding.device_set) == 8
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, record())
    mesh = make_mesh(fsdp=devices)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 2
        found, _ = checkpoints.restore(make_state(mesh=mesh), RECIPE, mesh=mesh)
    same(found, state)
    placed = found.learned["layers.0.qkv"].sharding
    assert len(placed.device_set) == devices
    assert placed.shard_shape((8, 2, 4, 4))[0] == 8 // devices


def test_half_a_checkpoint_is_never_picked_G5(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(step=1), record())
    last = tmp_path / "last"
    for name in ("2.orbax-checkpoint-tmp-123", "2.orbax-checkpoint-tmp"):
        (last / name / "state").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
        # The damaged step is written anew.
        checkpoints.save(make_state(step=2), record())
        checkpoints.wait()
        assert checkpoints.latest() == 2
        assert int(checkpoints.restore(make_state(), RECIPE)[0].step) == 2


def test_a_damaged_checkpoint_is_an_error_and_not_a_reset_E16(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(step=step), record())
            checkpoints.wait()
    for item in ("record", "state"):
        shutil.move(tmp_path / "last" / "2" / item, tmp_path / item)
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(ValueError, match=r"last/2: cannot be restored .*Item .* not found"):
                checkpoints.restore(make_state(), RECIPE)
        shutil.move(tmp_path / item, tmp_path / "last" / "2" / item)
    other = make_state()
    other.learned["head"] = jnp.zeros((8, 20), jnp.float32)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"last/2: cannot be restored .*\(8, 16\)"):
            checkpoints.restore(other, RECIPE)
    other = make_state()
    other.learned["more"] = jnp.zeros(3)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"last/2: .*learned.more is missing, not \(3,\)"):
            checkpoints.restore(other, RECIPE)
    # Without the damaged one, the run goes on from the one before.
    shutil.rmtree(tmp_path / "last" / "2")
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(make_state(), RECIPE)[0].step) == 1


def test_an_array_whose_bits_have_changed_is_an_error_E16(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(step=2), record())
    read = ocp.CheckpointManager.restore

    def spoilt(self, step, args):
        found = read(self, step, args=args)
        if "state" in found.keys():
            head = found.state.learned["head"]
            found.state.learned["head"] = head.at[3, 5].set(jnp.nextafter(head[3, 5], 1.0))
        return found

    monkeypatch.setattr(ocp.CheckpointManager, "restore", spoilt)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"last/2: .*learned.head is not what was saved"):
            checkpoints.restore(make_state(), RECIPE)


def test_a_failure_in_the_background_reaches_the_loop_G5(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(step=1), record())
    checkpoints.wait()

    def broken(*args, **kwargs):
        raise OSError("disk full")

    # What finishes a save in the background is the rename.
    monkeypatch.setattr("orbax.checkpoint._src.path.atomicity.AtomicRenameTemporaryPath.finalize",
                        broken)  # fmt: skip
    with pytest.raises(Exception, match="disk full"):
        checkpoints.save(make_state(step=2), record())
        checkpoints.wait()


def test_relative_folders_and_folders_in_use_G6(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpoints("out") as checkpoints:
        checkpoints.check_new()
        checkpoints.save(make_state(step=50), record())
    assert (tmp_path / "out" / "last" / "50").is_dir()
    with Checkpoints("out") as checkpoints, pytest.raises(ValueError, match="step 50; resume"):
        checkpoints.check_new()


def test_the_best_is_kept_beside_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(make_state(step=step), record(best=2.0), best=step == 2)
            checkpoints.wait()
        assert checkpoints.latest() == 4
        found, _ = checkpoints.restore(make_state(), RECIPE, best=True)
    assert int(found.step) == 2
    assert sorted(p.name for p in (tmp_path / "last").iterdir() if p.is_dir()) == ["3", "4"]


def test_another_recipe_is_refused_with_the_difference(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(step=1), record())
        checkpoints.wait()
        other = {**RECIPE, "objective": {"ratio": 0.7}, "mesh": {"data": 8}}
        with pytest.raises(ValueError, match="objective.ratio: saved 0.8, now 0.7"):
            checkpoints.restore(make_state(), other)
    with Checkpoints(tmp_path / "empty") as empty, pytest.raises(ValueError, match="no complete"):
        empty.restore(make_state(), RECIPE)
