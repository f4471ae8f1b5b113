"""Logs that torchrun leaves without a recorder: whose error counts, what only follows, and who was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

MISMATCH, DIED, FAILED = "distributed/collective-mismatch", "distributed/rank-died-first", "runtime/job-failed"
REAL = Path(__file__).resolve().parents[1] / "capsules" / "importers" / "fixtures" / "distributed"
SIZES = (
    "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8256 vs 8"
)
THROWN = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:4711"
STEPS = "".join(f"step {step} loss {2.5 - step / 100:.2f}\n" for step in range(1, 9))
TOLD = "W1130 09:03:40.930000 7 torch/distributed/elastic/agent/server/api.py:753] Received {} death signal, shutting "
FORCED = "W1130 09:04:10.931000 7 elastic/api.py:1047] Unable to shutdown process 91 via {}, forcefully exiting via"
STOPPED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: {}\n"

Read = Callable[[str], CapsuleReport]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The report of one log, given as text or as the name of a real one."""

    def run(text: str) -> CapsuleReport:
        path = REAL / f"{text}.torchrun.log"
        if "\n" in text:
            path = tmp_path / "job.out"
            path.write_text(text)
        report = analyze(Capsule.open(import_files([path], tmp_path / "made", attach=False)))
        assert not report.errors
        return report

    return run


def trace(error: str, who: str = "", file: str = "/job/train.py") -> str:
    lines = ("Traceback (most recent call last):", f'  File "{file}", line 8, in <module>', "    main()", error)
    return "".join(f"{who}{line}\n" for line in lines)


def summary(*ends: tuple[int, int, str]) -> str:
    """torchrun's, of (rank, exit code, signal)."""
    return "".join(
        f"  time      : 2026-11-30_07:26:25\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {3000 + rank}) {f' ({signal})' if signal else ''}\n  error_file: <N/A>\n"
        for rank, code, signal in ends
    )


def fired(report: CapsuleReport) -> dict[str, Finding]:
    return {each.rule: each for each in report.findings if each.kind != "hygiene"}


@pytest.mark.fires(MISMATCH)
@pytest.mark.quiet(DIED)
@pytest.mark.quiet(FAILED)
@pytest.mark.parametrize(("name", "received", "ended"), [("sizes", 11_524, 0), ("sizes_of_four", 5_764, 2)])
def test_two_sizes_that_meet_accuse_nobody(read: Read, name: str, received: int, ended: int):
    found = fired(read(name))
    assert list(found) == [MISMATCH]  # the rank that Gloo ended received what another one sent
    assert (found[MISMATCH].confidence, found[MISMATCH].where.rank) == ("undetermined", None)
    shown = {each.name: each.value for each in found[MISMATCH].evidence}
    assert (shown["bytes_received"], shown["ended_ranks"]) == (received, [ended])


@pytest.mark.fires(MISMATCH)
@pytest.mark.parametrize(
    "text",
    [
        STEPS + trace(f"RuntimeError: {SIZES}", "[rank1]: ") + trace(PEER, "[rank0]: "),
        STEPS + f"[rank1]: {THROWN}\n[rank1]:   what():  {SIZES}\n",
        STEPS
        + f"{THROWN}\n  what():  {SIZES}\n"
        + summary((0, -15, "SIGTERM"), (1, -6, "SIGABRT"), (2, -6, "SIGABRT")),
    ],
    ids=["python", "c++", "two aborted"],
)
def test_the_error_of_sizes_in_other_words(read: Read, text: str):
    found = fired(read(text))
    assert set(found) == {MISMATCH}
    assert found[MISMATCH].where.rank is None


@pytest.mark.fires(DIED)
def test_the_rank_that_raised_is_named_and_not_the_one_that_lost_it(read: Read):
    for text in ("raised", STEPS + trace(PEER, "[rank0]: ") + trace("ValueError: bad sample", "[rank1]: ")):
        report = read(text)
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 1)
        assert "ValueError: bad sample" in report.first_divergence.summary
        assert fired(report)[FAILED].where.rank == 1


@pytest.mark.fires(DIED)
def test_an_abort_that_answers_a_lost_peer_is_no_end_of_its_own(read: Read):
    thrown = "terminate called after throwing an instance of 'gloo::IoException'\n"
    errors = f"{thrown}  what():  {PEER}\n{trace(PEER, '[rank0]: ')}===\nFailures:\n"
    report = read(STEPS + errors + summary((1, -6, "SIGABRT"), (0, 1, ""), (2, -11, "SIGSEGV")))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 2)
    assert fired(report)[FAILED].where.rank == 2
    lost = fired(read(STEPS + errors + summary((1, -6, "SIGABRT"), (0, 1, ""))))
    assert list(lost) == [FAILED]
    assert lost[FAILED].where.rank is None


@pytest.mark.fires(DIED)
def test_an_error_of_a_library_that_nobody_caught_is_its_ranks(read: Read):
    thrown = "terminate called after throwing an instance of 'std::logic_error'\n"
    errors = f"{thrown}  what():  no such key\n{trace(PEER, '[rank0]: ')}"
    report = read(STEPS + errors + "===\nFailures:\n" + summary((1, -6, "SIGABRT"), (0, -15, "SIGTERM")))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 1)
    assert "std::logic_error: no such key" in report.first_divergence.summary


@pytest.mark.fires(FAILED)
def test_of_errors_without_a_time_the_first_one_counts(read: Read):
    errors = trace("KeyError: 'b'", "[rank2]: ") + trace("ValueError: a", "[rank0]: ")
    assert fired(read(STEPS + errors))[FAILED].where.rank == 2


@pytest.mark.fires(FAILED)
def test_a_rank_whose_peer_ended_without_an_error_is_no_culprit(read: Read):
    finding = fired(read("ended_early"))[FAILED]
    assert (finding.title, finding.where.rank) == ("Rank 0 lost its connection to another rank", None)
    assert "had ended before, without an error" in finding.summary
    others = STEPS + trace(PEER, "[rank0]: ") + "W1130 api.py:1] Sending process 3001 closing signal SIGTERM\n"
    assert "without an error" not in fired(read(others))[FAILED].summary


@pytest.mark.fires(FAILED)
@pytest.mark.parametrize("signal", ["15", "Signals.SIGTERM"])
def test_workers_that_outlive_their_launchers_signal_are_no_health(read: Read, signal: str):
    finding = fired(read("stopped"))[FAILED]
    assert (finding.severity, finding.confidence, finding.where.rank) == ("warning", "undetermined", None)
    assert "2 workers hung" in finding.title
    told = TOLD.format(signal) + "down workers\n"
    text = STEPS + told + FORCED.format(signal) + f" {signal}\n" + trace(STOPPED.format(signal), file="torchrun")
    assert "1 worker hung" in fired(read(text))[FAILED].title


@pytest.mark.quiet(FAILED)
def test_a_job_that_ends_when_it_is_told_to_is_a_remark(read: Read):
    text = STEPS + TOLD.format(15) + "down workers\n" + trace(STOPPED.format(15), file="torchrun")
    report = read(text)
    (finding,) = (each for each in report.findings if each.rule == FAILED)
    assert (finding.severity, finding.kind, report.first_divergence) == ("info", "hygiene", None)


@pytest.mark.quiet(FAILED)
@pytest.mark.quiet(DIED)
@pytest.mark.quiet(MISMATCH)
@pytest.mark.parametrize(
    "text",
    [
        STEPS + "[rank1]:[W1130 TCPStore.cpp:138] recvValue failed: Connection closed by peer\nTraining finished.\n",
        STEPS + "the loader stopped: Received 15 samples\n",
    ],
    ids=["closed at the end", "words"],
)
def test_a_job_that_ended_as_it_should_is_quiet(read: Read, text: str):
    report = read(text)
    assert not {MISMATCH, DIED, FAILED} & {each.rule for each in report.findings}
