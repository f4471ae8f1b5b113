"""What the console remembers of a directory between two visits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.views.overview import OverviewView
from llmconsole.app.ui.views.timelines import TimelinesView
from llmconsole.app.ui.widgets.rows import Rows

Make = Callable[..., Path]
Until = Callable[..., Any]


def test_the_capsule_looked_at_last_opens_on_its_view_and_any_other_on_the_overview(
    tmp_path: Path, make_capsule: Make, until: Until
) -> None:
    make_capsule("one")
    make_capsule("two")

    async def visit(capsule: str, keys: str, view: type) -> None:
        console = Console(tmp_path)
        async with console.run_test(size=(80, 24)) as pilot:
            rows = console.screen.query_one("#capsules", Rows)
            await until(pilot, lambda: len(rows) == 2, "listed")
            assert rows.select(str(tmp_path / f"{capsule}.capsule"))
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(console.screen, CapsuleScreen), "open")
            await until(pilot, lambda: console.screen._open is not None, "a view")
            await pilot.press(*keys)
            await until(pilot, lambda: bool(console.screen.query(view)), view.__name__)

    asyncio.run(visit("one", "2", TimelinesView))
    asyncio.run(visit("one", "", TimelinesView))
    asyncio.run(visit("two", "", OverviewView))
