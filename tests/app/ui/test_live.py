"""A capsule that is being written is followed, held still on request, and costs a slow link little."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmconsole.app.ui.app import Console
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.app.ui.widgets.timeline import Timeline
from llmconsole.capsules import CapsuleWriter

from .terminal import Terminal

Until = Callable[..., Any]


def value_at(step: int) -> float:
    return 2 + math.exp(-step / 50) + 0.1 * math.sin(step * 12.9898)


def write(writer: CapsuleWriter, steps: range) -> None:
    for step in steps:
        writer.scalar_row(step, {"loss": value_at(step), "grad_norm": 1.0 / (1 + step)})
    writer.flush()


def title(console: Console, selector: str) -> str:
    return "".join(segment.text for segment in console.screen.query_one(selector, Timeline).render_line(0))


def test_home_and_timelines_follow_a_running_job_and_pause_stops_the_view_alone(tmp_path: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(tmp_path)
        with CapsuleWriter(tmp_path / "live.capsule", title="live-run", phase="training") as writer:
            write(writer, range(50))
            async with console.run_test(size=(120, 40)) as pilot:
                await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
                await until(pilot, lambda: f"{value_at(49):.3g}" in title(console, "#small-loss"), "step 49")
                write(writer, range(50, 80))
                await until(pilot, lambda: f"{value_at(79):.3g}" in title(console, "#small-loss"), "home follows")
                await pilot.press("space")
                write(writer, range(80, 100))
                for _ in range(30):
                    await pilot.pause(0.1)
                assert f"{value_at(79):.3g}" in title(console, "#small-loss"), "paused"
                await pilot.press("space")
                await until(pilot, lambda: f"{value_at(99):.3g}" in title(console, "#small-loss"), "nothing was lost")
                await pilot.press("enter", "2")
                await until(pilot, lambda: bool(console.screen.query("#panel-0")), "the view is open")
                await until(
                    pilot, lambda: f"{value_at(99):.3g}" in title(console, "#panel-0"), "the view shows step 99"
                )
                write(writer, range(100, 130))
                await until(pilot, lambda: f"{value_at(129):.3g}" in title(console, "#panel-0"), "the view follows")

    asyncio.run(scenario())


WRITE = """
import sys, time, math
from llmconsole.capsules import CapsuleWriter
with CapsuleWriter(sys.argv[1], title="live-run", phase="training") as writer:
    for step in range(100_000):
        loss = 2 + math.exp(-step / 500) + 0.1 * math.sin(step * 12.9898)
        writer.scalar_row(step, {"loss": loss, "grad_norm": abs(math.sin(step)), "learning_rate": 1e-3,
                                 "memory_allocated": 6e10 + step})
        writer.flush()
        if step > 400:
            time.sleep(0.05)
"""


def test_a_live_run_costs_at_most_20_kib_a_second_at_200_by_50(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "live.capsule")])
    console = Terminal([str(tmp_path)], columns=200, lines=50)
    try:
        console.until("live-run")
        console.until("loss")
        console.read(3.0)
        begin, count = time.monotonic(), len(console.received)
        console.read(8.0)
        rate = (len(console.received) - count) / (time.monotonic() - begin)
        assert 0 < rate <= 20 * 1024
    finally:
        job.kill()
        job.wait()
        console.close()
