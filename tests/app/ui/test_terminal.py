"""The console in a real pseudo-terminal: whatever happens, the terminal is left as it was found."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .terminal import Terminal

Make = Callable[..., Path]


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def test_q_leaves_the_terminal_as_it_was_and_no_process_behind(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal]
) -> None:
    make_capsule("broken", title="sft-7b", loss=[3.0, 2.9, 2.8, float("nan")])
    console = terminal(str(tmp_path))
    console.until("loss-nonfinite")
    workers = children(console.pid)
    assert workers
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_legacy_mouse_report_beyond_column_95_is_survived(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal]
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path), columns=160, lines=40)
    console.until("run")
    # Button 1 pressed and released at column 150, line 10: 32 + 150 is no UTF-8. Split as the line may split it.
    for part in (b"\x1b[M" + bytes([32, 32 + 150, 32 + 10]), b"\x1b[", b"M" + bytes([35, 32 + 150]), bytes([42])):
        console.send(part)
        console.read(0.3)
    console.send("?")
    console.until("Search the case log")
    console.send("\x1b")
    console.read(1.0)
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_worker_that_dies_is_replaced_and_the_screen_goes_on(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    make_capsule("first")
    console = terminal(str(tmp_path))
    console.until("Nothing diverged")
    for pid in children(console.pid):
        os.kill(pid, number)
    make_capsule("second", loss=[3.0, 2.0, float("nan")])
    console.until("second")
    console.send("k")  # what needs me stands above what is quiet
    console.until("loss-nonfinite")
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path))
    console.until("Nothing diverged")
    os.kill(console.pid, number)
    assert console.wait() == 128 + number
    console.assert_sane()


def test_ctrl_z_gives_the_terminal_back_and_fg_draws_it_again(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal]
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path))
    console.until("Nothing diverged")
    console.send("\x1a")
    deadline = time.monotonic() + 20
    while "T" not in Path(f"/proc/{console.pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline, "it was not stopped"
        console.read(0.1)
    console.assert_sane()
    console.screen.reset()
    os.kill(console.pid, signal.SIGCONT)
    console.until("Nothing diverged")
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()


def test_a_sealed_capsule_sends_nothing_while_nothing_changes(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal]
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path))
    console.until("Nothing diverged")
    while console.read(2.0):  # the last strokes of the picture
        pass
    quiet = console.read(5.0)
    # A minute may turn in these five seconds; two in a row cannot.
    assert quiet == 0 or console.read(5.0) == 0


@pytest.mark.parametrize("settings", [{"TERM": "dumb"}, {"TERM": ""}])
def test_a_terminal_that_cannot_position_text_gets_the_list(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal], settings: dict[str, str]
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path), **settings)
    assert console.wait() == 0
    assert b"here is the list instead" in console.received
    assert b"\x1b" not in console.received.replace(b"\x1b[0m", b"").replace(b"\x1b[1m", b"")


def test_without_a_locale_only_ascii_is_sent(
    tmp_path: Path, make_capsule: Make, terminal: Callable[..., Terminal]
) -> None:
    make_capsule("run")
    console = terminal(str(tmp_path), LANG="C", LC_CTYPE="C", LC_ALL="")
    console.until("Nothing diverged")
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()
    assert all(byte < 0x80 for byte in console.received)
