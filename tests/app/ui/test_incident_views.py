"""Notebook and gate of an incident: what is written down, tested and run, and what happens where that goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.casebook import notebook as books
from llmconsole.app.casebook.incident import notebook as changing
from llmconsole.app.casebook.notebook import Hypothesis, Notebook
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.filling import FillScreen
from llmconsole.app.ui.views.gate import GateView
from llmconsole.app.ui.views.notebook import NotebookView, clock, page
from llmconsole.app.ui.widgets.rows import Rows
from rich.cells import cell_len

from ..capsules import diverged
from ..conftest import git

Until = Callable[..., Any]
OPENED = datetime(2026, 3, 1, 3, 0, tzinfo=UTC)
CHINESE = "学习率在第一万步之后突然变大，损失随之发散，而数据管道没有任何改变" * 3


def drawn(console: Console) -> str:
    """The page of the open view, each line without the blanks behind it."""
    found = console.screen.query("View #page")
    if not found:
        return ""
    lines = range(found.first().size.height)
    return "\n".join("".join(each.text for each in found.first().render_line(y)).rstrip() for y in lines)


def said(console: Console) -> str:
    return "\n".join(each.message for each in console._notifications)


async def view(console: Console, pilot: Any, until: Until, key: str) -> None:
    """From home into the only capsule's view on this key."""
    await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
    await pilot.press("enter")
    await until(pilot, lambda: getattr(console.screen, "open_view", None) is not None, "the capsule is open")
    await pilot.press(key)
    await until(pilot, lambda: drawn(console) not in ("", " reading …"), "the view is drawn")


async def fill(pilot: Any, until: Until, console: Console, *fields: str) -> None:
    """Type into the fields one after the other."""
    await until(pilot, lambda: isinstance(console.screen, FillScreen), "the fields are there")
    for words in fields:
        console.screen.focused.value = words
        await pilot.press("enter")
    await until(pilot, lambda: not isinstance(console.screen, FillScreen), "taken")


def record(capsule: Path) -> dict[str, Any]:
    return json.loads((capsule / "incident.json").read_text())


class TestNotebook:
    def test_from_the_clock_over_a_rules_verdict_to_notes(self, tmp_path: Path, until: Until) -> None:
        capsule = diverged(tmp_path / "run.capsule")

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(80, 24)) as pilot:
                await view(console, pilot, until, "8")
                assert "s starts the clock" in drawn(console)
                await pilot.press("x")
                assert "h writes one down" in said(console)
                await pilot.press("h")
                await fill(pilot, until, console, CHINESE, "同样的步骤，学习率减半")
                await until(
                    pilot, lambda: "1 学习率" in drawn(console).replace("▸ ? ", ""), "kept before the clock runs"
                )
                await pilot.press("s")
                await until(pilot, lambda: "target 30 min" in drawn(console), "the clock runs")
                await until(pilot, lambda: "2 The loss is not finite" in drawn(console), "a rule suggests one")
                await pilot.press("s")
                assert "started already" in said(console)
                await pilot.press("up", "up")
                await pilot.press("x")
                await fill(pilot, until, console, "lr / 2", "it diverges all the same", "refuted")
                await until(pilot, lambda: "✗ 1" in drawn(console), "refuted")
                assert "changed lr / 2: it diverges all the same → refuted" in drawn(console)
                assert record(capsule)["status"] == "open"
                await pilot.press("down", "t")
                await until(pilot, lambda: "→ undecided" in drawn(console), "the rule says what it saw")
                assert "The loss is NaN from step 3 on" in drawn(console)
                await pilot.press("x")
                await fill(pilot, until, console, "fp32", "the loss stays finite", "supported")
                await until(pilot, lambda: "✓ 2" in drawn(console), "supported")
                assert "located in" in drawn(console)
                await pilot.press("n")
                await fill(pilot, until, console, "[bold]node 7[/bold] \x1b[31m")
                await until(pilot, lambda: r"[bold]node 7[/bold] \x1b[31m" in drawn(console), "the note, as it is")

        asyncio.run(scenario())
        kept = record(capsule)
        verdicts = [[tried["verdict"] for tried in each["experiments"]] for each in kept["hypotheses"]]
        assert verdicts == [["refuted"], ["undecided", "supported"]]
        assert kept["hypotheses"][0]["claim"] == CHINESE
        assert kept["status"] == "located"
        assert len(kept["notes"]) == 1

    def test_what_is_missing_is_marked_and_escape_writes_nothing(self, tmp_path: Path, until: Until) -> None:
        capsule = diverged(tmp_path / "run.capsule")

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(60, 14)) as pilot:
                await view(console, pilot, until, "8")
                await pilot.press("h")
                await until(pilot, lambda: isinstance(console.screen, FillScreen), "the fields are there")
                await pilot.press("enter", "enter")
                await pilot.pause(0.2)
                assert isinstance(console.screen, FillScreen), "a hypothesis without words is none"
                await pilot.press(*"half", "escape")
                assert not isinstance(console.screen, FillScreen)
                await pilot.press("n", "escape")

        asyncio.run(scenario())
        assert not (capsule / "incident.json").exists()

    def test_the_chosen_hypothesis_stays_in_view_on_a_small_screen(self, tmp_path: Path, until: Until) -> None:
        capsule = diverged(tmp_path / "run.capsule")
        with changing(capsule) as book:
            for number in range(12):
                books.add_hypothesis(book, f"{CHINESE} {number}", "", "", OPENED)

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(40, 16)) as pilot:
                await view(console, pilot, until, "8")
                for number in range(1, 13):
                    await until(pilot, lambda at=number: f"▸ ? {at} " in drawn(console), f"{number} is in view")
                    await pilot.press("down")
                for _ in range(12):
                    await pilot.press("up")
                assert "▸ ? 1 " in drawn(console)

        asyncio.run(scenario())

    def test_a_worker_that_dies_over_a_test_costs_nothing_that_was_written(self, tmp_path: Path, until: Until) -> None:
        capsule = diverged(tmp_path / "run.capsule")
        with changing(capsule) as book:
            books.add_hypothesis(book, "not finite", "", "numerics/loss-nonfinite", OPENED)

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(80, 24)) as pilot:
                await view(console, pilot, until, "8")
                await until(pilot, lambda: console.link.is_idle("verdict"), "the report is made")
                worker = console.link._lines["verdict"].worker
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGSTOP)
                await pilot.press("t")
                await until(pilot, lambda: "running numerics/loss-nonfinite …" in drawn(console), "it says so")
                await pilot.press("t")
                assert "running" in said(console)
                os.kill(worker.pid, signal.SIGKILL)
                await until(pilot, lambda: "ended by SIGKILL" in said(console), "one line")
                assert "running" not in drawn(console)
                assert "▸ ? 1 not finite" in drawn(console)
                await pilot.press("t")
                await until(pilot, lambda: "→ undecided" in drawn(console), "the next one is answered")

        asyncio.run(scenario())
        assert len(record(capsule)["hypotheses"][0]["experiments"]) == 1

    def test_a_record_that_is_none_is_said_in_its_place(self, tmp_path: Path, until: Until) -> None:
        (diverged(tmp_path / "run.capsule") / "incident.json").write_text('{"hypotheses": 7}')

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(120, 24)) as pilot:
                await view(console, pilot, until, "8")
                assert "incident.json cannot be used" in drawn(console)
                await pilot.press("9")
                await until(pilot, lambda: "incident.json cannot be used" in drawn(console), "the gate says it too")

        asyncio.run(scenario())


class TestPage:
    @pytest.mark.parametrize(
        ("minutes", "words", "way_back"),
        [(0, "open for 0 s", False), (29, "open for 29 min", False), (31, "open for 31 min", True)],
    )
    def test_after_thirty_minutes_the_way_back_is_offered(self, minutes: int, words: str, way_back: bool) -> None:
        book = Notebook(opened=books.said(OPENED))
        shown = "\n".join(each.plain for each in clock(book, OPENED + timedelta(minutes=minutes), 80))
        assert words in shown
        assert ("go back to one batch" in shown) is way_back

    def test_a_located_incident_keeps_its_time(self) -> None:
        book = Notebook(opened=books.said(OPENED), located=books.said(OPENED + timedelta(minutes=12)), status="fixed")
        (line, *_) = clock(book, OPENED + timedelta(days=3), 80)
        assert line.plain.startswith(" fixed   located in 12 min")

    def test_before_it_is_opened_the_key_is_named(self) -> None:
        assert "s starts the clock" in clock(Notebook(), OPENED, 80)[0].plain

    @pytest.mark.parametrize("width", [20, 40, 80, 200])
    def test_no_line_is_wider_than_the_screen_and_nothing_is_lost(self, width: int) -> None:
        claim = f"{CHINESE} and " + "x" * 90
        now = OPENED
        book = Notebook(hypotheses=[Hypothesis(id=1, claim=claim, test=CHINESE, rule="numerics/loss-spike")])
        books.add_experiment(book, 1, CHINESE, claim, "refuted", now)
        book.notes.append(books.Note(text=claim, t=books.said(now)))
        lines, first, last = page(book, 0, width)
        assert max(cell_len(each.plain) for each in lines) <= width
        said_there = "".join(each.plain for each in lines).replace(" ", "")
        assert said_there.count("x" * 90) + said_there.count("x" * 10) >= 3
        assert said_there.count(CHINESE) == 5
        assert (first, last < len(lines)) == (0, True)


def resolved(tmp_path: Path, repository: Path) -> Path:
    """A capsule whose incident has become a case of the repository."""
    card = "# Debug cases\n\n## a-case · 损失变成 NaN\n\n- **Class:** nonfinite\n- **Rules:** numerics/loss-nonfinite\n"
    (repository / "debug-cases.md").write_text(card)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "Resolve a-case\n\nCase-Id: a-case")
    (tmp_path / "runs").mkdir()
    capsule = diverged(tmp_path / "runs" / "run.capsule")
    with changing(capsule) as book:
        book.case, book.status = "a-case", "fixed"
    return capsule


def plan(repository: Path, script: str) -> None:
    """A gate whose regression item runs a script."""
    (repository / "check.py").write_text(script)
    git(repository, "add", "check.py")
    git(repository, "commit", "-q", "-m", "A check")
    fixed, broken = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "HEAD~1")
    items = ("neighbours", "equivalence", "performance", "faults", "documents")
    skipped = "".join(f'[{name}]\nskip = "small"\n' for name in items)
    (repository / "gates").mkdir(exist_ok=True)
    (repository / "gates" / "a-case.toml").write_text(
        f'[regression]\ncommand = "{sys.executable} check.py"\nbroken = "{broken}"\nfixed = "{fixed}"\n'
        f'files = ["check.py"]\n{skipped}'
    )


#: Says who it is and waits to be ended.
WAIT = """
import os, pathlib, time
pathlib.Path({place!r}).write_text(str(os.getpid()))
print("waiting", flush=True)
time.sleep(100)
"""


def alive(place: Path) -> bool:
    """Whether the process that wrote its number there is still running."""
    try:
        os.kill(int(place.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


class TestGate:
    def test_without_a_case_each_key_says_what_comes_first(self, tmp_path: Path, until: Until) -> None:
        diverged(tmp_path / "run.capsule")

        async def scenario() -> None:
            console = Console(tmp_path, remember=False)
            async with console.run_test(size=(80, 24)) as pilot:
                await view(console, pilot, until, "9")
                assert "no case yet: r resolves it" in drawn(console)
                await pilot.press("t")
                assert "no case yet" in said(console)
                await pilot.press("S")
                assert "nothing is running" in said(console)

        asyncio.run(scenario())

    @pytest.mark.timeout(200)
    def test_file_problems_run_stop_and_failure(self, tmp_path: Path, repository: Path, until: Until) -> None:
        resolved(tmp_path, repository)
        pid = tmp_path / "pid"

        async def scenario() -> None:
            console = Console(tmp_path / "runs", remember=False, repository=repository)
            async with console.run_test(size=(80, 24)) as pilot:
                await view(console, pilot, until, "9")
                assert "No file says how to prove this fix" in drawn(console)
                await pilot.press("t")
                await until(pilot, lambda: "i writes the gate's file first" in said(console), "it says what is missing")
                await pilot.press("i")
                await until(pilot, lambda: "needs a command" in drawn(console), "the file is there, with its gaps")
                assert "edit it, then t runs it" in said(console)
                await pilot.press("i")
                await until(pilot, lambda: "is there already" in drawn(console), "it is not written over")
                await pilot.press("t")
                await until(pilot, lambda: "needs a command" in said(console), "what the file lacks")
                assert console.gates.of("a-case") is None

                plan(repository, WAIT.format(place=str(pid)))  # as in an editor, with the view open
                await pilot.press("t")
                await until(pilot, lambda: "waiting" in drawn(console), "its output is shown")
                assert "running: 0 of 6 done" in drawn(console)
                assert "▸ regression" in drawn(console)
                first = console.gates.of("a-case")
                await pilot.press("t")
                await pilot.pause(0.3)
                assert console.gates.of("a-case") is first, "one run at a time"
                await pilot.press("S")
                await until(pilot, lambda: "stopped; nothing was committed" in drawn(console), "stopped")

                plan(repository, "raise SystemExit('red on both')\n")
                await pilot.press("t")
                await until(pilot, lambda: "a-case   failed" in drawn(console), "a test that was never red")
                assert "! regression" in drawn(console), "no test was seen to fail"
                await pilot.press("up", "up")
                assert "red on both" in drawn(console)
                await pilot.press("down")
                assert "small" in drawn(console)
                await pilot.resize_terminal(30, 10)
                await pilot.pause(0.1)
                assert "a-case   failed" in drawn(console)

        asyncio.run(scenario())
        assert git(repository, "log", "-1", "--format=%s") == "A check"
        self._nothing_left(repository, pid)

    @pytest.mark.timeout(200)
    def test_leaving_while_a_gate_runs_ends_it(self, tmp_path: Path, repository: Path, until: Until) -> None:
        resolved(tmp_path, repository)
        pid = tmp_path / "pid"
        plan(repository, WAIT.format(place=str(pid)))

        async def scenario() -> None:
            console = Console(tmp_path / "runs", remember=False, repository=repository)
            async with console.run_test(size=(80, 24)) as pilot:
                await view(console, pilot, until, "9")
                await pilot.press("t")
                await until(pilot, pid.exists, "it runs")
                assert isinstance(console.screen.open_view, GateView)
                await pilot.press("8")
                await until(pilot, lambda: isinstance(console.screen.open_view, NotebookView), "and goes on unseen")
                assert alive(pid)
                await pilot.press("q")

        asyncio.run(scenario())
        self._nothing_left(repository, pid)

    @staticmethod
    def _nothing_left(repository: Path, pid: Path) -> None:
        """Neither process nor work tree nor record."""
        deadline = time.monotonic() + 30
        while alive(pid) or len(git(repository, "worktree", "list").split("\n")) > 1:
            assert time.monotonic() < deadline, git(repository, "worktree", "list")
            time.sleep(0.05)
        assert not (repository / "gates" / "a-case.json").exists()
