"""One step on one device and on eight: the same sums, gradients and update, on every axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peagle_jax.models.config import LayerConfig, RopeConfig
from peagle_jax.models.drafter import init_drafter
from peagle_jax.sharding import make_mesh
from tests.models.drafter_configs import small_drafter
from train.eagle3 import Unroll, eagle3_gradients
from train.feed import check_batch, on_devices
from train.objective import make_objective
from train.parameters import Trained, kept_ids, parameters_of, split
from train.rows import TargetHead
from train.sampling import CodConfig, count_table
from train.step import init_state, make_step, peagle_gradients, place_parameters

SLOTS, BATCH = 16, 8
COD = CodConfig(num_depths=4, ratio=0.8)


@functools.cache
def case(parallel=True):
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope=RopeConfig(theta=100.0))
    config = small_drafter(layers=(layer,), parallel_drafting=parallel)
    params = parameters_of(init_drafter(config, jax.random.key(0)))
    learned, frozen = split(config, params, Trained(head=True), jnp.float32)
    rng = np.random.default_rng(0)
    ids = np.repeat([[0, 1, -1]], [9, 6, 1], axis=1).repeat(BATCH, 0).astype(np.int32)
    batch = {
        "tokens": rng.integers(0, 31, (BATCH, SLOTS)).astype(np.int32),
        "loss_mask": rng.random((BATCH, SLOTS)) < 0.7,
        "document_ids": ids,
        "taps": rng.standard_normal((BATCH, SLOTS, 36)).astype(np.float32),
        "last_hidden": rng.standard_normal((BATCH, SLOTS, 12)).astype(np.float32),
    }
    matrix = jnp.asarray(rng.standard_normal((12, 32)), jnp.float32)
    head = TargetHead(matrix=matrix, of_draft=matrix[:, kept_ids(config, params)])
    return config, learned, frozen, head, batch


def one_step(mesh=None, accumulation=1, kind="p-eagle"):
    """Sums and parameters after one step of plain gradient descent on the mean gradient."""
    config, learned, frozen, head, batch = case(kind == "p-eagle")
    optimizer = optax.sgd(1.0)
    if kind == "p-eagle":
        objective = make_objective(config, COD, SLOTS, num_chunks=2, train_head=True, mesh=mesh)
        gradients = peagle_gradients(objective, jnp.asarray(count_table(COD, SLOTS)))
    else:
        gradients = eagle3_gradients(Unroll(config=config, num_steps=2, train_head=True, mesh=mesh))
    check_batch(BATCH, accumulation, 1, mesh)
    state = init_state(learned, optimizer, jax.random.key(3), mesh)
    if mesh is not None:
        frozen = place_parameters(frozen, mesh)
    placed = on_devices(batch, accumulation=accumulation, mesh=mesh)
    state, metrics = make_step(gradients, optimizer)(state, frozen, head, placed)
    return jax.device_get((metrics.sums, state.learned))


@functools.cache
def plain(kind):
    return one_step(kind=kind)


def compare(found, kind="p-eagle"):
    sums, learned = found
    wanted, wanted_learned = plain(kind)
    np.testing.assert_allclose(sums.loss, wanted.loss, rtol=1e-5)
    for name in ("count", "correct", "total", "joint_correct", "joint_total"):
        np.testing.assert_array_equal(getattr(sums, name), getattr(wanted, name), err_msg=name)
    start = case(kind == "p-eagle")[1]
    for name, value in wanted_learned.items():
        moved = np.linalg.norm(value - np.asarray(start[name]))
        assert moved > 0, f"{name} takes no part"
        assert np.linalg.norm(learned[name] - value) < 1e-5 * moved + 1e-6, name


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"data": 2, "tensor": 2, "sequence": 2}, id="data-tensor-sequence"),
        pytest.param({"data": 8}, id="data", marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, id="fsdp", marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "fsdp": 4}, id="fsdp-tensor", marks=pytest.mark.slow),
        pytest.param({"tensor": 8}, id="tensor-that-does-not-divide", marks=pytest.mark.slow),
        pytest.param({"sequence": 8}, id="sequence", marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "sequence": 4}, id="fsdp-sequence", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(axes):
    compare(one_step(make_mesh(**axes)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "sequence": 2}, {"tensor": 2}])
def test_a_mesh_changes_nothing_for_eagle_3(axes):
    compare(one_step(make_mesh(**axes), kind="eagle-3"), kind="eagle-3")


@pytest.mark.parametrize("accumulation", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_accumulation_changes_nothing(accumulation):
    compare(one_step(accumulation=accumulation))


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="global_batch is 6"):
        check_batch(6, 1, 1, make_mesh(data=4))
    with pytest.raises(ValueError, match="accumulation"):
        check_batch(8, 3, 1, None)
