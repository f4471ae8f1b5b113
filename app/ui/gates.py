"""Gates that run: the command itself as a process, watched line by line; it ends with the console at the latest."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from textual.signal import Signal

if TYPE_CHECKING:
    from textual.app import App

_ITEM = re.compile(r"llmconsole: (\d) of 6: (\w+) ")
_RESULT = re.compile(r"llmconsole: (\w+) (passed|failed|error|skipped): ")


@dataclass
class GateRun:
    """One run: the item at work, the verdicts so far, the last lines it printed, and once it ended its words."""

    case: str
    process: subprocess.Popen[str]
    item: str = ""
    done: int = 0
    verdicts: dict[str, str] = field(default_factory=dict[str, str])
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    ended: bool = False
    stopped: bool = False
    words: str = ""


class Gates:
    """The runs of this visit, at most one a case.

    Args:
        app: whoever listens to ``changed`` is told in its thread.
    """

    def __init__(self, app: App[Any]) -> None:
        self._app = app
        self._runs: dict[str, GateRun] = {}
        #: Published with the case's id.
        self.changed: Signal[str] = Signal(app, "gate")

    def of(self, case: str) -> GateRun | None:
        """The run of a case that is going on, or the last one of this visit."""
        return self._runs.get(case)

    def start(self, case: str, repository: str) -> None:
        """Run the gate of a case, unless it is running."""
        known = self._runs.get(case)
        if known is not None and not known.ended:
            return
        words = [
            sys.executable,
            "-P",
            "-m",
            "llmconsole.app.cli",
            "gate",
            "run",
            case,
            "--repo",
            repository,
            "--verbose",
        ]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        run = self._runs[case] = GateRun(case, process)
        threading.Thread(target=self._follow, args=(run,), name=f"gate-{case}", daemon=True).start()

    def stop(self, case: str) -> None:
        """End a run; what it started is cleaned up by the command's own helper."""
        run = self._runs.get(case)
        if run is not None and not run.ended:
            run.stopped = True
            with contextlib.suppress(OSError):
                run.process.terminate()

    def close(self) -> None:
        """End all runs."""
        for case in self._runs:
            self.stop(case)

    def _follow(self, run: GateRun) -> None:
        assert run.process.stderr is not None
        for line in run.process.stderr:
            text = line.rstrip("\n")
            if found := _ITEM.match(text):
                run.done, run.item = int(found[1]) - 1, found[2]
            elif found := _RESULT.match(text):
                run.verdicts[found[1]] = found[2]
            else:
                run.lines.append(text.removeprefix("llmconsole: "))
            self._tell(run)
        status = run.process.wait()
        run.ended = True
        if run.stopped:
            run.words = "stopped; nothing was committed"
        elif status == 2:
            run.words = run.lines[-1] if run.lines else "it could not be run"
        self._tell(run)

    def _tell(self, run: GateRun) -> None:
        with contextlib.suppress(RuntimeError):  # the console has closed
            self._app.call_from_thread(self.changed.publish, run.case)
