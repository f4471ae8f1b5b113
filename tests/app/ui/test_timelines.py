"""Timelines of several series and runs: overlay, added series, one panel in full, and on to the next capsule."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from llmconsole.app.looks.curves import curves
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.screens.choosing import ChooseScreen
from llmconsole.app.ui.views.timelines import TimelinesView
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.app.ui.widgets.timeline import Timeline
from textual.app import App, ComposeResult

from .conftest import Make, Until
from .test_home import lines


async def opened(console: Console, pilot: Any, until: Until, capsules: int) -> None:
    """Home lists the capsules; the first of the list is opened on its timelines."""
    await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == capsules, "listed")
    await pilot.press("enter", "2")
    await until(pilot, lambda: bool(console.screen.query(TimelinesView)), "the view is there")
    await until(pilot, lambda: "loss" in lines(console, "#panel-0"), "the curve is drawn")


def test_another_run_is_laid_over_chosen_by_typing_and_taken_away(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    make_capsule("new", title="sft-7b", trigger={"kind": "spike", "step": 3, "message": "loss spike"})
    make_capsule("old", title="baseline", loss=[4.5] * 90)
    make_capsule("none", title="other", loss=[1.0] * 10)

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(120, 40)) as pilot:
            await opened(console, pilot, until, 3)
            here = console.screen.entry.title
            assert len(console.home.others(console.screen.entry.path)) == 2
            other = "baseline" if here != "baseline" else "sft-7b"
            await pilot.press("o")
            await until(pilot, lambda: isinstance(console.screen, ChooseScreen), "it asks which")
            await pilot.press(*other, "enter")
            await until(pilot, lambda: other in lines(console, "#panel-0"), "named in the title beside its value")
            await pilot.press("o")
            await until(pilot, lambda: other not in lines(console, "#panel-0"), "taken away by the same key")

    asyncio.run(scenario())


def test_two_runs_of_different_length_share_one_axis_of_steps(make_capsule: Make) -> None:
    short = make_capsule("short", loss=np.linspace(3, 1, 40))
    long = make_capsule("long", loss=np.full(100, 7.0))
    one, other = curves(str(short), ["loss"], 50, beside=str(long))
    assert (one.beside, other.beside) == (False, True)
    assert (one.columns.start, one.columns.stop) == (other.columns.start, other.columns.stop) == (0, 100)
    assert one.columns.low[19] is not None
    assert one.columns.low[20:] == [None] * 30  # 40 of 100 steps: 20 of 50 columns
    assert (one.last, other.last) == (1.0, 7.0)
    (alone,) = curves(str(short), ["loss", "no such series"], 50, beside=str(short.parent / "long.capsule"))[:1]
    assert alone.columns == one.columns


def test_a_run_that_vanishes_is_taken_away_and_this_one_stays(tmp_path: Path, make_capsule: Make, until: Until) -> None:
    make_capsule("here")
    make_capsule("gone")

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(120, 40)) as pilot:
            await opened(console, pilot, until, 2)
            other = "gone" if console.screen.entry.title == "here" else "here"
            await pilot.press("o")
            await until(pilot, lambda: isinstance(console.screen, ChooseScreen), "it asks which")
            shutil.rmtree(tmp_path / f"{other}.capsule")
            await pilot.press("enter")
            await until(pilot, lambda: any(other in each.message for each in console._notifications), "said")
            await pilot.press("plus")
            await until(pilot, lambda: "loss" in lines(console, "#panel-0"), "drawn")
            assert other not in lines(console, "#panel-0")

    asyncio.run(scenario())


def test_a_series_is_added_to_the_chosen_panel_on_a_scale_of_its_own(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    make_capsule("run")

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(120, 40)) as pilot:
            await opened(console, pilot, until, 1)
            await pilot.press("tab", "a")
            await until(pilot, lambda: isinstance(console.screen, ChooseScreen), "it asks which")
            await pilot.press("enter")  # the only other series
            await until(pilot, lambda: "loss" in lines(console, "#panel-1"), "drawn in the second panel")
            assert "own scale" in lines(console, "#panel-1"), "nats are no gradient norm"
            assert "own scale" not in lines(console, "#panel-0")
            await pilot.press("z")
            await until(pilot, lambda: not console.screen.query_one("#panel-0", Timeline).display, "one in full")
            assert console.screen.query_one("#panel-1", Timeline).display
            await pilot.press("z", "a", "enter")
            await until(pilot, lambda: "loss" not in lines(console, "#panel-1"), "taken out again")

    asyncio.run(scenario())


def test_brackets_lead_to_the_neighbours_in_the_list_on_the_same_view(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    for name in ("one", "two", "three"):
        make_capsule(name)

    async def scenario() -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            await opened(console, pilot, until, 3)
            seen = [console.screen.entry.name]
            for _ in range(2):
                await pilot.press("right_square_bracket")
                await until(pilot, lambda: console.screen.entry.name != seen[-1], "the next one")
                await until(pilot, lambda: bool(console.screen.query(TimelinesView)), "on the same view")
                seen.append(console.screen.entry.name)
            assert len(set(seen)) == 3
            await pilot.press("right_square_bracket")
            await pilot.pause(0.1)
            assert isinstance(console.screen, CapsuleScreen)
            assert console.screen.entry.name == seen[-1], "no further"
            await pilot.press("left_square_bracket")
            await until(pilot, lambda: console.screen.entry.name == seen[1], "back by one")
            await pilot.press("escape")
            await until(pilot, lambda: console.screen is console.home, "home, no stack of screens")
            assert console.home.query_one("#capsules", Rows).selected.item.name == seen[1], "the cursor went along"

    asyncio.run(scenario())


def test_a_curve_that_is_on_its_way_is_not_called_unrecorded() -> None:
    class Two(App[None]):
        def compose(self) -> ComposeResult:
            yield Timeline("allocator", problem="reading …")
            yield Timeline("loss")

    async def scenario() -> None:
        async with Two().run_test(size=(60, 10)) as pilot:
            on_its_way, without = pilot.app.query(Timeline)
            assert "reading …" in on_its_way.render_line(0).text
            on_its_way.show([])
            assert "not recorded" in on_its_way.render_line(0).text
            assert "not recorded" in without.render_line(0).text

    asyncio.run(scenario())
