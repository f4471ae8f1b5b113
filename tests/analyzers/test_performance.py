"""What bounds a step: traces drawn event by event, read by the importer, and judged; traces of real jobs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.importers import import_files

from ..traces import NCCL, KinetoTrace
from .conftest import rule_named

REAL = Path(__file__).resolve().parents[3] / "shared" / "real" / "kineto"
FAMILY = (
    "performance/input-bound",
    "performance/communication-bound",
    "performance/launch-bound",
    "performance/gpu-idle",
    "performance/compute-bound",
    "performance/no-bottleneck",
)

Judge = Callable[..., CapsuleReport]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """What the family says of traces, one a rank, as files that the importer reads."""

    def run(*traces: KinetoTrace | Path) -> CapsuleReport:
        files = [
            each if isinstance(each, Path) else each.write(tmp_path / f"host_{at}.pt.trace.json")
            for at, each in enumerate(traces)
        ]
        capsule = Capsule.open(import_files(files, tmp_path / "out", attach=False))
        return analyze(capsule, [rule_named(each) for each in FAMILY])

    return run


def said(report: CapsuleReport) -> list[str]:
    assert not report.errors, report.errors
    return [each.rule.partition("/")[2] for each in report.findings]


def drawn(
    steps: int = 4,
    *,
    first: int = 10,
    data: float = 0.0,
    compute: float = 9.0,
    communication: float = 0.0,
    rank: int | None = None,
    world: int = 1,
    length: float = 10.0,
    **header: Any,
) -> KinetoTrace:
    """Steps of 10 ms: loading, then computation, then communication that nothing hides."""
    trace = KinetoTrace(rank, world, **header)
    for step in range(steps):
        at = length * step
        trace.step(first + step, at, length).data(at, max(data, 0.1))
        if compute:
            trace.kernel(at + data + 0.1, compute)
        if communication:
            trace.kernel(at + data + compute + 0.1, communication, NCCL)
    return trace


def many_kernels(steps: int = 3, *, each: float = 0.004, apart: float = 0.012, count: int = 800, **header: Any):
    """Steps full of short kernels, a little apart from one another."""
    trace = KinetoTrace(**header)
    for step in range(steps):
        at = 10.0 * step
        trace.step(10 + step, at, 10)
        for number in range(count):
            trace.kernel(at + apart * number + 0.02, each, "elementwise")
    return trace


class TestInput:
    @pytest.mark.fires("performance/input-bound")
    @pytest.mark.recorded("performance/input-bound")
    def test_the_device_waits_while_the_step_loads(self, judge: Judge):
        report = judge(drawn(data=4, compute=5))
        assert said(report) == ["input-bound"]
        (finding,) = report.findings
        assert finding.evidence[0].value == pytest.approx(0.4 + 0.01, abs=0.011)
        assert (finding.where.step, finding.where.rank) == (10, 0)

    @pytest.mark.quiet("performance/input-bound")
    def test_loading_that_the_device_does_not_notice(self, judge: Judge):
        """The device still computes the step before while the host is in the loader."""
        trace = KinetoTrace()
        for step in range(4):
            at = 10.0 * step
            trace.step(10 + step, at, 10).data(at, 6).kernel(at + 6.5, 9.5, launched=at + 6.2)
        assert said(judge(trace)) == ["compute-bound"]

    def test_one_long_wait_at_the_beginning_of_an_epoch_is_none(self, judge: Judge):
        trace = KinetoTrace()
        at = 0.0
        for step in range(12):
            wait = 12.0 if step == 5 else 0.1
            trace.step(10 + step, at, wait + 10).data(at, wait).kernel(at + wait, 9.5)
            at += wait + 10
        assert "input-bound" not in said(judge(trace))

    def test_the_first_step_of_a_job_is_warm_up(self, judge: Judge):
        trace = KinetoTrace()
        trace.step(0, 0, 500).data(0, 450).kernel(460, 9)
        for step in range(1, 4):
            trace.step(step, 490 + 10.0 * step, 10).kernel(490 + 10.0 * step + 0.1, 9)
        assert said(judge(trace)) == ["compute-bound"]

    def test_the_rank_that_loads_slowly_is_named_and_the_others_only_wait(self, judge: Judge):
        """Report D5's control: 15 of 20 ms are input on rank 2, and the others wait for it in their collective."""
        ranks = [drawn(data=0.1, compute=4, communication=15, rank=rank, world=4, length=20) for rank in (0, 1, 3)]
        report = judge(*ranks, drawn(data=15, compute=4, communication=0.2, rank=2, world=4, length=20))
        assert said(report) == ["input-bound"]
        assert report.findings[0].where.rank == 2
        assert "1 of 4 traced ranks" in report.findings[0].summary

    @pytest.mark.recorded("performance/input-bound")
    def test_the_real_job_without_workers_and_its_control(self, judge: Judge):
        if not REAL.is_dir():
            pytest.skip("../shared/real is not here")
        report = judge(REAL / "tb_plugin" / "resnet50_num_workers_0.pt.trace.json.gz")
        assert said(report) == ["input-bound"]
        (finding,) = report.findings
        named = {each.name: each.value for each in finding.evidence}
        assert named["data loading"] == pytest.approx(416, abs=0.5)
        assert named["idle while data is loaded"] == pytest.approx(0.33, abs=0.01)
        assert finding.cause == "samples are loaded in the training process itself"
        assert said(judge(REAL / "tb_plugin" / "resnet50_num_workers_4.pt.trace.json.gz")) == ["no-bottleneck"]


class TestCommunication:
    @pytest.mark.fires("performance/communication-bound")
    @pytest.mark.recorded("performance/communication-bound")
    def test_collectives_that_nothing_hides_on_every_rank(self, judge: Judge):
        report = judge(*(drawn(compute=5, communication=4, rank=rank, world=2) for rank in (0, 1)))
        assert said(report) == ["communication-bound"]
        (finding,) = report.findings
        assert finding.confidence == "likely"
        assert finding.evidence[0].value == pytest.approx(0.4)

    @pytest.mark.quiet("performance/communication-bound")
    def test_hidden_communication(self, judge: Judge):
        trace = drawn(rank=0, world=1)
        for step in range(4):
            trace.kernel(10.0 * step + 1, 7, NCCL)
        assert said(judge(trace)) == ["compute-bound"]

    @pytest.mark.quiet("performance/communication-bound")
    def test_waiting_for_a_slow_rank_is_no_network(self, judge: Judge):
        """Report D5: 200 of 292 ms are waited for rank 1, which itself hardly waits."""
        waits = {0: 210.0, 1: 10.0, 2: 210.0, 3: 210.0}
        traces = [
            drawn(compute=290 - wait, communication=wait, rank=rank, world=4, length=292)
            for rank, wait in waits.items()
        ]
        assert "communication-bound" not in said(judge(*traces))

    def test_one_rank_of_many_leaves_open_whom_it_waits_for(self, judge: Judge):
        report = judge(drawn(compute=5, communication=4, rank=3, world=128))
        (finding,) = report.findings
        assert (finding.confidence, finding.cause) == ("undetermined", None)
        assert ("ranks with a trace", 1, 128) in [(each.name, each.value, each.expected) for each in finding.evidence]
        assert "1 of 128 ranks" in finding.summary


class TestLaunches:
    @pytest.mark.fires("performance/launch-bound")
    @pytest.mark.recorded("performance/launch-bound")
    def test_many_short_kernels_with_gaps(self, judge: Judge):
        report = judge(many_kernels())
        assert said(report) == ["launch-bound"]
        named = {each.name: each.value for each in report.findings[0].evidence}
        assert named["kernels a step"] == 800
        assert named["mean kernel"] == pytest.approx(4.0)
        assert named["idle between kernels"] == pytest.approx(0.68, abs=0.01)

    @pytest.mark.quiet("performance/launch-bound")
    def test_many_short_kernels_back_to_back(self, judge: Judge):
        assert said(judge(many_kernels(each=0.0115))) == ["compute-bound"]

    def test_a_few_long_kernels_with_gaps_are_no_launches(self, judge: Judge):
        trace = KinetoTrace()
        for step in range(4):
            at = 10.0 * step
            trace.step(10 + step, at, 10)
            for number in range(8):
                trace.kernel(at + 0.1 + 1.2 * number, 0.7)
        assert said(judge(trace)) == ["no-bottleneck"]

    def test_stacks_slow_the_host_that_launches(self, judge: Judge):
        report = judge(many_kernels(with_stack=1))
        assert said(report) == []
        assert ["without stacks" in each.missing[0] for each in report.skipped if "launch" in each.rule] == [True]


class TestIdle:
    @pytest.mark.fires("performance/gpu-idle")
    @pytest.mark.recorded("performance/gpu-idle")
    def test_long_gaps_that_nothing_explains_stay_open(self, judge: Judge):
        report = judge(drawn(compute=3))
        assert said(report) == ["gpu-idle"]
        assert report.findings[0].confidence == "undetermined"

    @pytest.mark.quiet("performance/gpu-idle")
    def test_waiting_for_data_explains_it(self, judge: Judge):
        assert said(judge(drawn(data=7, compute=2.5))) == ["input-bound"]

    @staticmethod
    def monitored(build: Callable[..., Capsule], values: list[float], *, every: float = 5.0) -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            times = [1e9 + every * at for at in range(len(values))]
            writer.scalars("gpu_utilization", list(range(len(values))), values, times, rank=0)

        return build(fill)

    @pytest.mark.fires("performance/gpu-idle")
    def test_a_monitor_that_sees_a_saw_tooth(self, build, findings_of):
        (finding,) = findings_of("performance/gpu-idle", self.monitored(build, [0.0] * 20 + [1.0, 0.0, 0.05, 0.0] * 12))
        assert "by turns" in finding.title
        assert finding.evidence[0].value == pytest.approx(
            (12 + 11 * 0.05) / 45, abs=1e-4
        )  # cut to the first and last use

    @pytest.mark.quiet("performance/gpu-idle")
    def test_a_busy_device_with_an_idle_beginning_and_end(self, build, findings_of):
        busy = [0.0] * 100 + [0.9, 0.95, 0.97] * 10 + [0.0] * 100
        assert not findings_of("performance/gpu-idle", self.monitored(build, busy))

    @pytest.mark.parametrize("values", [[0.0] * 100, [0.3] * 5, [math.nan] * 50, [40.0] * 50])
    def test_a_device_of_nobody_and_too_little_to_tell(self, build, values: list[float]):
        report = analyze(self.monitored(build, values), [rule_named("performance/gpu-idle")])
        assert not report.findings
        assert not report.errors
        assert report.skipped


class TestComputation:
    @pytest.mark.fires("performance/compute-bound")
    @pytest.mark.recorded("performance/compute-bound")
    def test_it_names_the_longest_operation(self, judge: Judge):
        trace = drawn(compute=6)
        for step in range(4):
            trace.kernel(10.0 * step + 6.2, 3, "flash_fwd_kernel")
        (finding,) = judge(trace).findings
        assert (finding.rule, finding.severity, finding.kind) == ("performance/compute-bound", "info", "hygiene")
        assert "gemm, 6 ms a step of 10 ms" in finding.summary

    @pytest.mark.quiet("performance/compute-bound")
    @pytest.mark.fires("performance/no-bottleneck")
    @pytest.mark.recorded("performance/no-bottleneck")
    def test_a_little_of_everything(self, judge: Judge):
        assert said(judge(drawn(data=1.0, compute=6.5, communication=1.5))) == ["no-bottleneck"]

    @pytest.mark.quiet("performance/no-bottleneck")
    def test_a_bottleneck_is_one(self, judge: Judge):
        assert "no-bottleneck" not in said(judge(drawn()))


class TestAbstention:
    def reasons(self, report: CapsuleReport) -> set[str]:
        assert not report.findings
        assert not report.errors
        return {each.missing[0] for each in report.skipped}

    def test_a_cpu_alone(self, judge: Judge):
        trace = KinetoTrace(deviceProperties=[]).step(4, 0, 10).step(5, 10, 10).add("cpu_op", "aten::mm", 1, 8)
        report = judge(trace)
        assert len(report.skipped) == len(FAMILY)
        assert any("of a CPU alone" in each for each in self.reasons(report))

    def test_a_trace_without_steps(self, judge: Judge):
        """Ten seconds pass between two kernels while libraries are loaded: initialisation, not idleness."""
        report = judge(KinetoTrace().kernel(0, 4).kernel(10_000, 4).data(1, 2))
        assert any("marks its steps" in each for each in self.reasons(report))

    def test_the_first_step_of_a_job_alone(self, judge: Judge):
        assert any("warm-up" in each for each in self.reasons(judge(drawn(1, first=1, data=5, compute=2))))

    def test_a_later_step_alone_is_judged(self, judge: Judge):
        assert said(judge(drawn(1, first=200, data=5, compute=2))) == ["input-bound"]

    def test_a_profiler_that_measured_itself(self, judge: Judge):
        trace = drawn(data=5, compute=2)
        for step in range(4):
            trace.add("overhead", "Activity Buffer Request", 10.0 * step + 1, 3)
        assert any("the profiler itself" in each for each in self.reasons(judge(trace)))

    def test_slowness_is_hygiene_where_something_failed(self, build):
        def fill(writer: CapsuleWriter) -> None:
            for step in (5, 6):
                row = {"step": step, "window_ms": 10.0, "compute_ms": 3.0, "data_ms": 6.0}
                writer.record("profile", row)
            writer.record("events", {"kind": "exception", "step": 7, "type": "ValueError"})

        (finding,) = analyze(build(fill), [rule_named("performance/input-bound")]).findings
        assert finding.kind == "hygiene"
        assert finding.evidence[0].value == pytest.approx(0.6)


@pytest.mark.parametrize(
    "row",
    [
        {"window_ms": 0.0, "compute_ms": 0.0},
        {"window_ms": math.inf, "compute_ms": 1.0, "step": 3},
        {"window_ms": 10.0, "compute_ms": math.nan, "step": 3, "idle_data_ms": 3.0},
        {
            "window_ms": 1.0,
            "compute_ms": 50.0,
            "step": 3,
            "communication_ms": 70.0,
            "idle_data_ms": 1e300,
            "data_ms": 1.0,
        },
        {"window_ms": 10.0, "compute_ms": -3.0, "step": 3, "data_ms": -1.0},
        {"window_ms": 5e-324, "compute_ms": 5e-324, "step": 3, "kernels": 0, "idle_gaps_ms": 1.0},
        {
            "window_ms": 10.0,
            "compute_ms": 1.0,
            "step": 3,
            "top": [{"name": None, "ms": 3.0}, {"name": "k", "ms": math.nan}],
        },
        {"window_ms": 10.0, "compute_ms": 1.0, "step": 2**62, "loader": "", "profiler": {"with_stack": True}},
    ],
)
def test_odd_records_are_no_errors(build, row: dict[str, Any]):
    def fill(writer: CapsuleWriter) -> None:
        writer.record("profile", row)
        writer.record("profile", {"step": 4, "rank": 3, **row})

    assert not analyze(build(fill), [rule_named(each) for each in FAMILY]).errors


def test_the_other_real_traces_raise_no_false_alarm(judge: Judge):
    if not REAL.is_dir():
        pytest.skip("../shared/real is not here")
    assert not judge(REAL / "hta" / "simple_add.benchmark_result_493459_1694039959_trace.json.gz").findings
    assert not judge(REAL / "hta" / "amd_mi250_minitoy.json.gz").findings
    assert not judge(REAL / "hta" / "cpu_only_rank-34.pt.trace.json.gz").findings
    sampled = judge(REAL / "hta" / "sampled_rank-0.json.gz")
    assert {each.confidence for each in sampled.findings} == {"undetermined"}
    assert all("ranks with a trace" in {one.name for one in each.evidence} for each in sampled.findings)


class TestOddSteps:
    """What a few steps, or a part of a trace, would make believe."""

    @pytest.mark.quiet("performance/gpu-idle")
    @pytest.mark.parametrize("what", ["evaluate", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"])
    def test_one_long_step_makes_no_idle_device(self, judge: Judge, what: str):
        """Nine steps of 10 ms compute 9 ms; one waits 120 ms: 60 % of the time is idle, of the median step 10 %."""
        trace, at = KinetoTrace(), 0.0
        for step in range(10):
            length = 130.0 if step == 5 else 10.0
            trace.step(10 + step, at, length).kernel(at + 0.1, 9)
            if step == 5:
                trace.add("user_annotation", what, at + 9.5, 120)
            at += length
        assert said(judge(trace)) == ["no-bottleneck"]

    @pytest.mark.quiet("performance/communication-bound")
    def test_one_slow_collective_bounds_no_job(self, judge: Judge):
        trace, at = KinetoTrace(), 0.0
        for step in range(10):
            wait = 90.0 if step == 5 else 0.1
            trace.step(10 + step, at, 9.5 + wait).kernel(at + 0.1, 9).kernel(at + 9.2, wait, NCCL)
            at += 9.5 + wait
        assert said(judge(trace)) == ["no-bottleneck"]

    def test_a_torn_trace_whose_device_work_is_lost_is_not_called_idle(self, judge: Judge, tmp_path: Path):
        """Profilers write the host's events first: what is torn off is the device's."""
        trace = drawn(steps=6, data=0.0, compute=9)
        trace.events.sort(key=lambda each: each["cat"] == "kernel")
        whole = trace.text()
        torn = tmp_path / "torn.pt.trace.json"
        torn.write_text(whole[: whole.index('"kernel"') + 1500])
        report = judge(torn)
        assert said(report) == ["compute-bound"]
        assert report.findings[0].where.step == 10
        torn.write_text(whole[: whole.index('"kernel"')])
        assert said(judge(torn)) == []

    def test_streams_side_by_side_are_no_more_than_the_whole_time(self, judge: Judge):
        trace = KinetoTrace()
        for step in range(4):
            trace.step(10 + step, 10.0 * step, 10)
            for _ in range(2):
                trace.kernel(10.0 * step + 0.1, 9)
        (finding,) = judge(trace).findings
        assert finding.evidence[0].value == pytest.approx(0.9)
        assert "gemm, 18 ms a step of 10 ms (streams added)." in finding.summary

    def test_a_second_trace_in_the_file_is_left_out_and_said(self, judge: Judge, tmp_path: Path):
        both = tmp_path / "both.pt.trace.json"
        both.write_text(drawn(data=4, compute=5).text() + drawn(first=40).text())
        assert said(judge(both)) == ["input-bound"]
        capsule = Capsule.open(import_files([both], tmp_path / "again", attach=False))
        assert any("another trace" in each for each in capsule.manifest.raw["imported"]["files"][0]["notes"])


class TestMonitorFiles:
    """Logs of nvidia-smi as they lie in a job's directory."""

    @pytest.fixture
    def watched(self, tmp_path: Path) -> Callable[..., Capsule]:
        def watched(**nodes: list[list[tuple[int, int]]]) -> Capsule:
            """A capsule of files: for each device (utilisation in %, memory in MiB), a sample every 10 s."""
            files: list[Path] = []
            for name, devices in nodes.items():
                lines = ["timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB]"]
                for at in range(len(devices[0])):
                    time = f"2026/11/30 {at // 360:02}:{at // 6 % 60:02}:{at % 6}0.000"
                    lines += [
                        f"{time}, {number}, {each[at][0]} %, {each[at][1]} MiB, 81559 MiB"
                        for number, each in enumerate(devices)
                    ]
                files.append(tmp_path / f"{name}.csv")
                files[-1].write_text("\n".join(lines) + "\n")
            return Capsule.open(import_files(files, tmp_path / "out", attach=False))

        return watched

    def test_the_same_device_numbers_of_two_hosts_are_two_devices(self, watched: Callable[..., Capsule]):
        capsule = watched(node1=[[(95, 70_000)] * 60] * 2, node2=[[(95, 70_000)] * 60, [(30, 70_000)] * 60])
        assert sum(key.name == "gpu_utilization" for key in capsule.scalar_keys()) == 4
        (finding,) = analyze(capsule, [rule_named("performance/gpu-idle")]).findings
        assert finding.summary.startswith("Device 1 of node2.csv is in use 30% of the time over 590 s")
        assert any(
            "another host" in each["notes"][0] for each in capsule.manifest.raw["imported"]["files"] if each["notes"]
        )

    @pytest.mark.quiet("performance/gpu-idle")
    def test_a_night_without_a_job_and_a_device_that_is_only_touched_are_no_idling(
        self, watched: Callable[..., Capsule]
    ):
        night = [(95, 70_000)] * 30 + [(0, 4)] * 120 + [(95, 70_000)] * 30
        touched = [(8 if at % 60 == 0 else 0, 900) for at in range(180)]
        assert not analyze(watched(smi=[night, touched]), [rule_named("performance/gpu-idle")]).findings
        held = [(each, 70_000) for each, _ in night]  # the job is there all the time
        (finding,) = analyze(watched(smi=[held]), [rule_named("performance/gpu-idle")]).findings
        assert "in use 32% of the time" in finding.summary

    @pytest.mark.fires("performance/gpu-idle")
    def test_devices_that_stop_at_once_and_keep_their_memory_are_said(self, watched: Callable[..., Capsule]):
        hung = [(98, 70_000)] * 30 + [(0, 70_000)] * 30
        (finding,) = analyze(watched(smi=[hung] * 4), [rule_named("performance/gpu-idle")]).findings
        assert finding.title == "All 4 devices stopped and keep their memory"
        assert (finding.confidence, finding.where.rank) == ("undetermined", None)

    @pytest.mark.quiet("performance/gpu-idle")
    @pytest.mark.parametrize(
        "devices",
        [
            [[(98, 70_000)] * 30 + [(0, 4)] * 30] * 2,  # it gave its memory back
            [[(98, 70_000)] * 30 + [(0, 70_000)] * 5] * 2,  # a pause
            [[(98, 70_000)] * 60, [(98, 70_000)] * 30 + [(0, 70_000)] * 30],  # another one goes on
            [[(60, 70_000), (90, 70_000)] * 15 + [(0, 70_000)] * 30] * 2,  # a server without requests
        ],
        ids=["ended", "pause", "one device", "unsteady"],
    )
    def test_other_ends_are_none(self, watched: Callable[..., Capsule], devices: list[list[tuple[int, int]]]):
        assert not analyze(watched(smi=devices), [rule_named("performance/gpu-idle")]).findings

    @pytest.mark.fires("performance/gpu-idle")
    def test_where_all_devices_are_hardly_used_none_is_named(self, watched: Callable[..., Capsule]):
        devices = [[(20 + number, 70_000)] * 60 for number in range(4)]
        (finding,) = analyze(watched(smi=devices), [rule_named("performance/gpu-idle")]).findings
        assert finding.summary.startswith("All 4 devices are in use 20% to 23% of the time")
        assert finding.where.rank is None
        one = [[(95, 70_000)] * 60, [(20, 70_000)] * 60]
        (finding,) = analyze(watched(smi=one), [rule_named("performance/gpu-idle")]).findings
        assert finding.where.rank == 1


def test_what_a_profiler_calls_utilisation_stands_beside_the_shares_of_the_steps(judge: Judge):
    """Four steps of 10 ms load for 4 and compute for 5: 20 of 40 ms, and 20 of 35 from first to last kernel."""
    (finding,) = judge(drawn(data=4, compute=5)).findings
    told = {each.name: each.value for each in finding.evidence}
    assert told["computing"] == pytest.approx(20 / 40, abs=0.01)
    assert told["busy from first to last work"] == pytest.approx(20 / 35, abs=1e-3)
