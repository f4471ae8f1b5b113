"""The report for people: one line for the ladder, the first divergence with its numbers, what follows, what to do.

Everything that comes from a capsule passes ``visible`` on its way into a ``Text``; nothing is read as markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..analyzers.finding import Candidate, Counterfactual, Evidence, Finding, Where
from ..analyzers.report import ALARMS, END, IMPORT, CapsuleReport, Mark, Report, exit_status, judged, lacking, unjudged
from .numbers import size
from .text import ending, keep_tail, one_line

#: Sign and style of a mark; colour repeats the sign and never replaces it.
MARKS: dict[Mark, tuple[str, str]] = {
    "divergence": ("✗", "bold red"),
    "consequence": ("↳", "red"),
    "undetermined": ("?", "yellow"),
    "error": ("?", "magenta"),
    "note": ("✓", "green"),
    "quiet": ("✓", "green"),
    "not captured": ("–", "bright_black"),
}
_DIM = "bright_black"
_INDENT = 3
_MOST_LINES = 8
#: Characters of a value that still stands with the figures, to the right.
_FIGURE = 24


def print_report(report: Report | CapsuleReport, console: Console, *, within: str = "") -> None:
    """Print a report, one block a capsule; ``within`` names the part that was read, where it was not all."""
    reports = report.reports if isinstance(report, Report) else (report,)
    for number, each in enumerate(reports):
        if number:
            console.print()
        healthy = exit_status(each) == 0 and not each.errors
        brief = len(reports) > 1 and healthy
        console.print(capsule_block(each, console.width, brief=brief, within=within))


def capsule_block(report: CapsuleReport, width: int, *, brief: bool = False, within: str = "") -> RenderableType:
    """One capsule: ladder, first divergence with what follows from it, other findings, what was not said.

    ``brief`` leaves out notes and silence, so that of many capsules the healthy ones take three lines each.
    """
    first = _first(report)
    rows: list[RenderableType] = [_title(report, width), ladder_line(report, width), Text()]
    if brief:
        return Group(rows[0], rows[1], _nothing_diverged(report, within))
    told: set[int] = set()
    if first is None and (report.quiet or report.findings or not report.errors):
        rows.append(_nothing_diverged(report, within))
    for finding in ([first] if first else []) + [each for each in report.findings if _is_loud(each)]:
        if id(finding) in told:
            continue
        if told or finding is not first:
            rows.append(Text())
        rows += finding_block(finding, "First divergence" if finding is first else "Also", width)
        # One rule may speak of many places: the first in full, the others in a line each.
        more = [
            each for each in report.findings if each.rule == finding.rule and _is_loud(each) and each is not finding
        ]
        followers = _tree(report, finding.rule, {finding.rule})
        told |= {id(finding), *map(id, more), *(id(each) for each, _ in followers)}
        rows += _lines("More", [(each, "") for each in more], width)
        rows += _lines("Follows", followers, width)
    rows += _lines("Noted", [(each, "") for each in report.findings if id(each) not in told], width)
    return Group(*rows, *_unsaid(report))


def ladder_line(report: CapsuleReport, width: int) -> Text:
    """The eight stages with their marks, in one line down to 80 columns."""
    first = report.first_divergence.stage if report.first_divergence else None
    gap, inner = ("   ", " ") if width >= 108 else (" ", "")
    line = Text(" ", no_wrap=True, overflow="crop")
    for position, rung in enumerate(report.ladder):
        sign, style = MARKS[rung.mark]
        line.append(gap if position else "")
        line.append(rung.stage, "bold" if rung.stage == first else _DIM if rung.mark == "not captured" else "")
        line.append(inner + sign, style)
    return line


def finding_block(finding: Finding, heading: str, width: int) -> list[RenderableType]:
    """One finding in full: what, where, the numbers it rests on, why, and what to do."""
    sign, style = sign_of(finding)
    head = Text(" ")
    head.append(f"{sign} {heading}", style)
    head.append(f"  {one_line(finding.rule)}", "bold")
    head.append(f"   {', '.join(word for word in (finding.severity, finding.confidence) if word)}", _DIM)
    rows: list[RenderableType] = [head, _indented(Text(one_line(finding.title), "bold"))]
    place = place_of(finding.where)
    if place:
        rows.append(_indented(Text(place, "cyan")))
    if finding.summary and finding.summary != finding.title:
        rows.append(_indented(Text(one_line(finding.summary, 1000))))
    if finding.counterfactual is not None:
        rows += [Text(), *map(_indented, _counterfactual(finding.counterfactual))]
    evidence = _beside(finding)
    if evidence:
        rows += [Text(), _indented(_evidence_table(evidence))]
    advice = [("Why", (finding.cause,) if finding.cause else ()), ("Next", finding.next), ("Fix", finding.fix)]
    advice.append(("Known", tuple(f"llmconsole cases show {case}" for case in finding.cases)))
    if any(lines for _, lines in advice):
        rows += [Text(), _indented(_advice(advice))]
    return rows


def place_of(where: Where) -> str:
    """The place of a finding in words: step, tensor, rank, sample, request."""
    parts = [
        f"step {where.step:,}" if where.step is not None else "",
        keep_tail(one_line(where.tensor), 48) if where.tensor else "",
        f"rank {where.rank}" if where.rank is not None else "",
        f"sample {keep_tail(one_line(where.sample), 40)}" if where.sample else "",
        f"request {keep_tail(one_line(where.request), 40)}" if where.request else "",
    ]
    return " · ".join(part for part in parts if part)


#: Items of a list, and runs of ascending numbers, that are all shown.
_MOST_ITEMS, _MOST_RUNS = 3, 6


def figure(value: Any) -> str:
    """A value in a cell: at most five significant digits, thousands separated; what is no number as visible text."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        runs = _runs(list(value))
        items = runs or [figure(item) for item in value]
        whole = len(items) <= (_MOST_RUNS if runs else _MOST_ITEMS)
        return " · ".join(items) if whole else f"{items[0]} · {items[1]} … {items[-1]}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return one_line(value, 200)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else f"{'-' * (value < 0)}10^{value.bit_length() * 0.30103:.0f}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:,.5g}"
    return f"{value:,.1f}" if 1 <= abs(value) < 1e9 else f"{value:.3g}"


def _runs(items: list[Any]) -> list[str]:
    """Ascending whole numbers, as ranks are, by their runs, so that no hole is passed over; nothing of other lists."""
    if len(items) <= _MOST_ITEMS or any(type(each) is not int for each in items):
        return []
    if any(last >= each for last, each in pairwise(items)):
        return []
    starts = [0, *(at for at in range(1, len(items)) if items[at] != items[at - 1] + 1), len(items)]
    ends = [(items[start], items[end - 1]) for start, end in pairwise(starts)]
    return [
        " · ".join(map(figure, range(first, last + 1))) if last - first < 2 else f"{figure(first)} to {figure(last)}"
        for first, last in ends
    ]


def observed(each: Evidence) -> tuple[str, str, str]:
    """Value, expected value and unit in cells: bytes as KiB to TiB (``--json`` has them exactly), the rest as it is."""
    if each.unit != "B":
        return figure(each.value), figure(each.expected), one_line(each.unit)
    return _bytes(each.value), _bytes(each.expected), ""


def _bytes(value: Any) -> str:
    if isinstance(value, str):  # a bound or a range in words
        words = one_line(value, 200)
        return re.sub(r"\d+(?:,\d{3})+|\d{4,}", lambda found: size(int(found[0].replace(",", ""))), words)
    counted = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return size(value) if counted else figure(value)


def _title(report: CapsuleReport, width: int) -> RenderableType:
    title, path = one_line(report.capsule.title or report.capsule.id), one_line(report.capsule.path)
    line = Text(" ")
    line.append(title, "bold")
    room = width - len(line) - 4
    if room > 12 and path != title:
        line.append(f"   {keep_tail(path, room)}", _DIM)
    return line


def _nothing_diverged(report: CapsuleReport, within: str) -> RenderableType:
    ran = len(report.quiet) + len({each.rule for each in report.findings})
    unread = any(each.rule == IMPORT for each in report.errors)
    if unread and not judged(report):
        return Text(" – Nothing could be judged: the evidence could not be read whole", "yellow")
    if not ran:
        return Text(" – Nothing could be judged: no rule had the evidence it needs", "yellow")
    if any(each.severity in ALARMS for each in report.findings):
        return Text(" ? No divergence was found, but see below", "yellow")
    if unread:
        return Text(f" ? Nothing found in what could be read: {_count(ran, 'rule')} ran", "yellow")
    if words := unjudged(report):
        return _remarked("–", words, "yellow")
    if remark := next((each.summary for each in report.findings if each.rule == END), ""):
        return _remarked("·", f"Nothing found but a remark: {remark}", "")
    if within:
        return Text(f" ? Nothing found in {within}: {_count(ran, 'rule')} ran; the rest was not read", "yellow")
    return Text(f" ✓ Nothing found: {_count(ran, 'rule')} ran", "green")


def _remarked(sign: str, words: str, style: str) -> Padding:
    return Padding(Text(f"{sign} {one_line(words, 500)}", style), (0, 0, 0, 1))


def _beside(finding: Finding) -> list[Evidence]:
    """The evidence that the table of candidates does not show already."""
    table = finding.counterfactual
    if table is None:
        return list(finding.evidence)
    shown = {"tolerance", "matches_by_chance", "runner_up", "not_testable"}
    shown |= {_faults(candidate) for candidate in table.candidates}
    return [each for each in finding.evidence if each.name not in shown and each.value != table.observed]


def _evidence_table(rows: Sequence[Evidence]) -> Table:
    table = _table()
    table.add_column("evidence", overflow="fold")
    table.add_column("observed", justify="right", overflow="fold")
    expected = any(each.expected is not None for each in rows)
    if expected:
        table.add_column("expected", justify="right", overflow="fold")
    table.add_column("", overflow="fold", ratio=1)
    for each in rows:
        value, bound, unit = observed(each)
        remark = Text(unit)
        if each.note:
            remark.append(f"{'  ' if unit else ''}{one_line(each.note)}", _DIM)
        words = isinstance(each.value, str) and len(value) > _FIGURE  # an error, say: folded, it reads from the left
        cells = [Text(one_line(each.name)), Text(value, "bold", justify="left" if words else None)]
        if expected:
            cells.append(Text(bound if each.expected is not None else ""))
        table.add_row(*cells, remark)
    return table


def _counterfactual(table_of: Counterfactual) -> list[RenderableType]:
    """Reported, healthy, every candidate that fits, and the nearest that does not."""
    table = _table()
    for name, justify in (("candidate", "left"), ("value", "right"), ("off by", "right"), ("fits", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # pyright: ignore[reportArgumentType]
    table.add_row(Text("  reported"), Text(figure(table_of.observed), "bold"), "–", "–")

    def add(candidate: Candidate, name: str) -> None:
        fits = "yes" if candidate.fits else "no"
        if not candidate.fits and table_of.tolerance > 0 and math.isfinite(candidate.off_by):
            ratio = candidate.off_by / table_of.tolerance
            if ratio <= 1:  # this number is met, and others that were compared as well are not, or not as closely
                fits = "here, not overall"
            else:
                off = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
                fits = f"no, {off} tolerances off" if ratio < 1e7 else "no"
        lead = "▸ " if candidate.fits and candidate.faults else "  "
        cells = (lead + name, figure(candidate.value), f"{candidate.off_by:.2g}", fits)
        table.add_row(*(Text(cell, "bold" if candidate.fits else "") for cell in cells))

    healthy = next((each for each in table_of.candidates if not each.faults), None)
    add(
        healthy
        or Candidate(faults=(), value=table_of.healthy, off_by=abs(table_of.healthy - table_of.observed), fits=False),
        "healthy",
    )
    for candidate in (each for each in table_of.candidates if each.fits and each.faults):
        add(candidate, _faults(candidate))
    if table_of.runner_up is not None and table_of.runner_up.faults:
        add(table_of.runner_up, f"next nearest: {_faults(table_of.runner_up)}")
    notes = [f"fits within ±{table_of.tolerance:.2g}", f"chance of a match {table_of.chance:.1g}"]
    notes += [f"cannot be told apart: {one_line(' = '.join(each))}" for each in table_of.classes if len(each) > 1]
    if table_of.inert:
        notes.append(f"not testable here (no effect on this input): {one_line(', '.join(table_of.inert))}")
    return [table, Text(" · ".join(notes), _DIM)]


def _advice(parts: Iterable[tuple[str, Sequence[str]]]) -> Table:
    table = _grid()
    for name, lines in parts:
        for number, line in enumerate(lines):
            table.add_row(name if not number else "", Text(one_line(line, 1000)))
    return table


def _tree(report: CapsuleReport, rule: str, seen: set[str], depth: int = 0) -> list[tuple[Finding, str]]:
    """What follows from a rule's finding, depth first, each with the lead that draws the tree."""
    rows: list[tuple[Finding, str]] = []
    for each in report.findings:
        if each.caused_by == rule:
            rows.append((each, "  " * depth + "└ "))
            if each.rule not in seen:
                seen.add(each.rule)
                rows += _tree(report, each.rule, seen, depth + 1)
    return rows


def _lines(heading: str, rows: Sequence[tuple[Finding, str]], width: int) -> list[RenderableType]:
    """Findings that need a line each: sign, rule, step, summary; the summary goes below where the line is short."""
    if not rows:
        return []
    table = _grid()
    for number, (finding, lead) in enumerate(rows[:_MOST_LINES]):
        sign, style = sign_of(finding)
        line = Text(lead)
        line.append(sign, style)
        line.append(f" {one_line(finding.rule)}")
        if finding.where.step is not None:
            line.append(f"  step {finding.where.step:,}", "cyan")
        table.add_row(heading if not number else "", line)
        room = max(width - _INDENT - len(heading) - 4 - len(lead), 20)
        words = ending(finding.summary or finding.title, room * (1 if heading == "Noted" else 2))
        table.add_row("", Padding(Text(words, _DIM), (0, 0, 0, len(lead) + 2)))
    if len(rows) > _MOST_LINES:
        table.add_row("", Text(f"and {len(rows) - _MOST_LINES} more", _DIM))
    return [Text(), _indented(table)]


def _unsaid(report: CapsuleReport) -> list[RenderableType]:
    """What was quiet, what could not be judged and what failed: silence is a statement, and so is its absence."""
    table = _grid()
    if report.quiet:
        table.add_row("Quiet", Text(f"{_count(len(report.quiet), 'rule')} ran and found nothing"))
    if report.skipped:
        wanted = lacking(report)[:3]
        most = [f"{one_line(need).replace('|', ' or ')} ({count})" for need, count in wanted]
        text = Text(f"{_count(len(report.skipped), 'rule')} for lack of evidence; most wanted: ")
        text.append(", ".join(most), _DIM)
        table.add_row("Skipped", text)
    for number, each in enumerate(report.errors):
        row = Text(f"{one_line(each.rule)}: {one_line(each.error)}", "magenta")
        table.add_row("Failed" if not number else "", row)
    return [Text(), _indented(table)] if table.row_count else []


def sign_of(finding: Finding) -> tuple[str, str]:
    """Sign and style of a finding."""
    if finding.confidence == "undetermined":
        return MARKS["undetermined"]
    if finding.kind == "consequence":
        return MARKS["consequence"]
    if finding.severity in ALARMS:
        return MARKS["divergence"] if finding.severity == "critical" else ("✗", "bold yellow")
    return "·", _DIM


def _is_loud(finding: Finding) -> bool:
    return finding.severity in ALARMS and finding.caused_by is None


def _first(report: CapsuleReport) -> Finding | None:
    first = report.first_divergence
    if first is None:
        return None
    same = [each for each in report.findings if each.rule == first.rule]
    return next((each for each in same if each.where == first.where), same[0] if same else None)


def _faults(candidate: Candidate) -> str:
    return one_line(" + ".join(candidate.faults)) or "healthy"


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_DIM, show_edge=False)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, _INDENT))
