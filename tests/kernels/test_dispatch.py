"""Choice of implementation, the tables of devices and launches, and the doctor."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import (
    ahead_of_time,
    dispatch,
    doctor,
    expand_batch,
    fill_hidden,
    launch,
    memory,
    short_query_attention,
)
from pallas_kernels.devices import DEVICES, find_device, get_device
from pallas_kernels.expand_batch import shapes as expand_shapes
from pallas_kernels.fill_hidden import shapes as fill_shapes
from pallas_kernels.short_query_attention import shapes as attention_shapes
from pallas_kernels.vocab_loss import shapes as loss_shapes
from tests.kernels.compile_for_gpu import needs_cuda_plugin

ARGUMENTS = (
    np.arange(6, dtype=np.float32).reshape(3, 2),
    np.full(2, 9, np.float32),
    np.array([2, -1, 0], np.int32),
    np.array([False, True, False]),
)
EXPECTED = [[4, 5], [9, 9], [0, 1]]


def fill(implementation=None):
    return jax.jit(functools.partial(fill_hidden, implementation=implementation))


def test_default_works_on_this_platform_I12():
    np.testing.assert_array_equal(fill()(*ARGUMENTS), EXPECTED)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the kernel runs")
@pytest.mark.parametrize("jitted", [True, False])
def test_a_named_kernel_fails_with_the_reason(jitted):
    run = fill("triton") if jitted else functools.partial(fill_hidden, implementation="triton")
    arguments = map(jnp.asarray, ARGUMENTS)
    with pytest.raises(NotImplementedError, match="fill_hidden.*'triton'.*lowered for.*cpu"):
        run(*arguments)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the kernel runs")
def test_a_named_kernel_fails_under_transformations():
    def loss(hidden):
        rest = map(jnp.asarray, ARGUMENTS[1:])
        return jnp.sum(fill_hidden(hidden, *rest, implementation="triton"))

    with pytest.raises(NotImplementedError, match="lowered for"):
        jax.jit(jax.value_and_grad(loss))(ARGUMENTS[0])
    with pytest.raises(NotImplementedError, match="lowered for"):
        jax.jit(jax.vmap(loss))(ARGUMENTS[0][None])


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'cuda' is no implementation; choose one of triton"):
        dispatch._checked("cuda", "implementation")
    monkeypatch.setenv("PEAGLE_KERNELS", "fast")
    with pytest.raises(ValueError, match="PEAGLE_KERNELS: 'fast'"):
        fill_hidden(*map(jnp.asarray, ARGUMENTS))


def test_the_process_decides_unless_the_call_does(monkeypatch):
    monkeypatch.setenv("PEAGLE_KERNELS", "interpret")
    assert dispatch.resolve(None) == "interpret"
    assert dispatch.resolve("reference") == "reference"
    assert dispatch.resolve("triton") == "interpret", "a process that interprets, interprets"
    with dispatch.forcing("reference"):
        assert dispatch.resolve(None) == "reference"
    monkeypatch.setenv("PEAGLE_KERNELS", "auto")
    assert dispatch.resolve(None) is None


def test_vmap_of_the_kernel():
    """Each operand may be batched; kernels must not rely on where the grid's axes are."""
    batched = np.stack([ARGUMENTS[0], ARGUMENTS[0] + 10])
    filled = jax.jit(
        jax.vmap(functools.partial(fill_hidden, implementation="interpret"), (0, None, None, None))
    )(batched, *ARGUMENTS[1:])
    np.testing.assert_array_equal(filled[0], EXPECTED)
    np.testing.assert_array_equal(filled[1], [[14, 15], [9, 9], [10, 11]])


def test_the_interpreter_poisons_what_a_kernel_does_not_write_I5():
    """The oracle tests rely on it: a missing store shows as NaN or the least integer."""

    def write_half(float_ref, integer_ref):
        half = jnp.arange(2)
        memory.store(float_ref.at[half], jnp.ones(2), label="floats")
        memory.store(integer_ref.at[half], jnp.ones(2, jnp.int32), label="integers")

    floats, integers = pl.pallas_call(
        write_half,
        out_shape=[jax.ShapeDtypeStruct((4,), dtype) for dtype in (jnp.float32, jnp.int32)],
        interpret=True,
        name="write_half",
    )()
    assert np.isnan(floats[2:]).all() and not np.isnan(floats[:2]).any()
    assert integers.tolist() == [1, 1, *[np.iinfo(np.int32).min] * 2]


class TestCompiled:
    pytestmark = needs_cuda_plugin

    def test_default_holds_the_kernel_and_reference_does_not_I12(self):
        for implementation, kernels in ((None, ["fill_hidden"]), ("reference", [])):
            run = functools.partial(fill_hidden, implementation=implementation)
            compiled = ahead_of_time.compile_for(run, "h200", *ARGUMENTS)
            assert ahead_of_time.kernel_calls(compiled.as_text()) == kernels

    def test_sizes_that_are_no_powers_of_two_I6(self):
        """K of 10 and 7, three requests and one, 130 wide, heads of 80, 61 ids of 157.

        Interpreted kernels take any block; Triton alone wants powers of two and dots of 16.
        """
        expansions = [
            expand_shapes.Shape(name="", decodes=3, drafts=10),
            expand_shapes.Shape(name="", decodes=1, drafts=7, prefills=2, chunk=5),
        ]
        filled = fill_shapes.Shape(name="", requests=3, rows=11, drafts=10, hidden_size=130)
        attended = attention_shapes.Shape(
            name="", requests=3, rows=11, heads=6, kv_heads=3, head_dim=80, slots=100
        )
        judged = loss_shapes.Shape(
            name="", hidden=130, target_hidden=130, vocab=157, draft_vocab=61, rows=21
        )

        def program(rows, hidden, attention, loss):
            expanded = [
                expand_batch(*positional, **arrays, **shape.keywords())
                for shape, (positional, arrays) in zip(expansions, rows, strict=True)
            ]
            positional, arrays = attention
            return (
                expanded,
                fill_hidden(*hidden),
                short_query_attention(*positional, **arrays, **attended.keywords()),
                loss_shapes.losses_and_gradients(judged, loss),
            )

        compiled = ahead_of_time.compile_for(
            program,
            "a100",
            [expand_shapes.abstract_arguments(shape) for shape in expansions],
            fill_shapes.abstract_arguments(filled),
            attention_shapes.abstract_arguments(attended),
            loss_shapes.abstract_arguments(judged),
        )
        found = collections.Counter(ahead_of_time.kernel_calls(compiled.as_text()))
        assert found["expand_batch"] == 2
        assert found["fill_hidden"] == found["short_query_attention"] == 1
        assert found["vocab_loss_statistics"] and found["vocab_loss_derivative"]


class TestTables:
    def test_launch_parameters_fit_every_device(self):
        for kernel, classes in launch.TABLE.items():
            for shape_class, rows in classes.items():
                assert "any" in rows, f"{kernel}/{shape_class} must serve every GPU"
                assert set(rows) - {"any"} <= set(DEVICES)
                for entry in rows.values():
                    assert entry.num_warps <= 16 and 1 <= entry.num_stages <= 5

    def test_h100_and_h200_compile_alike(self):
        """Compile tests take one's figures for the other's."""
        for kernel, classes in launch.TABLE.items():
            for shape_class in classes:
                with launch.compiling_for("h100"):
                    of_h100 = launch.find_launch(kernel, shape_class)
                with launch.compiling_for("h200"):
                    assert launch.find_launch(kernel, shape_class) == of_h100

    def test_a_launch_must_be_a_power_of_two(self):
        with pytest.raises(ValueError, match="rows=12 must be a power of two"):
            launch.Launch(num_warps=4, num_stages=1, blocks={"rows": 12})

    def test_devices_are_found_by_kind(self):
        assert find_device("NVIDIA A100-SXM4-80GB") is get_device("a100")
        assert find_device("NVIDIA H100 80GB HBM3") is get_device("h100")
        assert find_device("NVIDIA H200") is get_device("h200")
        assert find_device("Tesla T4") is None
        with pytest.raises(ValueError, match="unknown GPU 'v100'.*a100, h100, h200, b200"):
            get_device("v100")


class TestDoctor:
    def test_says_what_runs_and_why(self):
        diagnosis = doctor.diagnose()
        text = doctor.format_diagnosis(diagnosis)
        assert set(diagnosis.implementations) == set(doctor.OPERATIONS)
        if diagnosis.backend == "cpu":
            assert set(diagnosis.implementations.values()) == {"reference"}
            assert "kernels are for NVIDIA GPUs" in text
        assert jax.__version__ in text and "CUDA plugin" in text

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="no problem there")
    def test_says_what_will_refuse(self, monkeypatch):
        monkeypatch.setenv("PEAGLE_KERNELS", "triton")
        diagnosis = doctor.diagnose()
        assert "every operation will refuse" in diagnosis.problems[0]
        monkeypatch.setenv("PEAGLE_KERNELS", "fast")
        assert "'fast' is no implementation" in doctor.diagnose().problems[0]
