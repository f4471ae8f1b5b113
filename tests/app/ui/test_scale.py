"""Large evidence in the real console with its real workers: what is pressed is answered at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.widgets.rows import Rows

from . import fluency
from .fluency import REDRAW_MS, TURN_MS, Watch, watched

Until = Callable[..., Any]
#: A large terminal: most has to be drawn there.
SIZE = (200, 50)
#: Keys are pressed again where something was slow: what the machine did besides is only ever added.
TRIES = 4


def drawn(console: Console, selector: str) -> str:
    found = console.screen.query(selector)
    if not found:
        return ""
    widget = found.first()
    return "\n".join("".join(each.text for each in widget.render_line(y)) for y in range(max(1, widget.size.height)))


async def pressed(pilot: Any, watch: Watch, keys: list[str]) -> None:
    """Press keys, one after the other is answered: no turn of the loop is long, and redraws are short."""
    said: list[str] = []
    for _ in range(TRIES):
        watch.clear()
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.05)
        if watch.turn() <= TURN_MS and watch.redraw(0.5) <= REDRAW_MS:
            return
        said.append(f"{watch.turn():.0f} ms the longest turn, {watch.redraw(0.5):.0f} ms a redraw")
    pytest.fail(f"{keys}: {'; '.join(said)}")


async def opened(console: Console, pilot: Any, until: Until) -> None:
    await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(console.screen, CapsuleScreen), "open")


def test_3000_capsules(tmp_path: Path, until: Until) -> None:
    fluency.many_capsules(tmp_path)

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        with watched() as watch:
            async with console.run_test(size=SIZE) as pilot:
                rows = console.screen.query_one("#capsules", Rows)
                begin = time.monotonic()
                await until(pilot, lambda: len(rows) == 3000, "all names are listed")
                named = time.monotonic() - begin
                await until(pilot, lambda: console.screen._listing.unread == 0, "all are read")
                read = time.monotonic() - begin
                assert named <= read
                await pressed(pilot, watch, ["down", "down", "pagedown", "pagedown", "end", "home"])
                await pilot.press("slash")
                await pressed(pilot, watch, ["2", "9", "backspace", "backspace"])

    asyncio.run(scenario())


def test_500_layers(tmp_path: Path, until: Until) -> None:
    fluency.many_layers(tmp_path)

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        with watched() as watch:
            async with console.run_test(size=SIZE) as pilot:
                await opened(console, pilot, until)
                await pilot.press("3")
                await until(pilot, lambda: "down_proj" in drawn(console, "LayersView Rows"), "layers")
                await pressed(pilot, watch, ["down", "pagedown", "pagedown", "left", "right", "b", "f"])

    asyncio.run(scenario())


def test_a_million_steps(tmp_path: Path, until: Until) -> None:
    fluency.long_series(tmp_path)

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        with watched() as watch:
            async with console.run_test(size=SIZE) as pilot:
                await opened(console, pilot, until)
                await pilot.press("2")
                await until(pilot, lambda: "N" in drawn(console, "#panel-0"), "the curve with its NaN")
                await pressed(pilot, watch, ["left", "left", "plus", "plus", "y", "y", "minus", "0"])

    asyncio.run(scenario())


def test_64_ranks_of_1200_collectives_do_not_hold_up_the_list(tmp_path: Path, until: Until) -> None:
    fluency.many_ranks(tmp_path)

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        with watched() as watch:
            async with console.run_test(size=SIZE) as pilot:
                await opened(console, pilot, until)
                await pilot.press("6")
                await until(pilot, lambda: not console.link.is_idle("table"), "the table is being made")
                await pilot.press("escape")
                await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "home")
                console.link.ask(console.screen, "listing", {"directory": str(tmp_path)})
                await until(pilot, lambda: console.link.is_idle("look"), "the list is answered")
                assert not console.link.is_idle("table"), "… while the table is still being made"
                await pilot.press("enter", "6")
                await until(pilot, lambda: "missing: rank 37" in drawn(console, "#grid"), "the rank that never came")
                await pressed(pilot, watch, ["left", "left", "down", "down", "comma", "full_stop", "w"])

    asyncio.run(scenario())


FIRST_PAINT = """
import asyncio, sys
from pathlib import Path
from llmconsole.app import cli
from llmconsole.app.commands import home
from llmconsole.app.ui.app import Console

HEAVY = {"torch", "numpy", "h5py", "git", "polars", "pandas", "watchdog", "transformers"}

async def main():
    console = Console(Path(sys.argv[1]), remember=False)
    async with console.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert not HEAVY & set(sys.modules), HEAVY & set(sys.modules)
        for _ in range(400):
            await pilot.pause(0.05)
            kept = console.reports.of(str(Path(sys.argv[1]) / "run.capsule"))
            if kept is not None:
                break
        else:
            raise SystemExit("no verdict")
        await pilot.press("enter", *"1234567", "escape", "c", "escape")
        await pilot.pause(1.0)
        assert not HEAVY & set(sys.modules), HEAVY & set(sys.modules)

asyncio.run(main())
"""


def test_the_process_of_the_screen_never_imports_what_reads_capsules(tmp_path: Path, make_capsule: Any) -> None:
    make_capsule("run")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PAINT, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
