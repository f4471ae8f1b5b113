"""Flight-recorder dumps become collectives and states of ranks, whichever of their many forms they come in."""

import copy
import gzip
import json
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.errors import EvidenceError
from llmconsole.capsules.importers import import_files, import_job, recognise, source
from llmconsole.capsules.importers.flight import rank_in_name
from llmconsole.capsules.importers.jobs import jobs
from llmconsole.capsules.importers.run import Run
from llmconsole.capsules.importers.source import Source
from llmconsole.capsules.limits import MIB

HERE = Path(__file__).parent / "fixtures" / "flight"
REAL = Path(__file__).resolve().parents[4] / "shared" / "real" / "flight_recorder"
FRAMES = [
    {"name": "all_reduce", "filename": "/torch/distributed_c10d.py", "line": 2696},
    {"name": "train", "filename": "/job/train.py", "line": 44},
]
BASE = 1_700_000_000_000_000_000


def entry(number, op="all_reduce", seq=None, group=("0", "default_pg"), **fields):
    """One finished call as torch 2.9 writes it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "thread_id": "1",
        "thread_name": "python",
        "collective_seq_id": number + 1 if seq is None else seq,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": BASE + number * 10**9,
        "input_sizes": [[4, 3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 3]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": BASE + number * 10**9 + 5 * 10**8,
        "time_discovered_completed_ns": BASE + number * 10**9 + 6 * 10**8,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": FRAMES,
    } | fields


def dump(entries=(), ranks="[0, 1]", **fields):
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {f"last_{each}_collective": len(entries) for each in ("enqueued", "started", "completed")}},
        "comm_lib_version": "2.27.3",
        "entries": list(entries),
    } | fields


@pytest.fixture
def job(tmp_path):
    """``job({name: dump})``: write the dumps, import what lies in the directory as the command line does."""

    def run(files, expect=1):
        place = tmp_path / "dumps"
        place.mkdir()
        for name, value in files.items():
            if not isinstance(value, bytes):
                value = json.dumps(value).encode() if name.endswith("json") else pickle.dumps(value, 2)
            (place / name).write_bytes(value)
        found, problems = jobs(sorted(place.iterdir()))
        assert (len(found), problems) == (expect, [])
        return [imported(each.files, tmp_path) for each in found] if expect != 1 else imported(found[0].files, tmp_path)

    return run


def imported(files, place, problems=()):
    done = import_job(files, place / "capsules", attach=False)
    assert done.problems == problems
    capsule = Capsule.open(done.path)
    assert capsule.damage() == ()
    return capsule


def dumped(tmp_path, value, name="dump_0"):
    (tmp_path / name).write_bytes(pickle.dumps(value, 4))
    return tmp_path / name


def states(capsule):
    return {each["rank"]: each for each in capsule.records("ranks")}


def at(record):
    return record["group"], record["seq"]


def notes(capsule):
    return [note for file in capsule.manifest.raw["imported"]["files"] for note in file["notes"]]


class TestFields:
    def test_a_call_has_every_field_in_the_words_of_a_capsule(self, job):
        capsule = job({"dump_0": dump([entry(0, output_dtypes=["BFloat16"])]), "dump_1": dump([entry(0)])})
        assert capsule.records("collectives", rank=0) == [
            {
                "group": "0",
                "group_desc": "default_pg",
                "group_ranks": [0, 1],
                "seq": 1,
                "order": 0,
                "op": "all_reduce",
                "dtype": "float32",
                "dtypes_out": ["bfloat16"],
                "shapes_in": [[4, 3]],
                "shapes_out": [[4, 3]],
                "state": "completed",
                "t_created": 1_700_000_000.0,
                "t_started": 1_700_000_000.5,
                "t_completed": 1_700_000_000.6,
                "timeout_s": 600.0,
                "p2p": False,
                "frames": [
                    {"name": "all_reduce", "file": "/torch/distributed_c10d.py", "line": 2696},
                    {"name": "train", "file": "/job/train.py", "line": 44},
                ],
                "rank": 0,
            }
        ]
        assert states(capsule)[1].pop("dumped") > 1_700_000_000
        assert states(capsule)[1] == {
            "rank": 1,
            "dump": True,
            "last_seq": {"0": 1},
            "last_started": {"0": 1},
            "last_completed": {"0": 1},
            "t": 1_700_000_000.0,
        }
        run, environment = capsule.manifest.run, capsule.manifest.environment
        assert (run.world_size, run.backend, environment.nccl) == (2, "nccl", "2.27.3")
        assert capsule.manifest.raw["placement"]["groups"] == {"0": {"desc": "default_pg", "ranks": [0, 1]}}

    def test_a_direct_call_names_the_global_rank_of_the_other_side(self, job):
        config = {"43": {"name": "43", "desc": "PIPELINE", "ranks": "[0, 4, 8, 12]"}}
        calls = [
            entry(0, "send 0->3", seq=26, group=("43", "PIPELINE"), p2p_seq_id=7, state="started", retired=False),
            entry(1, "recv 0<-1", seq=26, group=("43", "PIPELINE"), p2p_seq_id=8, is_p2p=None),
        ]
        calls[0]["is_p2p"] = True
        status = {"0": {"last_enqueued_collective": 8, "last_started_collective": -1, "last_completed_collective": 8}}
        capsule = job({"dump_0": dump(calls, pg_config=config, pg_status=status)})
        send, receive = capsule.records("collectives")
        assert (send["op"], send["peer"], send["seq"], send["p2p"]) == ("send", 12, 7, True)
        assert (receive["op"], receive["peer"], receive["seq"], receive["p2p"]) == ("recv", 4, 8, True)
        # Streams of direct calls overtake one another: that the eighth is done says nothing of the seventh.
        assert (send["state"], receive["state"]) == ("started", "completed")
        # The status of such a group counts direct calls; the entries tell how many collectives there were.
        assert states(capsule)[0]["last_seq"] == {"43": 26}

    def test_retired_calls_and_those_before_the_last_completed_one_are_completed(self, job):
        calls = [
            entry(0, state="scheduled", retired=True),
            entry(1, state="started", retired=False),
            entry(2, state="started", retired=False),
        ]
        status = {"0": {"last_enqueued_collective": 3, "last_started_collective": -1, "last_completed_collective": 2}}
        capsule = job({"dump_0": dump(calls, pg_status=status)})
        assert [each["state"] for each in capsule.records("collectives")] == ["completed", "completed", "started"]
        assert "last_started" not in states(capsule)[0]

    def test_the_calls_of_a_batch_are_as_far_as_the_entry_that_closes_it(self, job):
        # torch updates neither state nor times of what stands within a coalesced call, only of its last entry.
        alone = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
        closing = {"input_sizes": [], "output_sizes": []}
        direct = {"is_p2p": True, "collective_seq_id": 0}
        done = entry(3, "coalesced", p2p_seq_id=2, **direct, **closing)
        calls = [
            entry(0, "send 0->1", p2p_seq_id=1, **direct, **alone),  # no batch: it is in flight
            entry(1, "send 0->1", p2p_seq_id=2, **direct, **alone),
            entry(2, "recv 0<-1", p2p_seq_id=2, **direct, **alone),
            done,
            entry(4, "reduce_scatter_tensor_coalesced", seq=1, **alone),
            entry(5, "reduce_scatter_tensor_coalesced", seq=1, **alone),
            entry(6, "reduce_scatter_tensor_coalesced", seq=1, **closing),
            entry(7, "send 0->1", p2p_seq_id=3, **direct, **alone),
            entry(8, "coalesced", p2p_seq_id=3, **direct, **closing, **alone),
        ]
        capsule = job({"dump_0": dump(calls, pg_status={})})
        assert [each["state"][0] for each in capsule.records("collectives")] == [*"sccc", *"ccc", *"ss"]

    def test_calls_are_in_their_order_however_they_stand_in_the_file(self, job):
        calls = [entry(number) for number in range(9)]
        random.Random(3).shuffle(calls)
        capsule = job({"dump_0": dump(calls)})
        assert [each["order"] for each in capsule.records("collectives")] == list(range(9))

    def test_threads_are_told_apart_where_there_are_several(self, job):
        capsule = job({"dump_0": dump([entry(0), entry(1, thread_id="2")])})
        assert [each["thread"] for each in capsule.records("collectives")] == ["1", "2"]


class TestForms:
    @pytest.mark.parametrize("version", ["2.1", "2.4", "2.9", "2.10", 2.5, None])
    def test_every_version_is_read(self, job, version):
        value = dump([entry(0), entry(1)], version=version)
        if version == "2.1":
            del value["pg_status"]
            for each in value["entries"]:
                del each["timeout_ms"], each["thread_id"]
        capsule = job({"dump_0": value, "dump_1": value})
        assert len(capsule.records("collectives")) == 4
        assert states(capsule)[0]["last_seq"] == {"0": 2}

    def test_json_has_lists_for_tuples_strings_for_numbers_zeros_for_times_and_no_frames(self, job):
        calls = [entry(0, time_discovered_started_ns=0), entry(1, state="scheduled", time_discovered_completed_ns=0)]
        for each in calls:
            del each["frames"]
            each["process_group"] = list(each["process_group"])
        reached = {"last_enqueued_collective": "2", "last_started_collective": "-1", "last_completed_collective": "1"}
        value = dump([calls[0], calls[1] | {"retired": False}], pg_status={"0": reached})
        capsule = job({"dump_0.json": value})
        first, second = capsule.records("collectives")
        assert (first["group"], first["state"], second["state"]) == ("0", "completed", "scheduled")
        assert not {"t_started", "frames"} & first.keys()
        assert "t_completed" not in second
        assert states(capsule)[0]["last_completed"] == {"0": 1}

    def test_lists_may_be_printed(self, job):
        call = entry(0, input_sizes="[[4, 3], [2]]", input_dtypes="['Float', 'Long']", output_sizes="[]", record_id="0")
        capsule = job({"dump_0": dump([call], ranks="[0, 1, 2]")})
        record = capsule.records("collectives")[0]
        assert (record["shapes_in"], record["shapes_out"]) == ([[4, 3], [2]], [])
        assert (record["dtype"], record["group_ranks"]) == ("float32", [0, 1, 2])

    @pytest.mark.parametrize("name", ["dump_0", "dump_0.json"])
    def test_a_dump_without_entries_still_tells_how_far_its_rank_came(self, job, name):
        value = dump()
        value["pg_status"] = {"0": {f"last_{each}_collective": 7 for each in ("enqueued", "started", "completed")}}
        del value["entries"]
        capsule = job({name: value})
        assert states(capsule)[0]["last_seq"] == {"0": 7}
        assert capsule.record_streams() == ("ranks",)

    def test_a_torn_pickle_is_a_problem_and_the_other_ranks_are_read(self, tmp_path):
        whole = pickle.dumps(dump([entry(0)]), 2)
        (tmp_path / "dump_0").write_bytes(whole)
        (tmp_path / "dump_1").write_bytes(whole[:-20])
        done = import_job([tmp_path / "dump_0", tmp_path / "dump_1"], tmp_path, attach=False)
        assert len(done.problems) == 1
        assert str(tmp_path / "dump_1") in done.problems[0]
        assert list(states(Capsule.open(done.path))) == [0]

    def test_a_torn_json_is_read_up_to_the_tear(self, tmp_path):
        text = json.dumps(dump([entry(number) for number in range(5)]))
        path = tmp_path / "dump_0.json"
        path.write_text(text[: text.rindex('"record_id"') - 2])
        capsule = imported([path], tmp_path, (f"{path}: is cut at its end: what stands before the tear was read",))
        assert len(capsule.records("collectives")) == 4

    def test_a_trace_of_the_profiler_that_lists_groups_is_none(self, tmp_path):
        (tmp_path / "trace.json").write_text(
            '{"schemaVersion": 1, "distributedInfo": {"pg_config": {}}, "traceEvents": []}'
        )
        found = recognise(tmp_path / "trace.json")
        assert found is None or not found.FORMAT.startswith("flight")


class TestRanks:
    def test_the_rank_is_in_the_name(self):
        names = {
            "_dump_12": 12,
            "nccl_trace_rank_12": 12,
            "comm_lib_trace_rank_3": 3,
            "rank7_dump.json": 7,
            "trace_rank_2.json": 2,
            "job_5_rank_4_of_8": 4,
            "dump": None,
        }
        assert {name: rank_in_name(Path(name)) for name in names} == names

    def test_a_number_that_is_no_member_of_the_groups_is_not_believed(self, job):
        groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("TP", [2, 3]), "3": ("DP", [1, 3])}
        config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
        capsule = job({"dump_20260801.json": dump([entry(0)], pg_config=config)})
        assert list(states(capsule)) == [3]
        assert notes(capsule) == []

    def test_without_numbers_groups_direct_calls_and_elimination_tell(self, job):
        send = entry(0, "send 1->0", is_p2p=True)
        pair = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}, "5": {"desc": "x", "ranks": "[0, 2]"}}
        own = pair | {"6": {"desc": "y", "ranks": "[0]"}}
        files = {
            "a": dump([send], ranks="[0, 1, 2]"),
            "b": dump([entry(0)], pg_config=own),
            "c": dump([entry(0)], pg_config=pair),
        }
        capsule = job(files)
        assert [len(capsule.records("collectives", rank=rank)) for rank in range(3)] == [1, 1, 1]
        assert capsule.records("collectives", rank=1)[0]["op"] == "send"
        assert notes(capsule) == []

    def test_a_guess_is_said(self, job):
        capsule = job({"elided.json": dump([entry(0)])})
        assert notes(capsule) == ["nothing tells which rank wrote it; taken for rank 0"]

    def test_the_newest_of_several_dumps_counts_and_older_ones_add_what_it_lost(self, job):
        old = dump([entry(number) for number in range(5)])
        new = dump([entry(number) for number in range(3, 8)])
        capsule = job({"a_rank_0": new, "b_rank_0": old, "c_rank_1": dump([entry(0)])})
        assert [each["order"] for each in capsule.records("collectives", rank=0)] == list(range(8))
        assert states(capsule)[0]["last_completed"] == {"0": 5}  # as the status of the newest dump says

    def test_an_older_life_of_the_process_adds_nothing(self, job):
        old = dump([entry(number, time_created_ns=BASE - 10**12 + number) for number in range(90, 99)])
        capsule = job({"a_rank_0": old, "b_rank_0": dump([entry(0), entry(1)])})
        assert [each["order"] for each in capsule.records("collectives")] == [0, 1]


class TestGroups:
    CONFIG: ClassVar = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "35": {"name": "35", "desc": "TP", "ranks": "[0, 1]"},
        "43": {"name": "43", "desc": "PP", "ranks": "[0, 2]"},
    }

    def status(self, *locals_):
        reached = ("enqueued", "started", "completed")
        return {each: {f"last_{kind}_collective": 10 + int(each) for kind in reached} for each in locals_}

    def test_local_numbers_are_matched_by_the_entries(self, job):
        calls = [entry(0, seq=4, group=("43", "PP"), pg_id=2), entry(1, seq=5, group=("0", "default_pg"), pg_id=7)]
        capsule = job({"dump_0": dump(calls, pg_config=self.CONFIG, pg_status=self.status("2", "7"))})
        assert states(capsule)[0]["last_seq"] == {"43": 12, "0": 17}

    def test_without_entries_both_sorted_lists_correspond(self, job):
        capsule = job({"dump_0": dump([], pg_config=self.CONFIG, pg_status=self.status("9", "0", "4"))})
        assert states(capsule)[0]["last_seq"] == {"0": 10, "35": 14, "43": 19}

    def test_a_pair_that_contradicts_the_order_makes_the_others_unknown(self, job):
        calls = [entry(0, group=("43", "PP"), pg_id=4)]
        capsule = job({"dump_0": dump(calls, pg_config=self.CONFIG, pg_status=self.status("2", "9", "4"))})
        assert states(capsule)[0]["last_seq"] == {"43": 14}
        assert notes(capsule) == ["states of groups of which nothing tells the name; left out (2)"]

    def test_one_name_for_two_sets_of_ranks_becomes_two_names(self, job):
        def of(ranks):
            config = {"0": self.CONFIG["0"], "1": {"name": "1", "desc": "TP", "ranks": ranks}}
            return dump([entry(0, group=("1", "TP"), pg_id=1)], pg_config=config, pg_status={})

        capsule = job({f"dump_{rank}": of("[0, 1]" if rank < 2 else "[2, 3]") for rank in range(4)})
        found = {each["rank"]: (each["group"], each["group_ranks"]) for each in capsule.records("collectives")}
        assert found[0] == found[1] == ("1 (ranks 0, 1)", [0, 1])
        assert found[2] == found[3] == ("1 (ranks 2, 3)", [2, 3])

    def test_logs_that_are_two_runs_do_not_keep_the_dumps_apart(self, job):
        lines = "".join(
            f"iter {step}: loss {3 - step / 100:.4f}, time 4.00ms, mfu 3.21%\n" for step in range(30)
        ).encode()
        files = {f"_dump_{rank}": dump([entry(0)]) for rank in (1, 0)} | {"a.log": lines, "b.log": lines}
        first, *rest = job(files, expect=3)
        assert (first.ranks, len(rest)) == ((0, 1), 2)


class TestRealGloo:
    # The JSON of rank 3 was written when the others had gone: its failed call is retired like any other.
    @pytest.mark.parametrize(("suffix", "last"), [("", "scheduled"), (".json", "completed")])
    def test_a_missing_call_beside_a_missing_dump(self, tmp_path, suffix, last):
        files = sorted(each for each in (HERE / "missing-4").iterdir() if each.suffix == suffix)
        capsule = imported(files, tmp_path)
        assert capsule.manifest.run.world_size == 4
        assert {rank: each["last_seq"]["0"] for rank, each in states(capsule).items()} == {0: 7, 2: 7, 3: 6}
        done = {rank: each["last_completed"]["0"] for rank, each in states(capsule).items()}
        assert done == {0: 6, 2: 6, 3: 5 if last == "scheduled" else 6}
        sixth = {each["rank"]: each for each in capsule.records("collectives") if at(each) == ("0", 6)}
        assert [sixth[rank]["op"] for rank in (0, 2, 3)] == ["broadcast", "broadcast", "all_reduce"]
        assert [sixth[rank]["state"] for rank in (0, 2, 3)] == ["completed", "completed", last]
        assert sixth[3]["group_ranks"] == [0, 1, 2, 3]
        if not suffix:
            assert any(frame["name"] == "train" for frame in sixth[3]["frames"])

    def test_pickle_and_json_of_one_dump_count_once(self, tmp_path):
        (found,), problems = jobs(sorted((HERE / "healthy-4").iterdir()))
        assert (len(found.files), problems) == (8, [])
        capsule = imported(found.files, tmp_path)
        assert len(capsule.records("collectives")) == 4 * (4 * 3 + 1)
        assert all(each["state"] == "completed" and each["frames"] for each in capsule.records("collectives"))

    def test_a_healthy_pair(self, tmp_path):
        capsule = imported(sorted((HERE / "healthy-2").glob("trace_rank_?")), tmp_path)
        assert {each["rank"]: each["last_completed"] for each in capsule.records("ranks")} == {
            0: {"0": 9, "1": 4},
            1: {"0": 9, "1": 4},
        }

    def test_a_different_shape(self, tmp_path):
        capsule = imported(sorted((HERE / "shape-2").glob("*.json")), tmp_path)
        sixth = [each["shapes_in"] for each in capsule.records("collectives") if at(each) == ("0", 6)]
        assert sixth == [[[4]], [[5]]]


@pytest.mark.skipif(not REAL.exists(), reason="needs ../shared/real")
class TestRealFiles:
    def test_sixteen_ranks_of_a_mixture_of_experts(self, tmp_path):
        found, problems = jobs(sorted((REAL / "nvrx/fr_traces/gpu_error_1st").iterdir()))
        assert len(problems) == 1  # the log of the injected faults, which nobody knows
        assert [each.name for each in found[0].files] == [f"_dump_{rank}" for rank in range(16)]
        capsule = imported(found[0].files, tmp_path)
        assert capsule.manifest.run.world_size == 16
        experts = {rank: each["last_seq"]["74"] for rank, each in states(capsule).items() if rank >= 12}
        assert experts == {12: 20536, 13: 20538, 14: 20538, 15: 20538}
        done = {rank: each["last_completed"]["74"] for rank, each in states(capsule).items() if rank >= 12}
        assert done == {12: 20529, 13: 20536, 14: 20529, 15: 20536}
        send = capsule.records("collectives", rank=0)[0]
        assert (send["op"], send["peer"], send["group"], send["state"]) == ("send", 12, "43", "scheduled")

    def test_dumps_without_entries_say_how_far_their_ranks_came(self, tmp_path):
        capsule = imported(sorted((REAL / "nvrx/fr_traces/lock_gil_1st").glob("_dump_*")), tmp_path)
        assert not [each for each in capsule.records("collectives") if each["rank"] in (9, 14)]
        assert {rank: each["last_seq"]["72"] for rank, each in states(capsule).items() if rank >= 8} == {
            8: 45267, 9: 45264, 10: 45267, 11: 45267, 12: 45267, 13: 45267, 14: 45264, 15: 45267,
        }  # fmt: skip
        # Direct calls run on the default group and along the pipeline: their counters are no collectives.
        assert states(capsule)[0]["last_seq"]["39"] == 29

    def test_the_example_of_the_tutorial(self, tmp_path):
        capsule = imported([REAL / "pytorch_tutorial/fr_v2.5_example.json"], tmp_path)
        assert (capsule.manifest.run.world_size, capsule.manifest.run.backend) == (2, "nccl")
        assert capsule.records("collectives")[0]["t_completed"] == pytest.approx(1724779239.975812)


class TestOddContent:
    ODD = (
        None,
        True,
        -1,
        2**70,
        "x",
        "[1",
        [],
        {},
        [[]],
        [[["deep"]]],
        {"a": [1]},
        ("a", "b"),
        0.5,
        float("nan"),
        b"\xff",
    )

    def test_any_field_may_be_anything(self, tmp_path):
        draw = random.Random(11)
        for trial in range(150):
            value = copy.deepcopy(dump([entry(0), entry(1, "send 0->1", is_p2p=True), entry(2)]))
            for _ in range(draw.randint(1, 5)):
                inside = [each for each in value.values() if isinstance(each, dict)]
                inside += [each for one in inside for each in one.values() if isinstance(each, dict)]
                inside += value["entries"] if isinstance(value["entries"], list) else []
                place = draw.choice([value, *(each for each in inside if isinstance(each, dict) and each)])
                place[draw.choice(sorted(place))] = draw.choice(self.ODD)
                value["version"] = draw.choice(["2.9", [], None])
            (tmp_path / "dump_0").write_bytes(pickle.dumps(value, 4))
            done = import_job([tmp_path / "dump_0"], tmp_path / f"{trial}", attach=False)
            assert done.problems == ()
            capsule = Capsule.open(done.path)
            assert len(capsule.records("ranks")) == 1
            assert capsule.damage() == ()

    @pytest.mark.parametrize("sizes", [[[2**63, 4]], [[-1]], [[1.5]], [[3, None]], [3, [4]], "[[1"])
    def test_a_size_that_cannot_be_read_is_unknown_and_costs_nothing_else(self, tmp_path, sizes):
        entries = [entry(0), entry(1, input_sizes=sizes), entry(2)]
        capsule = imported([dumped(tmp_path, dump(entries))], tmp_path)
        calls = capsule.records("collectives")
        assert [each.get("shapes_in") for each in calls] == [calls[0]["shapes_in"], [], calls[0]["shapes_in"]]
        assert calls[0]["shapes_in"]
        assert notes(capsule) == ["input_sizes is missing, or cannot be read, and is taken as unknown in entries"]

    def test_what_is_read_as_unknown_is_said_once_for_each_field_of_a_file(self, tmp_path):
        odd = {"state": "weird", "profiling_name": None, "input_dtypes": [1, 2], "time_created_ns": "soon"}
        entries = [entry(at, **odd, retired=False) for at in range(3)]
        capsule = imported([dumped(tmp_path, dump(entries, pg_status={}))], tmp_path)
        assert {each.partition(" ")[0] for each in notes(capsule)} == set(odd)
        assert all(each.endswith("(3)") for each in notes(capsule))
        calls = capsule.records("collectives")
        assert {(each.get("state"), each.get("op"), each.get("dtype")) for each in calls} == {(None, "", "float32")}

    def test_nothing_is_said_of_what_recorders_leave_out(self, tmp_path):
        plain = [entry(0), entry(1, "barrier", input_sizes=[], input_dtypes=[], time_discovered_started_ns=None)]
        assert notes(imported([dumped(tmp_path, dump(plain))], tmp_path)) == []

    @pytest.mark.parametrize(
        ("value", "lost"),
        [(None, 1), ({}, 1), ([entry(0), 7], 1), ([entry(0), entry(1, collective_seq_id="x")], 1), ([entry(0)], None)],
    )
    def test_entries_that_are_lost_are_counted(self, tmp_path, value, lost):
        capsule = imported([dumped(tmp_path, dump() | {"entries": value, "pg_status": {}})], tmp_path)
        assert capsule.records("ranks")[0].get("entries_lost") == lost

    def test_a_status_says_how_far_a_rank_came_whatever_its_entries_are(self, tmp_path):
        status = {"0": {"last_enqueued_collective": 7, "last_started_collective": 7, "last_completed_collective": 6}}
        capsule = imported([dumped(tmp_path, dump() | {"entries": None, "pg_status": status})], tmp_path)
        (record,) = capsule.records("ranks")
        assert (record["last_seq"], record.get("entries_lost")) == ({"0": 7}, None)

    def test_a_dump_that_cannot_be_written_is_named_and_the_others_are(self, tmp_path, monkeypatch):
        write = Run.columns

        def columns(self, stream, length, columns, rank=None):
            if stream == "collectives" and rank == 0:
                raise EvidenceError("column seq: odd", "collectives")
            write(self, stream, length, columns, rank)

        monkeypatch.setattr(Run, "columns", columns)
        files = [dumped(tmp_path, dump([entry(0)]), f"dump_{rank}") for rank in range(2)]
        said = f"{files[0]}: the dump of rank 0 was left out: collectives: column seq: odd"
        capsule = imported(files, tmp_path, (said,))
        assert {each["rank"] for each in capsule.records("collectives")} == {1}

    @pytest.mark.parametrize("value", [[], "text", {"entries": 3, "pg_config": []}, [1, "…", None]])
    def test_no_dump_at_all(self, tmp_path, value):
        data = {"pg_config": {}, "entries": value} if not isinstance(value, dict) else value
        (tmp_path / "dump_0").write_bytes(pickle.dumps(data, 2))
        done = import_job([tmp_path / "dump_0"], tmp_path, attach=False)
        assert Capsule.open(done.path).records("collectives") == []

    def test_one_object_shared_a_million_times_is_looked_at_once(self, tmp_path):
        sizes = [[1] * 100_000]
        shared = entry(0, input_sizes=sizes, frames=[{"name": "f" * 100_000}] * 1000)
        (tmp_path / "dump_0").write_bytes(pickle.dumps(dump([shared] * 50_000), 4))
        done = import_job([tmp_path / "dump_0"], tmp_path, attach=False)
        records = Capsule.open(done.path).records("collectives")
        assert len(records) == 50_000
        assert len(records[0]["shapes_in"][0]) <= 64

    def test_the_originals_can_be_kept(self, tmp_path):
        shutil.copy(HERE / "healthy-2/trace_rank_0", tmp_path / "trace_rank_0")
        done = import_job([tmp_path / "trace_rank_0"], tmp_path, attach=True)
        assert [each.kind for each in Capsule.open(done.path).files()] == ["trace"]


@pytest.mark.parametrize("start", [b"\x80\x04}(\x8c\x09pg_config}\x8c\x07entries](", b'{"pg_config": {}, "entries": ['])
def test_a_small_archive_of_a_huge_dump_is_refused_before_it_is_unpacked(
    start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "spare_memory", lambda: 200 * MIB)
    packed = tmp_path / "_dump_0.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(64):
            file.write(b"N" * MIB)
    unpacked = 0
    pieces = Source._pieces

    def counted(self: Source, size: int, *, quiet: bool) -> Iterator[bytes]:
        nonlocal unpacked
        for piece in pieces(self, size, quiet=quiet):
            unpacked += len(piece)
            yield piece

    monkeypatch.setattr(Source, "_pieces", counted)
    with pytest.raises(EvidenceError, match=r"takes more than .* MiB to read, and half of what is free is 100"):
        import_files([packed], tmp_path / "x.capsule", attach=False)
    assert unpacked < 20 * MIB
