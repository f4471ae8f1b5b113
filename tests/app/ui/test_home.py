"""Home shows which capsules there are and what broke in the chosen one."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.screens.home import HomeScreen
from llmconsole.app.ui.views.overview import OverviewView
from llmconsole.app.ui.views.timelines import TimelinesView
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.app.ui.widgets.timeline import Timeline
from llmconsole.app.ui.widgets.verdict import Verdict
from textual.widgets import Static

Make = Callable[..., Path]
Until = Callable[..., Any]


def lines(console: Console, selector: str) -> str:
    """The text of a widget as drawn."""
    widget = console.screen.query_one(selector)
    return "\n".join(
        "".join(segment.text for segment in widget.render_line(y)) for y in range(max(1, widget.size.height))
    )


def test_a_broken_run_is_marked_and_explained(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    make_capsule("healthy")
    make_capsule("broken", title="sft-7b", loss=[*np.linspace(3, 2, 40), float("nan")])

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            rows = console.screen.query_one("#capsules", Rows)
            await until(pilot, lambda: len(rows) == 2, "both capsules are listed")
            await until(pilot, lambda: "✗" in lines(console, "#capsules") or "?" in lines(console, "#capsules"), "mark")
            await pilot.press("home")
            await until(pilot, lambda: "loss-nonfinite" in lines(console, "#first"), "the first divergence is named")
            await until(pilot, lambda: "N" in lines(console, "#small-loss"), "the NaN is marked on the curve")
            assert "2 capsules" in str(console.screen.query_one("#where", Static).render())

    asyncio.run(scenario())


def test_the_first_row_is_the_one_in_need_until_a_key_is_pressed(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    paths = [make_capsule("broken", loss=[*np.linspace(3, 2, 40), float("nan")]), make_capsule("healthy")]
    for age, path in enumerate(paths):
        for each in (*path.rglob("*"), path):
            os.utime(each, (1e9 + age, 1e9 + age))

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 2, "listed")
            await until(pilot, lambda: all(map(console.reports.of, map(str, paths))), "both are judged")
            await until(pilot, lambda: "loss-nonfinite" in lines(console, "#first"), "the broken one is shown")
            await pilot.press("down")
            await until(pilot, lambda: "Nothing diverged" in lines(console, "#first"), "the healthy one is chosen")
            console.reports.arrived.publish(str(paths[0]))
            await pilot.pause(0.2)
            assert console.home._selected.path == str(paths[1])

    asyncio.run(scenario())


def test_an_empty_directory_teaches_what_to_do(tmp_path: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "llmconsole demo" in lines(console, "#capsules"), "the screen teaches")

    asyncio.run(scenario())


def test_a_directory_with_evidence_further_below_names_where(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    below = tmp_path / "node0"
    below.mkdir()
    make_capsule("run").rename(below / "run.capsule")

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "node0" in lines(console, "#capsules"), "the directory is named")
            words = " ".join(lines(console, "#capsules").split())
            assert "directly here" in words
            assert "llmconsole DIR" in words
            assert "Recorder" not in words

    asyncio.run(scenario())


def test_capsules_appear_change_and_vanish_while_one_watches(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            rows = console.screen.query_one("#capsules", Rows)
            path = make_capsule("late")
            await until(pilot, lambda: len(rows) == 1, "the new capsule appears")
            (path / "capsule.json").write_text("{")
            await until(pilot, lambda: "unreadable" in lines(console, "#capsules"), "damage is a row with words")
            shutil.rmtree(path)
            await until(pilot, lambda: len(rows) == 0, "the deleted capsule leaves the list")

    asyncio.run(scenario())


def test_markup_and_escape_sequences_in_a_title_are_shown_as_text(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    make_capsule("hostile", title="[red]x[/red]\x1b[31m[bold")

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: r"[red]x[/red]\x1b[31m" in lines(console, "#capsules"), "the title is literal")
            await until(pilot, lambda: console.screen.query_one(Verdict).size.height > 0, "the verdict is drawn")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(console.screen, CapsuleScreen), "it opens")
            assert r"[red]x[/red]\x1b[31m" in lines(console, "#where")

    asyncio.run(scenario())


def test_the_filter_narrows_the_list_and_escape_takes_it_away(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    for name in ("alpha", "beta", "gamma"):
        make_capsule(name)

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            rows = console.screen.query_one("#capsules", Rows)
            await until(pilot, lambda: len(rows) == 3, "three capsules")
            await pilot.press("slash", *"eta")
            assert len(rows) == 1
            await pilot.press("escape")
            assert len(rows) == 3

    asyncio.run(scenario())


def test_timelines_open_from_home_and_share_one_cursor(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    make_capsule("run", trigger={"kind": "manual", "step": 30})

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter")
            await until(pilot, lambda: bool(console.screen.query(OverviewView)), "it opens on the overview")
            await pilot.press("2")
            await until(pilot, lambda: bool(console.screen.query(TimelinesView)), "the view is there")
            await until(pilot, lambda: "loss" in lines(console, "#panel-0"), "the curve is drawn")
            await pilot.press("N")
            await until(pilot, lambda: "step 30" in lines(console, "#panel-0"), "the cursor is at the trigger")
            assert all(panel.cursor == 30 for panel in console.screen.query(Timeline))
            value = 2 + np.exp(-3.0)  # of the curve at step 30, by hand
            assert f"{value:.3g}" in lines(console, "#panel-0")
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(console.screen, HomeScreen), "back home")

    asyncio.run(scenario())
