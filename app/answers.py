"""What the worker process can be asked. Every function here opens capsules or imports rules, and runs only there.

Arguments and results are plain data; the side that asks turns them into types again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import imports

if TYPE_CHECKING:
    from ..analyzers.finding import Finding
    from ..analyzers.registry import Rule
    from ..capsules import Capsule


def ping() -> dict[str, Any]:
    """Say that the worker is there."""
    return {"pid": os.getpid()}


def analyze(
    path: str, rules: Sequence[str] = (), stages: Sequence[str] = (), files: Sequence[str] = (), cases: str = ""
) -> Any:
    """Run rules on one capsule, or on raw files; ``rules`` and ``stages`` narrow them down (empty: all).

    Args:
        path: the capsule, or the raw file; what the report calls the evidence.
        rules: ids.
        stages: names.
        files: the raw files of one job, where they are several.
        cases: the directory from which the user's case log is found; its cases that name a finding's rule are added
            to those that the rule declares. Without it there are only these.
    """
    import msgspec

    from ..analyzers.report import IMPORT, RuleError
    from ..analyzers.runner import analyze as run_rules

    chosen = None
    if rules or stages:
        chosen = [
            rule for rule in _all_rules() if (not rules or rule.id in rules) and (not stages or rule.stage in stages)
        ]
    report = run_rules(_open(path, files), chosen)
    unread = tuple(RuleError(rule=IMPORT, error=problem) for problem in imports.problems_of(path, files))
    named = msgspec.structs.replace(report.capsule, path=path)
    findings = _with_own_cases(report.findings, cases) if cases else report.findings
    return msgspec.structs.replace(report, capsule=named, findings=findings, errors=(*report.errors, *unread))


def _with_own_cases(findings: tuple[Finding, ...], start: str) -> tuple[Finding, ...]:
    """Findings with the user's own cases before those that ship with the product."""
    import msgspec

    from . import paths
    from .casebook.log import own_text

    if not any(each.severity != "info" for each in findings):
        return findings
    text = own_text(paths.case_file(Path(start))).casefold()
    if not any(each.rule in text for each in findings):  # most have no log, and to take one apart is no small matter
        return findings
    from .looks.cases import own_cases

    return tuple(
        each
        if each.severity == "info"
        else msgspec.structs.replace(each, cases=tuple(dict.fromkeys([*own_cases(each.rule, start), *each.cases])))
        for each in findings
    )


def show(path: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """Manifest, inventory, the eight replay items and the damage of one capsule, or of the raw files of one job."""
    capsule = _open(path, files)
    return {
        "id": capsule.id,
        "title": capsule.title,
        "path": path,
        "status": capsule.status,
        "ranks": capsule.ranks,
        "manifest": capsule.manifest.raw,
        "inventory": capsule.inventory(),
        "replay": capsule.replay_items(),
        "damage": capsule.damage(),
    }


def peek(path: str) -> dict[str, Any]:
    """The line of a list: state, trigger, last step and when the capsule last changed (Unix seconds)."""
    capsule = _open(path)
    trigger = capsule.trigger
    return {
        "id": capsule.id,
        "title": capsule.title,
        "path": path,
        "status": capsule.status,
        "trigger": (trigger.kind or "") if trigger else "",
        "message": (trigger.message or "") if trigger else "",
        "step": _last_step(capsule),
        "changed": os.stat(path).st_mtime if imports.is_raw(path) else _last_change(Path(path)),
    }


def describe(path: str) -> dict[str, Any]:
    """What a case needs to know of a capsule: identity, digest, and the divergences with the first one in words."""
    from ..analyzers.runner import analyze as run_rules
    from ..capsules.errors import EvidenceError
    from ..capsules.process import host

    if imports.is_raw(path):
        raise EvidenceError(
            "a case needs a capsule that stays", path, "make one first: llmconsole import FILE -o DIRECTORY"
        )
    capsule = _open(path)
    report = run_rules(capsule)
    first, trigger = report.first_divergence, capsule.trigger
    divergences = [each for each in report.findings if each.kind == "divergence" and each.severity != "info"]
    manifest, run = capsule.manifest, capsule.manifest.run
    code = run.code if run else None
    made = trigger.kind == "imported" if trigger else False  # by an import, whose time says nothing of the job's
    return {
        "id": capsule.id,
        "sha256": capsule.digest(),
        "status": capsule.status,
        "run": ((run.name or run.id) if run else None) or "",
        "step": first.where.step if first else (trigger.step if trigger else None),
        "rules": list(dict.fromkeys([*([first.rule] if first else []), *(each.rule for each in divergences)])),
        "symptom": first.summary if first else ((trigger.message or "") if trigger else ""),
        "recorded": {
            "created": "" if made else manifest.created or "",
            "here": manifest.writer is not None and manifest.writer.host == host(),
            "commit": (code.commit if code else None) or "",
            "dirty": code.dirty if code else None,
        },
    }


#: Rules by which a send or a receive may be at fault.
_WAITS = ("distributed/missing-rank", "distributed/collective-mismatch", "distributed/group-order")


def two_ranks(path: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """The smallest reproduction of a hang or mismatch, as a script for two ranks; why there is none otherwise."""
    from ..analyzers.distributed.diagnosis import diagnosis
    from ..analyzers.distributed.reproduction import among_sends, reproduction
    from ..analyzers.runner import analyze as run_rules
    from .two_ranks import NotWritable, script

    capsule = _open(path, files)
    found = reproduction(capsule)
    if found is None:
        report = run_rules(capsule)
        named = [each.rule for each in report.findings if each.rule in _WAITS]
        if named and among_sends(diagnosis(capsule)):
            return {"problem": "what is at fault is a send or a receive, which is not shrunk yet", "rule": named[0]}
        first = report.first_divergence
        return {"problem": "no finding", "first": first.rule if first else ""}
    facts = {"rule": found.rule, "kind": found.kind, "ranks": found.ranks, "frame": found.frame}
    try:
        return {**facts, "script": script(found, os.path.basename(os.path.abspath(path)))}
    except NotWritable as reason:
        return {**facts, "problem": str(reason)}


def rules() -> dict[str, Any]:
    """Every registered rule with its declaration and documentation, and what could not be loaded."""
    from ..analyzers.registry import plugin_warnings

    return {
        "rules": [
            {
                "id": rule.id,
                "stage": rule.stage,
                "kind": rule.kind,
                "severity": rule.severity,
                "title": rule.title,
                "needs": rule.needs,
                "explained_by": rule.explained_by,
                "cases": rule.cases,
                "documentation": rule.documentation,
            }
            for rule in _all_rules()
        ],
        "warnings": plugin_warnings(),
    }


def environment() -> dict[str, Any]:
    """The environment as the recorder would write it into a manifest; imports torch."""
    from ..capsules.recorder.environment import environment as capture

    return dict(capture())


def device_facts() -> dict[str, Any]:
    """See :func:`.machine.device_facts`; imports torch."""
    from .machine import device_facts as ask

    return ask()


def container() -> str | None:
    """See :func:`.machine.container`."""
    from .machine import container as ask

    return ask()


def _open(path: str, files: Sequence[str] = ()) -> Capsule:
    return imports.open_evidence(path, files)


def _all_rules() -> tuple[Rule, ...]:
    from ..analyzers.registry import all_rules

    return all_rules()


def _last_step(capsule: Capsule) -> int | None:
    """The trigger's step, else the last one of the loss, else of any series."""
    if capsule.trigger is not None and capsule.trigger.step is not None:
        return capsule.trigger.step
    names = dict.fromkeys(["loss", *(key.name for key in capsule.scalar_keys())])
    last = [int(series.step[-1]) for name in names if len(series := capsule.scalars(name))]
    return max(last, default=None)


def _last_change(path: Path) -> float:
    """Unix seconds of the last write: rank heartbeats and the manifest are replaced as the job goes on."""
    candidates = [path / "capsule.json", *path.glob("ranks/*/rank.json"), *path.glob("ranks/*/scalars.bin")]
    return max((each.lstat().st_mtime for each in candidates if each.exists()), default=0.0)


METHODS: dict[str, Callable[..., Any]] = {
    "ping": ping,
    "analyze": analyze,
    "show": show,
    "peek": peek,
    "describe": describe,
    "rules": rules,
    "two_ranks": two_ranks,
    "environment": environment,
    "device_facts": device_facts,
    "container": container,
    "recognise": imports.recognise,
    "evidence_in": imports.evidence_in,
    "group": imports.group,
    "import_job": imports.import_job,
}
