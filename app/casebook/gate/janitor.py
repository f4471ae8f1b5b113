"""Cleans up after a gate, however the gate ended: a process of its own that waits for the end of its input.

A gate that is killed cannot remove its work trees or end its commands. This process sees the pipe close, ends every
process that carries the gate's token, removes the directory and has git forget the trees in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

#: Environment variable by which processes of one gate are known, their children included.
TOKEN = "LLMCONSOLE_GATE_TOKEN"

#: Looks for processes at most, a tenth of a second apart: a process may start another while it is being ended.
_ROUNDS = 50


def main() -> None:
    """``python -m … REPOSITORY DIRECTORY TOKEN``: wait, then clean."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    repository, directory, token = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    groups: set[int] = set()
    for line in sys.stdin:  # the process groups of the commands, one a line
        with contextlib.suppress(ValueError):
            groups.add(int(line))
    end_processes(token, groups)
    shutil.rmtree(directory, ignore_errors=True)
    from ..store import Repository, StoreError

    with contextlib.suppress(StoreError):
        Repository(repository).prune_worktrees()


def end_processes(token: str, groups: set[int]) -> None:
    """Kill the groups, and then whatever still carries the token; a command may have left its group."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(_ROUNDS):
        alive = _carrying(token)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _carrying(token: str) -> list[int]:
    """Processes whose environment holds the token; none where the system does not tell."""
    wanted = f"{TOKEN}={token}".encode()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
