"""Starts jobs under torchrun, and scripts, waits for them, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from .job import place

ROOT = Path(__file__).resolve().parents[3]
_MARK = "LLMCONSOLE_TEST_MARK"


class Started:
    """Processes that can be found and ended, whatever session or parent they have: all inherit one mark."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, command: Sequence[str], folder: Path, said: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; what it says goes to a file."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMCONSOLE_")}
        name, _, mark = self._mark.partition("=")
        environment = kept | {name: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with said.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def left(self) -> list[int]:
        """Those that are alive."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def kill(self) -> None:
        """End them all, at whatever they are."""
        while pids := self.left():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        for process in self._running:
            process.wait()


class Launch(Started):
    """One torchrun on this machine.

    Args:
        folder: for the jobs' capsules and files.
        ranks: their number.
        names: of the jobs, in the order in which they begin.
        plain: the one job is played in the ranks themselves, so that torchrun sees how they end.
    """

    def __init__(self, folder: Path, ranks: int, names: Sequence[str], *, plain: bool = False) -> None:
        super().__init__()
        self.folder, self.ranks = folder, ranks
        self._said = folder / "torchrun.txt"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = ["-m", "tests.distributed.lab.main", *["--plain"] * plain, str(folder), *names]
        self._process = self.start([*torchrun, *job], folder, self._said)

    def place(self, name: str) -> Path:
        """Where the capsule of a job lies."""
        return place(self.folder, name) / "job.capsule"

    def capsule(self, name: str) -> Path:
        """The capsule of a job, once all its ranks have ended."""
        while len(self.ended(name)) < self.ranks:
            self.wait()
        return self.place(name)

    def wait(self) -> None:
        """Wait a moment for what a running job does."""
        assert self._process.poll() is None, self._said.read_text()
        time.sleep(0.05)

    def status(self) -> int:
        """Of torchrun, once it has ended."""
        return self._process.wait()

    def ended(self, name: str) -> dict[int, int]:
        """Exit status (negative: the signal) of each rank of a job that has ended."""
        files = place(self.folder, name).glob("ended-*.txt")
        known = {int(path.stem.partition("-")[2]): path.read_text() for path in files}
        return {rank: int(status) for rank, status in known.items() if status}

    def words(self, name: str) -> str:
        """What the ranks of a job said."""
        return "".join(path.read_text() for path in sorted(place(self.folder, name).glob("said-*.txt")))


def looked_at(request: pytest.FixtureRequest) -> list[str]:
    """The jobs that the tests of the asking module look at (``name``, ``names``), of those tests that are to run."""
    chosen = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in chosen if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(name for each in given for name in (each.get("names") or (each["name"],))))
