"""Overview: the ladder, every finding under its cause, and one of them in full."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text
from textual import events, on
from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from ....analyzers.finding import Finding
from ....analyzers.report import ALARMS, CapsuleReport, lacking, unjudged
from ...commands.rules import RuleRow, Rules, documentation
from ...render import MARKS, finding_block, ladder_line, place_of, sign_of
from ...text import keep_tail, one_line
from ..actions import bindings
from ..capturing import how_to_capture, what_to_capture
from ..copying import as_text, copy
from ..link import Answer
from ..widgets.rows import Row, Rows
from .base import View

if TYPE_CHECKING:
    from ..app import Console

_DIM = "bright_black"


@dataclass(frozen=True)
class Item:
    """A row of the list: a finding, a rule that failed, a stage without evidence, or what stayed quiet."""

    finding: Finding | None = None
    rule: str = ""
    body: tuple[RenderableType, ...] = ()


class OverviewView(View):
    """The list above, what is chosen below; ``enter`` gives the lower part all the room."""

    name_ = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("overview")]
    DEFAULT_CSS = """
    OverviewView #ladder { height: auto; }
    OverviewView #findings { height: auto; max-height: 40%; min-height: 3; margin-top: 1; }
    OverviewView #chosen { height: 1fr; border-top: solid $panel-lighten-2; }
    OverviewView.whole #ladder, OverviewView.whole #findings { display: none; }
    OverviewView.whole #chosen { border-top: none; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._report: CapsuleReport | None = None
        self._rules: dict[str, RuleRow] = {}
        self._mode: Literal["list", "finding", "rule"] = "list"

    def compose(self) -> ComposeResult:
        """Ladder, list, the chosen row."""
        yield Static(" analysing …", id="ladder", markup=False)
        yield Rows[Item](empty="", id="findings")
        with VerticalScroll(id="chosen"):
            yield Static(id="body", markup=False)

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole analyze {self.path}"

    @property
    def _main(self) -> Console:
        return cast("Console", self.app)

    @property
    def _list(self) -> Rows[Item]:
        return cast("Rows[Item]", self.query_one("#findings", Rows))

    def on_mount(self) -> None:
        """Listen for the report; ask what each rule needs."""
        self._main.reports.arrived.subscribe(self, self._arrived)
        self._main.link.ask(self, "rules", {})

    def on_focus(self) -> None:
        """The list has the cursor."""
        self._list.focus()

    def on_resize(self, event: events.Resize) -> None:
        """Lines are cut to the width."""
        if self._report is not None:
            self._fill(self._report)

    def reload(self) -> None:
        """Show the report that is kept, or ask for one."""
        self._main.reports.want(self.path)
        self._arrived(self.path)

    def answered(self, answer: Answer) -> None:
        """Learn which rule belongs to which stage."""
        self._rules = {each.id: each for each in msgspec.convert(answer.result, Rules).rules}
        if self._report is not None:
            self._fill(self._report)

    def _arrived(self, path: str) -> None:
        kept = self._main.reports.of(path)
        if path != self.path or kept is None:
            return
        self._report = kept.report
        if kept.report is None:
            self.query_one("#ladder", Static).update(Text(f" ! {one_line(kept.problem)}", "magenta"))
            self._list.set_rows([])
        else:
            self._fill(kept.report)

    def _fill(self, report: CapsuleReport) -> None:
        width = max(40, self.size.width)
        self.query_one("#ladder", Static).update(ladder_line(report, width))
        self._list.set_rows(rows_of(report, self._rules, width - 2))  # beside the scroll bar
        self._show()

    def _show(self) -> None:
        """Draw the chosen row below the list."""
        item = self._chosen
        body: list[RenderableType] = []
        if item is not None:
            if self._mode == "rule" and item.rule in self._rules:
                body = documentation(self._rules[item.rule])
            elif item.finding is not None:
                body = self._finding(item.finding)
            else:
                body = list(item.body)
        self.query_one("#body", Static).update(Group(*body))

    def _finding(self, finding: Finding) -> list[RenderableType]:
        block = finding_block(finding, "First divergence" if self._is_first(finding) else "Finding", self.size.width)
        if finding.caused_by:
            block.append(Text(f"   Follows from {one_line(finding.caused_by)}", _DIM))
        return block

    def _is_first(self, finding: Finding) -> bool:
        first = self._report.first_divergence if self._report is not None else None
        return first is not None and (first.rule, first.where) == (finding.rule, finding.where)

    @property
    def _chosen(self) -> Item | None:
        row = self._list.selected
        return row.item if row is not None else None

    @on(Rows.Moved, "#findings")
    def _moved(self, message: Rows.Moved) -> None:
        message.stop()
        self._show()
        item = self._chosen
        if item is not None and item.finding is not None and item.finding.where.step is not None:
            self.post_message(self.CursorMoved(float(item.finding.where.step)))

    # -- actions

    @on(Rows.Chosen, "#findings")
    def _enter(self, message: Rows.Chosen) -> None:
        message.stop()
        self.action_open()

    def _enlarge(self, mode: Literal["list", "finding", "rule"]) -> None:
        self._mode = mode
        self.set_class(mode != "list", "whole")
        self._show()
        area = self.query_one("#chosen", VerticalScroll)
        area.scroll_home(animate=False)
        if mode == "list":
            self._list.focus()
        else:
            area.focus()

    @property
    def case_query(self) -> str:
        """What the case log is opened with: the rule of the chosen finding."""
        row = self._list.selected
        return f"rule:{row.item.finding.rule}" if row is not None and row.item.finding is not None else ""

    def action_open(self) -> None:
        """Show the chosen row in full."""
        if self._chosen is not None:
            self._enlarge("finding")

    def action_back(self) -> None:
        """From the documentation to the finding, from the finding to the list; from there the screen closes."""
        if self._mode == "list":
            raise SkipAction
        self._enlarge("list")

    def action_document(self) -> None:
        """Show the documentation of the chosen finding's rule; again: back to the finding."""
        item = self._chosen
        if self._mode == "rule":
            self._enlarge("finding")
        elif item is not None and item.rule in self._rules:
            self._enlarge("rule")

    def action_copy(self) -> None:
        """Copy what is chosen as text."""
        item = self._chosen
        if item is not None:
            body = self._finding(item.finding) if item.finding is not None else list(item.body)
            if self._mode == "rule" and item.rule in self._rules:
                body = documentation(self._rules[item.rule])
            copy(self.app, as_text(body))


def outline(report: CapsuleReport) -> list[tuple[Finding, int]]:
    """Every finding once, with its depth: first divergence, what else is loud, each over its consequences, infos."""
    first = report.first_divergence
    told: set[int] = set()
    lines: list[tuple[Finding, int]] = []

    def tell(finding: Finding, depth: int) -> None:
        if id(finding) in told:
            return
        told.add(id(finding))
        lines.append((finding, depth))
        same = [each for each in report.findings if each.rule == finding.rule and each is not finding]
        for each in same if finding.severity in ALARMS else ():
            if each.severity in ALARMS and id(each) not in told:  # other places of the same rule, next to it
                told.add(id(each))
                lines.append((each, depth))
        for each in report.findings:
            if each.caused_by == finding.rule:
                tell(each, depth + 1)

    for finding in report.findings:
        if first is not None and (finding.rule, finding.where) == (first.rule, first.where):
            tell(finding, 0)
    for finding in report.findings:
        if finding.severity in ALARMS and finding.caused_by is None:
            tell(finding, 0)
    for finding in report.findings:
        tell(finding, 0)
    return lines


def rows_of(report: CapsuleReport, rules: dict[str, RuleRow], width: int) -> list[Row[Item]]:
    """The rows of the list: findings, rules that failed, stages without evidence, what was quiet or skipped."""
    words = unjudged(report)
    all_well = not words and not any(each.severity in ALARMS for each in report.findings)
    rows: list[Row[Item]] = [_unjudged_row(report, words, width)] if words else []
    rows += [_quiet_row(report)] if report.quiet and all_well else []
    for number, (finding, depth) in enumerate(outline(report)):
        text = _finding_line(finding, depth, width)
        rows.append(Row(f"{number} {finding.rule} {finding.where}", text, Item(finding, finding.rule)))
    for error in report.errors:
        text = Text.assemble(
            (" ? ", "magenta"), f"{one_line(error.rule)} failed: {one_line(error.error)}", no_wrap=True
        )
        body = (Text(f" {one_line(error.rule)} did not finish", "bold"), Text(f"   {one_line(error.error, 2000)}"))
        rows.append(Row(f"error {error.rule}", text, Item(rule=error.rule, body=body)))
    rows += _stage_rows(report, rules, width)
    if report.skipped:
        rows.append(_skipped_row(report, width))
    if report.quiet and not all_well:
        rows.append(_quiet_row(report))
    return rows


def _unjudged_row(report: CapsuleReport, words: str, width: int) -> Row[Item]:
    body = [Text(f" {one_line(words, 600)}", "bold"), Text()]
    for need, count in lacking(report):
        if " " in need:
            body.append(Text(f"   {count} rule{'s' * (count > 1)} wanted {one_line(need, 600)}", _DIM))
    return Row("judged", _not_captured("", one_line(words, 600), width), Item(body=tuple(body)))


def _quiet_row(report: CapsuleReport) -> Row[Item]:
    count = len(report.quiet)
    text = Text.assemble((" ✓ ", "green"), f"{count} rule{'s' * (count > 1)} ran and found nothing", no_wrap=True)
    names = tuple(Text(f"   {one_line(each)}") for each in report.quiet)
    return Row("quiet", text, Item(body=(Text(" Ran and found nothing", "bold"), *names)))


def _finding_line(finding: Finding, depth: int, width: int) -> Text:
    sign, style = sign_of(finding)
    line = Text(" " + ("  " * depth)[:-2] + ("└ " if depth else ""), no_wrap=True)
    line.append(sign, style)
    line.append(f" {one_line(finding.rule)}", "" if finding.severity in ALARMS else _DIM)
    tail = finding.confidence if finding.severity in ALARMS else str(finding.severity)
    if finding.caused_by is not None:
        tail = "consequence"
    room = width - line.cell_len - len(tail) - 4
    place = place_of(finding.where)
    if len(place) > room:
        place = f"step {finding.where.step:,}" if finding.where.step is not None and room > 12 else ""
    line.append(f"  {keep_tail(place, max(1, room))}" if place else "", "cyan")
    line.append(" " * max(1, width - line.cell_len - len(tail) - 1))
    line.append(tail, _DIM)
    return line


def _stage_rows(report: CapsuleReport, rules: dict[str, RuleRow], width: int) -> list[Row[Item]]:
    """What to capture so that a stage can be judged, a line each; stages that nothing judges yet share one."""
    rows: list[Row[Item]] = []
    of_no_rule: list[str] = []
    for stage in (each.stage for each in report.ladder if each.mark == "not captured"):
        own = [each for each in report.skipped if each.rule in rules and rules[each.rule].stage == stage]
        needs = Counter(need for each in own for need in each.missing)
        if not needs:
            of_no_rule.append(stage)
            continue
        wanted = [need for need, _ in needs.most_common()]
        told = [need for need in wanted if " " in need] if unjudged(report) else []  # of evidence that was given
        words = one_line(what_to_capture(told or wanted))
        body = [Text(f" {stage}: not captured", "bold"), Text(f"   {words}"), Text()]
        body += [Text(f"   {one_line(each.rule)} needs {one_line(', '.join(each.missing))}") for each in own]
        rows.append(Row(f"stage {stage}", _not_captured(f"{stage}  ", words, width), Item(body=tuple(body))))
    if of_no_rule and rules:
        words = "no rule of this version judges " + ("these stages" if len(of_no_rule) > 1 else "this stage")
        line = _not_captured(", ".join(of_no_rule) + "  ", words, width)
        rows.append(Row("unjudged", line, Item(body=(line,))))
    return rows


def _not_captured(head: str, words: str, width: int) -> Text:
    sign, style = MARKS["not captured"]
    line = Text.assemble((f" {sign} ", style), head, (words, _DIM), no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _skipped_row(report: CapsuleReport, width: int) -> Row[Item]:
    count = len(report.skipped)
    needs = [need for need, _ in lacking(report)]
    wanted = what_to_capture(needs[:1] if unjudged(report) else needs)
    line = _not_captured(f"{count} rule{'s' * (count > 1)} skipped  ", one_line(wanted), width)
    body: list[RenderableType] = [Text(" Skipped for lack of evidence", "bold")]
    for each in report.skipped:
        body.append(Text(f"   {one_line(each.rule)}"))
        body += [Text(f"      lacks {one_line(how_to_capture([need]))}", _DIM) for need in each.missing]
    return Row("skipped", line, Item(body=tuple(body)))
