"""A pseudo-terminal for tests, with a screen from which one can read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest

#: Sent at the start and taken back at the end: alternate screen, mouse reports, bracketed paste.
TAKEN_BACK = {b"\x1b[?1049h": b"\x1b[?1049l", b"\x1b[?1000h": b"\x1b[?1000l", b"\x1b[?2004h": b"\x1b[?2004l"}


class Terminal:
    """A pseudo-terminal with the console in it and a screen that understands what the console sends."""

    def __init__(
        self,
        arguments: list[str],
        columns: int = 80,
        lines: int = 24,
        cwd: Path | None = None,
        command: list[str] | None = None,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.received = b""
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        settings = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment}
        settings.pop("LC_ALL", None)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(slave, number)
            os.closerange(3, 256)
            if cwd is not None:
                os.chdir(cwd)
            command = command or [sys.executable, "-m", "llmconsole.app.cli", *arguments]
            os.execvpe(command[0], command, settings)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(self.screen.display)

    def read(self, seconds: float) -> int:
        """Take in what arrives within ``seconds``; returns how many bytes that was."""
        count = 0
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                break
            if not (taken := self._take()):
                break
            count += taken
        return count

    def read_some(self) -> None:
        """Take in what is there, or wait a moment for something."""
        if select.select([self.master], [], [], 0.05)[0]:
            self._take()

    def _take(self) -> int:
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return 0
        self.received += data
        # pyte knows no private-mode colon forms; what it cannot parse is no matter of ours.
        with contextlib.suppress(Exception):
            self.stream.feed(data)
        return len(data)

    def until(self, words: str, seconds: float = 60) -> None:
        """Wait until the screen holds ``words``."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} did not appear:\n{self.text}"
            self.read(0.2)

    def send(self, keys: bytes | str) -> None:
        """Type."""
        os.write(self.master, keys if isinstance(keys, bytes) else keys.encode())

    def wait(self, seconds: float = 20) -> int:
        """Exit status; negative for a signal."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.read(0.2)
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        pytest.fail(f"it did not end:\n{self.text}")

    def assert_sane(self) -> None:
        """Modes and line settings are as they were before."""
        assert termios.tcgetattr(self.slave) == self.before
        for on, off in TAKEN_BACK.items():
            assert self.received.rfind(off) > self.received.rfind(on) or on not in self.received, on
        assert self.received.rfind(b"\x1b[?25h") >= self.received.rfind(b"\x1b[?25l")

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.slave)
        os.close(self.master)
