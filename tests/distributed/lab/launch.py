"""Starts jobs under torchrun, waits for them, and leaves no process behind."""

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

from .main import place

ROOT = Path(__file__).resolve().parents[3]
_MARK = "LLMCONSOLE_TEST_LAUNCH"


def marked(mark: str) -> list[int]:
    """Processes of a launch that are alive, whatever session or parent they have."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


class Launch:
    """One torchrun on this machine.

    Args:
        folder: for the jobs' capsules and files.
        ranks: their number.
        names: of the jobs, in the order in which they begin.
        plain: the one job is played in the ranks themselves, so that torchrun sees how they end.
    """

    def __init__(self, folder: Path, ranks: int, names: Sequence[str], *, plain: bool = False) -> None:
        self.folder, self.ranks = folder, ranks
        self._mark = uuid.uuid4().hex
        self.said = folder / "torchrun.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command += ["tests.distributed.lab.main", *["--plain"] * plain, str(folder), *names]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMCONSOLE_")}
        environment = kept | {_MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def capsule(self, name: str) -> Path:
        """The capsule of a job, once all its ranks have ended."""
        while len(self.ended(name)) < self.ranks:
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.05)
        return place(self.folder, name) / "job.capsule"

    def ended(self, name: str) -> dict[int, int]:
        """Exit status (negative: the signal) of each rank of a job that has ended."""
        files = place(self.folder, name).glob("ended-*.txt")
        known = {int(path.stem.partition("-")[2]): path.read_text() for path in files}
        return {rank: int(status) for rank, status in known.items() if status}

    def words(self, name: str) -> str:
        """What the ranks of a job said."""
        return "".join(path.read_text() for path in sorted(place(self.folder, name).glob("said-*.txt")))

    def left(self) -> list[int]:
        """Its processes that are alive."""
        return marked(self._mark)

    def kill(self) -> None:
        """End all of its processes, at whatever they are."""
        while pids := self.left():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait()
            time.sleep(0.01)
        self.process.wait()
