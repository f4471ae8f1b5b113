"""What a rule says: a finding with its numbers, its place and the candidates that were tried.

These types are the JSON of ``analyze --json`` (``llmconsole.report/1``): field names and order are a contract.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .stages import Stage

Severity = Literal["critical", "warning", "info"]
Confidence = Literal["confirmed", "likely", "undetermined"]
Kind = Literal["divergence", "consequence", "hygiene"]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a finding; ``order`` is the execution order inside a step, used to rank findings only."""

    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    sample: str | None = None
    request: str | None = None
    order: int | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number (or word) a finding rests on; every number on screen comes from one of these."""

    name: str
    value: Any
    expected: Any = None
    unit: str = ""
    note: str = ""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One set of named faults (empty: the healthy reference) and how far its value is from the observed one."""

    faults: tuple[str, ...]
    value: float
    off_by: float
    fits: bool


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """The table behind a counterfactual verdict (``counterfactual.md`` holds what each field guarantees)."""

    observed: float
    tolerance: float
    healthy: float
    candidates: tuple[Candidate, ...]
    classes: tuple[tuple[str, ...], ...]
    runner_up: Candidate | None
    chance: float
    inert: tuple[str, ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One statement of one rule. ``cause`` is None exactly where confidence is ``undetermined``.

    ``rule``, ``stage``, ``kind`` and ``cases`` are filled from the rule's declaration by the runner, ``severity``
    too unless the rule lowered it; ``caused_by`` is set by the ladder alone.
    """

    rule: str = ""
    stage: Stage = "capture"
    severity: Severity | None = None
    confidence: Confidence = "likely"
    kind: Kind | None = None
    caused_by: str | None = None
    title: str
    summary: str
    where: Where = Where()
    evidence: tuple[Evidence, ...] = ()
    cause: str | None = None
    next: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    counterfactual: Counterfactual | None = None
    cases: tuple[str, ...] = ()
