"""Gate: six items with their state, the output of the one that runs, and what is still missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ...casebook.gate.plan import ITEMS, QUESTIONS
from ...looks.gate_types import GateLook
from ...text import one_line
from ..actions import bindings
from ..gates import GateRun
from ..link import Answer
from .base import View
from .notebook import wrapped

if TYPE_CHECKING:
    from ..app import Console

SIGNS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "error": ("!", "magenta"), "skipped": ("–", "yellow")}


class GateView(View):
    """What proves the fix of the case that this incident was resolved as."""

    name_ = "gate"
    channel = "table"  # git may take its time, and so may the verdicts that are being made meanwhile
    signs = "✓ passed  ✗ failed  ! nothing shown  – left out, with a reason  ▸ running  · not run"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("gate")]
    DEFAULT_CSS = """
    GateView Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._look: GateLook | None = None
        self._to_run = False  # as soon as the file was read again
        self._at = 0

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        case = self._look.case if self._look is not None and self._look.case else "CASE"
        return f"llmconsole gate show {case}"

    @property
    def _main(self) -> Console:
        return cast("Console", self.app)

    def compose(self) -> ComposeResult:
        """One page."""
        yield Static(" reading …", id="page", markup=False)

    def on_mount(self) -> None:
        """Watch the run, where one goes on."""
        self._main.gates.changed.subscribe(self, self._changed)

    def reload(self) -> None:
        """Ask for file, last run and record."""
        self.ask("gate", repository=str(self._main.repository))

    def answered(self, answer: Answer) -> None:
        """Draw it."""
        self._look = msgspec.convert(answer.result, GateLook)
        if self._to_run and answer.method == "gate":
            self._to_run = False
            self._start()
        if answer.method == "gate_init" and not self._look.problem.startswith(f"{self._look.file} is there"):
            self.notify(f"wrote {one_line(self._look.file)}; edit it, then t runs it", timeout=6, markup=False)
        self._draw()

    def failed(self, problem: str) -> None:
        """Say it in place of the page."""
        self._to_run = False
        lines = wrapped(problem, self.size.width - 2)
        self.query_one("#page", Static).update("\n".join(f" {each}" for each in lines))

    def on_resize(self, event: events.Resize) -> None:
        """Lines are as long as the screen is wide."""
        self._draw()

    def _changed(self, case: str) -> None:
        if self._look is None or case != self._look.case:
            return
        run = self._main.gates.of(case)
        if run is not None and run.ended:
            self.reload()
        self._draw()

    def _draw(self) -> None:
        if self._look is None or not self.size.width:
            return
        run = self._main.gates.of(self._look.case) if self._look.case else None
        lines = page(self._look, run, self._at, self.size.width, self.size.height)
        self.query_one("#page", Static).update(Text("\n").join(lines))

    # -- actions

    def action_choose(self, by: int) -> None:
        """Another item."""
        self._at = max(0, min(self._at + by, len(ITEMS) - 1))
        self._draw()

    def action_init(self) -> None:
        """Write the gate's file."""
        if self._ready():
            self.ask("gate_init", repository=str(self._main.repository))

    def action_run(self) -> None:
        """Run the gate, or say what is missing."""
        if self._ready():
            self._to_run = True  # it may have been edited since
            self.reload()

    def _start(self) -> None:
        if self._look is None or not self._look.case:
            return
        if self._look.plan is None:
            words = self._look.problem if self._look.there else "i writes the gate's file first"
            self.notify(one_line(words), severity="warning", timeout=8, markup=False)
            return
        self._main.gates.start(self._look.case, str(self._main.repository))
        self._draw()

    def action_stop(self) -> None:
        """End the run."""
        run = self._main.gates.of(self._look.case) if self._look is not None else None
        if run is None or run.ended:
            self.notify("nothing is running", timeout=3)
        else:
            self._main.gates.stop(run.case)

    def _ready(self) -> bool:
        """Whether there is a case to act on; where not, it is said."""
        if self._look is None:
            self.notify("still reading; once more in a moment", timeout=3)
        elif not self._look.case:
            self.notify(one_line(self._look.problem), severity="warning", timeout=6, markup=False)
        return self._look is not None and bool(self._look.case)


def page(look: GateLook, run: GateRun | None, at: int, width: int, height: int) -> list[Text]:
    """Case and outcome, the six items, and below them the words or the output of the chosen one."""
    if not look.case:
        return [Text(f" {each}") for each in wrapped(look.problem, width - 2)]
    going = run is not None and not run.ended
    head = Text(" ")
    head.append(look.case, "bold")
    if going and run is not None:
        head.append(f"   running: {run.done} of {len(ITEMS)} done", "bold cyan")
    elif look.last is not None:
        style = "bold red" if look.last.outcome == "failed" else "bold green"
        head.append(f"   {look.last.outcome}", style)
        head.append(f"   {look.last.started[:16].replace('T', ' ')}  fix {look.last.fixed[:12]}", "dim")
    else:
        head.append("   not run yet", "dim")
    found = [head]
    if look.record:
        style = "green" if look.record.endswith("holds") else "yellow"
        found += [Text(f" {each}", style) for each in wrapped(look.record, width - 2)]
    if not look.there:
        found += [Text(), Text(" No file says how to prove this fix. i writes it with what card and git know.")]
    elif look.plan is None:
        found += [Text(), *(Text(f" {each}", "yellow") for each in wrapped(look.problem, width - 2))]
    found.append(Text())
    results = {} if going or look.last is None else {each.item: each for each in look.last.results}
    for index, name in enumerate(ITEMS):
        line = Text(f" {'▸' if index == at and not going else ' '} ")
        if going and run is not None:
            verdict = run.verdicts.get(name, "")
            sign, style = SIGNS.get(verdict, ("▸", "bold cyan") if name == run.item else ("·", "dim"))
        else:
            sign, style = SIGNS[results[name].verdict] if name in results else ("·", "dim")
        line.append(f"{sign} {name:<12}", style)
        line.append(f" {QUESTIONS[name]}", "dim" if name not in results else "")
        found.append(line)
    found.append(Text())
    room = max(1, height - len(found))
    if going and run is not None:
        found += [Text(f" {one_line(each)}", "dim") for each in list(run.lines)[-room:]]
    elif run is not None and run.words:
        found += [Text(f" {each}", "yellow") for each in wrapped(run.words, width - 2)]
    elif (chosen := results.get(ITEMS[at])) is not None:
        found += [Text(f" {each}") for each in wrapped(chosen.words, width - 2)]
        if chosen.runs:
            output = chosen.runs[-1].output.strip().split("\n")
            found += [Text(), *(Text(f"   {one_line(each)}", "dim") for each in output)]
    return found[:height]
