"""Resolving an incident: what engineer and capsule say becomes a case, shown first and then committed.

``plan`` refuses, naming everything that is missing, rather than preparing half a case; it changes nothing. ``commit``
takes the lock, applies the same edit to the file as it is by then, commits that file alone, and notes the incident.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import paths
from ..text import one_line
from . import cards
from .files import replace_file, restore_file
from .incident import read_notebook, update_incident
from .log import LARGEST
from .nodes import find_test
from .notebook import duration
from .store import Repository

if TYPE_CHECKING:
    from ..worker import Worker


class ResolveError(Exception):
    """The incident cannot be resolved as asked; one line that names everything missing, or what changed meanwhile.

    Attributes:
        fields: what is wrong by field of the statement, for a form; the key is empty where it concerns no field.
    """

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


@dataclass(frozen=True)
class _Problem:
    """One thing that keeps the statement from making a whole case: the field, and words for line and form."""

    field: str
    line: str
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What the engineer says. For a case that the log has, only what its card lacks is needed, and the fix."""

    case: str
    title: str = ""
    case_class: str = ""
    root_cause: str = ""
    trigger: str = ""
    fix_commit: str = ""
    regression_test: str = ""
    prevention: str = ""
    symptom: str = ""
    keywords: str = ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What the capsule says; ``symptom`` is its first divergence in a sentence, ``rules`` its divergences."""

    path: Path
    id: str
    sha256: str
    status: str
    run: str = ""
    step: int | None = None
    rules: tuple[str, ...] = ()
    symptom: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be committed: the file, its diff against HEAD, and the message."""

    file: Path
    diff: str
    message: str
    new_case: bool
    uncommitted: str
    statement: Statement
    incident: Incident
    repository: Repository
    fix_commit: str
    values: dict[str, str]
    occurrence: str
    resolved: str


#: Fields of a statement that a whole case needs, in the order of the form.
_REQUIRED = ("title", "case_class", "root_cause", "trigger", "fix_commit", "regression_test", "prevention")

#: Those that the card of a known case may hold already.
_ON_CARD = {
    "case_class": "Class",
    "root_cause": "Root cause",
    "trigger": "Trigger",
    "regression_test": "Regression test",
    "prevention": "Prevention",
}


def describe(worker: Worker, capsule: Path) -> Incident:
    """Read the capsule in the worker: identity, digest and first divergence.

    Raises:
        WorkerError: the capsule is unusable.
    """
    facts: dict[str, Any] = worker.call("describe", {"path": os.fspath(capsule)})
    return Incident(
        path=capsule,
        id=facts["id"],
        sha256=facts["sha256"],
        status=facts["status"],
        run=facts["run"],
        step=facts["step"],
        rules=tuple(facts["rules"]),
        symptom=facts["symptom"],
    )


def plan(statement: Statement, incident: Incident, *, repo: Path | None = None, now: datetime | None = None) -> Plan:
    """Work out the edit, its diff and the commit message; nothing is written.

    Args:
        statement: what the engineer says.
        incident: what the capsule says.
        repo: a directory in the repository with fix and test; default the working directory. The case log is the one
            of that repository unless ``LLMCONSOLE_CASES`` names another.
        now: the moment of resolving (UTC); default the clock's.

    Raises:
        ResolveError: something is missing or wrong; the line names all of it.
        StoreError: there is no repository to look into.
        IncidentError: ``incident.json`` is there and cannot be read.
    """
    code = Repository(repo or Path.cwd())
    file = paths.case_file(code.root).resolve()
    home = code if file.is_relative_to(code.root.resolve()) else Repository(file.parent)
    text = read(file)
    known = cards.find(cards.parse(text), statement.case)
    problems = _missing(statement, incident, known)
    fix = code.commit_id(statement.fix_commit)
    if statement.fix_commit and fix is None:
        words = f"{statement.fix_commit} is no commit in {code.root}"
        problems.append(_Problem("fix_commit", f"--fix-commit {words}", words))
    elif fix is not None and (filed := code.trailers(fix).get("Case-Id")):
        words = f"{fix[:12]} files the case {one_line(filed, 100)} and fixes nothing; name the commit of the fix"
        problems.append(_Problem("fix_commit", f"--fix-commit {words}", words))
    if statement.regression_test and (problem := _test_problem(code, statement.regression_test, fix)):
        problems.append(
            _Problem("regression_test", f"--regression-test {statement.regression_test}: {problem}", problem)
        )
    if problems or fix is None:
        raise _refusal(problems)

    book = read_notebook(incident.path)  # one that cannot be read could not be updated after the commit
    moment = now or datetime.now(UTC)
    values = _values(statement, incident, f"{code.subject(fix)} (commit {fix[:12]})")
    place = "" if incident.step is None else f", step {incident.step}"
    run = f" run {incident.run}" if incident.run else ""
    located = f", located in {duration(book.seconds(moment) or 0.0)}" if book.located else ""
    occurrence = f"{moment:%Y-%m-%d}{run}{place}, capsule {incident.id}, fixed by {fix[:12]}{located}"
    title = known.title if known else statement.title
    head = _at_head(home, file)
    draft = Plan(
        file=file,
        diff="",
        message=_message(statement, incident, title, values),
        new_case=known is None,
        uncommitted=_diff(head, text, file.name),
        statement=statement,
        incident=incident,
        repository=home,
        fix_commit=fix,
        values=values,
        occurrence=occurrence,
        resolved=f"{moment:%Y-%m-%dT%H:%M:%SZ}",
    )
    try:
        return replace(draft, diff=_diff(head, _edit(text, draft), home.relative(file)))
    except cards.CardError as error:
        raise ResolveError(str(error)) from error


def commit(plan: Plan) -> str:
    """Apply the plan to the case log as it is now, commit that file alone and mark the incident fixed.

    Returns the id of the commit. Where anything fails before it stands, file and index are as they were.

    Raises:
        ResolveError: the log changed in a way that the shown diff does not cover.
        StoreError: git refused.
        IncidentError: the commit stands, but ``incident.json`` could not be written.
    """
    repository = plan.repository
    with repository.locked():
        before = plan.file.read_bytes() if plan.file.exists() else None
        text = read(plan.file)
        known = cards.find(cards.parse(text), plan.statement.case)
        uncommitted = _diff(_at_head(repository, plan.file), text, plan.file.name)
        # Cases that others have committed meanwhile are kept; what nobody has seen is not committed.
        if (known is None) != plan.new_case or _changed_lines(uncommitted) != _changed_lines(plan.uncommitted):
            raise ResolveError(f"{plan.file} changed since the diff was shown; run the command again")
        try:
            edited = _edit(text, plan)
        except cards.CardError as error:
            raise ResolveError(str(error)) from error
        head = repository.commit_id("HEAD")
        try:
            replace_file(plan.file, edited.encode("utf-8", "surrogateescape"))
            sha = repository.commit(plan.file, plan.message)
        except BaseException as error:
            if repository.commit_id("HEAD") == head:  # an interrupt may come after the commit
                restore_file(plan.file, before)
            if isinstance(error, OSError):
                raise ResolveError(f"{plan.file} cannot be written: {error.strerror}") from error
            raise
    update_incident(
        plan.incident.path,
        {
            "status": "fixed",
            "case": plan.statement.case,
            "resolved": plan.resolved,
            "fix_commit": plan.fix_commit,
            "regression_test": plan.values.get("Regression test", ""),
            "case_commit": sha,
            "capsule_sha256": plan.incident.sha256,
            "gate": "not-run",
        },
    )
    return sha


def read(file: Path) -> str:
    """The case log's text (empty where there is none yet); bytes that are no UTF-8 survive a round trip."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
                raise ResolveError(f"{file} is no file of at most {LARGEST >> 20} MiB; LLMCONSOLE_CASES names one")
            return stream.read().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ResolveError(f"{file} cannot be read: {error.strerror}") from error


def _missing(statement: Statement, incident: Incident, known: cards.Card | None) -> list[_Problem]:
    """Everything that keeps the statement from making a whole case."""
    problems: list[_Problem] = []
    if not cards.valid_id(statement.case):
        words = "is no case id (lower-case words joined by dashes, such as loss-stuck-at-ln-v)"
        problems.append(_Problem("case", f"--case {statement.case!r} {words}", words if statement.case else "missing"))
    on_card = {"title": known.title if known else "", **{name: _on_card(known, name) for name in _ON_CARD}}
    for name in _REQUIRED:
        if not getattr(statement, name).strip() and not on_card.get(name, "").strip():
            problems.append(_Problem(name, "", "missing"))
    word = re.split(r"[\s,;]", statement.case_class.strip(), maxsplit=1)[0]
    if word and word not in cards.CLASSES:
        words = f"{word} is none of {', '.join(cards.CLASSES)}"
        problems.append(_Problem("case_class", f"--class {words}", words))
    if known is None and not (statement.symptom or incident.symptom).strip():
        words = "(the capsule shows no divergence to take it from)"
        problems.append(_Problem("symptom", f"--symptom is missing {words}", f"missing {words}"))
    if incident.status == "recording":
        problems.append(_Problem("", f"{incident.path} is still recording; stop the run first"))
    if not os.access(incident.path, os.W_OK):
        problems.append(_Problem("", f"{incident.path} is not writable (incident.json goes there)"))
    return problems


def _on_card(known: cards.Card | None, name: str) -> str:
    return known.get(_ON_CARD[name]) if known else ""


def _refusal(problems: Sequence[_Problem]) -> ResolveError:
    """All problems as one line for the command, in which what is absent stands together, and by field for a form."""
    absent = [_option(each.field) for each in problems if not each.line]
    lines = [each.line for each in problems if each.line]
    if absent:
        first = 1 if problems[0].field == "case" and problems[0].line else 0
        lines.insert(first, f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing")
    by_field: dict[str, str] = {}
    for each in problems:
        words = each.form or each.line
        by_field[each.field] = f"{by_field[each.field]}; {words}" if each.field in by_field else words
    return ResolveError("the incident is not resolved: " + "; ".join(lines), by_field)


def _option(field: str) -> str:
    return "--class" if field == "case_class" else f"--{field.replace('_', '-')}"


def _test_problem(code: Repository, node: str, fix: str | None) -> str | None:
    """Why the regression test is not there, or None; it must be committed, with the fix or since."""
    path = node.partition("::")[0]
    revisions = [revision for revision in (fix, code.commit_id("HEAD")) if revision]
    outside = path.startswith(("-", "/")) or ".." in Path(path).parts
    contents = [content for revision in revisions if (content := code.show(revision, path)) is not None]
    if not path or outside or not contents:
        uncommitted = not outside and (code.root / path).is_file()
        advice = "it is not committed yet" if uncommitted else f"no such file in {code.root}"
        return f"{advice}, neither at the fix commit nor at HEAD"
    if not any(find_test(content, node) for content in contents):
        return f"{path} holds no such test, neither at the fix commit nor at HEAD"
    return None


def _values(statement: Statement, incident: Incident, fix: str) -> dict[str, str]:
    """The fields that this incident can fill."""
    return {
        "Class": statement.case_class,
        "Keywords": statement.keywords,
        "Rules": ", ".join(incident.rules),
        "Symptom": statement.symptom or incident.symptom,
        "Root cause": statement.root_cause,
        "Trigger": statement.trigger,
        "Fix": fix,
        "Prevention": statement.prevention,
        "Regression test": statement.regression_test,
    }


def _edit(text: str, plan: Plan) -> str:
    """The log with the new section, or with the occurrence and whatever the known card lacked."""
    case = plan.statement.case
    if plan.new_case:
        return cards.append(text, case, plan.statement.title, {**plan.values, "Occurrences": plan.occurrence})
    known = cards.find(cards.parse(text), case)
    for name, value in plan.values.items():
        if known is not None and value.strip() and not known.get(name).strip():
            text = cards.set_field(text, case, name, value)
    return cards.add_occurrence(text, case, plan.occurrence)


def _message(statement: Statement, incident: Incident, title: str, values: dict[str, str]) -> str:
    subject = cards.single_line(f"Resolve {statement.case}: {title}")
    body = [
        textwrap.fill(cards.single_line(f"{name}: {values[name]}"), 72, break_long_words=False, break_on_hyphens=False)
        for name in ("Symptom", "Root cause", "Fix", "Regression test")
        if values[name].strip()
    ]
    trailers = f"Case-Id: {statement.case}\nCapsule-Sha256: {incident.sha256}\nGate-Result: not-run\n"
    return "\n\n".join([subject, "\n".join(body), trailers]) if body else f"{subject}\n\n{trailers}"


def _at_head(repository: Repository, file: Path) -> str:
    """The log as HEAD has it, in work-tree form; empty where it has none."""
    head = repository.commit_id("HEAD")
    content = repository.show(head, repository.relative(file), filtered=True) if head else None
    return (content or b"").decode("utf-8", "surrogateescape")


def _diff(before: str, after: str, name: str) -> str:
    """Unified diff, as git prints it."""
    old, new = cards.split_lines(before), cards.split_lines(after)
    source = f"a/{name}" if before else "/dev/null"
    rows = difflib.unified_diff(old, new, source, f"b/{name}")
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def _changed_lines(diff: str) -> list[str]:
    return [line for line in diff.split("\n")[2:] if line.startswith(("+", "-"))]
