"""Raw evidence on the command line and behind the console's questions: known by content, imported out of sight."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app import imports
from llmconsole.app.cli import main
from llmconsole.app.commands.evidence import sources
from llmconsole.app.worker import Worker, WorkerError

from .conftest import Run

LOG = "".join(f"s:{step} trl:{6 - step / 100:.4f} lr:0.000300 norm:0.50\n" for step in range(1, 60))


@pytest.fixture
def scratches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which scratch directories appear."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job" / "train.log"
    path.parent.mkdir()
    path.write_text(LOG)
    return path


def launched(run: Path, attempt: int = 0, text: str = LOG) -> None:
    """Logs of two processes of one attempt, as torchrun lays them."""
    for rank in range(2):
        place = run / f"attempt_{attempt}" / str(rank)
        place.mkdir(parents=True)
        (place / "stdout.log").write_text(text)
        (place / "stderr.log").touch()


def dump(calls: int) -> dict[str, Any]:
    """A flight-recorder dump of one of two ranks, after so many calls."""
    entries = [
        {
            "record_id": number, "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
            "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "input_sizes": [[4]],
            "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "completed",
            "retired": True, "time_created_ns": 10**18 + number, "frames": [],
        }
        for number in range(1, calls + 1)
    ]  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    return {"version": "2.10", "pg_config": {"0": group}, "pg_status": {}, "entries": entries}


@pytest.fixture
def worker(scratches: Path) -> Iterator[Worker]:
    with Worker(timeout=60) as worker:
        yield worker


class TestAnalyze:
    def test_a_log_is_analysed_under_its_own_path_and_leaves_nothing(self, cli: Run, log: Path, scratches: Path):
        done = cli("analyze", str(log), "--json")
        assert done.returncode == 0, done.stderr
        (report,) = json.loads(done.stdout)["reports"]
        assert report["capsule"]["path"] == str(log)
        assert report["capsule"]["title"] == "train.log"
        assert "numerics/loss-spike" in [*report["quiet"], *(each["rule"] for each in report["findings"])]
        assert not report["errors"]
        assert list(scratches.iterdir()) == []
        assert sorted(each.name for each in log.parent.iterdir()) == ["train.log"]

    def test_files_of_one_job_are_one_report_and_separate_ones_are_two(self, cli: Run, log: Path):
        (log.parent / "metrics.csv").write_text("step,loss\n1,6.0\n2,5.9\n")
        (log.parent / "notes.md").write_text("# nothing\n")
        together = cli("analyze", str(log.parent), "--json")
        (report,) = json.loads(together.stdout)["reports"]
        assert report["capsule"]["path"] == str(log.parent)
        assert together.stderr.count("\n") == 1
        assert "1 file of no known format left out (notes.md)" in together.stderr
        assert report["capsule"]["title"] == "job (2 files)"
        apart = json.loads(cli("analyze", str(log.parent), "--separate", "--json").stdout)["reports"]
        assert [Path(each["capsule"]["path"]).name for each in apart] == ["metrics.csv", "train.log"]

    def test_what_nobody_knows_is_a_line_each_and_two(self, cli: Run, log: Path):
        odd = {"text": b"plain words\n", "binary": os.urandom(3000), "empty": b""}
        for name, content in odd.items():
            (log.parent / name).write_bytes(content)
        done = cli("analyze", *(f"job/{name}" for name in odd), str(log), "--json")
        assert done.returncode == 2
        assert [report["capsule"]["path"] for report in json.loads(done.stdout)["reports"]] == [str(log)]
        text, binary, empty = done.stderr.splitlines()
        assert text.startswith("llmconsole: job/text: of no known format (looked for ")
        assert binary.startswith("llmconsole: job/binary: of no known format, a binary file")
        assert empty == "llmconsole: job/empty: is empty"

    def test_a_sparse_terabyte_is_refused_at_once(self, worker: Worker, tmp_path: Path):
        with (tmp_path / "huge").open("wb") as file:
            file.truncate(1 << 40)
        found = worker.call("group", {"paths": [str(tmp_path / "huge")]}, timeout=30)
        assert "no known format" in found["problems"][0]

    def test_directories_of_processes_are_one_report_a_run(self, cli: Run, tmp_path: Path):
        for name in ("one", "two"):
            launched(tmp_path / "logs" / name)
        (tmp_path / "logs" / "two" / "attempt_0" / "0" / "stderr.log").write_text("hello\n")
        done = cli("analyze", "logs", "--json")
        reports = json.loads(done.stdout)["reports"]
        assert {each["capsule"]["path"] for each in reports} == {"logs/one/attempt_0", "logs/two/attempt_0"}
        assert {each["capsule"]["title"] for each in reports} == {"one (2 files)", "two (2 files)"}
        assert done.stderr.count("\n") == 1
        assert "1 file of no known format left out (two/attempt_0/0/stderr.log)" in done.stderr
        for given in ("logs/one", "logs/one/attempt_0"):
            assert len(json.loads(cli("analyze", given, "--json").stdout)["reports"]) == 1

    def test_the_launchers_own_log_belongs_to_the_run_that_it_names(self, cli: Run, tmp_path: Path):
        launched(tmp_path / "logs" / "none_k3j2h1g0")
        error = (
            "Traceback (most recent call last):\nChildFailedError:\n  error_file: logs/none_{}/attempt_0/0/error.json\n"
        )
        (tmp_path / "torchrun.out").write_text(error.format("k3j2h1g0"))
        (tmp_path / "other.out").write_text(error.format("z9y8x7w6"))
        done = cli("analyze", str(tmp_path / "logs"), "torchrun.out", "other.out", "--json")
        paths = [each["capsule"]["path"] for each in json.loads(done.stdout)["reports"]]
        assert sorted(paths) == sorted([str(tmp_path), "other.out"])

    def test_two_runs_are_named_by_their_directories(self, cli: Run, tmp_path: Path):
        for name in ("one", "two"):
            launched(tmp_path / "logs" / name)
        done = cli("show", "logs")
        assert done.returncode == 2
        assert "holds 2 jobs; name one of them (" in done.stderr
        assert "logs/two/attempt_0" in done.stderr
        assert "import" not in done.stderr
        shown = json.loads(cli("show", "logs/two", "--json").stdout)
        assert [Path(each["path"]).parts[-2] for each in shown["manifest"]["imported"]["files"]] == ["0", "1"]

    def test_a_last_attempt_without_a_word_is_said(self, cli: Run, tmp_path: Path):
        launched(tmp_path / "logs" / "one")
        launched(tmp_path / "logs" / "one", attempt=1, text="")
        done = cli("analyze", "logs", "--json")
        assert done.stderr.count("\n") == 1
        assert "attempt 1 has left nothing that is known; attempt 0 is looked at" in done.stderr

    def test_names_of_control_characters_are_shown_escaped(self, cli: Run, tmp_path: Path):
        launched(tmp_path / "logs" / "a\x1b[2Jb")
        for command in ("analyze", "show"):
            done = cli(command, "logs")
            assert done.returncode == 0, done.stderr
            assert "\x1b[2J" not in done.stdout + done.stderr

    def test_a_directory_points_to_processes_further_below(self, worker: Worker, tmp_path: Path):
        launched(tmp_path / "all" / "one")
        (source,) = sources(worker, [str(tmp_path)])
        assert source.problem.endswith(f"there is some in {tmp_path / 'all'}")

    def test_a_directory_points_to_where_the_evidence_is(self, worker: Worker, log: Path):
        (source,) = sources(worker, [str(log.parent.parent)])
        assert "no capsule in this directory" in source.problem
        assert source.problem.endswith(f"there is some in {log.parent}")


class TestImport:
    def test_it_makes_a_capsule_with_the_original_in_it(self, cli: Run, log: Path):
        done = cli("import", str(log), "-o", "made", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document == {
            "format": "llmconsole.import/1",
            "capsules": [
                {
                    "path": "made/train.log.capsule",
                    "files": [{"path": str(log), "format": "log of llm.c", "bytes": len(LOG), "notes": []}],
                    "points": 177,
                    "records": 0,
                }
            ],
        }
        shown = json.loads(cli("show", "made/train.log.capsule", "--json").stdout)
        assert shown["manifest"]["trigger"]["kind"] == "imported"
        assert not shown["damage"]

    def test_what_cannot_be_used_is_said_and_the_rest_is_imported(self, cli: Run, log: Path):
        done = cli("import", "none", str(log), "-o", "made")
        assert done.returncode == 2
        assert done.stderr == "llmconsole: none: no such file or directory\n"
        assert done.stdout == "made/train.log.capsule\n"


class TestOtherCommands:
    def test_show_reads_a_raw_file(self, worker: Worker, log: Path):
        shown = worker.call("show", {"path": str(log)})
        assert shown["path"] == str(log)
        assert "loss" in json.dumps(shown["inventory"])

    def test_show_takes_a_directory_with_one_job_or_one_capsule(
        self, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def said(*arguments: str, status: int = 0) -> tuple[str, str]:
            assert main(list(arguments)) == status
            return capsys.readouterr()

        monkeypatch.chdir(tmp_path)
        (tmp_path / "dumps").mkdir()
        for rank in (0, 1):
            (tmp_path / "dumps" / f"_dump_{rank}").write_text(json.dumps(dump(calls=3 - rank)))
        direct, _ = said("show", "dumps", "--ranks")
        assert "first difference at 3" in direct
        assert "missing: rank 1" in direct
        assert said("import", "dumps", "-o", "runs") == ("runs/dumps.capsule\n", "")
        assert said("show", "runs", "--ranks") == (direct, "")
        whole = json.loads(said("show", "dumps", "--json")[0])
        assert (whole["path"], whole["title"], whole["ranks"]) == ("dumps", "dumps (2 files)", [0, 1])

        log.rename(tmp_path / "runs" / "train.log")
        words = "runs: holds 2 jobs; name one of them (runs/dumps.capsule, runs/train.log)"
        assert said("show", "runs", status=2) == ("", f"llmconsole: {words}\n")

    def test_a_case_asks_for_a_capsule_that_stays(self, worker: Worker, log: Path):
        with pytest.raises(WorkerError, match="llmconsole import"):
            worker.call("describe", {"path": str(log)})


class TestWorker:
    def test_files_are_recognised_for_the_list(self, worker: Worker, log: Path, tmp_path: Path):
        (tmp_path / "x").write_text("words\n")
        rows = worker.call("recognise", {"paths": [str(log), str(tmp_path / "x"), str(tmp_path / "none")]})
        assert [row["format"] for row in rows] == ["training log", "", ""]
        assert rows[0]["modified"] == log.stat().st_mtime
        assert rows[0]["size"] == len(LOG)

    def test_looks_open_raw_files_like_capsules(self, worker: Worker, log: Path):
        contents = worker.call("contents", {"path": str(log)})
        assert contents["series"][0] == "loss"
        assert contents["status"] == "sealed"
        assert worker.call("contents", {"path": str(log), "known": contents["version"]}) is None
        (curve,) = worker.call("curves", {"path": str(log), "names": ["loss"], "columns": 20})
        assert curve["name"] == "loss"
        assert worker.call("peek", {"path": str(log)})["step"] == 59

    def test_a_killed_worker_leaves_no_scratch_and_the_next_one_reads_again(
        self, worker: Worker, log: Path, scratches: Path
    ):
        worker.call("peek", {"path": str(log)})
        (scratch,) = scratches.iterdir()
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert [each.name for each in scratch.iterdir()] == ["train.log.capsule"]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(2):  # the first may find it dying
            try:
                assert worker.call("peek", {"path": str(log)})["step"] == 59
                break
            except WorkerError:
                continue
        (another,) = scratches.iterdir()
        assert another != scratch
        worker.close()
        assert list(scratches.iterdir()) == []

    def test_where_the_asking_process_is_killed_the_scratch_goes_too(self, log: Path, scratches: Path):
        program = """
            import sys, time
            from llmconsole.app.worker import Worker
            worker = Worker()
            worker.call("peek", {"path": sys.argv[1]})
            print("ready", flush=True)
            time.sleep(100)
        """
        asking = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(log)], stdout=subprocess.PIPE, text=True
        )
        assert asking.stdout is not None
        assert asking.stdout.readline() == "ready\n"
        assert len(list(scratches.iterdir())) == 1
        asking.kill()
        asking.wait()
        asking.stdout.close()
        until = time.monotonic() + 30
        while list(scratches.iterdir()) and time.monotonic() < until:
            time.sleep(0.02)
        assert list(scratches.iterdir()) == []


class TestGrowing:
    def test_a_log_that_grew_is_read_again(self, log: Path, scratches: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("LLMCONSOLE_SCRATCH", str(scratches))
        monkeypatch.setattr(imports, "_PATIENCE", 0.0)
        assert len(imports.open_evidence(str(log)).scalars("loss")) == 59
        assert imports.open_evidence(str(log)).path == imports.open_evidence(str(log)).path
        with log.open("a") as file:
            file.write("s:60 trl:5.0\n")
        assert len(imports.open_evidence(str(log)).scalars("loss")) == 60
        assert len(list(scratches.iterdir())) == 1  # the older import is gone
