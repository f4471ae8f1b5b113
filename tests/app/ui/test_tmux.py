"""The console inside tmux with 256 colours, as it is used over SSH: drawn, detached and attached, left clean."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Make

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Tmux:
    """A tmux server of its own with one window that runs a shell."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "tmux.sock"
        self.run("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "-c", str(folder), "sh")
        self.run("set", "-g", "default-terminal", "tmux-256color")

    def run(self, *words: str) -> str:
        command = ["tmux", "-S", str(self.socket), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

    def send(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def until(self, words: str) -> str:
        for _ in range(600):
            if words in (screen := self.run("capture-pane", "-p")):
                return screen
            time.sleep(0.1)
        pytest.fail(f"{words!r} did not appear:\n{self.run('capture-pane', '-p')}")

    def flags(self) -> str:
        """Alternate screen, mouse, bracketed keys, cursor: what a program that has ended must have given back."""
        return self.run(
            "display", "-p", "#{alternate_on} #{mouse_any_flag} #{keypad_cursor_flag} #{cursor_flag}"
        ).strip()


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    server = Tmux(tmp_path)
    yield server
    subprocess.run(["tmux", "-S", str(server.socket), "kill-server"], capture_output=True, check=False)


@pytest.mark.parametrize("leave", ["q", "kill"])
def test_in_tmux_it_is_drawn_survives_a_detach_and_leaves_the_pane_sane(
    tmp_path: Path, make_capsule: Make, tmux: Tmux, leave: str
) -> None:
    make_capsule("broken", title="sft-7b", loss=[3.0, 2.9, 2.8, float("nan")])
    before = tmux.flags()
    tmux.send(f"TERM=tmux-256color {sys.executable} -m llmconsole.app.cli .", "Enter")
    tmux.until("loss-nonfinite")
    coloured = tmux.run("capture-pane", "-p", "-e")
    assert "38;2;" not in coloured, "256 colours where the terminal says no more"
    tmux.send("?")
    tmux.until("Search the case log")
    tmux.send("Escape")
    tmux.until("First divergence")
    tmux.run("resize-window", "-x", "120", "-y", "40")
    tmux.until("First divergence")
    tmux.send("2")  # no view at home: nothing happens
    shell = int(tmux.run("display", "-p", "#{pane_pid}"))
    if leave == "q":
        tmux.send("q")
    else:
        (pid,) = pids_below(shell)
        os.kill(pid, signal.SIGTERM)
    for _ in range(300):
        if not pids_below(shell):
            break
        time.sleep(0.1)
    tmux.send("clear; echo left-$((40+2))", "Enter")
    tmux.until("left-42")
    assert tmux.flags() == before
    tmux.send("stty -a | tr ' ' '\\n' | grep -cx -e echo -e icanon", "Enter")
    tmux.until("\n2\n")


def pids_below(parent: int) -> list[int]:
    """Processes whose parent is ``parent``."""
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
