"""CUDA memory snapshots: documented forms, the replay against what the allocator really held, and damaged files."""

from __future__ import annotations

import contextlib
import gc
import gzip
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.capsules import Capsule
from llmconsole.capsules.allocator import History
from llmconsole.capsules.errors import EvidenceError
from llmconsole.capsules.importers import import_files, memory, recognise
from llmconsole.capsules.importers.jobs import jobs
from llmconsole.capsules.importers.memory import frames, histories, rank_in_name
from llmconsole.capsules.importers.memory.frames import category_of
from llmconsole.capsules.plain_pickle import load_plain

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from benchmarks.caching_allocator import (  # noqa: E402
    GIB,
    MIB,
    CachingAllocator,
    OutOfMemory,
    devices,
    largest_free,
    stack,
)

LINES = [stack(f"f{line} /home/me/train.py:{line}", "main /home/me/train.py:99") for line in range(1, 6)]


class Notes:
    """Takes what the reader says of a file."""

    def __init__(self) -> None:
        self.notes: dict[str, int] = {}

    def note(self, text: str, times: int = 1) -> None:
        self.notes[text] = self.notes.get(text, 0) + times


def histories_of(data: Any) -> list[History]:
    return histories(data, Notes().note)


def save(path: Path, data: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


def opened(path: Path) -> Capsule:
    return Capsule.open(import_files([path], path.parent / "imported", attach=False))


def small() -> CachingAllocator:
    """Two blocks that stay, one that goes, a failure."""
    a = CachingAllocator(100 * MIB, elsewhere=10 * MIB)
    a.malloc(30 * MIB, LINES[0])
    a.free(a.malloc(1000, LINES[1]))
    a.malloc(700, LINES[1])
    with pytest.raises(OutOfMemory):
        a.malloc(70 * MIB, LINES[2])
    return a


class TestTheEvidenceOfASnapshot:
    def test_is_the_state_at_the_failure_with_its_numbers(self, tmp_path: Path):
        a = small()
        capsule = opened(save(tmp_path / "snapshot.pickle", a.snapshot()))
        [event] = capsule.records("events")
        assert (event["kind"], event["requested"], event["free"]) == ("oom", 70 * MIB, 58 * MIB)
        assert (event["reserved"], event["allocated"]) == (32 * MIB, 30 * MIB + 1024)
        assert event["largest_free_block"] == 2 * MIB - 1024
        assert event["frames"][0] == {"name": "f3", "file": "/home/me/train.py", "line": 3}
        assert event["t"] == pytest.approx(a.now_us / 1e6)
        live = [(each["size"], each["count"], each["frames"][0]["name"]) for each in capsule.records("allocations")]
        assert live == [(30 * MIB, 1, "f1"), (1024, 1, "f2")]
        held = {each["total"]: each for each in capsule.records("segments")}
        assert [(each["size"], each["state"]) for each in held[2 * MIB]["blocks"]] == [
            (1024, "allocated"),
            (2 * MIB - 1024, "inactive"),
        ]
        assert held[30 * MIB]["allocated"] == held[30 * MIB]["active"] == 30 * MIB
        allocated = capsule.scalars("memory_allocated")
        assert (allocated.side, allocated.value.max(), allocated.value[-1]) == ("allocator", *(30 * MIB + 1024,) * 2)
        assert capsule.scalars("memory_reserved").value.tolist()[-1] == 32 * MIB
        [ledger] = capsule.records("memory")
        assert (ledger["allocated"], ledger["fragmentation"]) == (30 * MIB + 1024, 2 * MIB - 1024)

    def test_gives_every_event_back_in_its_order(self, tmp_path: Path):
        a = small()
        capsule = opened(save(tmp_path / "snapshot.pickle", a.snapshot()))
        columns = {each.name.partition("/")[2]: each.array() for each in capsule.tensors("allocator/*")}
        kinds = [each["action"] for each in a.events]
        from llmconsole.capsules.allocator import ACTIONS

        assert [ACTIONS[code] for code in columns["action"]] == kinds
        assert columns["size"].tolist() == [each["size"] for each in a.events]
        assert columns["address"].tolist() == [each.get("addr", each.get("device_free")) for each in a.events]

    def test_is_recognised_before_the_readers_of_text_are_loaded(self, tmp_path: Path):
        path = save(tmp_path / "snapshot.pickle", small().snapshot())
        script = (
            f"import sys; from llmconsole.capsules.importers import recognise; print(recognise({str(path)!r}).FORMAT, "
            "'llmconsole.capsules.importers.text_log' in sys.modules)"
        )
        said = subprocess.check_output([sys.executable, "-c", script], text=True)
        assert said.strip() == "CUDA memory snapshot False"

    def test_of_several_devices_is_one_rank_a_device(self, tmp_path: Path):
        first, second = CachingAllocator(GIB), CachingAllocator(GIB, device=2)
        first.malloc(30 * MIB, LINES[0])
        second.malloc(50 * MIB, LINES[1])
        path = save(tmp_path / "snapshot.pickle", devices(first, second))
        capsule = opened(path)
        live = {each["rank"]: each["size"] for each in capsule.records("allocations")}
        assert live == {0: 30 * MIB, 2: 50 * MIB}
        capsule = opened(path.rename(tmp_path / "rank5_snapshot.pickle"))
        assert {each["rank"]: each["size"] for each in capsule.records("allocations")} == {5: 50 * MIB}
        assert "nothing was kept" in str(capsule.manifest.raw["imported"])

    def test_of_each_rank_of_a_job_is_one_capsule_and_two_of_one_rank_are_two(self, tmp_path: Path):
        for rank in (0, 1, 10):
            save(tmp_path / f"snapshot_{rank}.pickle", small().snapshot())
        found, problems = jobs(sorted(tmp_path.iterdir()))
        assert not problems
        assert [len(job.files) for job in found] == [3]
        capsule = Capsule.open(import_files(found[0].files, tmp_path / "out", attach=True))
        assert sorted(each["rank"] for each in capsule.records("events")) == [0, 1, 10]
        assert {each.kind for each in capsule.files()} == {"snapshot"}
        save(tmp_path / "snapshot_01.pickle", small().snapshot())
        found, _ = jobs(sorted(tmp_path.glob("*.pickle")))
        assert [len(job.files) for job in found] == [1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("name", "rank"),
        [
            ("snapshot_3.pickle", None),
            ("snapshot.100.pickle", None),
            ("rank7_memory_snapshot.pickle", 7),
            ("snapshot.pickle", None),
            ("snapshot_20260822_121904.pickle", None),
            ("dump_snapshot_step_100.pickle", None),
            ("h100_4.pickle", None),
        ],
    )
    def test_has_the_rank_that_its_name_says(self, name: str, rank: int | None):
        assert rank_in_name(Path(name)) == rank

    @pytest.mark.parametrize(
        ("names", "ranks"),
        [
            (["snapshot_0.pickle", "snapshot_1.pickle", "snapshot_12.pickle"], [0, 1, 12]),
            (["mem-00.pickle.gz", "mem-01.pickle.gz", "mem-10.pickle.gz"], [0, 1, 10]),
            (["snapshot_0.pickle", "snapshot_100.pickle", "snapshot_200.pickle"], [None] * 3),
            (["snapshot_0.pickle", "snapshot_1.pkl"], [None] * 2),
            (["dump_step_0.pickle", "dump_step_1.pickle"], [None] * 2),
        ],
    )
    def test_has_the_number_in_its_name_for_a_rank_where_files_are_numbered_from_0_on(
        self, tmp_path: Path, names: list[str], ranks: list[int | None]
    ):
        for name in names:
            (tmp_path / name).touch()
        assert [rank_in_name(tmp_path / name) for name in names] == ranks

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("time_us", "x", "time_us cannot be read, and is taken as 0 in events (2)"),
            ("stream", None, "stream cannot be read, and is taken as 0 in events (2)"),
            ("frames", "x", "frames cannot be read, and are taken as unknown in events (2)"),
            ("size", 1.5, "events that are damaged were left out (2)"),
            ("size", ..., "events that are damaged were left out (2)"),
            ("addr", ..., "events that are damaged were left out (2)"),
            ("frames", ..., None),
            ("stream", 7, None),
        ],
    )
    def test_says_once_what_of_its_events_could_not_be_read(
        self, tmp_path: Path, field: str, value: Any, said: str | None
    ):
        memory = CachingAllocator(GIB)
        for at in range(8):
            memory.malloc((at + 1) * MIB, LINES[0])
        snapshot = memory.snapshot()
        for event in [each for each in snapshot["device_traces"][0] if each["action"] == "alloc"][2:4]:
            if value is ...:
                event.pop(field, None)
            else:
                event[field] = value
        capsule = opened(save(tmp_path / "snapshot.pickle", snapshot))
        (file,) = capsule.manifest.raw["imported"]["files"]
        told = [each for each in file["notes"] if "account" not in each]
        assert told == ([said] if said else [])

    def test_that_mosaic_made_up_has_the_peak_that_mosaic_computes(self, tmp_path: Path, real: Path):
        capsule = opened(
            Path(
                save(tmp_path / "m.pickle", pickle.loads((real / "memory_snapshot/mosaic_output.pickle").read_bytes()))
            )
        )
        text = (real / "memory_snapshot/mosaic_expected_test_out.txt").read_text()
        expected = [float(line.split("Usage: ")[1].split()[0]) for line in text.splitlines() if "Memory Usage" in line]
        # Mosaic counts what was asked for, not what it takes.
        columns = {each.name.partition("/")[2]: each.array() for each in capsule.tensors("allocator/*")}
        record = capsule.records("allocations")
        live = sorted((each["size"] / GIB for each in record), reverse=True)
        assert live[: len(expected[:10])] == pytest.approx(sorted(expected, reverse=True)[:10], abs=512 * 8 / GIB)
        assert set(columns["action"].tolist()) == {0, 2, 3} or set(columns["action"].tolist()) >= {0, 2}


def workload(seed: int) -> tuple[CachingAllocator, list[tuple[int, int, int, int]]]:
    """A random job, recorded from somewhere on, and after each of its acts what the allocator really held."""
    chosen = random.Random(seed)
    a = CachingAllocator(
        chosen.choice((2, 4)) * GIB,
        expandable=seed % 2 == 0,
        recording=False,
        entries=chosen.choice((None, 300)),
        own_stacks=seed % 3 == 0,
    )
    live: list[int] = []
    truth: list[tuple[int, int, int, int]] = []
    begin = chosen.randrange(300)
    for act in range(begin + 350):
        if act == begin:
            a.record()
        if live and chosen.random() < 0.48:
            a.free(live.pop(chosen.randrange(len(live))))
        else:
            size = chosen.choice((100, 5000, 700_000, 3 * MIB, 15 * MIB, 64 * MIB, 300 * MIB))
            with contextlib.suppress(OutOfMemory):
                live.append(a.malloc(size, chosen.choice(LINES), stream=chosen.choice((0, 0, 0, 7))))
        if chosen.random() < 0.02:
            a.release()
        if act >= begin:
            truth.append((len(a.events), a.allocated, a.reserved, largest_free(a.snapshot()) if act % 8 == 0 else -1))
    return a, truth


class TestTheReplay:
    @pytest.mark.parametrize("seed", range(8))
    def test_gives_what_the_allocator_really_held_at_every_event(self, seed: int):
        a, truth = workload(seed)
        snapshot = a.snapshot()
        [history] = histories_of(snapshot)
        assert history.sound
        dropped = len(a.events) - len(snapshot["device_traces"][0])
        for events, allocated, reserved, largest in truth:
            at = events - dropped - 1 + history.prologue
            if at < history.prologue:
                continue
            assert history.reserved[at] == reserved
            # A large block keeps up to 1 MiB that nobody asked for, which the trace does not show.
            assert abs(history.allocated[at] - allocated) <= 8 * MIB
            if largest >= 0:
                assert abs(history.largest_free(at) - largest) <= MIB
        assert history.allocated[-1] == pytest.approx(a.allocated, abs=0)
        assert sum(history.live(history.end).size) == a.allocated

    def test_names_the_stack_of_a_block_that_was_there_before_the_trace(self):
        a = CachingAllocator(GIB, entries=1)
        a.malloc(30 * MIB, LINES[3])
        a.malloc(512, LINES[1])
        a.free(a.malloc(700, LINES[2]))
        [history] = histories_of(a.snapshot())
        live = history.live(history.end)
        assert {history.stacks.of(stack)[0][0] for stack in live.stack.tolist()} == {"f4", "f2"}
        assert history.allocated[history.prologue - 1] == 30 * MIB + 512 + 1024  # the one that goes was there, too
        assert history.allocated[-1] == 30 * MIB + 512

    def test_counts_a_block_as_held_until_another_stream_has_done_with_it(self):
        a = CachingAllocator(GIB)
        a.free(a.malloc(100, LINES[1]))
        block = a.malloc(30 * MIB, LINES[0])
        a.free(block, later=True)
        [history] = histories_of(a.snapshot())
        assert history.allocated[-1] == 0
        assert history.largest_free(history.end) == 2 * MIB
        a.complete(block)
        [history] = histories_of(a.snapshot())
        assert history.largest_free(history.end) == 30 * MIB

    def test_works_on_traces_alone_and_on_segments_alone(self):
        a, _ = workload(3)
        whole = a.snapshot()
        [traced] = histories_of({"device_traces": whole["device_traces"]})
        assert len(traced) - traced.prologue == len(whole["device_traces"][0])
        [held] = histories_of({"segments": whole["segments"], "device_traces": [[]]})
        assert held.allocated[-1] == a.allocated
        assert held.reserved[-1] == a.reserved
        assert held.largest_free(held.end) == largest_free(whole)

    def test_rounds_as_the_settings_say(self):
        a = CachingAllocator(GIB)
        a.malloc(5 * MIB, LINES[0])
        snapshot = a.snapshot()
        trace = {"device_traces": snapshot["device_traces"]}
        settings_ = {"roundup_power2_divisions": {"1": 2, "8": 0}}
        [history] = histories_of(trace | {"allocator_settings": settings_})
        assert history.allocated[-1] == 6 * MIB  # 4 MiB and halves of it
        [history] = histories_of(trace | {"allocator_settings": {"roundup_power2_divisions": {"1": 0, "8": 4}}})
        assert history.allocated[-1] == 5 * MIB


class TestFilesOfOtherVersions:
    def check(self, path: Path, size: int = 30 * MIB) -> Capsule:
        found = recognise(path)
        assert found is not None
        assert found.FORMAT == "CUDA memory snapshot"
        capsule = opened(path)
        assert size in [each["size"] for each in capsule.records("allocations")]
        return capsule

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_of_every_protocol(self, tmp_path: Path, protocol: int):
        self.check(save(tmp_path / "s.pickle", small().snapshot(), protocol))

    def test_compressed(self, tmp_path: Path):
        path = tmp_path / "s.pickle.gz"
        path.write_bytes(gzip.compress(pickle.dumps(small().snapshot())))
        self.check(path)

    def test_before_torch_2_a_list_of_segments_with_the_history_of_blocks(self, tmp_path: Path):
        segments = small().snapshot()["segments"]
        for segment in segments:
            for name in ("segment_pool_id", "is_expandable", "requested_size", "frames"):
                del segment[name]
            for block in segment["blocks"]:
                frames, requested = block.pop("frames"), block.pop("requested_size")
                del block["address"]
                if block["state"] != "inactive":
                    block["history"] = [{"addr": 1, "real_size": requested, "frames": frames}]
        capsule = self.check(save(tmp_path / "old.pickle", segments))
        assert [each["frames"][0]["name"] for each in capsule.records("allocations")] == ["f1", "f2"]
        self.check(save(tmp_path / "older.pickle", {"segments": segments, "device_traces": [[]]}))

    def test_of_later_versions_with_fields_that_are_new(self, tmp_path: Path):
        snapshot = small().snapshot()
        for event in snapshot["device_traces"][0]:
            event |= {"pool_id": (0, 0), "user_metadata": "step 3", "compile_context": "0/0"}
            for frame in event["frames"]:
                frame |= {"fx_node_op": "call_function", "fx_node_name": "linear", "fx_original_trace": "x"}
        snapshot["device_traces"][0].insert(0, {"action": "annotate", "addr": 0, "size": 0, "time_us": 5, "frames": []})
        snapshot |= {
            "host_segments": [{"address": 1, "size": 2}],
            "host_traces": [],
            "external_annotations": [{"stage": "START", "name": "ProfilerStep#3", "device": 0, "time_us": 7}],
            "something_new": 1,
        }
        snapshot["allocator_settings"] |= {"max_round_threshold": 0, "max_cached_size": 0}
        capsule = self.check(save(tmp_path / "new.pickle", snapshot))
        notes = str(capsule.manifest.raw["imported"])
        for said in ("annotate", "pinned host memory", "something_new"):
            assert said in notes

    def test_without_frames_and_without_times(self, tmp_path: Path):
        snapshot = small().snapshot()
        for event in snapshot["device_traces"][0]:
            del event["frames"], event["time_us"]
        for segment in snapshot["segments"]:
            del segment["frames"]
            for block in segment["blocks"]:
                del block["frames"]
        capsule = self.check(save(tmp_path / "bare.pickle", snapshot))
        assert all("frames" not in each and "t" not in each for each in capsule.records("allocations"))

    def test_of_a_captured_graph_keeps_its_pool_apart(self):
        a = CachingAllocator(100 * MIB)
        a.free(a.malloc(40 * MIB, LINES[0]))
        with pytest.raises(OutOfMemory):
            a.malloc(110 * MIB, LINES[1])
        snapshot = a.snapshot()
        for event in snapshot["device_traces"][0]:
            event["pool_id"] = (0, 0) if event["action"] == "oom" else (3, 0)
        [history] = histories_of(snapshot)
        at = history.prologue + 3
        assert history.largest_free(at) == 40 * MIB
        assert history.largest_free(at, stream=0, pool=0) == 0

    def test_with_addresses_of_64_bits_and_with_two_devices_of_traces(self):
        high = 0xFFFF_D556_0000_0000
        snapshot = small().snapshot()
        for event in snapshot["device_traces"][0]:
            if "addr" in event:
                event["addr"] += high - 0x7F0000000000
        for segment in snapshot["segments"]:
            segment["address"] += high - 0x7F0000000000
            for block in segment["blocks"]:
                block["address"] += high - 0x7F0000000000
        [history] = histories_of(snapshot)
        assert history.sound
        assert history.allocated[-1] == 30 * MIB + 1024
        assert history.largest_free(history.end) == 2 * MIB - 1024


@pytest.mark.parametrize(
    ("told", "category"),
    [
        ([("_init_group", "/x/torch/optim/adamw.py", 1), ("step", "/x/torch/optim/adamw.py", 2)], "optimizer"),
        ([("zero_grad", "/x/torch/optim/optimizer.py", 1), ("train", "t.py", 2)], "unknown"),
        ([("linear", "/x/torch/nn/functional.py", 1), ("forward", "model.py", 2)], "activation"),
        ([("torch::autograd::Engine::evaluate_function(…)", "", 0)], "gradient"),
        ([("torch::autograd::python::PythonEngine::thread_init(…)", "", 0)], "gradient"),
        ([("torch::autograd::generated::MmBackward0::apply(…)", "", 0), ("torch::autograd::Node::operator()", "", 0)]
        , "gradient"),
        # what operations of a forward pass call where stacks of C++ are recorded, as they are by default
        (
            [
                ("torch::autograd::VariableType::(anonymous namespace)::mm(…)", "", 0),
                ("torch::autograd::THPVariable_mm(_object*, _object*, _object*)", "", 0),
                ("forward", "/job/model.py", 7),
            ],
            "activation",
        ),
        ([("torch::autograd::THPVariable_add(_object*, _object*, _object*)", "", 0)], "unknown"),
        ([("_make_grads", "/x/torch/autograd/__init__.py", 1), ("backward", "/x/torch/_tensor.py", 2)], "gradient"),
        ([("forward", "model.py", 2), ("recompute_fn", "/x/torch/utils/checkpoint.py", 3), ("backward", "b.py", 1)],
         "activation"),
        ([("all_gather_into_tensor", "/x/torch/distributed/distributed_c10d.py", 1)], "communication"),
        ([("update", "/x/transformers/cache_utils.py", 1), ("forward", "m.py", 2)], "kv_cache"),
        ([("__init__", "/x/torch/nn/modules/linear.py", 1), ("build", "m.py", 2)], "parameter"),
        ([("convert", "/x/torch/nn/modules/module.py", 1), ("to", "/x/torch/nn/modules/module.py", 2)], "parameter"),
        ([("extra_loss", "train.py", 1)], "unknown"),
        ([], "unknown"),
    ],
)  # fmt: skip
def test_frames_tell_what_was_allocated_or_nothing(told: list[tuple[str, str, int]], category: str):
    assert category_of(told) == category


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just("alloc"),
    st.just([]),
    st.just({}),
    st.binary(max_size=4),
    st.just(float("nan")),
)


class TestAHostileFile:
    def read(self, tmp_path: Path, data: Any) -> Capsule | str:
        """The capsule, or the one line that refuses the file."""
        path = save(tmp_path / "hostile.pickle", data)
        line = ""
        try:
            return Capsule.open(import_files([path], tmp_path / "out", attach=False))
        except EvidenceError as error:
            line = str(error)
        assert "\n" not in line
        assert "Error" not in line  # no name of an exception
        return line

    @pytest.mark.parametrize(
        "change",
        [
            {"addr": "140000000000000"},
            {"addr": -5},
            {"addr": 2**64 - 1},
            {"addr": 2**90},
            {"addr": None},
            {"size": 2**63},
            {"size": -1},
            {"size": "x"},
            {"size": 1.5},
            {"time_us": 2**80},
            {"time_us": "now"},
            {"stream": 2**64 - 1},
            {"frames": 7},
            {"frames": [7, None, {"name": 3, "filename": [], "line": "x"}, {}]},
            {"frames": [{"name": "a\x1b[31m\ud800", "filename": "b\0", "line": 2**70}]},
            {"action": 7},
            {"action": None},
            {"action": "annotate"},
            {"pool_id": (1, 2, 3, 4, 5, 6)},
            {"pool_id": "x"},
            {},
        ],
    )
    def test_with_fields_of_other_types_loses_those_events_and_no_more(self, tmp_path: Path, change: dict[str, Any]):
        snapshot = small().snapshot()
        trace = snapshot["device_traces"][0]
        trace[1] = {**trace[1], **change} if change else {}
        found = self.read(tmp_path, snapshot)
        assert isinstance(found, Capsule)
        assert found.records("events")
        assert not found.damage()

    @given(st.data())
    @settings(max_examples=30, deadline=None)
    def test_with_anything_anywhere_is_read_or_refused(self, data: st.DataObject):
        snapshot = small().snapshot()
        places: list[tuple[Any, Any]] = [(snapshot, key) for key in snapshot]
        for each in (*snapshot["device_traces"][0], *snapshot["segments"], *snapshot["segments"][0]["blocks"]):
            places += [(each, key) for key in each]
        places += [(snapshot["device_traces"], 0), (snapshot["device_traces"][0], 0), (snapshot["segments"], 0)]
        for _ in range(data.draw(st.integers(1, 4))):
            holder, key = data.draw(st.sampled_from(places))
            if isinstance(holder, list) and not holder:
                continue
            holder[key] = data.draw(JUNK)
        with contextlib.suppress(EvidenceError):
            for history in histories_of(snapshot):
                assert np.isfinite(history.allocated).all()
                history.segments(history.instant)
                assert history.blocks is not None

    def test_out_of_order_with_frees_of_nothing_and_double_frees_is_read(self, tmp_path: Path):
        a, _ = workload(1)
        snapshot = a.snapshot()
        random.Random(0).shuffle(snapshot["device_traces"][0])
        assert isinstance(self.read(tmp_path, snapshot), Capsule)
        free = {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0, "frames": []}
        one = {"device_traces": [[free, free, free, {**free, "action": "free_requested"}, free]], "segments": []}
        (tmp_path / "b").mkdir()
        found = self.read(tmp_path / "b", one)
        assert isinstance(found, Capsule)
        assert found.scalars("memory_allocated").value.tolist() == [0, 0, 0, 0, 0]

    @pytest.mark.parametrize(
        "data",
        [
            {"segments": [], "device_traces": []},
            {"segments": 3, "device_traces": "x", "total_size": 1},
            {"segments": [3, None, "x"], "device_traces": [3, None], "total_size": 0},
            {"segments": [{"device": -7, "total_size": "x"}], "device_traces": []},
            {"segments": [{"device": 0, "total_size": 2**64, "address": 3}], "device_traces": [[None] * 9]},
            [{"total_size": 1, "allocated_size": {}, "address": [], "blocks": 5}],
        ],
    )
    def test_that_holds_nothing_is_refused_with_one_line(self, tmp_path: Path, data: Any):
        assert isinstance(self.read(tmp_path, data), str)

    def test_with_a_million_frames_or_stacks_takes_bounded_room(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(frames, "MOST_STACKS", 500)
        frame = {"name": "f", "filename": "x.py", "line": 1}
        huge = [frame] * 1_000_000
        events = [{"action": "alloc", "addr": n * 512, "size": 1, "stream": 0, "frames": huge} for n in range(200)]
        [history] = histories_of({"device_traces": [events]})
        assert len(history.stacks) <= 3
        own = [
            {"action": "alloc", "addr": n * 512, "size": 1, "stream": 0, "frames": [{**frame, "line": n}]}
            for n in range(2000)
        ]
        notes = Notes()
        [history] = histories({"device_traces": [own]}, notes.note)
        assert len(history.stacks) <= 502
        assert len(history.blocks) == 2000
        assert any("more stack traces" in each for each in notes.notes)

    def test_that_shares_no_frames_keeps_its_stacks(self, monkeypatch: pytest.MonkeyPatch):
        """Other programs than torch write each event's frames anew: two lines of code stay two stacks."""
        monkeypatch.setattr(frames, "MOST_STACKS", 500)
        monkeypatch.setattr(frames, "MOST_FRAMES", 500)
        events = [
            {"action": "alloc", "addr": n * 512, "size": 1, "stream": 0}
            | {"frames": [{"name": "f", "filename": "x.py", "line": 1 + n % 2}]}
            for n in range(2000)
        ]
        notes = Notes()
        [history] = histories({"device_traces": [events]}, notes.note)
        assert sorted(int((history.stack == each).sum()) for each in (2, 3)) == [1000, 1000]
        assert not any("more stack traces" in each for each in notes.notes)

    @pytest.mark.parametrize("odd", [{}, {"line": "7"}, {"name": None}, {"filename": b"x.py"}])
    def test_with_frames_written_anew_for_each_event_has_the_stacks_of_one_that_shares_them(self, odd: dict[str, Any]):
        """``odd`` is what one frame says that no frame of torch does."""
        device = CachingAllocator(GIB)
        for turn in range(200):
            device.malloc(MIB, LINES[turn % len(LINES)])
        shared = device.snapshot()
        trace = shared["device_traces"][0]
        trace[-1]["frames"] = [{**trace[-1]["frames"][0], **odd}, {"name": "main"}]
        anew = [{**event, "frames": [dict(each) for each in event["frames"]]} for event in trace]
        [one], [other] = histories_of({"device_traces": [trace]}), histories_of({"device_traces": [anew]})
        assert list(map(one.stacks.of, one.stack.tolist())) == list(map(other.stacks.of, other.stack.tolist()))
        assert len(one.stacks) == len(other.stacks)

    def test_is_read_with_the_collector_off_until_its_containers_are_gone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Between two times of being off it would look at all of them."""
        states: list[bool] = []

        def loaded(*given: Any) -> Any:
            states.append(gc.isenabled())
            return load_plain(*given)

        monkeypatch.setattr(memory, "load_plain", loaded)
        monkeypatch.setattr(memory, "_say_what_else", lambda *_: states.append(gc.isenabled()))
        self.read(tmp_path, small().snapshot())
        assert states == [False, False]
        assert gc.isenabled()

    def test_torn_anywhere_or_with_a_call_in_it_is_refused_with_one_line(self, tmp_path: Path):
        whole = pickle.dumps(small().snapshot())
        for share in (0.3, 0.9, 0.999):
            path = tmp_path / f"{share}.pickle"
            path.write_bytes(whole[: int(len(whole) * share)])
            with pytest.raises(EvidenceError) as raised:
                import_files([path], tmp_path / "out", attach=False)
            assert "torn" in str(raised.value)

        class Call:
            def __reduce__(self) -> Any:
                return (print, ("called",))

        path = save(tmp_path / "call.pickle", {"segments": [{"total_size": 1}], "device_traces": [Call()]})
        with pytest.raises(EvidenceError, match="only plain data"):
            import_files([path], tmp_path / "out", attach=False)
