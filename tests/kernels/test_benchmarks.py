"""The kernel benchmarks run without a GPU, their arithmetic is right, every launch entry can be
tuned, and the committed figures cover every kernel."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    kernel_cases,
    kernel_goals,
    kernel_timing,
    kernel_tuning,
    kernels,
    kernels_compiled,
)
from benchmarks.kernel_cases import Work, select_cases
from pallas_kernels import ahead_of_time, launch
from pallas_kernels.devices import DEVICES
from pallas_kernels.launch import Launch
from tests.kernels import attention_oracle
from tests.kernels.compile_for_gpu import needs_cuda_plugin, needs_kernel_figures
from tests.kernels.counting import count_accesses

CASES = select_cases(None)
TINY = list({id(case.tiny): case for case in CASES}.values())


def find_case(kernel: str, shape: str):
    [case] = [case for case in CASES if (case.kernel, case.shape) == (kernel, shape)]
    return case


class TestTinyMode:
    def test_interprets_and_compares(self, tmp_path, capsys):
        path = tmp_path / "kernels.json"
        assert kernels.main(["--kernels", "fill_hidden", "--output", str(path)]) == 0
        assert "not speeds" in capsys.readouterr().out
        [row] = json.loads(path.read_text())["rows"]
        assert row["kernel"] == "fill_hidden" and row["difference"] == 0

    def test_a_difference_is_a_failure(self, monkeypatch, capsys):
        monkeypatch.setattr(kernels, "largest_difference", lambda *_: 0.5)
        assert kernels.main(["--kernels", "fill_hidden"]) == 1

    def test_an_unknown_kernel_is_bad_usage(self, capsys):
        assert kernels.main(["--kernels", "flash"]) == 2
        assert "no cases for 'flash'; kernels are expand_batch" in capsys.readouterr().err

    def test_every_case_has_a_tiny_twin(self):
        assert all(case.tiny is not None for case in CASES)

    @pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.kernel}-{case.shape}")
    def test_libraries_give_the_reference_values(self, case):
        """Or say that they are not installed, and how they are."""
        tiny, arguments = case.tiny, case.tiny.make(0)
        if not tiny.libraries:
            pytest.skip("no library does the like")
        expected = jax.jit(tiny.call("reference"))(*arguments)
        for name, library in tiny.libraries.items():

            def compare(library=library):
                found = library.call(*arguments)() if library.torch else library.call(*arguments)
                same = library.same
                return {"off": kernels.largest_difference(found, same(expected)) if same else 0.0}

            # Libraries promote dtypes and ranks as they like.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                found = kernels.refusal(compare, name)
            reason = found.get(f"{name}_refused", "")
            assert found.get("off", 1.0) < 2e-2 or "pip install" in reason, (name, found)


class TestArithmetic:
    def test_fill_moves_what_is_copied_and_written(self):
        case = find_case("fill_hidden", "gpt-oss-20b/decode-64")
        source = np.array([3, -1, 5, 0], np.int32)
        is_mask = np.array([False, False, True, False])
        mask_hidden = jnp.zeros(2880, jnp.bfloat16)
        found = case.work((None, mask_hidden, source, is_mask)).moved_bytes
        draft_rows = 64 * (8 + 7 - 1)
        assert found == (2 + draft_rows + 1) * 2880 * 2 + 4 * 4 + 4

    def test_prompt_chunks_move_the_256_megabytes_of_the_goal(self):
        goal = kernel_goals.GOALS[0]
        for case in CASES:
            if case.kernel == "fill_hidden" and case.shape.endswith("prefill"):
                hidden, mask_hidden, source, _ = case.abstract
                rows = np.arange(source.size) % hidden.shape[0]
                flags = np.arange(source.size) >= hidden.shape[0]
                moved = case.work((None, jnp.zeros(mask_hidden.shape, jnp.bfloat16), rows, flags))
                assert goal.applies({"moved_bytes": moved.moved_bytes}), case.shape

    @pytest.mark.parametrize("mask_rows, window", [(0, None), (40, None), (40, 9)])
    def test_training_attention_counts_the_pairs_of_the_dense_rule(self, mask_rows, window):
        shape = kernel_cases.interval_shapes.Shape(
            name="", heads=2, kv_heads=1, head_dim=16, rows=64, mask_rows=mask_rows, window=window
        )
        x = kernel_cases._interval_arguments(shape, 0)
        if mask_rows:
            names = ("document_ids", "anchors", "depths", "valid")
            packing = attention_oracle.Packing(*(np.asarray(x[name]) for name in names))
            allowed = attention_oracle.rollout_mask(packing, window)
        else:
            allowed = attention_oracle.document_mask(np.asarray(x["document_ids"]), window)
        assert kernel_cases.count_pairs(shape, x) == allowed.sum()
        case = kernel_cases._interval_case(shape, None, backward=False)
        assert case.work((x,)).flops == 4 * allowed.sum() * 2 * 16

    def test_short_queries_move_what_the_interpreted_kernel_loads(self):
        shape = kernel_cases.attention_shapes.Shape(
            name="", requests=2, rows=3, heads=4, kv_heads=2, head_dim=16, slots=512, window=100
        )
        case = kernel_cases._attention_case(shape, None)
        arguments = case.make(0)
        _, counts = count_accesses(case.call("interpret"), *arguments)
        names = [("load", "keys"), ("load", "values"), ("load", "query"), ("store", "out")]
        if ("store", "out") not in counts:
            names.pop()
        loaded = 2 * sum(counts[name] for name in names)
        assert case.work(arguments).moved_bytes == loaded

    def test_shares_of_the_ceilings(self):
        row = kernels.shares(
            Work(moved_bytes=3_000_000, flops=8_000_000),
            {"kernel": 1e-6, "reference": 4e-6},
            {"copy_bandwidth": 4e12, "matrix_rate": 1e13},
        )
        assert row["of_copy_bandwidth"] == pytest.approx(0.75)
        assert row["of_matrix_rate"] == pytest.approx(0.8)
        assert row["reference_seconds"] == 4e-6 and "kernel_seconds" not in row


class TestGoals:
    CEILINGS = {"copy_bandwidth": 4e12, "matrix_rate": 8e14}

    def rows(self, seconds: float, reference: float | None):
        times = {"kernel": seconds} | ({} if reference is None else {"reference": reference})
        for case in CASES:
            yield {
                "kernel": case.kernel,
                "shape": case.shape,
                "bound": case.bound,
                "launches": 1,
                **kernels.shares(Work(moved_bytes=3 * 10**9, flops=10**12), times, self.CEILINGS),
            }

    def test_each_is_judged_by_the_figure_of_its_shapes(self):
        judged = kernel_goals.judge(list(self.rows(1e-3, 5e-3)))
        assert {goal["claim"] for goal in judged} == {goal.claim for goal in kernel_goals.GOALS}
        found = {(goal["claim"][:20], goal["shape"]): goal for goal in judged}
        fill = found["share of copy bandwi", "gemma-4-31b/prefill"]
        assert fill["figure"] == pytest.approx(0.75) and fill["met"] is False
        attention = found["share of copy bandwi", "gpt-oss/full-verify-1x128k"]
        assert attention["figure"] == pytest.approx(0.75) and attention["met"] is True
        rollouts = found["share of the bf16 ma", "gpt-oss/rollouts"]
        assert rollouts["figure"] == pytest.approx(1.25) and rollouts["met"] is True
        times = found["times faster than th", "decode-64-k7"]
        assert times["figure"] == pytest.approx(5) and times["met"] is True
        late = found["microseconds at 64 r", "decode-64-k7"]
        assert late["figure"] == pytest.approx(1000) and late["met"] is False

    def test_without_a_figure_nothing_is_claimed(self):
        rows = list(self.rows(1e-6, None))
        [goal] = [goal for goal in kernel_goals.judge(rows) if goal["claim"].startswith("times")]
        assert goal["figure"] is None and goal["met"] is None
        text = kernel_goals.to_text(kernel_goals.judge(rows))
        assert "not measured" in text and "MISSED" not in text.split("\n")[0]

    def test_the_table_holds_every_row(self):
        rows = list(self.rows(1e-3, 5e-3))
        table = kernels.to_table(rows, self.CEILINGS)
        assert table.count("\n") == len(rows) + 1
        assert "75% of copy bandwidth" in table and "5.00" in table


class TestTuning:
    @pytest.mark.parametrize(
        "kernel, shape_class",
        [(kernel, cls) for kernel, classes in launch.TABLE.items() for cls in classes],
    )
    def test_every_entry_has_cases_that_read_it(self, kernel, shape_class):
        cases = kernel_tuning.cases_of(kernel, shape_class)
        assert cases and all(case.launches[kernel] == shape_class for case in cases)

    @pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.kernel}-{case.shape}")
    def test_cases_read_the_entries_they_name(self, case):
        with launch.recording() as read:
            jax.make_jaxpr(case.tiny.call("triton"))(*case.tiny.abstract)
        assert read == set(case.tiny.launches.items())

    def test_the_command_goes_over_every_entry_of_a_kernel(self, capsys):
        assert kernels.main(["--tune", "fill_hidden"]) == 0
        printed = capsys.readouterr().out
        for shape_class in launch.TABLE["fill_hidden"]:
            assert f"fill_hidden {shape_class}: " in printed
        assert printed.count('"any": Launch(num_warps=4, num_stages=1, blocks={"rows": 4') == 2
        assert printed.count("traced, not timed") == 2

    def test_the_command_knows_the_kernels_of_the_table(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            kernels.main(["--tune", "flash"])
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert all(kernel in message for kernel in launch.TABLE)

    def test_the_search_finds_the_fastest_that_runs(self):
        """A valley with its floor at 2 warps, 3 stages, 64 rows, 16 keys; 256 rows do not run."""
        start = Launch(num_warps=8, num_stages=1, blocks={"rows": 128, "keys": 64})

        def measure(entry: Launch):
            if entry.blocks["rows"] > 128:
                return None
            away = abs(entry.num_stages - 3) + sum(
                abs(math.log2(size / best))
                for size, best in (
                    (entry.num_warps, 2),
                    (entry.blocks["rows"], 64),
                    (entry.blocks["keys"], 16),
                )
            )
            return [1.0 + away, 3.0 + 3 * away]

        best, share = kernel_tuning.climb(start, measure)
        assert best == Launch(num_warps=2, num_stages=3, blocks={"rows": 64, "keys": 16})
        assert share == pytest.approx(1 / (1 + 2 + 2 + 1 + 2))

    def test_cases_that_ignore_the_launch_are_an_error(self):
        [case, *_] = kernel_tuning.cases_of("fill_hidden", "few_rows")
        measure = kernel_tuning.tracing("expand_batch", [case])
        with pytest.raises(RuntimeError, match="expand_batch do not read"):
            measure(launch.find_launch("expand_batch", "short"))


class TestTiming:
    def test_warms_up_and_takes_the_median(self, monkeypatch):
        calls, now = [], [0.0]

        def program():
            # Slow while it warms up, then 1 s, and one call that something disturbed.
            now[0] += {0: 60.0, 1: 30.0, 2: 20.0, 7: 9.0}.get(len(calls), 1.0)
            calls.append(now[0])
            return np.zeros(1)

        monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: now[0])
        assert kernel_timing.time_program(program) == 1.0
        assert kernel_timing.WARM_UP_CALLS >= 3
        assert len(calls) == kernel_timing.WARM_UP_CALLS + kernel_timing.TIMED_CALLS

    def test_buffers_go_round_beyond_the_cache(self):
        def make(seed):
            return (np.full(1000, seed, np.int32),)

        def count(least, most=10**9):
            return len(kernel_timing.argument_sets(make, least, most))

        assert count(40_001) == 11, "more than the cache together"
        assert count(100) == 4, "at least a few"
        assert count(10**8) == 16, "too small to leave the cache at all"
        assert count(40_001, most=12_000) == 3, "never more than there is memory for"

    def test_times_each_call_of_a_round(self, monkeypatch):
        sets = [(jnp.full(8, value, jnp.float32),) for value in range(4)]
        monkeypatch.setattr(kernel_timing, "time_program", lambda program, *_: 6.4)
        assert kernel_timing.time_call(jnp.sin, sets) == pytest.approx(0.1)
        assert kernel_timing.rounds_of([(jnp.zeros(2**24),)]) == 1, "long calls need no rounds"

    def test_rounds_compute_what_they_say(self):
        sets = [(jnp.full(3, value, jnp.float32),) for value in (1.0, 2.0)]
        program = jax.jit(kernel_timing.repeated(lambda x: (x, x * 2), rounds=2))
        assert program(sets).tolist() == [1, 2, 2, 4] * 2


class TestCompiledPrograms:
    pytestmark = needs_cuda_plugin

    @pytest.mark.parametrize("kernel, shape", [("expand_batch", "decode-64-k7")])
    def test_no_timed_call_is_merged_or_left_out(self, kernel, shape):
        case = find_case(kernel, shape)
        program = kernel_timing.repeated(case.call(None), rounds=2)
        compiled = ahead_of_time.compile_for(program, "h200", [case.abstract] * 3)
        assert ahead_of_time.kernel_calls(compiled.as_text()) == [kernel] * 6

    @pytest.mark.parametrize("shape", ["decode-64-k7", "mixed-32-and-4x2048"])
    def test_the_input_preparation_is_one_launch(self, shape):
        case = find_case("expand_batch", shape)
        compiled = ahead_of_time.compile_for(case.call(None), "h200", *case.abstract)
        assert ahead_of_time.count_launches(compiled.as_text()) == 1
        unfused = ahead_of_time.compile_for(case.call("reference"), "h200", *case.abstract)
        assert ahead_of_time.count_launches(unfused.as_text()) > 1


def committed_rows() -> list[dict]:
    return kernels_compiled.read_page(kernels_compiled.OUTPUT)


def test_the_committed_page_covers_every_case_on_every_device():
    found = {(row["operation"], row["shape"], row["device"]) for row in committed_rows()}
    expected = {(case.kernel, case.shape, device) for case in CASES for device in DEVICES}
    assert found == expected, "run python -m benchmarks.kernels_compiled"


def test_the_committed_page_explains_every_spill():
    for row in committed_rows():
        explained = (row["kernel"], row["device"]) in kernels_compiled.SPILL_REASONS
        assert row["spill_bytes"] == 0 or explained, row


class TestFigures:
    pytestmark = needs_kernel_figures

    def test_the_committed_figures_are_those_of_today(self, capsys):
        """One kernel stands for all: the whole page takes minutes."""
        assert kernels_compiled.main(["--json", "--kernels", "fill_hidden"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {"kernel", "device", "shape", "registers", "spill_bytes", "shared_memory_bytes"} <= (
            rows[0].keys()
        )
        committed = [row for row in committed_rows() if row["operation"] == "fill_hidden"]
        assert rows == committed, "run python -m benchmarks.kernels_compiled"
