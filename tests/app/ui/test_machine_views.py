"""Memory, ranks and latency in the console: drawn where captured, and where not, what to capture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.capsule import CapsuleScreen
from llmconsole.app.ui.views.ranks import RanksView
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.capsules import CapsuleWriter

Make = Callable[..., Path]
Until = Callable[..., Any]


def text(console: Console, selector: str) -> str:
    widget = console.screen.query_one(selector)
    return "\n".join("".join(each.text for each in widget.render_line(y)) for y in range(max(1, widget.size.height)))


def test_64_ranks_open_at_the_first_difference_and_the_cursor_stays_in_the_middle(tmp_path: Path, until: Until) -> None:
    with CapsuleWriter(tmp_path / "hang.capsule", title="hang", phase="training", manifest={}) as writer:
        common = {"group": "dp", "group_ranks": list(range(64)), "op": "all_reduce", "dtype": "bfloat16"}
        writer.records(
            "collectives",
            (
                {**common, "rank": rank, "seq": seq, "state": "completed" if seq < 200 else "started"}
                for rank in range(64)
                for seq in range(201 if rank != 37 else 200)
            ),
        )
        writer.record("memory", {"step": 3, "phase": "forward", "weights": 3 << 30, "allocated": 4 << 30})

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(console.screen, CapsuleScreen), "open")
            await pilot.press("6")
            await until(pilot, lambda: bool(console.screen.query("#grid")), "the view")
            await until(pilot, lambda: "missing: rank 37" in text(console, "#grid"), "the rank that never came")
            lines = text(console, "#grid").split("\n")
            place = next(index for index, line in enumerate(lines) if line.startswith("▸  37"))
            assert abs(place - len(lines) / 2) < 4
            assert "first difference at 201" in lines[0]
            await pilot.press("down", "left")
            await until(pilot, lambda: "seq 199" in text(console, "#grid"), "along")
            assert "▸  38" in text(console, "#grid")
            await pilot.press("w")
            await until(pilot, lambda: "▸  37" in text(console, "#grid"), "back at the difference")
            assert console.screen.query_one(RanksView).size.width == 80
            await pilot.press("5")
            await until(pilot, lambda: bool(console.screen.query("#ledger")), "memory")
            await until(pilot, lambda: "4 GiB" in text(console, "#ledger"), "the ledger")
            assert "WWW" in text(console, "#ledger")
            await pilot.press("7")
            await until(
                pilot, lambda: 'writer.record("requests"' in text(console, ".teach"), "what is missing is taught"
            )
            assert "No log or bench result is read for requests yet" in " ".join(text(console, ".teach").split())

    asyncio.run(scenario())


@pytest.mark.parametrize(("world_size", "words"), [(1, "ran in one process"), (2, "TORCH_FR_BUFFER_SIZE=2000")])
def test_ranks_are_taught_to_be_recorded_unless_the_job_is_one_process(
    tmp_path: Path, make_capsule: Make, until: Until, world_size: int, words: str
) -> None:
    make_capsule("bare", run={"world_size": world_size})

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(console.screen, CapsuleScreen), "open")
            await pilot.press("6")
            await until(pilot, lambda: bool(console.screen.query(".teach")), "taught")
            await until(pilot, lambda: words in text(console, ".teach"), "as the job is")
            assert ("DUMPS" in text(console, ".teach")) is (world_size > 1)

    asyncio.run(scenario())
