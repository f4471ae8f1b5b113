"""The chosen capsule in a glance: ladder, first divergence with its numbers, what to do next."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text
from textual.widgets import Static

from ....analyzers.finding import Finding
from ....analyzers.report import CapsuleReport, unjudged
from ...render import MARKS, observed, place_of
from ...text import one_line


class Verdict(Static):
    """Shows a report, or a word about why there is none yet."""

    _shown: tuple[CapsuleReport | None, str] | None = None

    def show(self, report: CapsuleReport | None, words: str = "") -> None:
        """Show a report; without one, ``words`` (loading, an error, an empty screen that teaches)."""
        if (report, words) == self._shown:
            return  # the same again would still cost a slow link a screenful
        self._shown = (report, words)
        self.update(Text(words, style="dim") if report is None else Group(ladder(report), Text(), *first(report)))


class Advice(Static):
    """The two lines under the timelines: the next step, and what else was found."""

    _shown: tuple[CapsuleReport | None] | None = None
    says = False  # whether there is any advice

    def show(self, report: CapsuleReport | None) -> None:
        """Show the next step of the first divergence and the other findings."""
        if (report,) == self._shown:
            return
        self._shown = (report,)
        if report is None:
            self.says = False
            self.update("")
            return
        found = _first_finding(report)
        lines: list[RenderableType] = []
        if found is not None and (found.fix or found.next):
            word, advice = ("Fix ", found.fix[0]) if found.fix else ("Next", found.next[0])
            lines.append(_labelled(word, one_line(advice)))
        others = [each for each in report.findings if each is not found and each.severity != "info"]
        if others:
            words = ", ".join(
                f"{each.rule.partition('/')[2]}{' (consequence)' if each.kind == 'consequence' else ''}"
                for each in others[:4]
            )
            lines.append(_labelled("Also", one_line(words)))
        self.says = bool(lines)
        self.update(Group(*lines))


def ladder(report: CapsuleReport) -> Text:
    """The eight stages with their marks, in two lines of four."""
    text = Text(no_wrap=True)
    for index, rung in enumerate(report.ladder):
        sign, style = MARKS[rung.mark]
        text.append(f"{' ' if index % 4 else ''}{rung.stage}", "dim" if rung.mark == "not captured" else "")
        text.append(sign, style)
        if index == 3:
            text.append("\n")
    return text


def first(report: CapsuleReport) -> list[RenderableType]:
    """The first divergence: its name, its place, its sentence, how sure it is."""
    found = _first_finding(report)
    if found is None and (words := unjudged(report)):
        return [Text(f"{one_line(words, 600)}.", style="yellow")]
    if found is None:
        return [Text(f"Nothing diverged: {len(report.quiet)} checks ran and found nothing.", style="green")]
    head = Text()
    sign, style = ("?", "yellow") if found.confidence == "undetermined" else ("✗", "bold red")
    head.append(f"{sign} First divergence  ", style)
    head.append(one_line(found.rule), "bold")
    lines: list[RenderableType] = [head]
    if place := place_of(found.where):
        lines.append(Text(f"{place}", "cyan"))
    lines.append(Text(f"{one_line(found.summary, 600)}"))
    known = f" · {len(found.cases)} known case{'s' if len(found.cases) > 1 else ''}" if found.cases else ""
    lines.append(Text(f"{found.confidence}{known}", "dim"))
    return lines


def numbers(found: Finding) -> list[tuple[str, str, str, str]]:
    """(name, value, expected, unit) of a finding's evidence, as text."""
    return [(one_line(each.name), *observed(each)) for each in found.evidence]


def _first_finding(report: CapsuleReport) -> Finding | None:
    where = report.first_divergence
    if where is None:
        return None
    return next((each for each in report.findings if (each.rule, each.where) == (where.rule, where.where)), None)


def _labelled(label: str, words: str) -> Text:
    return Text.assemble((f"{label}  ", "bold"), words, no_wrap=True, overflow="ellipsis")
