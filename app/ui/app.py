"""The console itself: one app, its worker link, its screens, and what holds on every screen."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import BindingType

from .actions import bindings
from .link import Link
from .screens.home import HomeScreen


class Console(App[None]):
    """The incident console on one directory of capsules."""

    TITLE = "llmconsole"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.link = Link()

    def on_mount(self) -> None:
        """Show home; workers start with the first question, after the first paint."""
        self.push_screen(HomeScreen(self.directory))

    def on_unmount(self) -> None:
        """No process is left behind."""
        self.link.close()
