"""What lies in a directory, read lightly and only where something changed: manifests and heartbeats, heads of files.

Runs in the worker, which keeps one ``Lister`` a directory. Changes are found by what the file system says of the few
small files that are replaced as a job goes on; nothing else is opened.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from .entry import Entry
from .raw_files import RawFiles

#: Capsules shown at most; a directory that holds more says so.
MAX_ENTRIES = 10_000
#: Ranks whose files are looked at to see whether a capsule changed.
_MOST_STAMPED = 1024
#: Directories with evidence that are named where there is none directly in the one that is listed.
_MOST_BELOW = 3


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a directory at one moment; ``version`` is a digest of it, the same in every worker.

    ``unread`` capsules and files were not opened yet, as there was no time. Such capsules are entries by their names,
    with an empty status; of such files it is not known whether they are evidence. ``below`` are directories in this one
    that hold evidence, a few of them, where there is none directly in it.
    """

    directory: str
    version: str = ""
    entries: tuple[Entry, ...] = ()
    problem: str = ""
    unread: int = 0
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """An entry with what the file system said when it was read: of all its files, and of the capsule as a whole."""

    stamp: tuple[object, ...]
    entry: Entry
    outside: tuple[int, ...]


class Lister:
    """Lists one directory again and again.

    Args:
        directory: where capsules appear.
        clock: Unix seconds; a recording without a heartbeat becomes stale by the clock alone.
        inotify: see ``Watch``.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, *, inotify: bool | None = None) -> None:
        from ..capsules.watch import Watch

        self.directory = directory
        self.watch = Watch(directory, inotify=inotify)
        self._clock = clock
        self._names: dict[str, float] = {}  # with the time of the manifest, 0 where there was none yet
        self._problem = ""
        self._seen: dict[str, _Seen] = {}
        self._raw = RawFiles(directory)
        self._below: tuple[object, tuple[str, ...]] = ((), ())  # with what the file system said of the directories

    def listing(self, budget: float | None = None) -> Listing:
        """The directory as it is now. Never raises: what cannot be read is a row with words.

        Args:
            budget: seconds after which capsules not read before are left for the next time, the newest come first.
        """
        if self.watch.changed():
            self._scan()
        until = None if budget is None else time.monotonic() + budget
        seen: dict[str, _Seen] = {}
        unread: list[Entry] = []
        for name, changed in self._names.items():
            if until is None or name in self._seen or not changed or time.monotonic() < until:
                if (found := self._look(name)) is not None:
                    seen[name] = found
            else:
                unread.append(Entry(path=f"{self.directory}/{name}", name=name, title=name, changed=changed))
        self._seen = seen
        entries = (*(each.entry for each in seen.values()), *unread, *self._raw.entries(until))
        below = () if entries or self._raw.unread else self._holding()
        return Listing(
            directory=str(self.directory),
            version=_version((entries, self._problem, below)),
            entries=entries,
            problem=self._problem,
            unread=len(unread) + self._raw.unread,
            below=below,
        )

    def _holding(self) -> tuple[str, ...]:
        """Directories in this one that hold evidence, looked for again where one of them was written to."""
        stamp = [(name, _written(f"{self.directory}/{name}")) for name in self._names]
        if stamp != self._below[0]:
            from .imports import holding

            self._below = stamp, tuple(islice(holding(str(self.directory), self._names), _MOST_BELOW))
        return self._below[1]

    def _scan(self) -> None:
        """Names that may be capsules, the newest first; whether they are, their manifest says."""
        self._problem = ""
        names: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(self.directory) as found:
                for each in found:
                    kind = _kind(each)
                    if kind == "directory":
                        names.append(each.name)
                    elif kind == "file":
                        files.append(each.name)
        except OSError as error:
            self._problem = f"{self.directory}: {error.strerror or error}; choose another with llmconsole DIR"
        if len(names) > MAX_ENTRIES:
            self._problem = f"{len(names):,} capsules; the {MAX_ENTRIES:,} first by name are shown"
            names = sorted(names)[:MAX_ENTRIES]
        changed = {name: _written(f"{self.directory}/{name}/capsule.json") for name in names}
        if others := [name for name, written in changed.items() if not written]:
            from ..capsules.importers.launched import files_below

            files += files_below(self.directory, others)[0]
        self._problem = self._raw.named(files) or self._problem
        self._names = dict(sorted(changed.items(), key=lambda each: each[1], reverse=True))

    def _look(self, name: str) -> _Seen | None:
        before, outside = self._seen.get(name), _outside(f"{self.directory}/{name}")
        # What was sealed changes as a whole, by another file in its place; what is not may change anywhere.
        if before is not None and before.entry.status == "sealed" and outside and before.outside == outside:
            return before
        path = self.directory / name
        stamp = stamp_of(path)
        if stamp is None:
            return None
        # A live capsule is read each time: whether it still lives is a question of the clock.
        if before is not None and before.stamp == stamp and before.entry.status != "recording":
            return before
        return _Seen(stamp, self._read(path, stamp), outside)

    def _read(self, path: Path, stamp: tuple[object, ...]) -> Entry:
        from ..capsules import Capsule, EvidenceError  # the screen imports the types above, and nothing heavy with them

        changed = last_write(stamp)
        try:
            capsule = Capsule.open(path, clock=self._clock)
            trigger = capsule.trigger
            return Entry(
                path=str(path),
                name=path.name,
                id=capsule.id,
                title=capsule.title,
                status=capsule.status,
                phase=capsule.manifest.phase or "",
                trigger=(trigger.kind or "") if trigger else "",
                message=(trigger.message or "") if trigger else "",
                step=trigger.step if trigger and trigger.step is not None else capsule.last_step,
                changed=changed,
                incident=_incident(path),
            )
        except EvidenceError as error:
            return Entry(path=str(path), name=path.name, title=path.name, changed=changed, problem=str(error))
        except Exception as error:  # one strange capsule must not empty the list
            problem = f"{type(error).__name__}: {error}"
            return Entry(path=str(path), name=path.name, title=path.name, changed=changed, problem=problem)


def _kind(entry: os.DirEntry[str]) -> str:
    """``directory``, ``file`` (a regular one), or nothing that is looked at; links are followed."""
    if entry.name.startswith("."):
        return ""
    try:
        return "directory" if entry.is_dir() else "file" if entry.is_file() else ""
    except OSError:
        return ""


def _written(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _outside(path: str) -> tuple[int, ...]:
    """What three looks tell of a capsule as a whole; empty where it cannot be looked at."""
    try:
        own, manifest, ranks = os.lstat(path), os.lstat(f"{path}/capsule.json"), os.lstat(f"{path}/ranks")
    except OSError:
        return ()
    return own.st_ctime_ns, own.st_ino, manifest.st_ctime_ns, manifest.st_size, manifest.st_ino, ranks.st_ctime_ns


def _version(rows: object) -> str:
    from hashlib import blake2b

    try:
        packed = msgspec.msgpack.encode(rows)
    except UnicodeEncodeError:  # file names that are no UTF-8
        packed = repr(rows).encode("utf-8", "surrogateescape")
    return blake2b(packed, digest_size=8).hexdigest()


def stamp_of(path: Path) -> tuple[object, ...] | None:
    """Modification times and sizes of the files that tell of a change; None where there is no capsule.

    A directory without permission has a stamp too: it is a row that says so.
    """
    stamp: list[object] = []
    try:
        manifest = os.lstat(path / "capsule.json")
        stamp += [manifest.st_mtime, manifest.st_size, manifest.st_ino]
    except PermissionError:
        return ("no permission",) if path.name.endswith(".capsule") else None
    except OSError:
        return None
    try:
        with os.scandir(path / "ranks") as ranks:
            for rank in islice(ranks, _MOST_STAMPED):
                for name in ("rank.json", "scalars.bin"):
                    try:
                        state = os.lstat(f"{rank.path}/{name}")
                    except OSError:
                        continue
                    stamp += [state.st_mtime, state.st_size]
    except OSError:
        pass  # no rank yet, or no permission: the manifest's stamp stands for both
    with contextlib.suppress(OSError):
        stamp.append(os.lstat(path / "incident.json").st_mtime)
    return tuple(stamp)


def last_write(stamp: tuple[object, ...] | None) -> float:
    """Unix seconds of the newest modification that a stamp knows of; 0 where there is none."""
    return max((each for each in stamp or () if isinstance(each, float)), default=0.0)


def _incident(path: Path) -> str:
    from .casebook.incident import IncidentError, read_incident

    try:
        return str(read_incident(path).get("status", ""))
    except IncidentError:
        return ""
