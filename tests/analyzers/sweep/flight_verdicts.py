"""What a diagnosis says of a directory of dumps, and whether that is right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .flight_faults import NAMED, Truth

if TYPE_CHECKING:
    from llmconsole.capsules import Capsule

Outcome = Literal["exact", "other call", "abstained", "quiet", "wrong rank"]
#: Names of evidence in which rules list the ranks that they hold responsible.
_RESPONSIBLE = ("missing_ranks", "deviating_ranks", "calling_ranks", "dead_ranks")


@dataclass(frozen=True)
class Verdict:
    """Ranks held responsible, and the calls named: groups and numbers; ``sure`` is false where nobody is responsible.

    ``rule`` is the rule that speaks, ``silent`` lists ranks without a dump of which it says that only they are left.
    """

    ranks: frozenset[int] = frozenset()
    calls: frozenset[tuple[str, int]] = frozenset()
    sure: bool = False
    silent: frozenset[int] = frozenset()
    rule: str = ""
    said: str = ""


def of_capsule(capsule: Capsule) -> Verdict:
    """The first divergence that the rules of the stage name."""
    from llmconsole.analyzers.registry import all_rules
    from llmconsole.analyzers.runner import analyze

    report = analyze(capsule, [rule for rule in all_rules() if rule.stage == "distributed"])
    assert not report.errors, report.errors
    first = report.first_divergence
    found = [
        each for each in report.findings if first is not None and each.rule == first.rule and each.kind == "divergence"
    ]
    if not found:
        return Verdict()
    chosen = found[0]
    evidence = {each.name: each for each in chosen.evidence}
    words = f"{chosen.title} {chosen.summary} " + " ".join(f"{each.value} {each.note}" for each in chosen.evidence)
    groups = set(re.findall(r"_GROUP \((\d+)\)|default_pg \((0)\)|(the default group)", words))
    number = chosen.where.order
    calls = {("".join(each).replace("the default group", "0"), number) for each in groups if number is not None}
    if chosen.rule == "distributed/group-order":  # one call each of the groups in the circle
        named = re.findall(r" (\d[\d,]*) of (?:\w+_GROUP \((\d+)\)|default_pg \((0)\)|(the default group))", words)
        calls = {("".join(each[1:]).replace("the default group", "0"), int(each[0].replace(",", ""))) for each in named}
    ranks = next((evidence[name].value for name in _RESPONSIBLE if name in evidence and evidence[name].value), [])
    if not ranks and chosen.where.rank is not None:
        ranks = [chosen.where.rank]
    silent = evidence["silent_ranks"].value if "silent_ranks" in evidence else []
    sure = chosen.confidence != "undetermined" and chosen.where.rank is not None
    return Verdict(frozenset(ranks), frozenset(calls), sure, frozenset(silent), chosen.rule, chosen.summary)


def of_torchfrtrace(printed: str) -> list[Verdict]:
    """The calls for which it holds ranks responsible, in the order in which it prints them; its answer is the first."""
    found: list[Verdict] = []
    opening_line = r"(?:Not all ranks joining|Collective sequence number|Input/output mismatch)[^\n:]*: (\d+)"
    for block in re.split(
        r"^(?=Not all ranks joining|Collective sequence number|Input/output mismatch)", printed, flags=re.MULTILINE
    ):
        opening = re.match(opening_line, block)
        if opening is None:
            continue
        group = re.search(r"^group info: (\S+?)(?::|$)", block, re.MULTILINE)
        missing = re.search(r"^missing ranks: \{([\d, ]*)\}", block, re.MULTILINE)
        ranks = {int(each) for each in re.findall(r"Culprit rank (\d+)", block)}
        ranks |= {int(each) for each in missing[1].split(",")} if missing and missing[1].strip() else set()
        if ranks:
            calls = {(group[1] if group else "", int(opening[1]))}
            found.append(Verdict(frozenset(ranks), frozenset(calls), True, rule="torchfrtrace", said=block[:200]))
    return found


def outcome(truth: Truth, verdict: Verdict, absent: frozenset[int] = frozenset()) -> Outcome:
    """How a verdict compares with what happened.

    A fault that dumps cannot show asks for silence or an abstention; of a rank that left no dump it is enough to say
    that only ranks without a dump can be missing.
    """
    if not verdict.sure:
        if truth.ranks and truth.ranks <= absent and truth.ranks <= verdict.silent <= absent:
            return "exact"
        return "abstained" if verdict.said else "quiet"
    if truth.fault == "slow" and verdict.rule == "distributed/straggler" and verdict.ranks == truth.ranks:
        return "exact"
    if truth.fault not in NAMED or verdict.ranks != truth.ranks:
        return "wrong rank"
    right = any(
        group in truth.groups and (not truth.numbers or number in truth.numbers) for group, number in verdict.calls
    )
    return "exact" if right else "other call"
