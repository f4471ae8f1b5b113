"""A log that was copied into the directory is a row like a capsule: verdict, curves, views, and a capsule by a key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.runner import analyze
from llmconsole.app.entry import RAW
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.asking import AskScreen
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.screens.home import HomeScreen
from llmconsole.app.ui.views.overview import rows_of
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.app.ui.widgets.verdict import first
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files
from textual.widgets import Input

from ...traces import KinetoTrace
from ..test_raw_files import log
from .test_home import lines

Until = Callable[..., Any]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where workers import to."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def said(console: Console) -> str:
    return "\n".join(each.message for each in console._notifications)


@pytest.mark.parametrize("number", [1, 200])
def test_a_trace_that_cannot_be_judged_is_not_shown_as_healthy(tmp_path: Path, number: int) -> None:
    """The first step of a job is warm-up; a later one is judged."""
    trace = KinetoTrace().step(number, 0, 10).kernel(0.5, 9)
    path = import_files([trace.write(tmp_path / "a.pt.trace.json")], tmp_path / "out", attach=False)
    report = analyze(Capsule.open(path))
    shown = [row.text.plain for row in rows_of(report, {}, 120)]
    told = str(first(report)[0])
    if number == 1:
        assert shown[0].startswith(" – Nothing could be judged; wanted: a trace of later steps")
        assert any("rules skipped  a trace of later steps" in each for each in shown)
        assert told.startswith("Nothing could be judged; wanted: a trace of later steps")
    else:
        assert not any("could be judged" in each for each in (*shown, told))
        assert not any("rules skipped  a trace" in each for each in shown)


def test_a_job_of_two_logs_is_judged_drawn_and_made_a_capsule(runs: Path, scratch: Path, until: Until) -> None:
    log(runs / "a.log", 0, 60)
    log(runs / "b.log", 60, 120)
    (runs / "README.md").write_text("# nothing\n")

    async def scenario() -> None:
        console = Console(runs, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            rows = console.screen.query_one("#capsules", Rows)
            await until(pilot, lambda: len(rows) == 1, "one row")
            assert "0 capsules, 1 from raw files" in lines(console, "#where")
            await until(pilot, lambda: "Nothing diverged" in lines(console, "#first"), "judged")
            await until(pilot, lambda: "loss" in lines(console, "#small-loss"), "drawn")
            assert "4.81" in lines(console, "#small-loss"), "to the last step of the second file"
            await pilot.press("r")
            assert "i makes a capsule of it" in said(console)
            assert isinstance(console.screen, HomeScreen)

            await pilot.press("enter", "2")
            await until(pilot, lambda: bool(console.screen.query("#panel-0")), "timelines")
            await until(pilot, lambda: "loss 4.81" in lines(console, "#panel-0"), "of both files")
            for key in "89":
                await pilot.press(key)
                await until(pilot, lambda: bool(console.screen.query(".teach")), "words")
                assert "i makes a capsule of it" in lines(console, ".teach").replace("\n", " ")
            await pilot.press("i")
            await until(pilot, lambda: isinstance(console.screen, AskScreen), "it says what it will write")
            await pilot.press("escape")
            await pilot.pause(0.2)
            assert not list(runs.glob("*.capsule"))
            await pilot.press("i", "y")
            await until(pilot, lambda: getattr(console.screen, "entry", None) is not None
                        and console.screen.entry.status == "sealed", "the capsule takes the file's place")  # fmt: skip
            assert console.screen.number == 9
            assert console.home._selected.path == str(runs / f"{runs.name}.capsule")
            await until(pilot, lambda: console.screen.open_view is not None, "it has a gate")

    asyncio.run(scenario())
    capsule = Capsule.open(runs / f"{runs.name}.capsule")
    assert len(capsule.scalars("loss")) == 120
    assert sorted(each.name for each in (capsule.path / "files").iterdir()) == ["a.log", "b.log"]
    assert list(scratch.iterdir()) == []


def test_a_log_grows_and_goes_while_it_is_open(runs: Path, until: Until) -> None:
    path = log(runs / "train.log")

    async def scenario() -> None:
        console = Console(runs, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            assert console.home._selected.status == RAW
            await pilot.press("enter", "2")
            await until(pilot, lambda: bool(console.screen.query("#panel-0")), "timelines")
            await until(pilot, lambda: "loss 5.41" in lines(console, "#panel-0"), "step 59")
            with path.open("a") as file:
                file.write("".join(f"s:{step} trl:4.5 lr:0.0003\n" for step in range(60, 80)))
            await until(pilot, lambda: "loss 4.5" in lines(console, "#panel-0"), "step 79")
            path.unlink()
            await until(pilot, lambda: len(console.home._rows) == 0, "it leaves the list")
            await pilot.pause(0.2)
            assert isinstance(console.screen, CapsuleScreen), "what was seen stays on the screen"
            await pilot.press("escape")
            assert isinstance(console.screen, HomeScreen)

    asyncio.run(scenario())


def test_where_nothing_may_be_written_the_import_says_so(runs: Path, until: Until) -> None:
    log(runs / "train.log")

    async def scenario() -> None:
        console = Console(runs, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            os.rename(runs, runs.with_name("moved"))
            await pilot.press("i", "y")
            await until(pilot, lambda: "train.log" in said(console) and "importing" not in said(console), "one line")

    asyncio.run(scenario())


def test_a_filter_that_hides_everything_says_so(runs: Path, until: Until) -> None:
    log(runs / "train.log")

    async def scenario() -> None:
        console = Console(runs, remember=False)
        console.state.filter = "from last week"
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "The filter hides it" in lines(console, "#capsules"), "said")
            assert console.screen.query_one("#list").border_title == "Capsules 0 of 1"
            assert console.screen.query_one("#filter", Input).display
            await pilot.press("escape")
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "taken away")

    asyncio.run(scenario())
