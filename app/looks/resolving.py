"""Resolving an incident on behalf of the screen: a draft, the plan that is shown, the commit of just that plan.

Nothing is kept here between the three, so a worker that died in between costs nothing: the screen sends back what it
was given, and a commit whose diff or message would differ from what was shown is refused.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...analyzers.report import CapsuleReport
from .. import paths
from ..answers import describe
from ..casebook import cards
from ..casebook.incident import IncidentError
from ..casebook.log import load
from ..casebook.resolve import Incident, ResolveError, Statement, commit, plan
from ..casebook.store import Repository, StoreError
from ..text import one_line
from .types import ResolveDone, ResolveDraft, ResolvePlan

#: Class that a stage suggests where no card says it; a suggestion, which the form shows and the engineer changes.
_CLASS_OF = {
    "data": "not-converging",
    "objective": "not-converging",
    "numerics": "not-converging",
    "distributed": "distributed",
    "kernel": "kernel",
    "application": "application",
}
_CLASS_OF_PHASE = {"serving": "serving", "evaluation": "evaluation", "rag": "application", "agent": "application"}


def resolve_draft(path: str, repository: str, report: dict[str, Any] | None = None) -> ResolveDraft:
    """Fill what report, case log and repository know; what only the engineer knows stays empty.

    Args:
        path: the capsule.
        repository: a directory in the repository that fix and test are in.
        report: the capsule's report, where the screen has it; it is made here otherwise.
    """
    from .capsules import opened

    capsule = opened(path)
    if report is None:
        from ...analyzers.runner import analyze

        found = analyze(capsule)
    else:
        found = msgspec.convert(report, CapsuleReport)
    values = _from_report(found, capsule.manifest.phase or "")
    head, root, notes = "", repository, list[str]()
    code = None
    try:
        code = Repository(Path(repository))
        root = str(code.root)
        fix = code.newest_without_trailer("Case-Id")  # a commit that files a case fixes nothing
        if fix is not None:
            values["fix_commit"] = fix[:12]
            place = "HEAD" if fix == code.commit_id("HEAD") else "newest but for cases:"
            head = f"{place} {fix[:12]} {code.subject(fix)}"
    except StoreError as error:
        notes.append(str(error))
    try:
        ids, rule = values.pop("cases").split(), values.pop("rule")
        known = load(paths.case_file(Path(root)))
        own = [card for card in known if not card.seed and (card.id in ids or rule in _rules(card))]
        if own:
            values |= _from_card(own[-1])
            # What mends a known case is its own fix, until somebody says otherwise.
            if code is not None and (fix := _fix_of(own[-1], code)) and values.get("fix_commit") != fix[:12]:
                values["fix_commit"] = fix[:12]
                head = f"on the card: {fix[:12]} {code.subject(fix)}" + (f"; {head}" if head else "")
        elif alike := [card.id for card in known if card.id in ids]:
            notes.append(f"Filled from report and HEAD. Cases alike: {', '.join(alike)} (esc, then c: read them first)")
    except ResolveError as error:
        notes.append(str(error))
    return ResolveDraft(values=values, repository=root, head=head, note="; ".join(notes))


def resolve_plan(path: str, repository: str, statement: dict[str, str]) -> ResolvePlan:
    """What would be committed, or what is missing; nothing is written."""
    facts = describe(path)
    moment = datetime.now(UTC).replace(microsecond=0)
    try:
        planned = plan(Statement(**statement), _incident(path, facts), repo=Path(repository), now=moment)
    except ResolveError as error:
        return ResolvePlan(problems=error.fields or {"": str(error)})
    except (StoreError, IncidentError) as error:
        return ResolvePlan(problems={"": str(error)})
    return ResolvePlan(
        problems={},
        file=os.fspath(planned.file),
        diff=planned.diff,
        message=planned.message,
        new_case=planned.new_case,
        uncommitted=bool(planned.uncommitted),
        moment=moment.isoformat(),
        incident=facts,
    )


def resolve_commit(path: str, repository: str, statement: dict[str, str], shown: dict[str, Any]) -> ResolveDone:
    """Commit exactly what was shown, or say why not."""
    agreed = msgspec.convert(shown, ResolvePlan)
    stated = Statement(**statement)
    before = repository_of = None
    try:
        incident, moment = _incident(path, agreed.incident), datetime.fromisoformat(agreed.moment)
        planned = plan(stated, incident, repo=Path(repository), now=moment)
        if (os.fspath(planned.file), planned.diff, planned.message) != (agreed.file, agreed.diff, agreed.message):
            words = "case log or repository changed since this was shown; go back and look at it again"
            return ResolveDone(case=stated.case, problem=words)
        repository_of, before = planned.repository, planned.repository.commit_id("HEAD")
        return ResolveDone(case=stated.case, commit=commit(planned))
    except (ResolveError, StoreError, IncidentError) as error:
        after = repository_of.commit_id("HEAD") if repository_of is not None else None
        if isinstance(error, IncidentError) and after is not None and after != before:
            return ResolveDone(case=stated.case, commit=after, warning=str(error))
        return ResolveDone(case=stated.case, problem=str(error))


def _from_report(report: CapsuleReport, phase: str) -> dict[str, str]:
    """Fields that the first divergence suggests; ``cases`` are ids of known cases, ``rule`` its rule."""
    values = {"case_class": _CLASS_OF_PHASE.get(phase, ""), "cases": "", "rule": ""}
    first = report.first_divergence
    finding = None
    if first is not None:
        same = [each for each in report.findings if each.rule == first.rule]
        finding = next((each for each in same if each.where == first.where), same[0] if same else None)
    if finding is None:
        return values
    values["case"] = finding.rule.rpartition("/")[2]
    values["title"] = one_line(finding.title, 200)
    values["symptom"] = one_line(finding.summary, 1000)
    values["root_cause"] = one_line(finding.cause or "", 1000)
    values["case_class"] = values["case_class"] or _CLASS_OF.get(finding.stage, "")
    values["cases"], values["rule"] = " ".join(finding.cases), finding.rule
    return values


def _rules(card: cards.Card) -> list[str]:
    return card.get("Rules").replace(",", " ").split()


def _from_card(card: cards.Card) -> dict[str, str]:
    """Fields that an earlier incident of the user's suggests; what its card has is not said twice.

    The cases that ship with the product suggest none: a root cause that nobody found must not get into the log.
    """
    word = card.get("Class").replace(",", " ").split()
    known = {"case": card.id, "title": card.title, "root_cause": "" if card.get("Root cause") else None}
    if word and word[0] in cards.CLASSES:
        known["case_class"] = word[0]
    return {name: text for name, text in known.items() if text is not None}


def _fix_of(card: cards.Card, code: Repository) -> str | None:
    """Full id of the last commit that a card names as its fix and that the repository has, or None."""
    found = (code.commit_id(name) for name in reversed(cards.fix_commits(card)))
    return next((commit for commit in found if commit is not None), None)


def _incident(path: str, facts: dict[str, Any]) -> Incident:
    return Incident(
        path=Path(path),
        id=facts["id"],
        sha256=facts["sha256"],
        status=facts["status"],
        run=facts["run"],
        step=facts["step"],
        rules=tuple(facts["rules"]),
        symptom=facts["symptom"],
    )
