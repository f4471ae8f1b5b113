"""Which rank, and which call: faults of many ranks in flight-recorder dumps, beside the analyzer that torch ships.

Each incident is a directory of dumps of 2 to 64 ranks (``tests/analyzers/sweep``). Ours reads the directory as it is:
shuffled, pickled or JSON. ``torchfrtrace`` gets the same content as pickles, since it reads nothing else, and
``--allow-incomplete-ranks`` where dumps are missing; of what it prints, the first call for which it holds ranks
responsible is its answer. It runs in one process for all incidents, so that importing torch counts once; times are
taken with its command, as a user starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.analyzers.sweep import flight_faults, flight_verdicts
from tests.analyzers.sweep.parallel_jobs import Call, Job, run

#: Incidents of each fault that dumps can show, of each that is none, and of each that they cannot show.
NAMED, OTHERS = 20, 8
#: Ranks and entries a rank of the dumps whose reading is timed.
LARGE = ((64, 2000), (1024, 500))
#: Seconds after which a command is taken to give no answer.
PATIENCE = 180
TARGET_EXACT, TARGET_TIME = 0.99, 1 / 3
_KINDS = ("exact", "other call", "abstained", "quiet", "wrong rank")


def main(parts: Sequence[str] = ("rates", "times")) -> None:
    """Print rates and times."""
    if "rates" in parts:
        with tempfile.TemporaryDirectory() as place:
            rates(Path(place))
    for ranks, entries in LARGE if "times" in parts else ():
        with tempfile.TemporaryDirectory() as place:
            times(Path(place), ranks, entries)


# -- rates


def incidents() -> Iterator[flight_faults.Incident]:
    """All incidents of the comparison."""
    for fault in flight_faults.NAMED:
        yield from (flight_faults.incident(seed, fault) for seed in range(NAMED))
    for fault in (*flight_faults.QUIET, *flight_faults.OUTSIDE):
        yield from (flight_faults.incident(seed, fault) for seed in range(OTHERS))


def rates(place: Path) -> None:
    """Both diagnoses of every incident."""
    found = list(incidents())
    own: list[str] = []
    pickles: list[tuple[str, bool]] = []
    began = time.process_time()
    broken = 0
    for at, each in enumerate(found):
        files = flight_faults.write(each, place / f"own-{at}")
        try:
            verdict = with_llmconsole(files, place)
        except Exception:
            traceback.print_exc()
            broken += 1
            verdict = flight_verdicts.Verdict()
        own.append(flight_verdicts.outcome(each.truth, verdict, each.missing_dumps))
        flight_faults.write(each, place / f"torch-{at}", pickled=True)
        absent = bool(each.missing_dumps) or each.truth.fault == "torn-apart"
        pickles.append((str(place / f"torch-{at}"), absent))
    seconds = time.process_time() - began
    answers = with_torchfrtrace(pickles)
    theirs: list[str] = []
    somewhere = 0
    for each, (printed, _) in zip(found, answers, strict=True):
        verdicts = flight_verdicts.of_torchfrtrace(printed) or [flight_verdicts.Verdict()]
        outcomes = [flight_verdicts.outcome(each.truth, verdict, each.missing_dumps) for verdict in verdicts]
        theirs.append(outcomes[0])
        somewhere += each.truth.fault in flight_faults.NAMED and "exact" in outcomes
    raised = sum(failed for _, failed in answers)
    print(f"{len(found)} incidents, {seconds:.0f} s; tracebacks: ours {broken}, torchfrtrace {raised}")
    print("torchfrtrace DIRECTORY [--allow-incomplete-ranks], the first call with ranks held responsible")
    for side, outcomes in (("llmconsole", own), ("torchfrtrace", theirs)):
        _table(side, found, outcomes)
    faults = sum(each.truth.fault in flight_faults.NAMED for each in found)
    print(f"right anywhere in what it prints: {somewhere / faults:.1%}")


def _table(side: str, found: list[flight_faults.Incident], outcomes: list[str]) -> None:
    print(f"\n{side:17}" + "".join(f"{kind:>12}" for kind in _KINDS))
    for fault in (*flight_faults.NAMED, *flight_faults.QUIET, *flight_faults.OUTSIDE):
        count = Counter(o for each, o in zip(found, outcomes, strict=True) if each.truth.fault == fault)
        print(f"{fault:17}" + "".join(f"{count[kind] or '':>12}" for kind in _KINDS))
    named = [(each, o) for each, o in zip(found, outcomes, strict=True) if each.truth.fault in flight_faults.NAMED]
    deciding = [o for each, o in named if each.truth.deciding]
    others = [o for each, o in zip(found, outcomes, strict=True) if each.truth.fault not in flight_faults.NAMED]
    exact = sum(o == "exact" for _, o in named)
    sure = sum(o == "exact" for o in deciding)
    print(
        f"exact: {exact / len(named):.1%} of {len(named)}; where three ranks decide {sure / len(deciding):.1%} of ",
        end="",
    )
    print(f"{len(deciding)}" + (f" (target {TARGET_EXACT:.0%})" if side == "llmconsole" else ""))
    wrong = sum(o == "wrong rank" for _, o in named), sum(o == "wrong rank" for o in others)
    print(
        f"wrong rank: {wrong[0] / len(named):.1%} of the faults, {wrong[1] / len(others):.1%} of {len(others)} others"
    )


def with_llmconsole(files: list[Path], place: Path) -> flight_verdicts.Verdict:
    """Import the dumps and ask the rules."""
    from llmconsole.capsules import Capsule
    from llmconsole.capsules.importers import import_job

    done = import_job(files, place / "capsules", attach=False)
    return flight_verdicts.of_capsule(Capsule.open(done.path))


def with_torchfrtrace(directories: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """What torch's analyzer prints of each directory, and whether it raised; in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.distributed", "--torchfrtrace"],
        input=json.dumps(directories),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [(printed, failed) for printed, failed in json.loads(done.stdout)]


def _torchfrtrace() -> None:
    """Run torch's analyzer on the directories that standard input lists."""
    from torch.distributed.flight_recorder import fr_trace

    answers: list[tuple[str, bool]] = []
    (handler,) = logging.getLogger("Flight Recorder").handlers
    for directory, incomplete in json.load(sys.stdin):
        printed = io.StringIO()
        handler.setStream(printed)  # type: ignore[attr-defined]
        failed = False
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                fr_trace.main([directory, *(["--allow-incomplete-ranks"] if incomplete else [])])
            except BaseException:
                failed = True
        answers.append((printed.getvalue(), failed))
    print(json.dumps(answers))


# -- times


def times(place: Path, ranks: int, entries: int) -> None:
    """Seconds from the command to its last line, one after the other on the same dumps of a hang."""
    large(place / "dumps", ranks, entries)
    size = sum(each.stat().st_size for each in (place / "dumps").iterdir())
    torch = Path(sys.executable).with_name("torchfrtrace")
    ours = [str(Path(sys.executable).with_name("llmconsole")), "analyze", str(place / "dumps")]
    theirs = [str(torch), str(place / "dumps")]
    print(f"\n{ranks:,} ranks of {entries:,} entries, {size / 1e6:.0f} MB")
    taken = {name: _timed(command) for name, command in (("torchfrtrace", theirs), ("llmconsole analyze", ours))}
    for name, (seconds, peak, printed) in taken.items():
        print(f"{name:19}{seconds:7.1f} s {peak:7.0f} MB   {printed[:80]}")
    (theirs_took, _, _), (ours_took, ours_peak, _) = taken["torchfrtrace"], taken["llmconsole analyze"]
    sign = "≤ " if theirs_took >= PATIENCE else ""
    print(f"share of its time {sign}{ours_took / theirs_took:.2f} (target {TARGET_TIME:.2f})", end="")
    print(f"; memory / files {ours_peak * 1e6 / size:.1f}")


def large(directory: Path, ranks: int, entries: int) -> None:
    """Dumps of a healthy run of tensor and data parallelism in which one rank stops before the last step."""
    import random

    from tests.analyzers.sweep.parallel_jobs import train

    job: Job = train(random.Random(7), ranks, 8, 1, entries)
    program: list[Call] = job.programs[ranks // 3]
    del program[entries * 99 // 100 :]
    job.stopped.add(ranks // 3)
    truth = flight_faults.Truth("stuck", frozenset((ranks // 3,)))
    found = flight_faults.Incident(0, truth, job, run(job), "2.10", False, frozenset(), entries, False, True, {})
    flight_faults.write(found, directory)


def _timed(command: list[str]) -> tuple[float, float, str]:
    """Wall seconds, peak MB of any of its processes, and the first telling line of a command; it has so long."""
    with tempfile.TemporaryFile("w+") as printed:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        killer = threading.Timer(PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        _, status, usage = os.wait4(process.pid, 0)
        killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        printed.seek(0)
        text = printed.read(1_000_000)
    if process.returncode == -signal.SIGKILL:
        return seconds, usage.ru_maxrss / 1e3, f"no answer in {PATIENCE} s"
    lines = [line.strip() for line in text.splitlines() if "rank" in line.lower()]
    return seconds, usage.ru_maxrss / 1e3, lines[0] if lines else text.strip()[:80]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["rates", "times"], help="rates, times or both")
    parser.add_argument("--torchfrtrace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.torchfrtrace:
        _torchfrtrace()
    else:
        main(given.parts)
