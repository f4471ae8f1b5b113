"""The registry of rules: one decorator, one table, entry points for rules of others.

A rule is a pure function from a capsule to findings. Its docstring, under fixed headings, is its documentation.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from .finding import Finding, Kind, Severity
from .stages import STAGES, Stage

if TYPE_CHECKING:
    from ..capsules import Capsule

RuleFunction = Callable[["Capsule"], Iterable[Finding]]

#: Modules of this package that hold rules, one a family.
FAMILIES = ("capsule", "data", "objective", "numerics", "optimizer", "distributed", "runtime", "memory", "performance")

#: Headings every rule's documentation has, in this order.
HEADINGS = (
    "What it checks",
    "Why it matters",
    "How it decides",
    "Looks like it but is not",
    "What to try next",
    "Fix",
)

ENTRY_POINT_GROUP = "llmconsole.rules"


class NotJudged(Exception):
    """Raised by a rule that has its evidence and yet cannot compare it; the message says what would be needed.

    The rule is then skipped with that reason: silence would say that it looked and found nothing.
    """


class NotCaptured(NotJudged):
    """Raised by a rule whose evidence is absent in a way that ``needs`` has no name for (rows of validation, say).

    It is skipped as if a need were missing: the silence of the other rules of its stage still counts.
    """


@dataclass(frozen=True)
class Rule:
    """A registered rule: its declaration and its function."""

    id: str
    stage: Stage
    kind: Kind
    severity: Severity
    needs: tuple[str, ...]
    explained_by: tuple[str, ...]
    cases: tuple[str, ...]
    report: bool
    function: RuleFunction

    @property
    def documentation(self) -> str:
        """The rule's docstring, dedented."""
        return inspect.getdoc(self.function) or ""

    @property
    def title(self) -> str:
        """First line of the documentation, without the final stop."""
        return self.documentation.partition("\n")[0].rstrip(".")


_RULES: dict[str, Rule] = {}


def rule(
    id: str,
    *,
    stage: Stage,
    kind: Kind = "divergence",
    severity: Severity = "critical",
    needs: tuple[str, ...] = (),
    explained_by: tuple[str, ...] = (),
    cases: tuple[str, ...] = (),
    report: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule under ``id`` (``family/name``).

    Args:
        id: unique identifier; registering a second rule under it is an error.
        stage: rung of the ladder the rule belongs to.
        kind: divergence, consequence (by nature) or hygiene; a single finding may only lower it.
        severity: severity of its findings unless a finding says otherwise.
        needs: names of evidence, alternatives joined by ``|``; the rule is skipped where one is absent.
        explained_by: rules whose finding at that step or earlier turns this rule's finding into a consequence.
        cases: ids of cases in the case log that describe the same fault.
        report: the rule always speaks (a ledger, a distribution) and so has no quiet twin.

    Raises:
        ValueError: the id is taken, or has no family.
    """

    def register(function: RuleFunction) -> RuleFunction:
        if id in _RULES and _RULES[id].function.__module__ != function.__module__:
            raise ValueError(f"rule {id!r} is registered twice")
        if "/" not in id or stage not in STAGES:
            raise ValueError(f"rule {id!r}: an id is family/name and a stage one of {', '.join(STAGES)}")
        _RULES[id] = Rule(id, stage, kind, severity, needs, explained_by, cases, report, function)
        return function

    return register


@cache
def _load() -> tuple[str, ...]:
    """Import every family and every plug-in; return one warning for each plug-in that is broken."""
    for family in FAMILIES:
        importlib.import_module(f"..{family}", __name__)
    if not _plugged():
        return ()
    from importlib.metadata import entry_points

    warnings: list[str] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:  # a plug-in's fault must not take the product down
            warnings.append(f"plug-in {entry.name} ({entry.value}) was not loaded: {type(error).__name__}: {error}")
    return tuple(warnings)


def _plugged() -> bool:
    """Whether anything installed names the group: to take all entry points apart takes as long as many of the rules."""
    for place in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    with contextlib.suppress(OSError), open(f"{place or '.'}/{name}/entry_points.txt", "rb") as file:
                        if ENTRY_POINT_GROUP.encode() in file.read():
                            return True
    return False


def all_rules() -> tuple[Rule, ...]:
    """Every registered rule, by stage and then id."""
    _load()
    return tuple(sorted(_RULES.values(), key=lambda each: (STAGES.index(each.stage), each.id)))


def plugin_warnings() -> tuple[str, ...]:
    """One line for each plug-in that could not be loaded."""
    return _load()
