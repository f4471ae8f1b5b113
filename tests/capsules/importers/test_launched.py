"""Directories of a launcher, one a process: one run is one job, ranks and attempts come from where its files lie."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import import_files, import_job, recognise
from llmconsole.capsules.importers.jobs import jobs
from llmconsole.capsules.importers.launched import files_below, origins, place_of

from .conftest import notes, values

DIED = "distributed/rank-died-first"
FAILED = "runtime/job-failed"
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:47285."
RAISED = "ValueError: label 50257 is out of range"


def steps(until: int, first: int = 0) -> str:
    return "".join(f"step {step} loss {4 - step / 100:.4f}\n" for step in range(first, until))


def traceback(error: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "/job/train.py", line 17, in main', "    step()", error]
    return "".join(f"{prefix}{line}\n" for line in lines)


def error_file(error: str, t: int) -> str:
    """What ``@record`` writes."""
    more = {"py_callstack": traceback(error), "timestamp": str(t)}
    return json.dumps({"message": {"message": error, "extraInfo": more}})


def put(
    run: Path, attempt: int, rank: int, *, out: str = "", err: str = "", error: str = "", t: int = 1_796_040_836
) -> None:
    place = run / f"attempt_{attempt}" / str(rank)
    place.mkdir(parents=True)
    (place / "stdout.log").write_text(out)
    (place / "stderr.log").write_text(err)
    if error:
        (place / "error.json").write_text(error_file(error, t))


def failed(run: Path, attempt: int = 0, *, first: int = 0, prefix: bool = True, ranks: int = 2) -> Path:
    """Local rank 1 raises, and the others lose their connection to it; ``first`` is the first rank of the machine."""
    for rank in range(ranks):
        error = RAISED if rank == 1 else LOST
        said = f"[rank{first + rank}]: " if prefix else ""
        put(run, attempt, rank, out=steps(5), err=traceback(error, said), error=error, t=1_796_040_836 + (rank != 1))
    return run


def found(directory: Path) -> list[Path]:
    names = [each.name for each in directory.iterdir() if each.is_dir()]
    return [directory / each for each in files_below(directory, names)[0]]


def known(directory: Path) -> list[Path]:
    return [each for each in found(directory) if recognise(each) is not None]


def read(directory: Path) -> Capsule:
    ((job,), _) = jobs(known(directory))
    return Capsule.open(import_files(job.files, directory.parent / "made", attach=False))


def first(capsule: Capsule) -> tuple[str, int | None] | None:
    found = analyze(capsule).first_divergence
    return None if found is None else (found.rule, found.where.rank)


class TestVerdicts:
    @pytest.mark.parametrize("given", ["logs", "logs/none_k3j2h1g0", "logs/none_k3j2h1g0/attempt_0"])
    def test_the_rank_that_raised_is_named_from_any_level(self, tmp_path: Path, given: str):
        failed(tmp_path / "logs" / "none_k3j2h1g0")
        assert first(read(tmp_path / given)) == (DIED, 1)

    def test_without_a_prefix_the_directory_tells_the_rank(self, tmp_path: Path):
        failed(tmp_path / "logs" / "none_k3j2h1g0", prefix=False)
        capsule = read(tmp_path / "logs")
        assert first(capsule) == (DIED, 1)
        assert "counts the processes of one machine" in notes(capsule)

    def test_where_errors_went_to_the_terminal_the_error_files_tell_them(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "none_k3j2h1g0")
        for path in run.glob("*/*/stderr.log"):
            path.unlink()
        capsule = read(tmp_path / "logs")
        report = analyze(capsule)
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 1)
        assert "train.py:17" in report.first_divergence.summary

    def test_the_last_attempt_decides(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "none_k3j2h1g0")
        for rank in range(2):
            put(run, 1, rank, out=steps(20))
        capsule = read(tmp_path / "logs")
        assert first(capsule) is None
        past = [each for each in capsule.records("events") if each["kind"] == "exception"]
        assert len(past) == 4
        assert all(each["past"] for each in past)

    def test_an_attempt_that_fails_otherwise_than_the_one_before(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "none_k3j2h1g0")
        for rank, error in enumerate(("IndexError: index 9 is out of bounds", LOST)):
            put(
                run, 1, rank, out=steps(9), err=traceback(error, f"[rank{rank}]: "), error=error, t=1_796_050_000 + rank
            )
        assert first(read(tmp_path / "logs")) == (DIED, 0)
        assert first(read(run / "attempt_0")) == (DIED, 1)

    @pytest.mark.parametrize(
        "words",
        [
            "Fatal Python error: Segmentation fault\n\n"
            'Current thread 0x00007f2 (most recent call first):\n  File "a.py", line 9 in step\n',
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        ],
    )
    def test_a_process_that_ends_below_python_is_named_though_its_error_stream_holds_nothing_else(
        self, tmp_path: Path, words: str
    ):
        run = tmp_path / "logs" / "none_k3j2h1g0"
        put(run, 0, 0, out=steps(5), err=traceback(LOST))
        put(run, 0, 1, out=steps(5), err=words)
        assert first(read(tmp_path / "logs")) == (DIED, 1)

    def test_a_healthy_run_says_nothing(self, tmp_path: Path):
        for rank in range(4):
            put(tmp_path / "logs" / "none_k3j2h1g0", 0, rank, out=steps(50))
        capsule = read(tmp_path / "logs")
        assert first(capsule) is None
        assert len(values(capsule, "loss", rank=3)) == 50


class TestRanks:
    def test_a_line_tells_the_first_rank_of_a_machine_and_the_others_are_counted_on(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "77_k3j2h1g0", first=8)
        put(run, 0, 2, out=steps(5))
        capsule = read(tmp_path / "logs")
        assert first(capsule) == (DIED, 9)
        assert len(values(capsule, "loss", rank=10)) == 5

    def test_two_machines_that_begin_together_and_state_no_rank_accuse_no_rank(self, tmp_path: Path):
        runs = [failed(tmp_path / f"77_k3j2h1g{each}", prefix=False) for each in range(2)]
        whose = origins(found(tmp_path))
        assert not any(each.told for each in whose.values())
        os.utime(runs[1] / "attempt_0", (1e9, 1e9))  # a run of another day is no machine of this one
        assert all(each.told for each in origins(found(tmp_path)).values())

    def test_ranks_that_do_not_fit_their_directories_are_not_told(self, tmp_path: Path):
        run = tmp_path / "logs" / "77_k3j2h1g0"
        put(run, 0, 0, err=traceback(RAISED, "[rank3]: "))
        put(run, 0, 1, err=traceback(RAISED, "[rank1]: "))
        assert {each.told for each in origins(found(run)).values()} == {False}

    def test_a_machine_may_have_other_ranks_in_the_next_attempt(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "77_k3j2h1g0", first=8)
        failed(run, 1, first=0)
        put(run, 2, 0, out=steps(3))
        whose = {
            (place.attempt, place.rank): each for path, each in origins(found(run)).items() if (place := place_of(path))
        }
        assert (whose[0, 1].rank, whose[1, 1].rank) == (9, 1)
        assert not whose[2, 0].told

    def test_mpirun_names_ranks_of_the_job(self, tmp_path: Path):
        for rank in (4, 5):
            place = tmp_path / "out" / "1" / f"rank.{rank}"
            place.mkdir(parents=True)
            (place / "stdout").write_text(steps(5))
            (place / "stderr").write_text(traceback(RAISED if rank == 5 else LOST))
        assert first(read(tmp_path / "out")) == (DIED, 5)


class TestMachines:
    """Several machines write below one directory."""

    def test_those_that_began_together_and_tell_different_ranks_are_one_job(self, tmp_path: Path):
        failed(tmp_path / "logs" / "77_k3j2h1g0", first=4, ranks=4)
        for rank in range(4):
            said = traceback(LOST, f"[rank{rank}]: ")
            put(tmp_path / "logs" / "77_z9y8x7w6", 0, rank, out=steps(5), err=said, error=LOST, t=1_796_040_837)
        capsule = read(tmp_path / "logs")
        assert first(capsule) == (DIED, 5)
        assert capsule.ranks == tuple(range(8))

    @pytest.mark.parametrize(
        "how", ["the same ranks", "not told", "another id", "another day", "a third one is not told"]
    )
    def test_others_stay_apart(self, tmp_path: Path, how: str):
        failed(tmp_path / "77_k3j2h1g0", prefix=how != "not told")
        other = tmp_path / ("78_z9y8x7w6" if how == "another id" else "77_z9y8x7w6")
        failed(other, first=0 if how == "the same ranks" else 2)
        if how == "another day":
            os.utime(other / "attempt_0", (1e9, 1e9))
        if how == "a third one is not told":
            failed(tmp_path / "77_a1b2c3d4", prefix=False)
        assert len(jobs(known(tmp_path))[0]) == (3 if how == "a third one is not told" else 2)


class TestLaunchers:
    """The launcher's own log tells how processes ended that left no word."""

    def summary(self, run: str) -> str:
        ends = ((0, 1, f"logs/{run}/attempt_0/0/error.json"), (1, -9, "<N/A>"))
        return traceback("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:") + "".join(
            f"  time      : 2026-11-30_07:16:2{1 - rank}\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {3000 + rank}){' (SIGKILL)' if code < 0 else ''}\n  error_file: {file}\n"
            for rank, code, file in ends
        )

    def test_the_one_that_names_the_run_is_of_its_job(self, tmp_path: Path):
        run = tmp_path / "logs" / "none_k3j2h1g0"
        put(run, 0, 0, out=steps(5), err=traceback(LOST, "[rank0]: "), error=LOST)
        put(run, 0, 1, out=steps(5))
        (tmp_path / "logs" / "train.out").write_text(self.summary(run.name))
        ((job,), _) = jobs([tmp_path / "logs" / "train.out", *known(tmp_path / "logs")])
        assert job.files[-1].name == "train.out"
        assert first(Capsule.open(import_files(job.files, tmp_path / "made", attach=False))) == (DIED, 1)

    def test_what_it_repeats_of_its_processes_counts_once(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "none_k3j2h1g0")
        repeated = "".join(f"[default{rank}]:{line}\n" for rank in range(2) for line in steps(5).splitlines())
        (tmp_path / "train.out").write_text(repeated + self.summary(run.name))
        ((job,), _) = jobs([tmp_path / "train.out", *known(tmp_path / "logs")])
        capsule = Capsule.open(import_files(job.files, tmp_path / "made", attach=False))
        assert first(capsule) == (DIED, 1)
        assert [len(values(capsule, "loss", rank=rank)) for rank in range(2)] == [5, 5]
        assert not [each for each in capsule.records("events") if "go back" in str(each.get("message"))]

    def test_that_of_another_run_stays_apart(self, tmp_path: Path):
        failed(tmp_path / "none_k3j2h1g0")
        (tmp_path / "train.out").write_text(self.summary("none_z9y8x7w6"))
        assert len(jobs([tmp_path / "train.out", *known(tmp_path)])[0]) == 2
        (tmp_path / "train.out").write_text(steps(9) + "see none_k3j2h1g0/attempt_0/0/error.json\n")
        assert len(jobs([tmp_path / "train.out", *known(tmp_path)])[0]) == 2


class TestNearTwins:
    def test_two_runs_beside_each_other_are_two_jobs(self, tmp_path: Path):
        for name in ("none_k3j2h1g0", "none_a1b2c3d4"):
            failed(tmp_path / name)
        made, _ = jobs(known(tmp_path))
        assert [{file.parents[2].name for file in job.files} for job in made] in (
            [{"none_k3j2h1g0"}, {"none_a1b2c3d4"}],
            [{"none_a1b2c3d4"}, {"none_k3j2h1g0"}],
        )

    @pytest.mark.parametrize(
        "names",
        [
            ["exp1/train.log", "exp2/train.log"],
            ["0/stdout.log", "1/stdout.log"],
            ["data/0/shard.log", "data/1/shard.log"],
            ["trial_0/0/stdout.log", "trial_1/0/stdout.log"],
            ["attempt_0/0/train.log", "attempt_0/1/train.log"],
            ["attempt_0/a/stdout.log", "attempt_0/b/stdout.log"],
            ["attempt_0/filtered_stdout.log", "x/attempt_0/filtered_stdout.log"],
            ["a/b/c/d/attempt_0/0/stdout.log", "a/b/c/d/attempt_0/1/stdout.log"],
        ],
    )
    def test_other_directories_are_not_looked_into(self, tmp_path: Path, names: list[str]):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(steps(20))
        assert found(tmp_path) == []

    def test_logs_of_experiments_that_are_given_stay_apart(self, tmp_path: Path):
        for name in ("0", "1"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "stdout.log").write_text(steps(20))
        assert len(jobs([tmp_path / "0" / "stdout.log", tmp_path / "1" / "stdout.log"])[0]) == 2

    def test_a_log_that_lies_in_the_run_is_no_process(self, tmp_path: Path):
        run = failed(tmp_path / "run")
        (run / "stdout.log").write_text(steps(20))
        assert len(jobs([*known(tmp_path), run / "stdout.log"])[0]) == 2


class TestHostile:
    def test_no_link_is_followed(self, tmp_path: Path):
        failed(tmp_path / "elsewhere" / "run")
        logs = tmp_path / "logs"
        (logs / "run" / "attempt_0" / "0").mkdir(parents=True)
        (logs / "linked").symlink_to(tmp_path / "elsewhere" / "run")
        (logs / "run" / "attempt_1").symlink_to(tmp_path / "elsewhere" / "run" / "attempt_0")
        (logs / "run" / "attempt_0" / "1").symlink_to(tmp_path / "elsewhere" / "run" / "attempt_0" / "1")
        (logs / "run" / "attempt_0" / "0" / "stdout.log").symlink_to("/etc/passwd")
        assert found(logs) == []

    def test_so_many_files_are_taken_the_newest_run_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for number in range(3):
            put(tmp_path / f"run{number}", 0, 0, out=steps(3))
            os.utime(tmp_path / f"run{number}", (1e9 + number, 1e9 + number))
        monkeypatch.setattr("llmconsole.capsules.importers.launched.MOST_FOUND", 3)
        assert [path.parents[2].name for path in found(tmp_path)] == ["run2", "run2", "run1"]
        assert files_below(tmp_path, ["run0", "run1", "run2"])[1] == 1

    def test_a_pipe_and_a_name_of_control_characters(self, tmp_path: Path):
        run = failed(tmp_path / "logs" / "a\x1b[2Jb\n_k3j2h1g0")
        os.mkfifo(run / "attempt_0" / "2")
        (run / "attempt_0" / "3").mkdir()
        os.mkfifo(run / "attempt_0" / "3" / "stdout.log")
        assert first(read(tmp_path / "logs")) == (DIED, 1)


class TestErrorFiles:
    def test_it_tells_when_the_rank_ended(self, tmp_path: Path):
        path = tmp_path / "error.json"
        path.write_text(error_file(RAISED, 1_796_040_836))
        capsule = Capsule.open(import_files([path], tmp_path / "made", attach=False))
        (end,) = capsule.records("ranks")
        assert end["exit"] == {"kind": "exception", "message": RAISED, "t": 1_796_040_836.0}
        (event,) = capsule.records("events")
        assert (event["type"], event["message"]) == ("ValueError", "label 50257 is out of range")
        assert event["frames"] == [{"name": "main", "file": "/job/train.py", "line": 17}]
        assert first(capsule) == (FAILED, 0)

    @pytest.mark.parametrize("extra", [3, {}, {"timestamp": "9" * 400, "py_callstack": [1]}, {"timestamp": 1.5}])
    def test_what_is_odd_beside_the_words_is_left_out(self, tmp_path: Path, extra: Any):
        path = tmp_path / "error.json"
        path.write_text(json.dumps({"message": {"message": RAISED, "extraInfo": extra}}))
        (event,) = Capsule.open(import_files([path], tmp_path / "made", attach=False)).records("events")
        assert event["message"] == "label 50257 is out of range"
        assert "t" not in event

    @pytest.mark.parametrize("message", [{"message": 3, "extraInfo": {}}, "plain", {"text": RAISED}, [RAISED], None])
    def test_another_document_is_one_line(self, tmp_path: Path, message: Any):
        path = tmp_path / "error.json"
        path.write_text(json.dumps({"message": message}))
        with pytest.raises(EvidenceError, match=r"error\.json") as caught:
            import_files([path], tmp_path / "made", attach=False)
        assert "\n" not in str(caught.value)

    def test_of_a_torn_one_the_words_are_kept(self, tmp_path: Path):
        path = tmp_path / "error.json"
        path.write_text(error_file(RAISED, 1_796_040_836)[:-20])
        made = import_job([path], tmp_path / "made", attach=False)
        assert len(made.problems) == 1
        (event,) = Capsule.open(made.path).records("events")
        assert event["message"] == "label 50257 is out of range"
