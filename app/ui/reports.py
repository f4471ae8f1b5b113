"""The reports of this visit, one store for all screens: a capsule is analysed once until it changes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from textual.signal import Signal

from ...analyzers.report import CapsuleReport
from ..entry import RAW

if TYPE_CHECKING:
    from textual.app import App

    from ..entry import Entry
    from .link import Answer, Link


#: Seconds between two verdicts on evidence that is being written.
_LIVE_EVERY = 15.0


@dataclass(frozen=True)
class Kept:
    """What is known of one capsule: its report, or in ``problem`` one line why there is none.

    ``made_of`` is the change (Unix seconds) of the capsule it was made of, 0 where nobody said.
    """

    report: CapsuleReport | None
    problem: str
    made_of: float


class Reports:
    """Asks for reports, keeps them, and tells who listens.

    Args:
        app: gets the worker's answers and hands them to ``keep``.
        link: the way to the worker.
        cases: the directory from which the user's case log is found.
    """

    def __init__(self, app: App[Any], link: Link, cases: str = "") -> None:
        self._app, self._link, self._cases = app, link, cases
        self._kept: dict[str, Kept] = {}
        self._asked: dict[str, float] = {}
        #: Published with the capsule's path; widgets subscribe when they are mounted.
        self.arrived: Signal[str] = Signal(app, "report")

    def of(self, path: str) -> Kept | None:
        """What is known of a capsule, or None where nothing was asked or the answer is still awaited."""
        return self._kept.get(path)

    def want(self, path: str, changed: float | None = None) -> None:
        """Ask for a report unless one of this change is there. A question not yet begun gives way to a newer one.

        Args:
            path: the capsule's directory.
            changed: when the capsule last changed; without it any report will do, and a failure is tried again.
        """
        kept = self._kept.get(path)
        if kept is not None and (kept.report is not None if changed is None else kept.made_of == changed):
            return
        self._asked[path] = changed or 0.0
        self._link.ask(self._app, "analyze", {"path": path, "cases": self._cases}, channel="verdict")

    def refresh(self, path: str, changed: float, status: str) -> None:
        """Ask anew where the evidence changed; what is being written is judged every 15 seconds, not every step."""
        kept = self._kept.get(path)
        due = kept is None or changed - kept.made_of >= _LIVE_EVERY
        if status == RAW and not due:  # nobody seals a file: its last lines are judged when it has been still
            due = time.time() - changed >= _LIVE_EVERY
        if due or status not in ("recording", RAW):
            self.want(path, changed)

    def look_ahead(self, entries: Iterable[Entry]) -> None:
        """While nobody waits for a verdict, ask for the first of these that has none."""
        if self._link.is_idle("verdict"):
            for entry in entries:
                if entry.path not in self._kept:
                    self.want(entry.path, entry.changed)
                    return

    def keep(self, answer: Answer) -> None:
        """Take an answer to ``analyze``; whoever listens to ``arrived`` is told."""
        path = answer.params["path"]
        report = None if answer.problem else msgspec.convert(answer.result, CapsuleReport)
        self._kept[path] = Kept(report, answer.problem, self._asked.pop(path, 0.0))
        self.arrived.publish(path)


def case_query(report: CapsuleReport | None) -> str:
    """The query that finds the cases which name the rule of a report's first divergence."""
    first = report.first_divergence if report is not None else None
    return f"rule:{first.rule}" if first is not None else ""
