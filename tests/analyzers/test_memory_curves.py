"""Leaks in curves of allocated memory, and memory of other processes, from logs and from what monitors measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.importers import import_files

from tests.analyzers.conftest import rule_named

LEAK, OTHERS, FRAGMENTED = "memory/leak", "memory/other-process", "memory/fragmentation"
MIB, GIB = 1 << 20, 1 << 30
REAL = Path(__file__).resolve().parents[3] / "shared" / "real" / "text_logs" / "torchtitan" / "autoresearch"

Build = Callable[..., Capsule]


def says(rule: str, capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, [rule_named(rule)])
    assert not report.errors, report.errors
    return list(report.findings)


def noise(count: int, size: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, count)


class TestACurveThatRises:
    def curve(
        self, build: Build, values: np.ndarray, every: int = 50, name: str = "memory_allocated", **more: np.ndarray
    ):
        step = np.arange(1, len(values) + 1) * every

        def fill(writer: CapsuleWriter) -> None:
            writer.scalars(name, step, np.asarray(values, float), unit="bytes")
            for other, series in more.items():
                writer.scalars(other, step, np.asarray(series, float))

        return build(fill)

    @pytest.mark.fires(LEAK)
    def test_evenly_and_falls_back_at_the_end_of_an_epoch_is_a_leak(self, build: Build):
        """pdearena#4: 7.6 GB at the start, 3.2 MB a step, more than 23 GB at iteration 4,800."""
        epoch = 7.6e9 + 3.2e6 * 50 * np.arange(96)
        values = np.concatenate([epoch, epoch[:30]]) + noise(126, 2e6)
        [finding] = says(LEAK, self.curve(build, values))
        assert finding.confidence == "likely"
        growth = next(each for each in finding.evidence if each.name == "growth")
        assert growth.value == pytest.approx(3.2e6, rel=0.02)
        assert "step 4,850" in finding.summary

    @pytest.mark.parametrize(
        ("levels", "fires"),
        [
            ([20 + 2.5 * n for n in range(12)], True),
            ([20 + 2.5 * n for n in range(9)], False),
            ([20 + 0.1 * n for n in range(12)], False),
            ([20 + 2.5 * n - 4 * (n == 8) for n in range(12)], False),
            ([20, 20.1] * 6, False),
        ],
        ids=["each higher", "too few", "too little", "once lower", "flat"],
    )
    def test_of_a_few_tables_of_one_phase_is_a_leak_where_each_is_higher_by_much(
        self, build: Build, levels: list[float], fires: bool
    ):
        def fill(writer: CapsuleWriter) -> None:
            for number, level in enumerate(levels):
                writer.record("memory", {"step": 50 * number, "allocated": round(level * GIB), "peak": 90 * GIB})

        capsule = build(fill)
        assert [each.confidence for each in says(LEAK, capsule)] == ["likely"] * fires
        if fires:
            assert "51.20 MiB a step" in says(LEAK, capsule)[0].summary  # 2.5 GiB in 50 steps

    def test_of_other_phases_each_is_a_curve_of_its_own_and_evaluation_is_none(self, build: Build):
        def fill(writer: CapsuleWriter) -> None:
            for step in range(24):
                for phase, level in (("forward", 40), ("backward", 20), ("eval", 10 + step)):
                    writer.record("memory", {"step": step, "phase": phase, "allocated": level * GIB})

        assert says(LEAK, build(fill)) == []

    def reserve(self, build: Build, failed: bool, **more: object) -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            step = np.arange(0, 3000, 100)
            writer.scalars("memory_reserved", step, 2e10 + 2e7 * step, unit="bytes")
            for name, level in more.items():
                writer.scalars(name, step, np.full(len(step), level), unit="bytes")
            if failed:
                sizes = {"requested": GIB, "free": 0, "capacity": 80 * GIB}
                writer.record("events", {"kind": "oom", "step": 2990, **sizes})

        return build(fill)

    def test_of_reserved_memory_alone_until_the_device_is_full_leaves_open_what_grew(self, build: Build):
        [finding] = says(LEAK, self.reserve(build, failed=True))
        assert (finding.confidence, finding.cause) == ("undetermined", None)
        assert "what is allocated is not on record" in finding.summary
        assert says(LEAK, self.reserve(build, failed=True, memory_allocated=1e10)) == []

    def test_of_reserved_memory_alone_without_a_failure_is_not_judged(self, build: Build):
        report = analyze(self.reserve(build, failed=False), [rule_named(LEAK)])
        assert [each.rule for each in report.skipped] == [LEAK]

    def test_that_is_given_back_every_so_often_is_a_remark(self, build: Build):
        step = np.arange(600)
        [finding] = says(LEAK, self.curve(build, 6.1e10 + 1e8 * (step % 20)))
        assert (finding.severity, finding.title) == ("info", "Memory rises and is given back")

    @pytest.mark.fires(LEAK)
    @pytest.mark.recorded(LEAK)
    def test_in_a_log_of_deepspeed_is_a_leak(self, tmp_path: Path):
        said = "[2026-08-22 12:19:04,123] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05]"
        speed = "epoch=0/micro_step={step}/global_step={step}, RunningAvgSamplesPerSec=30.1, CurrSamplesPerSec=30.2, "
        log = "".join(
            f"{said.format(step=step)}\n{speed.format(step=step)}"
            f"MemAllocated={12 + step * 0.002:.2f}GB, MaxMemAllocated=30.1GB\n"
            for step in range(10, 2000, 10)
        )
        (tmp_path / "train.log").write_text(log)
        capsule = Capsule.open(import_files([tmp_path / "train.log"], tmp_path / "imported", attach=False))
        [finding] = says(LEAK, capsule)
        growth = next(each for each in finding.evidence if each.name == "growth")
        assert growth.value == pytest.approx(0.002 * GIB, rel=0.05)

    @pytest.mark.quiet(LEAK)
    def test_once_in_the_first_steps_is_the_optimizer_s_state(self, build: Build):
        values = np.full(100, 30e9)
        values[0] = 10e9
        assert says(LEAK, self.curve(build, values + noise(100, 3e6))) == []

    @pytest.mark.parametrize(
        "values",
        [
            8e9 + 4e9 * (1 - np.exp(-np.arange(200) / 25.0)),  # a cache that fills up
            8e9 + 3e9 * (np.arange(200) % 2),  # measured in two phases
            8e9 + 2e9 * (np.arange(200) % 4),
            8e9 + noise(200, 5e8),  # lengths that vary
            8e9 + 2e9 * (np.arange(200) > 100),  # something new once
            8e9 + 1e9 * np.digitize(np.arange(200), [50, 120]),
            np.maximum.accumulate(8e9 + noise(200, 5e8)),  # a maximum so far
            np.full(200, 8e9),
            8e9 - 1e6 * np.arange(200),
            8e9 + 1e5 * np.arange(200),  # 20 MB in all
            np.array([8e9, 9e9, 10e9]),
        ],
    )
    def test_in_another_way_is_quiet(self, build: Build, values: np.ndarray):
        assert says(LEAK, self.curve(build, values)) == []

    def test_only_in_what_is_reserved_is_quiet(self, build: Build):
        rising = 8e9 + 2e7 * np.arange(200)
        flat = np.full(200, 6e9)
        assert says(LEAK, self.curve(build, flat, memory_reserved=rising, memory_device_used=rising)) == []

    def test_with_the_lengths_is_quiet(self, build: Build):
        lengths = 128.0 + 16 * np.arange(200)
        assert says(LEAK, self.curve(build, 8e9 + 1e6 * lengths + noise(200, 1e7), sequence_length=lengths)) == []
        constant = np.full(200, 4096.0)
        assert says(LEAK, self.curve(build, 8e9 + 1e6 * lengths + noise(200, 1e7), sequence_length=constant))

    def test_at_each_evaluation_by_as_much_is_a_leak(self, build: Build):
        values = 8e9 + 2e8 * (np.arange(200) // 10)
        assert says(LEAK, self.curve(build, values))

    def test_with_values_that_are_none_is_quiet(self, build: Build):
        values = np.full(60, np.nan)
        values[::7] = np.inf
        assert says(LEAK, self.curve(build, values)) == []


OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of {size} "
    "GiB of which {free} GiB is free. {others}Of the allocated memory {used} GiB is allocated by PyTorch, and {idle} "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
)
TABLE = """Mon Nov 30 07:{minute:02}:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   44C    P0             312W / 400W |   52224MiB /  81920MiB |     97%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A      4242      C   python                                      31744MiB |
|    0   N/A  N/A      5151      C   /usr/bin/python3                            20480MiB |
+-----------------------------------------------------------------------------------------+
"""
TRACE = 'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n    main()\n'


class TestTheTextOfAFailure:
    def read(self, tmp_path: Path, text: str, more: Callable[[CapsuleWriter], None] | None = None) -> Capsule:
        (tmp_path / "job.log").write_text(text)
        files = [tmp_path / "job.log"]
        if more is not None:
            lines = "".join(f'{{"step": {step}, "seq_len": {128 + 64 * step}}}\n' for step in range(1, 30))
            (tmp_path / "metrics.jsonl").write_text(lines)
            files.append(tmp_path / "metrics.jsonl")
        return Capsule.open(import_files(files, tmp_path / "imported", attach=False))

    def sorted_batches(self) -> str:
        """rapidsai/crossfit#18."""
        numbers = {"asked": "12.00", "size": "47.54", "free": "11.00", "used": "23.57", "idle": "12.12", "others": ""}
        return TRACE + OUT.format(**numbers)

    @pytest.mark.fires(FRAGMENTED)
    def test_decides_likely_and_growing_lengths_are_named_where_they_are_on_record(self, tmp_path: Path):
        [finding] = says(FRAGMENTED, self.read(tmp_path, self.sorted_batches()))
        assert finding.confidence == "likely"
        assert "12.12 GiB are held unused" in finding.summary
        assert "lengths" not in str(finding.cause)
        (tmp_path / "grown").mkdir()
        [finding] = says(FRAGMENTED, self.read(tmp_path / "grown", self.sorted_batches(), more=lambda _: None))
        assert finding.confidence == "likely"
        assert "lengths grow" in str(finding.cause)
        assert "longest batches first" in finding.fix[0]

    @pytest.mark.quiet(FRAGMENTED)
    @pytest.mark.quiet(OTHERS)
    def test_of_a_full_device_is_neither_fragmentation_nor_another_process(self, tmp_path: Path):
        numbers = {"asked": "2.00", "size": "79.10", "free": "0.50", "used": "75.57", "idle": "1.24", "others": ""}
        capsule = self.read(tmp_path, TRACE + OUT.format(**numbers))
        assert says(FRAGMENTED, capsule) == says(OTHERS, capsule) == []

    def test_of_a_real_full_device_is_neither(self, tmp_path: Path):
        logs = sorted(REAL.glob("run*35*"))
        if not logs:
            pytest.skip("../shared/real is not here")
        capsule = Capsule.open(import_files(logs[:1], tmp_path, attach=False))
        assert says(FRAGMENTED, capsule) == says(OTHERS, capsule) == []

    @pytest.mark.fires(OTHERS)
    @pytest.mark.recorded(OTHERS)
    def test_names_the_processes_that_hold_the_device(self, tmp_path: Path):
        others = "Process 4711 has 60.00 GiB memory in use. Process 99 has 18.00 GiB memory in use. "
        numbers = {"asked": "2.00", "size": "79.10", "free": "0.50", "used": "15.00", "idle": "0.80", "others": others}
        [finding] = says(OTHERS, self.read(tmp_path, TRACE + OUT.format(**numbers)))
        assert finding.confidence == "likely"
        assert "4711" in finding.summary


class TestADeviceThatAMonitorWatched:
    def watched(self, build: Build, used: float, reserved: float, name: str = "memory_device_used") -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            climb = np.minimum(1.0, np.arange(1, 61) / 10)
            writer.scalars(
                name, np.arange(60), used - reserved + reserved * climb, time=1e9 + np.arange(60.0), unit="bytes"
            )
            writer.scalars("memory_reserved", np.arange(60), reserved * climb, unit="bytes")

        return build(fill)

    @pytest.mark.fires(OTHERS)
    def test_holds_more_than_this_process_reserved(self, build: Build):
        [finding] = says(OTHERS, self.watched(build, 74 * GIB, 20 * GIB))
        assert "54.00 GiB" in finding.summary
        assert finding.confidence == "likely"
        [finding] = says(OTHERS, self.watched(build, 40 * GIB, 32 * GIB))
        assert finding.confidence == "undetermined"

    def test_names_the_processes_that_a_monitor_lists(self, tmp_path: Path):
        """The columns of nvidia-smi --query-compute-apps are not those of the device: a table has both."""
        rows = "".join(f'{{"step": {step}, "memory_reserved": {30 * GIB}}}\n' for step in range(1, 40))
        (tmp_path / "metrics.jsonl").write_text(rows)
        table = "".join(TABLE.format(minute=minute) for minute in range(10))
        (tmp_path / "smi.log").write_text(table)
        files = [tmp_path / "metrics.jsonl", tmp_path / "smi.log"]
        [finding] = says(OTHERS, Capsule.open(import_files(files, tmp_path / "imported", attach=False)))
        assert finding.confidence == "likely"
        assert "5151 (20.00 GiB)" in finding.summary
        assert "4242" not in finding.summary

    @pytest.mark.quiet(OTHERS)
    @pytest.mark.parametrize("beyond", [0, 0.5 * GIB, 1.0 * GIB, 2.2 * GIB])
    def test_context_and_communication_are_quiet(self, build: Build, beyond: float):
        assert says(OTHERS, self.watched(build, 60 * GIB + beyond, 60 * GIB)) == []
