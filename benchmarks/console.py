"""What the console costs: the first paint beside a minimal Textual app, memory, bytes to the terminal, and redraws.

The two apps are started in turns in a pseudo-terminal, so that other work on the machine weighs on both alike. Redraws
and handlers are CPU time of the thread, scaled by a loop whose time on a free machine is known.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmconsole.app.ui.app import Console
from llmconsole.app.ui.widgets.rows import Rows

from tests.app.ui import fluency
from tests.app.ui.terminal import Terminal

MINIMAL = """
from textual.app import App
from textual.widgets import Static
class Minimal(App):
    def compose(self):
        yield Static("Capsules")
Minimal().run()
"""
LIVE = """
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


def first_paint(folder: Path, rounds: int) -> None:
    """Milliseconds from the start of the interpreter until the first word stands on the screen."""
    (folder / "minimal.py").write_text(MINIMAL)
    (folder / "runs").mkdir()
    apps = {"minimal": [str(folder / "minimal.py")], "llmconsole": ["-m", "llmconsole.app.cli", str(folder / "runs")]}
    times: dict[str, list[float]] = {name: [] for name in apps}
    cpu: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(rounds):
        for name, arguments in apps.items():
            begin = time.monotonic()
            terminal = Terminal([], command=[sys.executable, *arguments])
            while "Capsules" not in terminal.text:
                terminal.read_some()
            times[name].append((time.monotonic() - begin) * 1e3)
            cpu[name].append(_cpu_ms(terminal.pid))
            terminal.close()
    for name in apps:
        print(
            f"  {name:12} {statistics.median(times[name]):5.0f} ms, best {min(times[name]):4.0f};"
            f" CPU {statistics.median(cpu[name]):4.0f} ms, best {min(cpu[name]):4.0f}"
        )
    ratio = statistics.median(a / b for a, b in zip(times["llmconsole"], times["minimal"], strict=True))
    print(f"  ratio        {ratio:5.2f} (median of pairs; limit 350 ms where the minimal app takes 190)")


def _cpu_ms(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e6


def idle(folder: Path) -> None:
    """Memory and bytes of a console that shows a sealed capsule."""
    runs = folder / "sealed"
    runs.mkdir()
    fluency.many_capsules(runs, 1)
    console = Terminal([str(runs)])
    console.until("Nothing diverged")
    while console.read(2.0):
        pass
    status = Path(f"/proc/{console.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    quiet = min(console.read(5.0), console.read(5.0))
    console.close()
    print(f"  RSS {resident:.0f} MB (limit 80); {quiet / 5:.0f} bytes/s while nothing changes (limit 0)")


def live(folder: Path) -> None:
    """Bytes a second while a job writes twenty steps a second."""
    runs = folder / "live"
    runs.mkdir()
    job = subprocess.Popen([sys.executable, "-c", LIVE, str(runs / "live.capsule")])
    console = Terminal([str(runs)], columns=200, lines=50)
    try:
        console.until("live-run")
        console.until("loss")
        console.read(3.0)
        begin, count = time.monotonic(), len(console.received)
        console.read(15.0)
        rate = (len(console.received) - count) / (time.monotonic() - begin)
    finally:
        job.kill()
        job.wait()
        console.close()
    print(f"  {rate / 1024:.1f} KiB/s on home at 200x50, live (limit 20)")


async def _fluent(
    make: Callable[[Path], Path], keys: list[str], shows: str, folder: Path
) -> tuple[float, float, float]:
    console = Console(make(folder), remember=False)
    with fluency.watched() as watch:
        async with console.run_test(size=(200, 50)) as pilot:
            await _until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) > 0)
            first, *rest = keys
            await pilot.press(*first.split())
            await _until(pilot, lambda: bool(console.screen.query(shows)))
            await pilot.pause(1.0)
            while not console.link.is_idle("table"):
                await pilot.pause(0.1)
            await pilot.pause(0.5)
            watch.clear()
            for key in rest:
                await pilot.press(key)
                await pilot.pause(0.05)
    return watch.redraw(0.5), watch.redraw(), watch.turn()


async def _until(pilot: Any, happened: Callable[[], bool]) -> None:
    while not happened():
        await pilot.pause(0.05)


def fluent(folder: Path) -> None:
    """Redraws and the longest turn of the event loop, with keys pressed on large evidence."""
    print(f"  {'at 200x50':34}{'redraw':>9}{'longest':>9}{'turn':>7}   (limits 20, –, 50 ms)")
    for name, make, keys, shows in (
        ("3,000 capsules", fluency.many_capsules, ["home", *["down"] * 8, "pagedown", "end", "home"], "#capsules"),
        ("500 layers", fluency.many_layers, ["enter 3", *["down"] * 4, "pagedown", "left", "right", "b"], "LayersView"),
        ("10^6 steps", fluency.long_series, ["enter 2", "left", "left", "plus", "plus", "y", "minus"], "#panel-0"),
        ("64 ranks", fluency.many_ranks, ["enter 6", "left", "left", "down", "comma", "w"], "#grid"),
    ):
        place = folder / shows.strip("#")
        place.mkdir()
        median, longest, turn = asyncio.run(_fluent(make, keys, shows, place))
        print(f"  {name:34}{median:9.1f}{longest:9.1f}{turn:7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="starts of each app")
    rounds = parser.parse_args([] if __name__ != "__main__" else None).rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = str(folder / "own")
        print("first paint at 80x24 in a pseudo-terminal, warm")
        first_paint(folder, rounds)
        print("idle, and live")
        idle(folder)
        live(folder)
        print("keys on large evidence")
        fluent(folder)


if __name__ == "__main__":
    main()
