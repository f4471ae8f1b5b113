"""Draws the picture of the README from a real capsule: ``python -m benchmarks.picture CAPSULE docs/console.svg``."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.home import HomeScreen

SIZE = (110, 30)


async def draw(capsule: Path) -> str:
    """The home screen with this capsule alone, as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the picture shows no path of this machine
        runs = Path("runs")
        runs.mkdir()
        (runs / capsule.name).symlink_to(capsule)
        console = Console(runs, remember=False)
        async with console.run_test(size=SIZE) as pilot:
            home = console.screen
            assert isinstance(home, HomeScreen)
            for _ in range(200):
                await pilot.pause(0.1)
                if console.reports.of(str(runs / capsule.name)) is not None:
                    break
            await pilot.pause(1.0)
            svg = console.export_screenshot(title="llmconsole runs")
    # Fonts from elsewhere are not ours to load.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    capsule, target = (Path(each).resolve() for each in arguments)
    target.write_text(asyncio.run(draw(capsule)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
