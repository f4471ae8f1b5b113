"""Traces of torch's profiler: steps, the device's time cut up without a rest, ranks, memory, torn and odd files."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import EvidenceError, Source, import_files, import_job, recognise
from llmconsole.capsules.importers.jobs import jobs
from llmconsole.capsules.importers.kineto import intervals
from llmconsole.capsules.importers.kineto.events import Trace

from ...traces import BASE, NCCL, KinetoTrace
from .conftest import Imports, notes


def profiles(capsule: Capsule) -> list[dict]:
    return [dict(each) for each in capsule.records("profile")]


def three_steps(rank: int | None = None, world: int = 1, **header) -> KinetoTrace:
    """Steps of 10 ms: 4 ms computation, 3 ms communication of which 1 ms beside it, 0.5 ms copy, 2 ms of loading."""
    trace = KinetoTrace(rank, world, **header)
    for step in range(3):
        at = 10.0 * step
        trace.step(step + 5, at, 10).data(at, 2)
        trace.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 2, 0.5, 7, device=0)
        trace.kernel(at + 3, 4).kernel(at + 6, 3, NCCL)
    return trace


class TestWindows:
    def test_the_parts_of_a_step_add_up_to_it(self, imported: Imports):
        found = profiles(imported(three_steps().text(), name="trace.json"))
        assert [each["step"] for each in found] == [5, 6, 7]
        for each in found:
            expected = {
                "window_ms": 10.0,
                "compute_ms": 4.0,
                "communication_total_ms": 3.0,
                "communication_ms": 2.0,
                "copy_ms": 0.5,
                "busy_ms": 6.0,
                "idle_ms": 3.5,
                "data_ms": 2.0,
                "idle_data_ms": 2.0,
                "idle_gaps_ms": 1.5,
            }
            assert {name: each[name] for name in expected} == pytest.approx(expected)
            assert (each["kernels"], each["launches"], each["devices"]) == (2, 2, 1)
            assert each["top"][0] == {"name": "gemm", "ms": pytest.approx(4.0), "calls": 1}
        assert found[1]["t"] == pytest.approx(BASE / 1e9 + 0.010)

    def test_kernels_that_overlap_count_once(self, imported: Imports):
        trace = KinetoTrace().step(3, 0, 10).kernel(1, 4).kernel(2, 4).kernel(2, 1).kernel(5.5, 0.5)
        (found,) = profiles(imported(trace.text(), name="trace.json"))
        assert (found["compute_ms"], found["idle_ms"]) == (pytest.approx(5.0), pytest.approx(5.0))

    def test_a_step_ends_when_the_device_has_done_what_it_launched(self, imported: Imports):
        """The host is 6 ms ahead: cut at the host's marks, the first step would idle and the last would be lost."""
        trace = KinetoTrace()
        for step in range(3):
            trace.step(step + 4, 4.0 * step, 4).kernel(1 + 8.0 * step, 8, launched=4.0 * step + 0.5)
        found = profiles(imported(trace.text(), name="trace.json"))
        assert [each["window_ms"] for each in found] == pytest.approx([9.0, 8.0, 8.0])
        assert [each["idle_ms"] for each in found] == pytest.approx([1.0, 0.0, 0.0])

    def test_the_step_that_begins_after_the_last_one_is_none(self, imported: Imports):
        trace = three_steps().step(8, 30, 0.05)
        assert [each["step"] for each in profiles(imported(trace.text(), name="trace.json"))] == [5, 6, 7]

    def test_loading_in_another_thread_is_no_wait(self, imported: Imports):
        trace = KinetoTrace().step(3, 0, 10).kernel(1, 8).data(0, 10, tid=99).data(0, 1)
        (found,) = profiles(imported(trace.text(), name="trace.json"))
        assert found["data_ms"] == pytest.approx(1.0)

    def test_without_steps_the_device_work_is_one_window_and_it_is_said(self, imported: Imports):
        capsule = imported(KinetoTrace().kernel(100, 4).kernel(120, 4).text(), name="trace.json")
        (found,) = profiles(capsule)
        assert "step" not in found
        assert found["window_ms"] == pytest.approx(24.0)
        assert "no ProfilerStep" in notes(capsule)
        assert not capsule.records("ranks")

    def test_several_devices_are_a_mean(self, imported: Imports):
        trace = KinetoTrace().step(2, 0, 10).kernel(1, 8).kernel(1, 4, device=1)
        (found,) = profiles(imported(trace.text(), name="trace.json"))
        assert (found["devices"], found["compute_ms"]) == (2, pytest.approx(6.0))

    def test_the_hosts_operations_without_what_they_call(self, imported: Imports):
        trace = KinetoTrace(deviceProperties=[]).step(2, 0, 10)
        trace.add("cpu_op", "aten::linear", 1, 6).add("cpu_op", "aten::addmm", 2, 4).add("cpu_op", "aten::add", 7.5, 1)
        trace.add("cpu_op", "aten::add", 1, 3, tid=2).add("user_annotation", "gloo:all_reduce", 3, 2, tid=3)
        (found,) = profiles(imported(trace.text(), name="trace.json"))
        assert {each["name"]: each["ms"] for each in found["top"]} == pytest.approx(
            {"aten::addmm": 4.0, "aten::add": 4.0, "aten::linear": 2.0}
        )
        assert found["communication_ms"] == pytest.approx(2.0)
        assert "compute_ms" not in found


class TestJobs:
    def test_rank_and_size_come_from_the_trace(self, tmp_path: Path):
        files = [three_steps(rank, 8).write(tmp_path / f"host_{17 + rank}.{rank}.pt.trace.json.gz") for rank in (3, 5)]
        ((job,), problems) = jobs(files)
        assert not problems
        capsule = Capsule.open(import_files(job.files, tmp_path / "out", attach=False))
        assert {each["rank"] for each in profiles(capsule)} == {3, 5}
        assert capsule.manifest.run.world_size == 8
        assert "rank 3 of 8" in notes(capsule)
        assert {each["rank"]: each["compute_ms"] for each in capsule.records("ranks")} == pytest.approx(
            {3: 4.0, 5: 4.0}
        )
        assert [each["memory"] for each in capsule.manifest.placement["ranks"]] == [80 * 2**30] * 2

    def test_rank_from_the_name_and_none_at_all(self, tmp_path: Path):
        named = three_steps().write(tmp_path / "rank12_trace.json.gz")
        capsule = Capsule.open(import_files([named], tmp_path / "out", attach=False))
        assert {each["rank"] for each in profiles(capsule)} == {12}
        assert "tells a rank" not in notes(capsule)
        nameless = three_steps().write(tmp_path / "trace.json")
        assert "tells a rank" in notes(Capsule.open(import_files([nameless], tmp_path / "out", attach=False)))

    def test_two_traces_of_the_same_steps_are_two_runs(self, tmp_path: Path):
        files = [three_steps().write(tmp_path / f"{name}.json") for name in ("before", "after")]
        assert len(jobs(files)[0]) == 2

    def test_kernels_tell_of_their_collective(self, imported: Imports):
        args = {
            "Collective name": "_allgather_base",
            "In msg nelems": 1024,
            "Out msg nelems": 8192,
            "dtype": "BFloat16",
            "Group size": 8,
            "Process Group Name": "3",
            "Process Group Description": "fsdp",
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        }
        trace = KinetoTrace(0, 8).step(2, 0, 10).kernel(1, 2, NCCL, **args).kernel(4, 2, NCCL, **{"Collective name": 3})
        (found,) = imported(trace.text(), name="trace.json").records("collectives")
        assert (found["op"], found["dtype"], found["group"], found["group_desc"]) == (
            "_all_gather_base",
            "bfloat16",
            "3",
            "fsdp",
        )
        assert (found["group_ranks"], found["shapes_in"], found["shapes_out"]) == (list(range(8)), [[1024]], [[8192]])
        assert found["t_completed"] - found["t_started"] == pytest.approx(0.002, abs=1e-6)
        assert "seq" not in found


class TestTimes:
    def test_display_unit_is_no_unit_and_old_times_count_since_1970(self, imported: Imports):
        trace = three_steps(displayTimeUnit="ns")
        del trace.header["baseTimeNanoseconds"]
        for event in trace.events:
            event["ts"] += 1_623_142_623_460_000
        first = profiles(imported(trace.text(), name="trace.json"))[0]
        assert first["window_ms"] == pytest.approx(10.0)
        assert first["t"] == pytest.approx(1_623_142_623.46)

    def test_nanoseconds_are_told_by_their_size(self, imported: Imports):
        trace = three_steps()
        for event in trace.events:
            event["ts"] = 1_790_857_026_000_000_000 + event["ts"] * 1000
            event["dur"] *= 1000
        capsule = imported(trace.text(), name="trace.json")
        assert profiles(capsule)[0]["window_ms"] == pytest.approx(10.0, rel=1e-3)
        assert "nanoseconds" in notes(capsule)

    def test_old_capital_categories(self, imported: Imports):
        trace = three_steps()
        new = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "user_annotation": "Operator", "cuda_runtime": "Runtime"}
        for event in trace.events:
            event["cat"] = new[event["cat"]]
            event["tid"] = str(event["tid"])
        assert profiles(imported(trace.text(), name="trace.json"))[2]["idle_ms"] == pytest.approx(3.5)


class TestMemory:
    def test_the_allocators_instants_are_series(self, imported: Imports):
        trace = three_steps(2, 4)
        for at, (allocated, reserved) in enumerate([(100, 400), (300, 400), (200, 800)]):
            args = {
                "Device Type": 1,
                "Device Id": 0,
                "Bytes": 5,
                "Total Allocated": allocated,
                "Total Reserved": reserved,
            }
            trace.events.append(
                {"ph": "i", "name": "[memory]", "ts": 1e3 * at, "pid": 1, "tid": 1, "s": "t", "args": args}
            )
        capsule = imported(trace.text(), name="trace.json")
        assert capsule.scalars("memory_allocated", rank=2).value.tolist() == [100, 300, 200]
        assert capsule.scalars("memory_reserved", rank=2).value.tolist() == [400, 400, 800]
        assert capsule.scalars("memory_allocated", rank=2).time[1] == pytest.approx(BASE / 1e9 + 0.001)


class TestOddFiles:
    def test_a_torn_trace_says_so_and_keeps_what_is_whole(self, tmp_path: Path):
        text = three_steps().text()
        for cut in range(len(text) // 3, len(text), 173):
            path = tmp_path / "torn.json"
            path.write_text(text[:cut])
            found = import_job([path], tmp_path / "out", attach=False)
            capsule = Capsule.open(found.path)
            assert profiles(capsule)
            assert "torn" in notes(capsule) or cut > text.rindex("}\n  ]")

    def test_a_torn_archive(self, tmp_path: Path):
        trace = three_steps()
        for at in range(3000):
            trace.kernel(30 + at / 100, 0.005, f"kernel {random.Random(at).random()}")
        data = gzip.compress(trace.text().encode())
        (tmp_path / "a.json.gz").write_bytes(data[: len(data) // 2])
        capsule = Capsule.open(import_files([tmp_path / "a.json.gz"], tmp_path / "out", attach=False))
        assert len(profiles(capsule)) == 3

    @pytest.mark.parametrize(
        "odd",
        [
            '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {"occupancy": nan, "b": -inf}}',
            '{"ph": "X", "cat": "cpu_op", "name": "C:\\Users\\me", "ts": 1, "dur": 2}',
            '{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 2}',
            '{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": [], "args": 7}',
            '{"ph": "X", "cat": "kernel", "name": null, "ts": -5e30, "dur": -1, "args": {"device": {}, "stream": []}}',
            '{"ph": "i", "name": "[memory]", "ts": null, "args": {"Total Allocated": "x", "Device Id": 1e99}}',
            '{"ph": "X", "cat": {}, "name": 3, "ts": 1, "dur": 1, "args": {"list": [{"a": 1}, {"b": [{}, {}]}]}}',
            "7",
            '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#999999999999999999999", "ts": 1, "dur": 2}',
        ],
    )
    def test_an_odd_event_costs_no_other(self, tmp_path: Path, odd: str):
        text = three_steps().text()
        at = text.index("}\n    },\n    {", len(text) // 2) + len("}\n    },\n")
        (tmp_path / "odd.json").write_text(f"{text[:at]}{odd},\n{text[at:]}")
        capsule = Capsule.open(import_files([tmp_path / "odd.json"], tmp_path / "out", attach=False))
        steps = [each for each in profiles(capsule) if each.get("step") in (5, 6, 7)]
        assert [each["communication_total_ms"] for each in steps] == pytest.approx([3.0] * 3)

    def test_a_list_of_events_alone_and_one_that_was_never_closed(self, imported: Imports):
        events = json.dumps(three_steps().events)
        assert len(profiles(imported(events, name="list.json"))) == 3
        assert len(profiles(imported(events[:-1] + ",", name="open.json"))) == 3

    def test_headers_after_the_events_and_as_text(self, imported: Imports):
        trace = three_steps()
        body = json.dumps({"traceEvents": trace.events, "distributedInfo": "{'rank': 4, 'world_size': 6}"})
        assert {each["rank"] for each in profiles(imported(body, name="trace.json"))} == {4}

    def test_a_header_longer_than_what_is_looked_at_first(self, imported: Imports):
        groups = [{"pg_name": str(each), "ranks": list(range(3000))} for each in range(12)]
        trace = three_steps(with_stack=1, profile_memory=1, record_shapes=1)
        trace.header["distributedInfo"] = {"rank": 7, "world_size": 3000, "pg_config": groups}
        capsule = imported(trace.text(), name="trace.json")
        assert {each["rank"] for each in profiles(capsule)} == {7}
        assert capsule.manifest.run.world_size == 3000

    @pytest.mark.parametrize("text", ['{"traceEvents": []}', '{"schemaVersion": 1, "deviceProperties": [], "traceEv'])
    def test_nothing_in_it_is_one_line(self, imported: Imports, text: str):
        with pytest.raises(EvidenceError, match=r"no event|no array"):
            imported(text, name="trace.json")

    def test_json_that_is_no_trace(self, tmp_path: Path):
        (tmp_path / "a.json").write_text('{"schemaVersion": 1, "widgets": []}')
        assert recognise(tmp_path / "a.json") is None

    def test_pieces_smaller_than_the_file_hold_the_same_events(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = three_steps().write(tmp_path / "a.json")
        whole = [event for piece in Trace(Source(path)).pieces() for event in piece]
        monkeypatch.setattr("llmconsole.capsules.importers.kineto.events._PIECE", 700)
        trace = Trace(Source(path))
        assert [event for piece in trace.pieces() for event in piece] == whole
        assert trace.header["traceName"] == "made by a test"


class TestIntervals:
    def test_against_a_count_of_moments(self):
        random_ = random.Random(3)
        for _ in range(50):
            left, right = (
                [(random_.randrange(60), random_.randrange(12)) for _ in range(random_.randrange(12))] for _ in range(2)
            )
            spans = [intervals.union([a for a, _ in each], [b for _, b in each]) for each in (left, right)]
            moments = [{at for a, b in each for at in range(a, a + b)} for each in (left, right)]
            assert [intervals.total(each) for each in spans] == [len(each) for each in moments]
            assert intervals.total(intervals.both(*spans)) == len(moments[0] & moments[1])
            assert intervals.total(intervals.gaps(spans[0], 10, 50)) == len(set(range(10, 50)) - moments[0])
            assert intervals.total(intervals.within(spans[0], 10, 50)) == len(set(range(10, 50)) & moments[0])


class TestRealTraces:
    """Traces of real jobs: INDEX.md beside them says what is in each."""

    def test_the_loader_in_the_training_process(self, imported: Imports, real: Path):
        found = profiles(imported(real / "kineto" / "tb_plugin" / "resnet50_num_workers_0.pt.trace.json.gz"))
        window, busy = (sum(each[name] for each in found) for name in ("window_ms", "busy_ms"))
        assert [each["step"] for each in found] == [5, 6, 7, 8, 9, 10]
        assert sum(each["data_ms"] for each in found) == pytest.approx(416, abs=0.5)
        assert 0.54 < busy / window < 0.62
        assert busy == pytest.approx(591.5, abs=0.1)  # the sum of the kernels' lengths: one stream

    def test_one_of_128_ranks_and_one_of_300_on_a_cpu(self, imported: Imports, real: Path):
        capsule = imported(real / "kineto" / "hta" / "sampled_rank-0.json.gz")
        assert capsule.manifest.run.world_size == 128
        assert "rank 0 of 128" in notes(capsule)
        alone = imported(real / "kineto" / "hta" / "cpu_only_rank-34.pt.trace.json.gz")
        (found,) = profiles(alone)
        assert (found["rank"], found["step"], alone.manifest.run.world_size) == (34, 551, 300)
        assert "compute_ms" not in found
        assert "CPU alone" in notes(alone)

    def test_names_of_the_other_vendor(self, imported: Imports, real: Path):
        capsule = imported(real / "kineto" / "hta" / "amd_mi250_minitoy.json.gz")
        (found,) = profiles(capsule)
        assert (found["step"], found["kernels"], found["launches"]) == (1, 14, 14)
        assert found["copy_ms"] == pytest.approx(0.038, abs=1e-3)
        assert capsule.manifest.environment.gpu == "AMD Radeon Graphics"

    def test_four_jobs_in_one_directory(self, real: Path):
        assert len(jobs(sorted((real / "kineto" / "hta").iterdir()))[0]) == 4


class TestTorchItself:
    def test_a_schedule_with_shapes_memory_and_stacks(self, tmp_path: Path):
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        model, rows = torch.nn.Linear(32, 32), [torch.randn(32) for _ in range(40)]
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        path = tmp_path / "rank1_trace.json.gz"
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=4, repeat=1),
            on_trace_ready=lambda each: each.export_chrome_trace(str(path)),
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        ) as profiler:
            for batch in loader:
                model(batch).sum().backward()
                profiler.step()
        capsule = Capsule.open(import_files([path], tmp_path / "out", attach=False))
        found = profiles(capsule)
        assert [each["step"] for each in found] == [2, 3, 4, 5]
        assert all(
            each["profiler"] == dict.fromkeys(("with_stack", "record_shapes", "profile_memory"), True) for each in found
        )
        assert all("aten::addmm" in [one["name"] for one in each["top"]] for each in found)
        assert all(0 < each["data_ms"] <= each["window_ms"] for each in found)
        assert len(capsule.scalars("memory_allocated (cpu)", rank=1).value) > 10
