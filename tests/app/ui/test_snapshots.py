"""Every screen and state as it is drawn, at three sizes and in three palettes.

One console is shown at all sizes in turn. A snapshot holds the text of the screen and, for each palette, a short digest
of the styles of each line. ``LLMCONSOLE_UPDATE_SNAPSHOTS=1`` writes them anew; then read them.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from difflib import unified_diff
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens import entries
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.capsules import CapsuleWriter
from rich.color import ColorType
from rich.segment import Segment
from textual.widgets import Input

from . import scenes

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = bool(os.environ.get("LLMCONSOLE_UPDATE_SNAPSHOTS"))
SIZES = ((80, 24), (120, 40), (200, 50))
PALETTES = ("textual-dark", "textual-light", "ansi-dark")

#: What differs from run to run, replaced by as many zeros.
_VOLATILE = re.compile(
    r"\b[0-9A-HJKMNP-TV-Z]{26}\b|/\S*pytest-of\S*|[0-9a-f]{12,64}|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?"
)

#: Length of the path of the repository on the screens; the usual temporary path is about 80 long.
_PATH = 120

#: Least contrast of text against its background (WCAG 2); what is dimmed on purpose may be fainter.
_CONTRAST, _FAINT = 3.0, 1.9
_FRAMES = set(" ─│╭╮╰╯▎▁▂▃▄▅▆▇█▔▌▐")


class Album:
    """Takes snapshots of one console at one size, and says at the end what differs."""

    def __init__(self, console: Console, pilot: Any) -> None:
        self.console, self.pilot = console, pilot
        self.wrong: list[str] = []

    async def settled(self) -> None:
        """Until all workers have said what they were asked, and the picture has not changed for some time since."""
        quiet, before = 0, ""
        for _ in range(2400):
            await self.pilot.pause(0.03)
            if not all(self.console.link.is_idle(channel) for channel in ("look", "table", "verdict")):
                quiet = 0
                continue
            now = "\n".join(_text([*strip]) for strip in self.console.screen._compositor.render_strips())
            quiet = quiet + 1 if now == before else 0
            before = now
            if quiet == 5:
                return
        pytest.fail("the console never came to rest")

    async def take(self, name: str, *, settle: bool = True, overlay: bool = False, again: bool = False) -> None:
        """One snapshot in each palette; the text must be the same in all.

        Args:
            name: of the snapshot.
            settle: wait for all answers before.
            overlay: something lies over the screen; what it dims may be hard to read.
            again: another state of a screen that was taken already: the other palettes at the smallest size only.
        """
        for size in SIZES:
            await self.pilot.resize_terminal(*size)
            await self.settled() if settle else await self.pilot.pause(0.2)
            self.console.clear_notifications()
            palettes = PALETTES[:1] if again and size != SIZES[0] else PALETTES
            await self._in_palettes(name, palettes, overlay)
        await self.pilot.resize_terminal(*SIZES[0])

    async def _in_palettes(self, name: str, palettes: Sequence[str], overlay: bool) -> None:
        width, height = self.console.size
        lines: list[str] = []
        styles: list[str] = []
        for palette in palettes:
            if palette != self.console.theme:
                self.console.theme = palette
                await self.pilot.pause(0.05)  # styles follow with the next messages
            strips = [[*strip] for strip in self.console.screen._compositor.render_strips()]
            drawn = [_VOLATILE.sub(lambda found: "0" * len(found[0]), _text(strip)).rstrip() for strip in strips]
            if palette == palettes[0]:
                lines = drawn
            elif drawn != lines and not overlay:
                differ = [f"{a}\n{b}" for a, b in zip(lines, drawn, strict=True) if a != b]
                self.wrong.append(f"{name} at {width}x{height}: other text in {palette}:\n" + "\n".join(differ[:3]))
            if not overlay:
                bad = _bad_colours(strips, palette)
                self.wrong += [f"{name} at {width}x{height}, {palette}: {each}" for each in bad]
            styles.append(f"{palette} {' '.join(_digest(strip) for strip in strips)}")
        self.console.theme = palettes[0]
        self._compare(SNAPSHOTS / f"{width}x{height}" / f"{name}.txt", "\n".join((*lines, *styles, "")))

    def _compare(self, path: Path, found: str) -> None:
        if UPDATE:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        elif not path.exists():
            self.wrong.append(f"{path.parent.name}/{path.name} does not exist")
        elif path.read_text(encoding="utf-8") != found:
            before = path.read_text(encoding="utf-8").split("\n")
            changed = "\n".join(unified_diff(before, found.split("\n"), "kept", "drawn", lineterm="", n=0))
            self.wrong.append(f"{path.parent.name}/{path.name} differs:\n{changed}")


def _text(strip: list[Segment]) -> str:
    return "".join(segment.text for segment in strip)


def _digest(strip: list[Segment]) -> str:
    """Four letters on where which style begins in a line; attributes of empty cells' foreground do not count."""
    whole: list[str] = []
    at, last = 0, ""
    for segment in strip:
        style = segment.style
        said = "" if style is None else f"{style.without_color} {style.bgcolor}"
        if style is not None and segment.text.strip():
            said += f" {style.color}"
        if said != last:
            whole.append(f"{at} {said}")
            last = said
        at += segment.cell_length
    return blake2b("\n".join(whole).encode(), digest_size=2).hexdigest()


def _bad_colours(strips: list[list[Segment]], palette: str) -> list[str]:
    """Text that cannot be read on its ground, or in the terminal's palette a colour that is not the terminal's."""
    bad: dict[str, None] = {}
    for strip in strips:
        for segment in strip:
            style = segment.style
            if style is None or not segment.text.strip():
                continue
            if palette.startswith("ansi"):
                for colour in (style.color, style.bgcolor):
                    if colour is not None and colour.type not in (ColorType.DEFAULT, ColorType.STANDARD):
                        bad[f"{segment.text.strip()[:20]!r} is drawn in {colour.name}"] = None
            elif style.color is not None and style.bgcolor is not None:
                contrast = _contrast(style.color.get_truecolor(), style.bgcolor.get_truecolor())
                faint = style.dim or not any(char.isalnum() for char in segment.text)
                if contrast < (_FAINT if faint else _CONTRAST) and not set(segment.text) <= _FRAMES:
                    bad[f"{segment.text.strip()[:20]!r} has a contrast of {contrast:.1f}"] = None
    return list(bad)


def _contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    def luminance(colour: tuple[int, int, int]) -> float:
        parts = [value / 255 for value in colour]
        red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 12:00 of the day on which everything was written, in UTC."""
    now = time.gmtime(scenes.NOON)
    clock = SimpleNamespace(
        strftime=lambda form, at=now: time.strftime(form, at), localtime=time.gmtime, time=lambda: float(scenes.NOON)
    )
    monkeypatch.setattr(entries, "time", clock)
    monkeypatch.setattr(Input, "cursor_blink", False)
    for name in ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"):
        monkeypatch.setenv(name, f"{scenes.NOON} +0000")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository which is the working directory, under a path of one length on every machine and in every run."""
    root = scenes.repository(tmp_path / "w".ljust(_PATH - len(str(tmp_path)) - 1, "w"))
    monkeypatch.chdir(root)
    return root


def photographed(directory: str, visit: Callable[[Album], Awaitable[None]], **options: Any) -> None:
    async def scenario() -> None:
        console = Console(Path(directory), remember=False)
        if options.get("mute"):
            console.link.close()  # nobody answers: what is on the screen until the first answer
        async with console.run_test(size=SIZES[0]) as pilot:
            album = Album(console, pilot)
            while not options.get("mute") and console.screen._listing is None:
                await pilot.pause(0.02)
            await visit(album)
        if album.wrong:
            pytest.fail("\n".join(album.wrong), pytrace=False)

    asyncio.run(scenario())


@pytest.mark.timeout(400)
def test_home_before_and_without_capsules(place: Path) -> None:
    (place / "runs").mkdir()

    def once(name: str) -> Callable[[Album], Awaitable[None]]:
        async def visit(album: Album) -> None:
            await album.take(name, settle=name != "home-loading", again=name != "home-empty")

        return visit

    photographed("runs", once("home-loading"), mute=True)
    photographed("runs", once("home-empty"))
    photographed("no-such-directory", once("home-error"))


@pytest.mark.timeout(400)
def test_home_with_capsules_in_every_state(place: Path) -> None:
    runs = place / "runs"
    scenes.broken(runs / "20260301-1155-broken.capsule")
    scenes.healthy(runs / "20260301-1100-demo.capsule", "demo", scenes.NOON - 3600)
    scenes.healthy(runs / "20260228-0900-long.capsule", scenes.LONG, scenes.NOON - 90_000)
    scenes.healthy(runs / "20260227-0900-zh.capsule", "中文模型微调实验：学习率预热与损失尖峰", scenes.NOON - 200_000)
    scenes.damaged(runs / "20260301-1159-cut.capsule")
    scenes.stale(runs / "20260301-1158-eval.capsule")

    async def visit(album: Album) -> None:
        rows: Rows[Any] = album.console.screen.query_one("#capsules", Rows)

        async def choose(name: str) -> None:
            assert rows.select(f"runs/{name}.capsule")

        await album.settled()
        for name, capsule in (
            ("home-divergence", "20260301-1155-broken"),
            ("home-healthy", "20260301-1100-demo"),
            ("home-long-name", "20260228-0900-long"),
            ("home-chinese", "20260227-0900-zh"),
            ("home-damaged", "20260301-1159-cut"),
            ("home-stale", "20260301-1158-eval"),
        ):
            await choose(capsule)
            await album.take(name, again=name != "home-divergence")
        await album.pilot.press("slash", *"nothing like it")
        await album.take("home-filter-finds-nothing", again=True)
        await album.pilot.press("escape", "question_mark")
        await album.take("home-help", overlay=True)
        await album.pilot.press("escape", "colon")
        await album.take("palette", overlay=True)
        await album.pilot.press("escape")
        with CapsuleWriter(runs / "20260301-1200-live.capsule", title="sft-7b-r2", phase="training") as writer:
            for step in range(200):
                writer.scalar_row(step, {"loss": 3 - step / 100, "grad_norm": 1.0})
            writer.flush()
            for _ in range(200):
                await album.pilot.pause(0.05)
                if len(rows) == 7:
                    break
            await choose("20260301-1200-live")
            await album.take("home-live", again=True)
            await album.pilot.press("space")
            await album.take("home-paused", again=True)

    photographed("runs", visit)


@pytest.mark.timeout(400)
def test_an_opened_capsule_its_cases_and_its_resolution(place: Path) -> None:
    scenes.broken(place / "runs/20260301-1155-broken.capsule")

    async def visit(album: Album) -> None:
        press = album.pilot.press
        await album.settled()
        await press("enter")
        await album.take("overview")
        await press("enter")
        await album.take("finding")
        await press("d")
        await album.take("rule")
        await press("escape", "2")
        await album.settled()
        await press("N")
        await album.take("timelines")
        await press("a")
        await album.take("timelines-add", overlay=True, again=True)
        await press("escape")
        for key, name in zip("34567", ("layers", "batch", "memory", "ranks", "latency"), strict=True):
            await press(key)
            await album.take(name)
        await press("question_mark")
        await album.take("latency-help", overlay=True, again=True)
        await press("escape", "c")
        await album.take("cases")
        await press("escape", "r")
        await album.take("resolve")
        await press("f2")
        await album.take("resolve-refused", again=True)
        from llmconsole.app.ui.widgets.form import Form

        album.console.screen.query_one(Form).fill(
            {"trigger": "sequences above 3,900 tokens", "regression_test": "tests/test_labels.py::test_alone",
             "prevention": "bf16 for the MLP"}
        )  # fmt: skip
        await album.settled()
        await press("f2")
        await album.take("resolve-review")

    photographed("runs", visit)


@pytest.mark.timeout(400)
def test_a_capsule_that_lacks_evidence_teaches(place: Path) -> None:
    scenes.healthy(place / "runs/20260301-1100-demo.capsule", "demo")

    async def visit(album: Album) -> None:
        await album.settled()
        await album.pilot.press("enter")
        await album.take("overview-healthy", again=True)
        for key, name in zip("34567", ("layers", "batch", "memory", "ranks", "latency"), strict=True):
            await album.pilot.press(key)
            await album.take(f"{name}-not-captured", again=name != "layers")

    photographed("runs", visit)


@pytest.mark.timeout(400)
def test_the_notebook_of_an_incident_and_the_gate_of_its_case(place: Path) -> None:
    path = place / "runs/20260301-1155-broken.capsule"
    scenes.broken(path)
    plan = place / "gates/loss-overflow-17.toml"

    async def visit(album: Album) -> None:
        press = album.pilot.press
        await album.settled()
        await press("enter", "8")
        await album.take("notebook-not-opened", again=True)
        await press("9")
        await album.take("gate-without-case", again=True)
        scenes.investigated(path)
        await press("8")
        await album.take("notebook")
        await press("down", "x")
        await album.take("notebook-result", overlay=True, again=True)
        await press("escape", "9")
        await album.take("gate-without-file", again=True)
        plan.parent.mkdir()
        plan.write_text(scenes.GATE.replace('skip = "the only caller"', ""))
        await press("8", "9")
        await album.take("gate-with-gaps", again=True)
        plan.write_text(scenes.GATE)
        await press("8", "9")
        await album.take("gate")

    photographed("runs", visit)


@pytest.mark.timeout(400)
def test_raw_evidence_beside_a_capsule(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    scenes.healthy(place / "runs/20260301-1100-demo.capsule", "demo", scenes.NOON - 3600)
    scenes.logs(place / "runs")

    async def visit(album: Album) -> None:
        press = album.pilot.press
        rows: Rows[Any] = album.console.screen.query_one("#capsules", Rows)
        await album.settled()
        assert rows.select("runs/part0.log")
        await album.take("home-raw")
        await press("i")
        await album.take("home-raw-import", overlay=True, again=True)
        await press("escape", "enter", "8")
        await album.take("notebook-of-a-raw-log", again=True)

    photographed("runs", visit)
