"""The console itself: one app, its worker link, its screens, and what holds on every screen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import App
from textual.binding import BindingType

from .. import paths
from .actions import Action, bindings, load_keymap
from .colours import DARK, LIGHT
from .driver import Driver
from .gates import Gates
from .link import Answer, Link
from .reports import Reports
from .state import State, load, save

if TYPE_CHECKING:
    from textual._path import CSSPathType
    from textual.screen import Screen

    from ..entry import Entry
    from .screens.home import HomeScreen

#: Dark, light, and the terminal's own palette.
THEMES = ("textual-dark", "textual-light", "ansi-dark", "ansi-light")


#: Seconds in which a message is read.
_READ = 1.0


class Console(App[None]):
    """The incident console on one directory of capsules.

    Args:
        directory: where capsules appear.
        remember: whether theme, filter and selection are kept between visits.
        repository: directory in the repository of code and case log; the working directory, or where that is in no
            repository, the capsules' directory.
    """

    TITLE = "llmconsole"
    CSS_PATH: ClassVar[CSSPathType | None] = ["app.tcss", "screens/home.tcss"]
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]

    def __init__(self, directory: Path, *, remember: bool = True, repository: Path | None = None) -> None:
        super().__init__(driver_class=Driver)
        self.directory = directory
        here = Path.cwd()
        beside = paths.repository_root(here) is None and paths.repository_root(directory) is not None
        self.repository = repository or (directory if beside else here)
        self.link = Link()
        self.reports = Reports(self, self.link, str(self.repository))
        self.gates = Gates(self)
        self.remember = remember
        self.state = load(directory) if remember else State()
        self.keymap, self.warnings = load_keymap(paths.config_directory() / "keys.toml")
        self.set_keymap(self.keymap)
        self.ansi_theme_dark, self.ansi_theme_light = DARK, LIGHT
        if self.state.theme in THEMES:
            self.theme = self.state.theme

    def get_default_screen(self) -> Screen[None]:
        """Home lies under all other screens."""
        from .screens.home import HomeScreen

        return HomeScreen(self.directory)

    @property
    def home(self) -> HomeScreen:
        """The list of capsules, below all other screens."""
        return cast("HomeScreen", self.screen_stack[0])

    def on_mount(self) -> None:
        """Workers start with the first question, after the first paint."""
        self.call_after_refresh(_painted)
        self.app_resume_signal.subscribe(self, self._draw_again)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Outside the main thread (tests) there is nothing to catch.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self._ended, number)
        for warning in self.warnings:
            self.notify(warning, severity="warning", markup=False)

    def on_unmount(self) -> None:
        """No process is left behind."""
        self.gates.close()
        self.link.close()
        if self.remember:
            save(self.directory, self.state)

    @on(Answer)
    def _reported(self, answer: Answer) -> None:
        if answer.method == "analyze":
            self.reports.keep(answer)
        elif answer.method == "import_job":
            from .importing import imported

            imported(self, answer)

    async def on_event(self, event: events.Event) -> None:
        """With the next key goes what has been read, or it would lie over fields and curves."""
        if isinstance(event, events.Key):
            for each in list(self._notifications):
                if time.time() - each.raised_at > (_READ if each.severity == "information" else 3 * _READ):
                    self._unnotify(each)
        await super().on_event(event)

    def _draw_again(self, _: object) -> None:
        """Whoever had the terminal meanwhile has left nothing of the picture."""
        self.refresh()

    def _ended(self, number: signal.Signals) -> None:
        self.exit(return_code=128 + number)

    # -- actions of every screen

    def scopes(self, screen: Screen[Any]) -> tuple[str, ...]:
        """Scopes of the registry whose actions work on a screen, the innermost first."""
        own = getattr(screen, "scopes", ())
        return (*own, "app")

    async def run_registered(self, action: Action, screen: Screen[Any]) -> None:
        """Run an action of the registry as its key would: on the open view, the screen, or the app."""
        if action.scope == "app":
            await self.run_action(action.method, self)
            return
        view = getattr(screen, "open_view", None)
        target = view if view is not None and action.scope != getattr(screen, "scope", "") else screen
        await self.run_action(action.method, target)

    def action_help(self) -> None:
        """Show the keys that work here."""
        from .screens.help import HelpScreen

        screen = self.screen
        twin, signs = getattr(screen, "twin", ""), getattr(screen, "signs", "")
        self.push_screen(HelpScreen(self.scopes(screen), twin, self.keymap, signs))

    def action_command_palette(self) -> None:
        """Find an action by name."""
        from textual.command import CommandPalette

        from .palette import ActionProvider

        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(providers=[ActionProvider], placeholder="what do you want to do?"))

    def action_cases(self) -> None:
        """Open the case log; a screen that shows a finding or a case says what to look for first."""
        from .screens.cases import CasesScreen

        if isinstance(self.screen, CasesScreen):
            self.screen.action_search()
        else:
            self.push_screen(CasesScreen(self.repository, getattr(self.screen, "case_query", "")))

    async def action_quit(self) -> None:
        """Leave, unless a screen holds something that would be lost by it."""
        held = next((words for each in self.screen_stack if (words := getattr(each, "unsaved", ""))), "")
        if held:
            self.notify(f"not yet: {held}; esc leads out of there", severity="warning", markup=False)
        else:
            await super().action_quit()

    def resolve(self, entry: Entry) -> None:
        """Open the form that makes a case of an incident."""
        from .importing import needs_capsule
        from .screens.resolve import ResolveScreen

        if words := needs_capsule("A case", entry):
            self.notify(words, severity="warning", timeout=8)
            return

        self.push_screen(ResolveScreen(entry, self.repository))

    def replace(self, raw: str, entry: Entry) -> None:
        """Show a capsule where the raw evidence is open that it was made of."""
        from .screens.capsule import CapsuleScreen

        if isinstance(self.screen, CapsuleScreen) and self.screen.entry.path == raw:
            self.state.viewed, self.state.view = entry.path, self.screen.number
            self.switch_screen(CapsuleScreen(entry))

    def make_capsule(self, entry: Entry) -> None:
        """Ask whether a capsule is to be made of raw evidence, and make it."""
        from .importing import ask_and_import

        ask_and_import(self, entry)

    def export(self, path: str) -> None:
        """Ask for a format, then write the report of a capsule into the working directory."""
        from .exporting import ask_and_write

        ask_and_write(self, path)

    def action_next_theme(self) -> None:
        """Go round the themes."""
        here = THEMES.index(self.theme) if self.theme in THEMES else -1
        self.theme = self.state.theme = THEMES[(here + 1) % len(THEMES)]
        self.notify(f"theme {self.theme}", timeout=2)

    def action_mouse(self) -> None:
        """Leave the mouse to the terminal, or take it back."""
        if isinstance(self._driver, Driver):
            words = (
                "mouse: the console's" if self._driver.toggle_mouse() else "mouse: the terminal's (select text freely)"
            )
            self.notify(words, timeout=3)


def _painted() -> None:
    """What the first paint did without: garbage collection, and the screens that the first key may open."""
    gc.freeze()  # what is loaded stays: leaving it out keeps collections short, so that no key waits
    gc.enable()
    threading.Thread(target=import_module, args=(".screens.capsule", __package__), daemon=True).start()


def run(directory: Path, chosen: Path | None = None, *, repository: Path | None = None) -> int:
    """Run the console, with a capsule chosen where one is given, and return its exit status."""
    console = Console(directory, repository=repository)
    if chosen is not None:
        console.state.capsule = str(directory / chosen.resolve().name)
    console.run()
    return console.return_code or 0
