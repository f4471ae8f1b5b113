"""Cleans up after a gate, however the gate ended: a process of its own that waits for the end of its input.

A gate that is killed cannot remove its work trees or end its commands. This process sees the pipe close, ends every
process that carries the gate's token, restores the files of a commit that was cut short, removes the directory and has
git forget the trees in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec

#: Environment variable by which processes of one gate are known, their children included.
TOKEN = "LLMCONSOLE_GATE_TOKEN"

#: Name of a ``Journal`` in the gate's directory.
JOURNAL = "journal"

#: Looks for processes at most, a tenth of a second apart: a process may start another while it is being ended.
_ROUNDS = 50


class Journal(msgspec.Struct, kw_only=True):
    """What to restore where a commit was cut short.

    Attributes:
        root: of the repository.
        sign: path in it of the file by which a commit is known to have come about.
        files: path and former content (None where there was none) of each.
        new: paths that the index did not know.
    """

    root: str
    sign: str
    files: list[tuple[str, bytes | None]]
    new: list[str]


def main() -> None:
    """``python -m … DIRECTORY TOKEN``: wait, then clean."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directory, token = Path(sys.argv[1]), sys.argv[2]
    groups: set[int] = set()
    repositories: dict[Path, None] = {}
    for line in sys.stdin.buffer:  # ``group PID`` of a command, ``repository PATH`` of which a tree was made
        word, _, value = line.rstrip(b"\n").partition(b" ")
        if word == b"group":
            groups.add(int(value))
        elif word == b"repository":
            repositories[Path(os.fsdecode(value))] = None
    end_processes(token, groups)
    from ..store import Repository, StoreError

    with contextlib.suppress(OSError, StoreError, msgspec.DecodeError):
        _restore(directory / JOURNAL)
    _remove(directory)
    for repository in repositories:
        with contextlib.suppress(StoreError):
            Repository(repository).remove_worktrees(directory)


def _restore(file: Path) -> None:
    """Undo what was written for a commit that did not come about."""
    from ..files import restore_file
    from ..store import Repository

    journal = msgspec.msgpack.decode(file.read_bytes(), type=Journal)
    repository = Repository(Path(journal.root))
    sign = repository.root / journal.sign
    if sign.exists() and repository.show("HEAD", journal.sign) == sign.read_bytes():
        return  # it was committed
    for path, content in journal.files:
        restore_file(Path(path), content)
    if journal.new:
        repository.forget(journal.new)


def _remove(directory: Path) -> None:
    """Remove a directory, also what a test has made read-only in it."""
    shutil.rmtree(directory, ignore_errors=True)
    for place, names, _ in os.walk(directory):
        for path in (os.path.join(place, name) for name in names):
            with contextlib.suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(directory, ignore_errors=True)


def end_processes(token: str, groups: set[int]) -> None:
    """Kill the groups, and then whatever still carries the token; a command may have left its group."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for number in range(_ROUNDS):
        alive = _carrying(token)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(OSError):
                # Git takes its locks and half-made trees along when it is asked to end.
                os.kill(pid, signal.SIGTERM if number < _ROUNDS // 2 and _is_git(pid) else signal.SIGKILL)
        time.sleep(0.1)


def _is_git(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().startswith("git")


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
