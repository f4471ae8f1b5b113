"""Tracebacks, out of memory and NCCL lines become events, with the bytes and the rank that the text states."""

from __future__ import annotations

from pathlib import Path

from .conftest import Imports

GIB, MIB = 2**30, 2**20


def events(capsule, kind: str):
    return [each for each in capsule.records("events") if each["kind"] == kind]


class TestOutOfMemory:
    def test_todays_text(self, imported: Imports):
        (oom,) = events(
            imported(
                "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 960.00 MiB. GPU 0 has a "
                "total capacity of "
                "24.00 GiB of which 0.50 GiB is free. Process 77 has 616.00 MiB memory in use. Including "
                "non-PyTorch memory, "
                "this process has 8.47 GiB memory in use. Of the allocated memory 6.75 GiB is allocated by "
                "PyTorch, and "
                "128.00 MiB is reserved by PyTorch but unallocated. If reserved …\n"
            ),
            "oom",
        )
        assert oom["requested"] == 960 * MIB
        assert oom["capacity"] == 24 * GIB
        assert oom["free"] == GIB // 2
        assert oom["allocated"] == 6.75 * GIB
        assert oom["reserved"] == 6.75 * GIB + 128 * MIB
        assert oom["other_processes"] == [{"pid": 77, "bytes": 616 * MIB}]
        assert oom["rank"] == 2
        assert oom["type"] == "torch.OutOfMemoryError"

    def test_the_text_of_older_versions(self, imported: Imports):
        (oom,) = events(
            imported(
                "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 5; 24.00 GiB total capacity; "
                "22.00 GiB already "
                "allocated; 292.50 MiB free; 22.50 GiB reserved in total by PyTorch)\n"
            ),
            "oom",
        )
        assert (oom["requested"], oom["capacity"], oom["allocated"]) == (2 * GIB, 24 * GIB, 22 * GIB)
        assert (oom["free"], oom["reserved"], oom["device"]) == (292.5 * MIB, 22.5 * GIB, 5)

    def test_the_real_run_names_each_rank_once(self, real: Path, imported: Imports):
        found = events(imported(real / "text_logs" / "torchtitan" / "autoresearch" / "run35.log"), "oom")
        assert len({each["rank"] for each in found}) == len(found) >= 7
        assert found[0]["requested"] == round(2.9 * GIB)
        assert found[0]["reserved"] - found[0]["allocated"] == round(1.24 * GIB)


class TestExceptions:
    def test_interleaved_tracebacks_of_two_ranks(self, imported: Imports):
        capsule = imported(
            "3: Traceback (most recent call last):\n"
            "2: Traceback (most recent call last):\n"
            '3:   File "train.py", line 3, in main\n'
            '2:   File "train.py", line 4, in main\n'
            "3:     foo()\n"
            "3: ValueError: bad: thing\n"
            "2:     bar()\n"
            "2: KeyError: 'x'\n"
        )
        found = {each["rank"]: (each["type"], each["message"]) for each in events(capsule, "exception")}
        assert found == {3: ("ValueError", "bad: thing"), 2: ("KeyError", "'x'")}

    def test_the_step_is_the_last_one_logged(self, imported: Imports):
        capsule = imported(
            "iter 10: loss 3.1400, time 15.50ms, mfu 3.21%\nTraceback (most recent call last):\n"
            '  File "a.py", line 1, in <module>\n    f()\nmy.pkg.Oops\n'
        )
        (found,) = events(capsule, "exception")
        assert (found["step"], found["type"]) == (10, "my.pkg.Oops")

    def test_the_real_misuse_is_named_once_a_rank(self, real: Path, imported: Imports):
        capsule = imported(real / "text_logs" / "torchtitan" / "autoresearch" / "run31.log")
        named = [each for each in events(capsule, "exception") if "mxfp8_cublas" in each["message"]]
        assert {each["type"] for each in named} == {"ValueError"}
        assert sorted(each["rank"] for each in named) == list(range(8))

    def test_the_real_collective_error_keeps_its_last_words(self, real: Path, imported: Imports):
        capsule = imported(real / "text_logs" / "torchtitan" / "autoresearch" / "run156.log")
        first = events(capsule, "exception")[0]
        assert first["type"] == "torch.distributed.DistBackendError"
        assert any("NCCL_ALGO was set to Tree" in each["message"] for each in events(capsule, "log"))


class TestCollectives:
    def test_the_watchdog_names_the_rank(self, imported: Imports):
        capsule = imported(
            "[rank1]:[E ProcessGroupNCCL.cpp:563] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=456, "
            "OpType=ALLREDUCE, NumelIn=65297, NumelOut=65297, Timeout(ms)=600000) ran for 600054 milliseconds "
            "before timing out.\n"
            "[PG ID 0 PG GUID 0(default_pg) Rank 3] failure detected by watchdog at work sequence id: 7219 PG "
            "status: last "
            "enqueued work: 7220, last completed work: 7218\n"
        )
        found = events(capsule, "log")
        assert [each["rank"] for each in found] == [1, 3]
        assert all(each["logger"] == "nccl" and each["level"] == "error" for each in found)
        assert "SeqNum=456" in found[0]["message"]
