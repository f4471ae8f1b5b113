"""The rules about the capsule itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.jsonio import decode, encode

from tests.analyzers.conftest import rule_named
from tests.analyzers.played_jobs import play, same

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]

NOW = 1_700_000_000.0


def series(writer: CapsuleWriter) -> None:
    writer.scalars("loss", step=[0, 1, 2], value=[3.0, 2.0, 1.0], rank=0)
    writer.record("events", {"kind": "step_begin", "step": 0})


@pytest.mark.fires("capsule/not-replayable")
def test_a_capsule_with_a_loss_alone_cannot_be_replayed(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of("capsule/not-replayable", build(series))
    assert (finding.severity, finding.kind) == ("info", "hygiene")
    assert all(each.note for each in finding.evidence)


@pytest.mark.quiet("capsule/not-replayable")
def test_a_capsule_with_all_eight_items_is_quiet(build: Build, findings_of: Say) -> None:
    capsule = build(complete, COMPLETE)
    assert [item.name for item in capsule.replay_items() if not item.present] == []
    assert not findings_of("capsule/not-replayable", capsule)


@pytest.mark.quiet("capsule/not-replayable")
def test_raw_files_are_no_recording_and_nothing_is_missing_of_one(build: Build) -> None:
    report = analyze(build(series, {"trigger": {"kind": "imported"}}), [rule_named("capsule/not-replayable")])
    (skipped,) = report.skipped
    assert (report.findings, "recording" in skipped.missing[0]) == ((), True)


@pytest.mark.quiet("capsule/damaged")
def test_a_sealed_capsule_is_not_damaged(build: Build, findings_of: Say) -> None:
    assert not findings_of("capsule/damaged", build(series))


@pytest.mark.fires("capsule/damaged")
@pytest.mark.recorded("capsule/damaged")
@pytest.mark.parametrize("name", ["scalars.bin", "records/events.jsonl"])
def test_a_file_cut_short_is_named_and_the_rest_is_still_read(build: Build, findings_of: Say, name: str) -> None:
    capsule = build(series)
    path = capsule.path / "ranks" / "rank00000" / name
    path.write_bytes(path.read_bytes()[:-5])
    (finding,) = findings_of("capsule/damaged", Capsule.open(capsule.path))
    assert (finding.severity, finding.kind, finding.confidence) == ("warning", "hygiene", "confirmed")
    assert name.rpartition("/")[2] in finding.summary


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A capsule of three steps whose writer was killed: rank 0 was never sealed and its process has ended."""
    path = tmp_path / "killed.capsule"
    series(CapsuleWriter(path, clock=lambda: NOW))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    file = path / "ranks" / "rank00000" / "rank.json"
    file.write_bytes(encode(decode(file.read_bytes()) | {"pid": child.pid}))
    return path


def opened_later(path: Path) -> Capsule:
    return Capsule.open(path, clock=lambda: NOW + 60)


@pytest.mark.fires("capsule/damaged")
@pytest.mark.parametrize("torn", [0, 5])
def test_a_killed_job_is_said_to_have_ended_and_not_that_its_capsule_is_to_be_copied_again(
    killed: Path, findings_of: Say, torn: int
) -> None:
    events = killed / "ranks" / "rank00000" / "records" / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"kin'[:torn])
    (finding,) = findings_of("capsule/damaged", opened_later(killed))
    assert finding.title == "The job ended without closing the recorder"
    assert (finding.severity, finding.kind, finding.confidence) == ("warning", "hygiene", "confirmed")
    assert finding.summary.startswith("The record reaches step 2 and")
    assert ("1 unfinished last row was dropped" in finding.summary) == bool(torn)
    assert (finding.evidence[0].name, finding.evidence[0].value) == ("last recorded step", 2)
    assert "out-of-memory killer" in finding.next[0]
    assert "signal" in finding.next[1]
    assert not any("copy" in each for each in finding.next)


def ended(path: Path, *, skips: bool, exit_: dict[str, Any] | None = None) -> Capsule:
    """Three ranks of a job whose writers were killed; rank 1 left a call out, or ended by itself."""
    programs = same(3)
    if skips:
        del programs[1][12]
    stuck = (lambda rank, at: rank == 1 and at >= 8) if exit_ else (lambda rank, at: False)
    writer = CapsuleWriter(path, clock=lambda: NOW)
    play(programs, stuck=stuck).write(writer)
    if exit_:
        writer.record("ranks", {"exit": exit_, "dump": True}, rank=1)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for file in path.glob("ranks/*/rank.json"):
        file.write_bytes(encode(decode(file.read_bytes()) | {"pid": child.pid}))
    return opened_later(path)


@pytest.mark.fires("capsule/damaged")
@pytest.mark.parametrize(
    ("skips", "exit_", "why"),
    [
        (True, None, "distributed/collective-mismatch"),
        (False, {"kind": "exception", "message": "ValueError: bad"}, "distributed/rank-died-first"),
        (False, None, None),
    ],
)
def test_ranks_that_ended_for_what_a_rule_of_the_calls_names_are_not_searched_for_in_the_kernel_log(
    tmp_path: Path, findings_of: Say, skips: bool, exit_: Any, why: str | None
) -> None:
    capsule = ended(tmp_path / "ended.capsule", skips=skips, exit_=exit_)
    (finding,) = findings_of("capsule/damaged", capsule)
    assert any("out-of-memory killer" in each for each in finding.next) == (why is None)
    if why:
        assert finding.summary.startswith(f"3 ranks ended without sealing: see {why} for why.")


@pytest.mark.fires("capsule/damaged")
def test_a_job_of_another_host_that_fell_silent_is_not_said_to_have_ended(killed: Path, findings_of: Say) -> None:
    file = killed / "ranks" / "rank00000" / "rank.json"
    file.write_bytes(encode(decode(file.read_bytes()) | {"host": "elsewhere"}))
    (finding,) = findings_of("capsule/damaged", opened_later(killed))
    assert finding.title == "The recorder fell silent without closing"


@pytest.mark.fires("capsule/damaged")
def test_a_killed_job_whose_files_are_broken_in_the_middle_has_a_damaged_capsule(
    killed: Path, findings_of: Say
) -> None:
    events = killed / "ranks" / "rank00000" / "records" / "events.jsonl"
    events.write_bytes(b"broken\n" + events.read_bytes())
    (finding,) = findings_of("capsule/damaged", opened_later(killed))
    assert finding.title == "The capsule is damaged in 2 places"
    assert "copy the capsule again" in finding.next[0]


def complete(writer: CapsuleWriter) -> None:
    ids = np.arange(8).reshape(2, 4)
    writer.batch(step=3, rank=0, sample_ids=["a", "b"], input_ids=ids, labels=ids)
    writer.rng(step=3, rank=0, torch=b"0123", python=b"4567", numpy=b"89")
    writer.scalars("loss", step=[3], value=[float("nan")], rank=0)
    row = {"order": 0, "name": "layers.0", "role": "activation", "dtype": "float32", "device": "cpu", "numel": 8}
    row |= {"shape": [2, 4], "stride": [4, 1]}
    writer.stats([{**row, "step": 2, "nan": 0}, {**row, "step": 3, "nan": 1}], rank=0)
    writer.tensor("reference/out", np.zeros((2, 2), np.float32), step=3, order=0, rank=0)
    writer.tensor("observed/out", np.ones((2, 2), np.float32), step=3, order=0, rank=0)
    writer.record("events", {"kind": "exception", "step": 3, "type": "RuntimeError", "message": "stop"})


_DIGEST = {"name": "x", "sha256": "0" * 64}
COMPLETE: dict[str, Any] = {
    "identity": {name: _DIGEST for name in ("model", "adapter", "tokenizer", "chat_template", "base_checkpoint")},
    "position": {"global_step": 3, "tokens_seen": 100, "data_cursor": {"offset": 1}},
    "placement": {"device": ["cpu"], "mesh": [1]},
    "config": {"lr": 1e-3},
    "environment": {"python": "3.11", "torch": "2.13", "packages": {"torch": "2.13"}},
    "trigger": {"kind": "nonfinite", "step": 3, "rank": 0, "signal": "loss"},
}


class TestNothingLogged:
    """Files of a run in which no step was ever reported."""

    @staticmethod
    def event_file(folder: Path, *steps: int) -> Path:
        """What tensorboard's own writer leaves, opened in March 2025, with one number for each step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(folder))
        for step in steps:
            value = Summary.Value(tag="loss", simple_value=2.0)
            writer.add_event(Event(wall_time=1.742e9 + step, step=step, summary=Summary(value=[value])))
        writer.close()
        (path,) = folder.iterdir()
        return path

    @staticmethod
    def imported(target: Path, *files: Path) -> Capsule:
        from llmconsole.capsules.importers import import_files

        return Capsule.open(import_files(files, target, attach=False))

    @pytest.mark.fires("capsule/nothing-logged")
    @pytest.mark.recorded("capsule/nothing-logged")
    def test_a_file_that_was_opened_and_never_written_to_is_a_job_that_died_before_its_first_step(
        self, tmp_path: Path, findings_of: Say
    ) -> None:
        (tmp_path / "run").mkdir()
        path = self.event_file(tmp_path / "run")
        path.write_bytes(opened_at(path.read_bytes(), 1.742e9))
        (finding,) = findings_of("capsule/nothing-logged", self.imported(tmp_path / "out", path))
        assert (finding.severity, finding.confidence) == ("warning", "undetermined")
        assert "before its first step" in finding.summary
        assert path.name in finding.summary
        assert "standard error" in finding.next[0]

    @pytest.mark.quiet("capsule/nothing-logged")
    def test_one_step_is_enough(self, tmp_path: Path, findings_of: Say) -> None:
        (tmp_path / "run").mkdir()
        capsule = self.imported(tmp_path / "out", self.event_file(tmp_path / "run", 0))
        assert not findings_of("capsule/nothing-logged", capsule)

    @pytest.mark.quiet("capsule/nothing-logged")
    def test_a_file_of_a_moment_ago_may_be_of_a_job_that_starts(self, tmp_path: Path, findings_of: Say) -> None:
        (tmp_path / "run").mkdir()
        (finding,) = findings_of(
            "capsule/nothing-logged", self.imported(tmp_path / "out", self.event_file(tmp_path / "run"))
        )
        assert (finding.severity, "may still be starting" in finding.summary) == ("info", True)

    @pytest.mark.quiet("capsule/nothing-logged")
    def test_an_empty_file_beside_one_that_goes_on_is_a_remark(self, tmp_path: Path, findings_of: Say) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        files = self.event_file(tmp_path / "one"), self.event_file(tmp_path / "two", 1, 2, 3)
        (finding,) = findings_of("capsule/nothing-logged", self.imported(tmp_path / "out", *files))
        assert (finding.severity, "reach step 3" in finding.summary) == ("info", True)


def opened_at(data: bytes, wall: float) -> bytes:
    """An event file with the wall time of its records set, and their checksums with it."""
    import struct

    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    made, at = b"", 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        body = body[:1] + struct.pack("<d", wall) + body[9:]
        made += data[at : at + 12] + body + struct.pack("<I", masked_crc32c(body))
        at += 16 + length
    return made
