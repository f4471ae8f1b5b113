"""The notebook of an incident: hypotheses, what tested them, what was seen, and the clock. Pure; ``incident`` keeps it.

One experiment changes one thing. The incident is located when the first hypothesis is supported; where thirty minutes
brought none, the way back is to overfit one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ...analyzers.report import CapsuleReport

Verdict = Literal["undecided", "supported", "refuted"]
Status = Literal["open", "located", "fixed", "gated"]

#: Seconds within which an incident should be located; after them the way back is offered.
TARGET = 30 * 60.0

WAY_BACK = (
    "30 minutes brought no supported hypothesis: go back to one batch. Train on a single batch until its loss is near "
    "zero. It falls: data, objective and gradients are sound, so look at data volume, schedule and scale. It does not: "
    "labels, then loss, then preprocessing, then gradient chain, then capacity"
)

#: Suspects where no rule named one, by class: what to test first.
_TRIAGE: dict[str, tuple[tuple[str, str], ...]] = {
    "not-converging": (
        ("the learning rate is too high, too low, or does not follow its schedule", "a third of the learning rate"),
        ("the data do not hold what the loss asks for", "read three samples with labels; overfit one batch"),
        ("a number does not fit its type", "the same steps in fp32"),
    ),
    "overfitting": (
        ("too few data for the number of epochs", "the same steps on more data, or fewer epochs"),
        ("too little regularisation", "weight decay or dropout up by a factor of three"),
    ),
    "evaluation": (
        ("the model is in training mode, or gradients are on, during evaluation", "evaluate one checkpoint twice"),
        ("evaluation preprocesses or tokenises otherwise than training", "one sample through both, side by side"),
    ),
    "resources": (
        ("the configuration needs more memory than there is", "half the batch, or half the length"),
        ("something grows with every step", "live bytes at the same phase of two steps"),
        ("free memory lies in pieces that are too small", "expandable segments, or fixed lengths"),
    ),
}


class Experiment(msgspec.Struct, kw_only=True):
    """One thing that was changed, what was seen, and what it says of the hypothesis; ``t`` is RFC 3339 UTC."""

    changed: str
    observed: str
    verdict: Verdict
    t: str


class Hypothesis(msgspec.Struct, kw_only=True):
    """A claim, and what tests it.

    Attributes:
        id: number within the incident, from 1.
        claim: what would explain the symptom.
        test: the experiment that would support or refute it.
        rule: id of the rule whose finding suggested it, and which tests it again; empty where none does.
        source: who wrote it down: ``rule``, ``triage`` or ``person``.
        experiments: what was tried, in order.
        t: when it was written down.
    """

    id: int
    claim: str
    test: str = ""
    rule: str = ""
    source: Literal["rule", "triage", "person"] = "person"
    experiments: list[Experiment] = []
    t: str = ""

    @property
    def verdict(self) -> Verdict:
        """That of the latest experiment which decided."""
        found: Verdict = "undecided"
        for each in self.experiments:
            found = each.verdict if each.verdict != "undecided" else found
        return found


class Note(msgspec.Struct, kw_only=True):
    """A line someone wrote down."""

    text: str
    t: str


class Notebook(msgspec.Struct, kw_only=True):
    """What ``incident.json`` holds of the search; times are RFC 3339 UTC, empty where it did not happen."""

    status: Status = "open"
    opened: str = ""
    located: str = ""
    resolved: str = ""
    case: str = ""
    gate: str = ""
    hypotheses: list[Hypothesis] = []
    notes: list[Note] = []

    def seconds(self, now: datetime) -> float | None:
        """Time from opening to locating; so far, where it is not located."""
        if not self.opened:
            return None
        end = self.located or self.resolved
        return max(0.0, ((moment(end) if end else now) - moment(self.opened)).total_seconds())

    def late(self, now: datetime) -> bool:
        """Whether the way back should be offered."""
        return self.status == "open" and (self.seconds(now) or 0.0) >= TARGET

    def hypothesis(self, number: int) -> Hypothesis | None:
        """The one of that number."""
        return next((each for each in self.hypotheses if each.id == number), None)


def begin(report: CapsuleReport, phase: str, trigger: str, now: datetime) -> Notebook:
    """A notebook with the hypotheses that the rules suggest, the first divergence first; triage where none does.

    Args:
        report: of the capsule.
        phase: of the manifest.
        trigger: kind of what ended the recording.
        now: when the incident is opened.
    """
    found: list[Hypothesis] = []
    first = report.first_divergence
    suspects = [each for each in report.findings if each.kind == "divergence" and each.severity != "info"]
    suspects.sort(key=lambda each: first is None or (each.rule, each.where) != (first.rule, first.where))
    for each in suspects:
        if any(known.rule == each.rule for known in found):
            continue
        test = each.next[0] if each.next else ""
        cause = each.cause or ""
        claim = each.title if cause.casefold() in ("", each.title.casefold()) else f"{each.title}: {cause}"
        found.append(Hypothesis(id=0, claim=claim, test=test, rule=each.rule, source="rule"))
    if not found:
        kind = "resources" if trigger == "oom" else "evaluation" if phase == "evaluation" else "not-converging"
        found = [Hypothesis(id=0, claim=claim, test=test, source="triage") for claim, test in _TRIAGE[kind]]
    stamp = said(now)
    for number, each in enumerate(found, start=1):
        each.id, each.t = number, stamp
    return Notebook(opened=stamp, hypotheses=found)


def add_hypothesis(book: Notebook, claim: str, test: str, rule: str, now: datetime) -> Hypothesis:
    """Write a hypothesis down."""
    number = max((each.id for each in book.hypotheses), default=0) + 1
    found = Hypothesis(id=number, claim=claim, test=test, rule=rule, t=said(now))
    book.hypotheses.append(found)
    return found


def add_experiment(book: Notebook, number: int, changed: str, observed: str, verdict: Verdict, now: datetime) -> bool:
    """Write down what an experiment showed; a supported hypothesis locates the incident. False: no such hypothesis."""
    found = book.hypothesis(number)
    if found is None:
        return False
    found.experiments.append(Experiment(changed=changed, observed=observed, verdict=verdict, t=said(now)))
    if verdict == "supported" and book.status == "open":
        book.status, book.located = "located", said(now)
    elif book.status == "located" and all(each.verdict != "supported" for each in book.hypotheses):
        book.status, book.located = "open", ""  # what supported it was refuted since
    return True


def judge_by_rule(report: CapsuleReport, rule: str) -> tuple[str, Verdict]:
    """What a rule says of its hypothesis now: observation and verdict; silence of a rule that ran refutes.

    The rule supports it only where it is confirmed: what was likely when it suggested it is no surer said twice, and
    wants an experiment.
    """
    said = [each for each in report.findings if each.rule == rule and each.severity != "info"]
    if said:
        sure = said[0].confidence == "confirmed"
        words = "" if sure else f" ({said[0].confidence}: an experiment decides)"
        return f"{rule}: {said[0].summary}{words}", "supported" if sure else "undecided"
    skipped = next((each for each in report.skipped if each.rule == rule), None)
    if skipped is not None:
        return f"{rule} cannot run: {', '.join(skipped.missing)} is missing", "undecided"
    failed = next((each for each in report.errors if each.rule == rule), None)
    if failed is not None:
        return f"{rule} failed: {failed.error}", "undecided"
    return (f"{rule} ran and is quiet", "refuted") if rule in report.quiet else (f"{rule} did not run", "undecided")


class Statistics(msgspec.Struct, kw_only=True):
    """Incidents and cases in numbers.

    Attributes:
        incidents: how many by status.
        located: how many were located, and ``median_seconds`` how long that took.
        classes: cases of the user's log by class.
        rules: rules that more than one case or occurrence names, most frequent first.
        ungated: ids of cases without a gate that passed.
    """

    incidents: dict[str, int]
    located: int
    median_seconds: float | None
    classes: dict[str, int]
    rules: dict[str, int]
    ungated: tuple[str, ...]


def count(books: Sequence[Notebook], cards: Sequence[Any]) -> Statistics:
    """Numbers over the incidents of a directory and the cards of a log (``cards.Card``)."""
    from statistics import median

    from .show import is_gated

    incidents: dict[str, int] = {}
    for book in books:
        incidents[book.status] = incidents.get(book.status, 0) + 1
    times = [book.seconds(moment(book.located)) or 0.0 for book in books if book.opened and book.located]
    classes: dict[str, int] = {}
    rules: dict[str, int] = {}
    for card in cards:
        word = (card.get("Class").replace(",", " ").split() or ["unknown"])[0]
        classes[word] = classes.get(word, 0) + 1
        often = max(1, sum(bool(line.strip(" -*+")) for line in card.get("Occurrences").split("\n")))
        for rule in dict.fromkeys(card.get("Rules").replace(",", " ").split()):
            rules[rule] = rules.get(rule, 0) + often
    return Statistics(
        incidents=dict(sorted(incidents.items())),
        located=len(times),
        median_seconds=median(times) if times else None,
        classes=dict(sorted(classes.items(), key=lambda each: -each[1])),
        rules=dict(sorted(((rule, n) for rule, n in rules.items() if n > 1), key=lambda each: (-each[1], each[0]))),
        ungated=tuple(card.id for card in cards if not is_gated(card.get("Gate"))),
    )


def said(now: datetime) -> str:
    """A moment as it is written down."""
    return f"{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def moment(text: str) -> datetime:
    """A moment as it was written down; the epoch where the text is none, as the file may have been edited."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def duration(seconds: float) -> str:
    """A time to locate for people: ``11 min``, ``2 h 5 min``."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{int(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
