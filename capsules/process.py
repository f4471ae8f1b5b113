"""Who wrote a capsule, and whether that process is still there."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


@cache
def host() -> str:
    """Name of this host, as it is compared with the one in a manifest."""
    return socket.gethostname()


def utc(seconds: float) -> str:
    """Unix seconds as RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def process_start(pid: int) -> str | None:
    """A word that differs between two processes that had the same pid, or None where it cannot be had.

    On Linux: the boot's id and the start time in clock ticks (field 22 of ``/proc/PID/stat``, ``proc(5)``).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:8]}:{_stat(pid)[19]}"
    except (OSError, IndexError):
        return None


def _stat(pid: int) -> list[str]:
    """Fields 3 (the state) and following of ``/proc/PID/stat``; nothing where it cannot be had."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_gone(pid: int, started: str | None) -> bool:
    """Whether the process of this host that had ``pid`` and ``process_start`` has ended.

    One that its parent has not waited for yet (state Z or X) has ended, though its pid still takes signals.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    if _stat(pid)[:1] in (["Z"], ["X"]):
        return True
    now = process_start(pid)
    return started is not None and now is not None and now != started
