"""The notebook of an incident and the gate of its case, read and written for the screen."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...analyzers.report import CapsuleReport
from ...analyzers.runner import analyze
from ..casebook import notebook as books
from ..casebook.gate.gate import Gate, GateError, PlanError, ResolveError, StoreError
from ..casebook.gate.record import RecordError, record_name, verify
from ..casebook.incident import IncidentError, open_incident, read_notebook
from ..casebook.incident import notebook as changing
from ..casebook.notebook import Notebook
from .capsules import opened
from .gate_types import GateLook


def notebook(path: str) -> Notebook:
    """The notebook as it stands; an empty one where the incident was never opened, or for a raw file.

    Raises:
        IncidentError: it cannot be read.
    """
    return read_notebook(Path(path)) if Path(path).is_dir() else Notebook()


def notebook_open(path: str, report: dict[str, Any] | None = None) -> Notebook:
    """Start the clock; the report is made here where the screen has none.

    Raises:
        IncidentError: it cannot be written.
    """
    if not Path(path).is_dir():
        raise IncidentError(f"{path} is a raw file; llmconsole import makes a capsule of it, which holds a notebook")
    capsule = opened(path)
    found = msgspec.convert(report, CapsuleReport) if report is not None else analyze(capsule)
    trigger = str(capsule.trigger.kind or "") if capsule.trigger is not None else ""
    return open_incident(Path(path), found, capsule.manifest.phase or "", trigger, datetime.now(UTC))


def notebook_write(path: str, what: str, words: dict[str, str], number: int = 0) -> Notebook:
    """Write down a note, a hypothesis, or what a test of hypothesis ``number`` showed.

    Args:
        path: the capsule.
        what: ``note`` (text), ``hypothesis`` (claim, test) or ``experiment`` (changed, observed, verdict).
        words: those fields.
        number: of the hypothesis.

    Raises:
        IncidentError: it cannot be written, or there is no such hypothesis.
    """
    now = datetime.now(UTC)
    with changing(Path(path)) as book:
        if what == "note":
            book.notes.append(books.Note(text=words["text"], t=books.said(now)))
        elif what == "hypothesis":
            books.add_hypothesis(book, words["claim"], words.get("test", ""), "", now)
        else:
            verdict = msgspec.convert(words["verdict"], books.Verdict)
            if not books.add_experiment(book, number, words["changed"], words["observed"], verdict, now):
                raise IncidentError(f"there is no hypothesis {number} any more")
    return book


def notebook_test(path: str, number: int) -> Notebook:
    """Run the rule of a hypothesis again and write down what it says.

    Raises:
        IncidentError: it cannot be written, or there is no such hypothesis.
    """
    found = read_notebook(Path(path)).hypothesis(number)
    if found is None or not found.rule:
        raise IncidentError(f"hypothesis {number} has no rule")
    observed, verdict = books.judge_by_rule(analyze(opened(path)), found.rule)
    words = {"changed": "", "observed": observed, "verdict": verdict}
    return notebook_write(path, "experiment", words, number)


def gate(path: str, repository: str) -> GateLook:
    """The gate of the case that an incident was resolved as: its file, its last run, its record. Never raises."""
    try:
        case = notebook(path).case
        if not case:
            return GateLook(
                case="", problem="This incident has no case yet: r resolves it, then a gate proves the fix."
            )
        found = Gate(case, Path(repository))
    except (IncidentError, GateError, ResolveError, StoreError) as error:
        return GateLook(case="", problem=str(error))
    look = GateLook(case=case, file=str(found.plan_file), there=found.plan_file.exists())
    try:
        if look.there:
            look.plan = found.plan()[0]
    except (GateError, PlanError) as error:
        look.problem = str(error)
    try:
        look.last = found.last()
        if found.record_file.exists():
            verify(found.repository, case)
            look.record = f"{record_name(case)} holds"
    except (RecordError, StoreError) as error:
        look.record = str(error)
    return look


def gate_init(path: str, repository: str) -> GateLook:
    """Write the gate's file with what is known."""
    try:
        Gate(notebook(path).case, Path(repository)).init(Path(path))
    except (IncidentError, GateError, ResolveError, StoreError) as error:
        look = gate(path, repository)
        look.problem = str(error)
        return look
    return gate(path, repository)
