"""Raw evidence files behind the paths that people give: imported when they are asked for, kept until they change.

Runs in the worker. Imported capsules lie in a scratch directory that belongs to the asking process, which removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .scratch import scratch

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Imported capsules kept at a time.
_KEPT = 16
#: A file that grows is read again no sooner than after so many times the seconds that reading took.
_PATIENCE = 10.0
#: Files of one directory that are looked at.
MOST_FILES = 5000
_MOST_NEIGHBOURS = 50


@dataclass(frozen=True)
class _Imported:
    stamp: tuple[object, ...]
    path: Path
    problems: tuple[str, ...]
    made: float
    took: float


_imported: OrderedDict[tuple[str, ...], _Imported] = OrderedDict()
#: Files of jobs that have several, by the first one's path, as whoever asks has said.
_jobs: dict[str, tuple[str, ...]] = {}
#: Formats of files by path, with the stamp of which they hold; a list asks every second.
_formats: OrderedDict[str, tuple[tuple[object, ...], str]] = OrderedDict()


def is_raw(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a regular file, so that it can only be raw evidence."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def open_evidence(path: str, files: Sequence[str] = ()) -> Capsule:
    """The capsule at a path, or the one that raw files are imported to.

    Args:
        path: a capsule's directory, or one raw file.
        files: the raw files of one job instead.

    Raises:
        EvidenceError: it cannot be read.
    """
    from ..capsules import Capsule

    raw = tuple(files) or _files_of(path)
    return Capsule.open(_import(raw).path if raw else path)


def problems_of(path: str, files: Sequence[str] = ()) -> tuple[str, ...]:
    """A line for each raw file behind ``open_evidence`` that could not be read whole."""
    raw = tuple(files) or _files_of(path)
    return _import(raw).problems if raw else ()


def belong_together(path: str, files: Sequence[str]) -> None:
    """From now on the raw file at ``path`` stands for all ``files`` of its job; none: for itself alone."""
    if files:
        _jobs[path] = tuple(files)
    else:
        _jobs.pop(path, None)


def _files_of(path: str) -> tuple[str, ...]:
    """The raw files that a path stands for; none where it is a capsule's."""
    return _jobs.get(path, (path,)) if is_raw(path) else ()


def stamp_of_job(path: str) -> tuple[object, ...] | None:
    """``stamp_of_raw`` of all files that a path stands for, one behind the other."""
    files = _files_of(path)
    return tuple(each for file in files for each in stamp_of_raw(file) or ()) if files else None


def stamp_of_raw(path: str | os.PathLike[str]) -> tuple[object, ...] | None:
    """Time of modification (Unix seconds), size and identity of a raw file; None where it is none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return (state.st_mtime, state.st_size, state.st_ino) if stat.S_ISREG(state.st_mode) else None


def recognise(paths: Sequence[str]) -> list[dict[str, Any]]:
    """What raw files are, by their content: path, format (empty where nobody knows), modified, size."""
    from ..capsules.importers import recognise as known

    found: list[dict[str, Any]] = []
    for path in paths:
        stamp = stamp_of_raw(path)
        kind = ""
        if stamp is not None:
            before, kind = _formats.get(path, ((), ""))
            if before != stamp and (not kind or before[2:] != stamp[2:]):  # what grows stays what it is
                importer = known(path)
                kind = importer.FORMAT if importer is not None else ""
            _formats[path] = (stamp, kind)
            while len(_formats) > 4 * MOST_FILES:
                _formats.popitem(last=False)
        found.append(
            {
                "path": path,
                "format": kind,
                "modified": stamp[0] if stamp is not None else 0.0,
                "size": stamp[1] if stamp is not None else 0,
            }
        )
    return found


def evidence_in(directory: str) -> dict[str, Any]:
    """The raw evidence that lies directly in a directory, or below it in a launcher's directories of processes.

    Returns:
        ``files``, as ``recognise`` has them; names that are ``unknown``; how many were ``left_out``; the directory
        ``below`` that has evidence where there is none; ``remarks``, a line each.

    Raises:
        EvidenceError: the directory cannot be listed.
    """
    from ..capsules.importers.launched import files_below

    files, places = _listed(directory)
    above = directory.rstrip("/")
    rows = recognise([f"{above}/{name}" for name in files[:MOST_FILES]])
    further, unseen = files_below(directory, places)
    launched = recognise([f"{above}/{name}" for name in further])
    rows += [row for row in launched if row["format"] or row["size"]]
    known = [row for row in rows if row["format"]]
    below = "" if known else next(holding(directory, places), "")
    return {
        "files": known,
        "unknown": [os.path.relpath(row["path"], directory) for row in rows if not row["format"]],
        "left_out": max(0, len(files) - MOST_FILES),
        "below": below,
        "remarks": [*_without_a_word(launched), *_too_many(directory, unseen if further else 0)],
    }


def _too_many(directory: str, unseen: int) -> list[str]:
    """A line where there are more directories of processes than are looked into."""
    which = f"{unseen:,} older director{'y' if unseen == 1 else 'ies'}"
    return [f"{directory}: {which} not looked into; give a run's own directory"] if unseen else []


def _without_a_word(launched: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each run whose last attempt has left nothing that is known, while one before it has."""
    from ..capsules.importers.launched import place_of

    last: dict[str, int] = {}
    told: dict[str, int] = {}
    for row in launched:
        if (place := place_of(row["path"])) is not None:
            last[place.run] = max(last.get(place.run, 0), place.attempt)
            if row["format"]:
                told[place.run] = max(told.get(place.run, 0), place.attempt)
    return [
        f"{run}: attempt {last[run]} has left nothing that is known; attempt {attempt} is looked at"
        for run, attempt in told.items()
        if attempt < last[run]
    ]


def group(paths: Sequence[str], separate: bool = False) -> dict[str, Any]:
    """Raw files as jobs: ``jobs``, lists of paths; and ``problems``, path and line for files that nobody knows."""
    from ..capsules.importers.jobs import jobs

    found, problems = jobs(paths, separate=separate)
    return {
        "jobs": [[os.fspath(file) for file in job.files] for job in found],
        "problems": [str(error) for error in problems],
    }


def import_job(files: Sequence[str], target: str) -> dict[str, Any]:
    """Make a capsule of a job's files in ``target``, with the originals in it.

    Raises:
        EvidenceError: nothing could be read of them, or the capsule cannot be written.
    """
    from ..capsules import Capsule
    from ..capsules.importers import import_job as make

    made = _written(lambda: make(files, target, attach=True), target)
    manifest = Capsule.open(made.path).manifest.raw
    return {"capsule": os.fspath(made.path), "problems": made.problems, "imported": manifest.get("imported", {})}


def _import(files: tuple[str, ...]) -> _Imported:
    from ..capsules.errors import EvidenceError
    from ..capsules.importers import import_job as make

    stamps = [stamp_of_raw(file) for file in files]
    if None in stamps:
        raise EvidenceError("there is no such file", files[stamps.index(None)])
    stamp = tuple(stamps)
    kept = _imported.get(files)
    if kept is not None:
        grows = time.monotonic() < kept.made + _PATIENCE * kept.took
        if kept.path.exists() and (kept.stamp == stamp or grows):
            _imported.move_to_end(files)
            return kept
        _forget(files)
    place = scratch()
    started = time.monotonic()
    made = _written(lambda: make(files, place, attach=False), place)
    ended = time.monotonic()
    kept = _imported[files] = _Imported(stamp, made.path, made.problems, ended, ended - started)
    while len(_imported) > _KEPT:
        _forget(next(iter(_imported)))
    return kept


def _forget(files: tuple[str, ...]) -> None:
    shutil.rmtree(_imported.pop(files).path, ignore_errors=True)


def _written(make: Any, where: str) -> Any:
    """Run an import, whose only system error can be that its capsule cannot be written."""
    from ..capsules.errors import EvidenceError

    try:
        return make()
    except OSError as error:
        hint = "TMPDIR may name a roomier directory" if error.errno == errno.ENOSPC else ""
        raise EvidenceError(f"cannot be written ({error.strerror or error})", error.filename or where, hint) from None


def _listed(directory: str) -> tuple[list[str], list[str]]:
    """Names of files and of directories, sorted; hidden ones are left out."""
    from ..capsules.errors import EvidenceError

    files: list[str] = []
    places: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                try:
                    if entry.is_dir():
                        places.append(entry.name)
                    elif entry.is_file():
                        files.append(entry.name)
                except OSError:
                    continue
    except OSError as error:
        raise EvidenceError(f"cannot be read ({error.strerror or error})", directory) from None
    return sorted(files), sorted(places)


def holding(directory: str, places: Iterable[str]) -> Iterator[str]:
    """Those of a directory's own directories in which there is evidence; the first by name are looked at."""
    return (each for each in sorted(places)[:_MOST_NEIGHBOURS] if _holds(f"{directory}/{each}"))


def _holds(directory: str) -> bool:
    """Whether there is evidence in a directory, capsules or files; a few of its files are looked at."""
    from ..capsules.errors import EvidenceError
    from ..capsules.importers.launched import files_below

    try:
        files, places = _listed(directory)
    except EvidenceError:
        return False
    if any(os.path.isfile(f"{directory}/{each}/capsule.json") for each in places[:_MOST_NEIGHBOURS]):
        return True
    files = [*files[:_MOST_NEIGHBOURS], *files_below(directory, places[:_MOST_NEIGHBOURS])[0][:_MOST_NEIGHBOURS]]
    return any(row["format"] for row in recognise([f"{directory}/{name}" for name in files]))
