"""The only way from the screen to capsules: questions to warm worker processes, answers as messages.

Three workers, so that a list or a curve never waits for a verdict or a large table. Each starts with its first
question. A question that was not yet asked
of the worker is replaced by a newer one of the same key: a screen wants the latest answer, not all of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from textual.message import Message
from textual.message_pump import MessagePump

from ..worker import Worker, WorkerError

#: ``look`` answers at once; ``table`` makes tables of all records of a kind; ``verdict`` runs the rules.
Channel = Literal["look", "table", "verdict"]


class Answer(Message):
    """What the worker said to one question: ``result``, or ``problem``, one line for the user."""

    def __init__(self, method: str, params: dict[str, Any], result: Any, problem: str) -> None:
        super().__init__()
        self.method, self.params, self.result, self.problem = method, params, result, problem


@dataclass(frozen=True)
class _Question:
    asker: MessagePump
    method: str
    params: dict[str, Any]
    timeout: float | None
    jobs: dict[str, tuple[str, ...]]

    @property
    def sent(self) -> dict[str, Any]:
        """The parameters, with all files of a job where a path is the first of several raw ones."""
        if not self.jobs:
            return self.params
        if self.method == "analyze":
            return {**self.params, "files": self.jobs[self.params["path"]]}
        return {**self.params, "jobs": self.jobs}


@dataclass
class _Line:
    """One worker with the questions that wait for it."""

    worker: Worker = field(default_factory=Worker)
    waiting: OrderedDict[tuple[int, str, str], _Question] = field(default_factory=OrderedDict)
    wake: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    working: bool = False
    closed: bool = False


class Link:
    """Owns the workers and their threads; ``close`` ends both.

    Attributes:
        jobs: all files of a job by the path of the first, where raw evidence is spread over several; questions about
            that path are about all of them.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, ...]] = {}
        self._lines: dict[Channel, _Line] = {"look": _Line(), "table": _Line(), "verdict": _Line()}

    def ask(
        self,
        asker: MessagePump,
        method: str,
        params: dict[str, Any],
        *,
        channel: Channel = "look",
        key: str = "",
        timeout: float | None = None,
    ) -> None:
        """Put a question; an ``Answer`` is posted to ``asker`` later. Never blocks, never raises.

        Args:
            asker: widget, screen or app that gets the answer.
            method: method of the worker.
            params: its parameters.
            channel: who answers; what may take seconds must not be asked of ``look``.
            key: tells apart questions of one method that must all be answered.
            timeout: seconds before the worker is killed and started afresh.
        """
        line = self._lines[channel]
        with line.wake:
            if line.closed:
                return
            slot = (id(asker), method, key)
            asked = [params.get("path", ""), params.get("beside", "")]
            jobs = {each: self.jobs[each] for each in asked if each in self.jobs}
            line.waiting.pop(slot, None)
            line.waiting[slot] = _Question(asker, method, params, timeout, jobs)
            if line.thread is None:
                line.thread = threading.Thread(target=_serve, args=(line,), name=f"worker-{channel}", daemon=True)
                line.thread.start()
            line.wake.notify()

    def is_idle(self, channel: Channel) -> bool:
        """Whether nothing waits on this channel and nothing is being answered."""
        line = self._lines[channel]
        return not (line.waiting or line.working)

    def pids(self) -> tuple[int | None, ...]:
        """Process ids of the live workers."""
        return tuple(line.worker.pid for line in self._lines.values())

    def close(self) -> None:
        """Forget what waits and end the workers; a call in progress is cut short."""
        for line in self._lines.values():
            with line.wake:
                line.closed = True
                line.waiting.clear()
                line.wake.notify()
            line.worker.abort()
        for line in self._lines.values():
            if line.thread is not None:
                line.thread.join(2.0)


def _serve(line: _Line) -> None:
    """Thread of one line: ask, wait, post. A worker that died is started afresh by its next call."""
    while True:
        with line.wake:
            while not line.waiting and not line.closed:
                line.wake.wait()
            if line.closed:
                break
            _, question = line.waiting.popitem(last=False)
            line.working = True
        result, problem = None, ""
        try:
            result = line.worker.call(question.method, question.sent, question.timeout)
        except WorkerError as error:
            problem = str(error)
        except Exception as error:  # the thread must live on, or the screen would wait for ever
            problem = f"{question.method}: {type(error).__name__}: {error}"
        line.working = False
        if not line.closed:
            question.asker.post_message(Answer(question.method, question.params, result, problem))
    line.worker.close()
