"""Commands in the demo's repository: the training run, line by line, and its tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

#: A step of this size wins nothing from more threads, and a shared machine loses by them.
MAX_THREADS = 4

#: Seconds between asking a training run to end and killing it; it seals its capsule in between.
GRACE_S = 5.0

#: What a launcher may have left in the shell; the demo is one process whatever they say.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LLMCONSOLE_RUN")

_LINE = re.compile(r"step (?P<step>\d+) loss (?P<loss>\S+) lr (?P<rate>\S+)")


@dataclass(frozen=True)
class TrainedStep:
    """One line of the training script's output; a loss that is not finite is one, too."""

    step: int
    loss: float
    learning_rate: float


class TrainingError(Exception):
    """The training script ended in an error of its own; one line."""


def train(directory: Path, *arguments: str) -> Generator[TrainedStep]:
    """Run ``train.py`` in ``directory`` and yield its steps as they are printed.

    The process is gone when the iteration ends, however it ends: close the iterator (``contextlib.closing``) where
    it may be left early.

    Raises:
        TrainingError: the script left with a status other than 0 (loss finite) and 1 (loss not finite).
    """
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
        start_new_session=True,  # an interrupt reaches us alone, and we end it
    )
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=5)
    try:
        for line in process.stdout:
            if match := _LINE.match(line):
                yield TrainedStep(int(match["step"]), float(match["loss"]), float(match["rate"]))
            elif line.strip():
                said.append(line.strip())
        status = process.wait()
    finally:
        _end(process)
        process.stdout.close()
    if status not in (0, 1) or (status == 1 and said and "Error" in said[-1]):
        raise TrainingError(f"train.py left with status {status}: {said[-1] if said else 'without a word'}")


@dataclass(frozen=True)
class TestRun:
    """How a run of tests ended: every test passed, or only assertions failed, or it could not be run."""

    outcome: str  # passed, failed, error
    summary: str  # the runner's own last lines, for people

    __test__ = False


def run_tests(directory: Path, *modules: str) -> TestRun:
    """Run the named test modules of ``directory`` (all of them where none is named) with unittest."""
    selection = list(modules) or ["discover", "-s", "tests", "-t", "."]
    done = subprocess.run(
        [sys.executable, "-m", "unittest", *selection],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    ran = next((line for line in reversed(lines) if line.startswith("Ran ")), "")
    complaint = next((line for line in reversed(lines) if line.startswith("AssertionError")), "")
    if done.returncode == 0 and last.startswith("OK") and not ran.startswith("Ran 0"):
        return TestRun("passed", f"{ran}: {last}")
    # An import error is no red test: it would say nothing about the fault.
    if re.fullmatch(r"FAILED \(failures=\d+\)", last):
        return TestRun("failed", complaint or last)
    return TestRun("error", last)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(min(MAX_THREADS, len(os.sched_getaffinity(0)))))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a shared machine, threads that spin slow everyone
    environment.pop("PYTHONSAFEPATH", None)  # the scripts import the modules beside them
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in _LAUNCHERS:
        environment.pop(name, None)
    return environment


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the process's session to end, then kill what is left of it."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
