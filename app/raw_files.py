"""The raw evidence files of a directory as rows of the list: known by their heads, grouped to jobs, a few at a time.

Runs in the worker. What was found out of a file is kept; a file that grows stays what it is, and one that nobody knows
is looked at again only when it changed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .entry import RAW, Entry

if TYPE_CHECKING:
    from ..capsules.importers.jobs import Part

#: Files of a directory that are looked at.
MOST_FILES = 5000
#: Files that are no evidence, of which a change is noticed at one look; the next look takes the next ones.
_AGAIN = 500
#: The steps of a file are looked up again once it is so many times as large.
_GROWN = 2
#: Ends of names of files that are shown although they may not be read: what they hold cannot be seen.
_EVIDENT = (".log", ".out", ".err", ".csv", ".jsonl", ".json", ".wandb", ".txt", ".gz")


@dataclass(frozen=True)
class _Stamp:
    modified: float
    size: int
    inode: int
    mode: int


@dataclass
class _File:
    """What is known of a file as it was at ``seen``; ``stamp`` is newer where it has only grown since."""

    stamp: _Stamp
    seen: _Stamp
    part: Part | None = None
    problem: str = ""

    @property
    def is_row(self) -> bool:
        return self.part is not None or bool(self.problem)


class RawFiles:
    """Follows the files that lie directly in one directory, or below it where a launcher put those of processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Files that there was no time yet to look at.
        self.unread = 0
        self._names: list[str] = []
        self._files: dict[str, _File] = {}
        self._turn = 0  # where the next look at files that are no evidence begins
        self._jobs: list[list[str]] | None = None

    def named(self, names: Iterable[str]) -> str:
        """Take the names, or relative paths, that are there now; returned is what to say where some are left out."""
        names = sorted(names)
        self._names = names[:MOST_FILES]
        for gone in self._files.keys() - set(self._names):
            self._forget(gone)
        return "" if len(names) <= MOST_FILES else f"{len(names):,} files; the {MOST_FILES:,} first by name are read"

    def entries(self, until: float | None) -> list[Entry]:
        """The rows, one a job.

        Args:
            until: monotonic seconds after which files not looked at before are left for the next time.
        """
        self._follow()
        stamps = {name: self._stamp(name) for name in self._names if name not in self._files}
        waiting = [(name, stamp) for name, stamp in stamps.items() if stamp is not None]
        waiting.sort(key=lambda each: -each[1].modified)
        self.unread = len(waiting)
        for name, stamp in waiting:
            if until is not None and time.monotonic() >= until:
                break
            self._look_at(name, stamp)
            self.unread -= 1
        return self._rows()

    def _follow(self) -> None:
        """Look again at what changed: at all evidence, and at some of the rest."""
        rest = [name for name, file in self._files.items() if not file.is_row]
        again = rest[self._turn : self._turn + _AGAIN]
        self._turn = self._turn + _AGAIN if self._turn + _AGAIN < len(rest) else 0
        for name in [*(name for name, file in self._files.items() if file.is_row), *again]:
            file, now = self._files[name], self._stamp(name)
            if now is None:
                self._forget(name)
            elif now != file.stamp:
                same = (now.inode, now.mode) == (file.seen.inode, file.seen.mode)
                if file.part is not None and same and file.stamp.size <= now.size < _GROWN * file.seen.size:
                    file.stamp = now
                else:
                    self._look_at(name, now)

    def _forget(self, name: str) -> None:
        if self._files.pop(name).is_row:
            self._jobs = None

    def _look_at(self, name: str, stamp: _Stamp) -> None:
        """Find out what a file is, by head and tail."""
        from ..capsules.importers.jobs import part

        before = self._files.get(name)
        found = self._files[name] = _File(stamp, stamp)
        path = self.directory / name
        if not os.access(path, os.R_OK):
            if name.endswith(_EVIDENT) or (before is not None and before.is_row):
                found.problem = f"{path}: may not be read (permission denied)"
        else:
            try:
                found.part = part(path)
            except MemoryError:
                raise
            except Exception:  # nobody knows it, or it went meanwhile
                found.part = None
        if found.part != (before.part if before is not None else None):
            self._jobs = None

    def _stamp(self, name: str) -> _Stamp | None:
        try:
            state = os.stat(self.directory / name)
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(state.st_mode):
            return None
        return _Stamp(state.st_mtime, state.st_size, state.st_ino, state.st_mode)

    def _named(self, path: Path) -> str:
        return str(path.relative_to(self.directory))

    def _path(self, name: str) -> str:
        return str(self.directory / name)

    def _rows(self) -> list[Entry]:
        known = [file.part for file in self._files.values() if file.part is not None]
        if self.unread:  # a file yet to come may tell two runs from one: until then each stands alone, unjudged
            rows = [self._row([self._named(each.path)], status="") for each in known]
        else:
            rows = [self._row(names) for names in self._grouped(known)]
        for name, file in self._files.items():
            if file.problem:
                path, changed = self._path(name), file.stamp.modified
                rows.append(Entry(path=path, name=name, title=name, changed=changed, problem=file.problem))
        return rows

    def _grouped(self, known: list[Part]) -> list[list[str]]:
        if self._jobs is None:
            from ..capsules.importers.jobs import grouped

            self._jobs = [[self._named(path) for path in job.files] for job in grouped(known)]
        return self._jobs

    def _row(self, names: list[str], status: str = RAW) -> Entry:
        from ..capsules.importers.launched import name_of

        files = [self._files[name] for name in names]
        kinds = dict.fromkeys(file.part.format for file in files if file.part is not None)
        several = len(names) > 1
        title = f"{name_of([Path(self._path(name)) for name in names])} ({len(names)} files)" if several else names[0]
        return Entry(
            path=self._path(names[0]),
            name=names[0],
            title=title,
            status=status,
            trigger=next(iter(kinds)) if len(kinds) == 1 else f"{len(kinds)} formats",
            message=", ".join(kinds),
            changed=max(file.stamp.modified for file in files),
            files=tuple(map(self._path, names)) if several else (),
        )
