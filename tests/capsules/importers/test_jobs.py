"""Which files are of one job, what their capsule is called, and what happens where two bring the same series."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import Source, import_files, import_job
from llmconsole.capsules.importers.jobs import jobs

from .conftest import notes, values


def log(path: Path, first: int, last: int, loss: float = 2.0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"s:{step} trl:{loss + step / 1000}\n" for step in range(first, last)))
    return path


def names(found) -> list[list[str]]:
    return [[file.name for file in job.files] for job in found[0]]


class TestGrouping:
    def test_a_log_that_begins_later_continues_the_other_in_order(self, tmp_path: Path):
        files = [log(tmp_path / "run.log.2", 90, 200), log(tmp_path / "run.log", 1, 101)]
        assert names(jobs(files)) == [["run.log", "run.log.2"]]
        capsule = Capsule.open(import_files(jobs(files)[0][0].files, tmp_path / "out", attach=False))
        assert len(values(capsule, "loss")) == 100 + 110
        (event,) = capsule.records("events")
        assert event["step"] == 90

    def test_two_that_begin_alike_are_two_runs(self, tmp_path: Path):
        files = [log(tmp_path / "a.log", 1, 100), log(tmp_path / "b.log", 1, 100)]
        assert names(jobs(files)) == [["a.log"], ["b.log"]]

    def test_one_that_logs_less_often_is_no_continuation(self, tmp_path: Path):
        rare = tmp_path / "b.log"
        rare.write_text("".join(f"s:{step} trl:2.0\n" for step in range(10, 1000, 10)))
        assert len(jobs([log(tmp_path / "a.log", 1, 1000), rare])[0]) == 2

    def test_ranks_in_names_are_ranks_of_one(self, tmp_path: Path):
        files = [log(tmp_path / f"train_rank_{rank}.log", 1, 20, loss=rank) for rank in (0, 1)]
        ((job,), _) = jobs(files)
        capsule = Capsule.open(import_files(job.files, tmp_path / "out", attach=False))
        assert values(capsule, "loss", rank=1)[0] == (1, 1.001)
        assert values(capsule, "loss", rank=0)[0] == (1, 0.001)

    def test_directories_are_jobs_of_their_own_and_separate_means_each_file(self, tmp_path: Path):
        files = [
            log(tmp_path / "x" / "a.log", 1, 9),
            log(tmp_path / "x" / "b.log", 9, 20),
            log(tmp_path / "y" / "a.log", 1, 9),
        ]
        assert names(jobs(files)) == [["a.log", "b.log"], ["a.log"]]
        assert len(jobs(files, separate=True)[0]) == 3

    def test_what_nobody_knows_comes_back_as_a_line(self, tmp_path: Path):
        (tmp_path / "x.bin").write_bytes(os.urandom(4000))
        (tmp_path / "empty").write_bytes(b"")
        found, problems = jobs(
            [tmp_path / "x.bin", tmp_path / "empty", tmp_path / "none", log(tmp_path / "a.log", 1, 3)]
        )
        assert len(found) == 1
        assert ["no known format" in str(each) for each in problems] == [True, False, False]


class TestCapsules:
    def test_two_formats_of_one_run_keep_their_points_apart(self, tmp_path: Path):
        metrics = tmp_path / "metrics.csv"
        metrics.write_text("step,loss\n1,2.5\n2,2.25\n")
        capsule = Capsule.open(import_files([log(tmp_path / "a.log", 1, 3), metrics], tmp_path / "out", attach=False))
        assert values(capsule, "loss") == [(1, 2.5), (2, 2.25)]
        assert capsule.path.name == f"{tmp_path.name}.capsule"
        assert values(capsule, "loss", side="a.log") == [(1, 2.001), (2, 2.002)]

    def test_it_says_what_it_was_made_of(self, tmp_path: Path):
        path = log(tmp_path / "a.log", 1, 3)
        capsule = Capsule.open(import_files([path], tmp_path / "out", attach=True))
        assert capsule.path == tmp_path / "out" / "a.log.capsule"
        assert (capsule.status, capsule.title) == ("sealed", "a.log")
        assert capsule.trigger is not None
        assert capsule.trigger.kind == "imported"
        (listed,) = capsule.manifest.raw["imported"]["files"]
        assert (listed["path"], listed["format"], listed["bytes"]) == (str(path), "log of llm.c", path.stat().st_size)
        (original,) = capsule.files()
        assert (capsule.path / original.path).read_bytes() == path.read_bytes()
        assert not capsule.damage()

    def test_the_same_file_has_the_same_id_and_another_name_is_found_for_its_capsule(self, tmp_path: Path):
        path = log(tmp_path / "a.log", 1, 3)
        first, second = (Capsule.open(import_files([path], tmp_path / "out", attach=False)) for _ in range(2))
        assert first.id == second.id
        assert first.path != second.path

    def test_nothing_known_is_one_line(self, tmp_path: Path):
        path = tmp_path / "x"
        path.write_text("hello\nworld\n")
        with pytest.raises(EvidenceError, match="of no known format") as caught:
            import_files([path], tmp_path / "out", attach=False)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


class TestSources:
    def test_gzip_is_taken_off_and_a_torn_archive_keeps_what_it_has(self, tmp_path: Path):
        text = "".join(f"s:{step} trl:{2 + step / 7}\n" for step in range(5000)).encode()
        path = tmp_path / "a.log.gz"
        path.write_bytes(gzip.compress(text)[:-2000])
        made = import_job([path], tmp_path / "out", attach=False)
        capsule = Capsule.open(made.path)
        read = values(capsule, "loss")
        assert 100 < len(read) < 5000
        assert read == [(step, float(f"{2 + step / 7}")) for step in range(len(read))]
        assert "before the end" in notes(capsule)

    def test_a_pipe_and_a_directory_are_refused_at_once(self, tmp_path: Path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "none"):
            with pytest.raises(EvidenceError):
                Source(path)

    def test_an_archive_that_announces_terabytes_costs_its_head_only(self, tmp_path: Path):
        path = tmp_path / "zeros.gz"
        with gzip.open(path, "wb") as file:
            for _ in range(20):
                file.write(bytes(1 << 20))
        assert jobs([path])[1]
