"""Directories that launchers leave, one a process: which run, attempt and rank wrote a file, by where it lies.

torchrun and accelerate write ``LOG_DIR/RUN_ID_RANDOM/attempt_0/LOCAL_RANK/`` with ``stdout.log``, ``stderr.log`` and
``error.json`` (``--log-dir`` with ``--redirects`` or ``--tee``); mpirun writes ``DIR/1/rank.0/`` with ``stdout`` and
``stderr`` (``--output-filename``). Nothing else is taken for one job: numbered directories may be anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..errors import EvidenceError
from .source import Source

#: Directories that are looked into, files of them that are found, and entries of one that are seen.
_MOST_PLACES = 2000
MOST_FOUND = 5000
_MOST_ENTRIES = 10_000
#: Levels below a directory that is given: run, attempt, rank.
_DEEPEST = 3
#: Seconds within which the machines of one job begin; torchrun's rendezvous waits as long.
_BEGIN_TOGETHER = 600.0

_NAME = re.compile(r"(?:attempt_\d{1,6}|\d{1,6}|rank\.\d{1,6})$")
_TORCHRUN = re.compile(r"(.*)/attempt_(\d{1,6})/(\d{1,6})/(stdout\.log|stderr\.log|error\.json)$", re.DOTALL)
_MPIRUN = re.compile(r"(.*)/()rank\.(\d{1,6})/(stdout|stderr)$", re.DOTALL)
#: What makes the name of torchrun's run of its id: eight signs that are drawn.
_DRAWN = re.compile(r"(.+)_[a-z0-9_]{8}$", re.DOTALL)
_ERROR = re.compile(rb"^ {1,8}error_file: ([^\n]{1,4096})/attempt_\d{1,6}/\d{1,6}/error\.json\s*$", re.MULTILINE)
_SAYS_RANK = re.compile(rb"^\[rank(\d{1,6})\]:", re.MULTILINE)
_UNTOLD = "no line tells the rank: it is the number of the directory, which counts the processes of one machine"
_UNLIKE = "lines of this attempt name ranks that do not fit the numbers of their directories"
#: What a process prints before it ends, and what is written at its end.
_ORDER = ("stdout.log", "stdout", "stderr.log", "stderr", "error.json")


@dataclass(frozen=True)
class Place:
    """Where a launcher put a file.

    Attributes:
        run: directory of the whole run, absolute.
        attempt: of the launcher, from 0 on; it starts all processes again.
        rank: the directory's number.
        local: whether that counts the processes of one machine only.
        name: of the file.
    """

    run: str
    attempt: int
    rank: int
    local: bool
    name: str

    @property
    def turn(self) -> tuple[int, int, int]:
        """What sorts the files of a run: attempts as they follow one another, and ranks in them."""
        return self.attempt, self.rank, _ORDER.index(self.name)


@dataclass(frozen=True)
class Origin:
    """Whose a file is.

    Attributes:
        rank: of the job, as far as that is known.
        told: whether it surely is.
        past: whether another attempt followed.
        note: what a reader should know of the rank; may be empty.
    """

    rank: int
    told: bool
    past: bool
    note: str = ""


def place_of(path: str | os.PathLike[str]) -> Place | None:
    """The place of a file that lies as launchers put it; None for all others. Looks at the path only."""
    full = os.path.abspath(path)
    if (found := _TORCHRUN.match(full)) is None and (found := _MPIRUN.match(full)) is None:
        return None
    return Place(found[1] or "/", int(found[2] or 0), int(found[3]), bool(found[2]), found[4])


def name_of(paths: Sequence[Path]) -> str:
    """What the files of one job are called: the run, the file, or the directory where there are several."""
    if (place := place_of(paths[0])) is not None:
        return os.path.basename(place.run) or "/"
    return paths[0].name if len(paths) == 1 else Path(os.path.abspath(paths[0])).parent.name


def files_below(directory: str | os.PathLike[str], names: Iterable[str]) -> tuple[list[str], int]:
    """The files of launched processes below some of a directory's own directories, the newest of these first.

    At most three levels down, no link is followed, and so many directories and files are looked at.

    Returns:
        The files, as paths relative to the directory; how many of the names there was no room for.
    """
    found: list[str] = []
    left = _MOST_PLACES
    ordered = sorted(names, key=lambda name: -_changed(f"{directory}/{name}"))
    for done, name in enumerate(ordered):
        if left <= 0 or len(found) >= MOST_FOUND:
            return found[:MOST_FOUND], len(ordered) - done
        waiting = [name]
        own: list[str] = []
        while waiting and left > 0 and len(found) + len(own) < MOST_FOUND:
            here = waiting.pop(0)
            left -= 1
            files, places = _entries(f"{directory}/{here}")
            own += [each for each in (f"{here}/{file}" for file in files) if place_of(f"{directory}/{each}")]
            if here.count("/") + 1 < _DEEPEST:
                waiting += [f"{here}/{each}" for each in places]
        found += sorted(own)
    return found[:MOST_FOUND], 0


def runs_of(paths: Collection[Path]) -> dict[Path, str]:
    """What the files of one job have in common: the directory of their run; files of no run are left out.

    The launcher's own log belongs to the run whose error files it names; that run's name is drawn, and so no other's.
    Several machines that write below one directory have a run each. These are one job where they have the same run id,
    began at the same time, and the lines of each tell its ranks, of which no two have the same.
    """
    places = {path: place for path in paths if (place := place_of(path)) is not None}
    same: dict[str, set[str]] = {}
    for place in places.values():
        above, name = os.path.split(place.run)
        if place.local and (drawn := _DRAWN.match(name)) is not None:
            same.setdefault(f"{above}/{drawn[1]}", set()).add(place.run)
    stands = {place.run: place.run for place in places.values()}
    for group in same.values():
        for machines in _begun_together(group):
            if len(machines) > 1 and _share_no_rank({path: at for path, at in places.items() if at.run in machines}):
                stands |= dict.fromkeys(machines, min(machines))
    found = {path: stands[place.run] for path, place in places.items()}
    names = {os.path.basename(place.run): place.run for place in places.values() if place.local}
    for path in paths if names else ():
        if path not in places and (named := _named_runs(path, names)):
            found[path] = stands[names[named.pop()]]
    return found


def _named_runs(path: Path, names: Collection[str]) -> set[str]:
    """The one of some runs whose error files a launcher's summary names; empty where there is none, or several."""
    try:
        source = Source(path)
        paths = {each for part in (source.head, source.tail) for each in _ERROR.findall(part)}
    except (EvidenceError, OSError):
        return set()
    found = {os.path.basename(each.decode("utf-8", "replace")) for each in paths} & set(names)
    return found if len(found) == 1 and all(map(_DRAWN.match, found)) else set()


def _begun_together(runs: Iterable[str]) -> list[list[str]]:
    """Runs parted by when they began."""
    began = sorted((_changed(f"{run}/attempt_0"), run) for run in runs)
    parted: list[list[str]] = []
    for at, (moment, run) in enumerate(began):
        if not at or moment > began[at - 1][0] + _BEGIN_TOGETHER:
            parted.append([])
        parted[-1].append(run)
    return parted


def _share_no_rank(places: dict[Path, Place]) -> bool:
    """Whether the ranks of several runs are told, in the last attempt of each, and all differ."""
    offsets, last = _offsets(places), _last_attempts(places)
    if any(len(offsets.get(each, ())) != 1 for each in last.items()):
        return False
    now = {(place.run, place.rank) for place in places.values() if place.attempt == last[place.run]}
    ranks = [rank + min(offsets[run, last[run]]) for run, rank in now]
    return min(ranks) >= 0 and len(set(ranks)) == len(ranks)


def _last_attempts(places: dict[Path, Place]) -> dict[str, int]:
    last: dict[str, int] = {}
    for place in places.values():
        last[place.run] = max(last.get(place.run, 0), place.attempt)
    return last


def _offsets(places: dict[Path, Place]) -> dict[tuple[str, int], set[int]]:
    """What is between ranks that lines tell and local ranks, by run and attempt: after a restart machines may swap."""
    offsets: dict[tuple[str, int], set[int]] = {}
    for path, place in places.items():
        if place.local and (said := _said_rank(path)) is not None:
            offsets.setdefault((place.run, place.attempt), set()).add(said - place.rank)
    return offsets


def origins(paths: Sequence[Path]) -> dict[Path, Origin]:
    """Whose the files of one job are; files that lie elsewhere are left out.

    The number of torchrun's directory is a local rank. A line that begins with ``[rank12]:`` tells the rank of the job,
    and so those of all processes of that attempt and machine, which are counted on. Where none does, one machine is
    taken to be all; that is open where another directory of the same run id has begun at the same time.
    """
    places = {path: place for path in paths if (place := place_of(path)) is not None}
    last, offsets = _last_attempts(places), _offsets(places)
    several = {run for (run, _), found in offsets.items() if found != {0}}
    several |= set(filter(_has_twin, {place.run for place in places.values() if place.local}))
    found: dict[Path, Origin] = {}
    for path, place in places.items():
        said = offsets.get((place.run, place.attempt), set()) if place.local else {0}
        past = place.attempt < last[place.run]
        if len(said) == 1 and (offset := min(said)) >= 0:
            found[path] = Origin(place.rank + offset, True, past)
        else:
            found[path] = Origin(place.rank, not said and place.run not in several, past, _UNLIKE if said else _UNTOLD)
    return found


def _said_rank(path: Path) -> int | None:
    """The one rank by which lines of a file begin; None where there is none, or there are several."""
    try:
        source = Source(path)
        said = {int(each) for part in (source.head, source.tail) for each in _SAYS_RANK.findall(part)}
    except (EvidenceError, OSError):
        return None
    return said.pop() if len(said) == 1 else None


def _has_twin(run: str) -> bool:
    """Whether a run of the same id lies beside it that began at the same time: it may be another machine's."""
    above, name = os.path.split(run)
    drawn = _DRAWN.match(name)
    if drawn is None:
        return False
    began = _changed(f"{run}/attempt_0")
    return any(
        each != name
        and (other := _DRAWN.match(each)) is not None
        and other[1] == drawn[1]
        and abs(_changed(f"{above}/{each}/attempt_0") - began) <= _BEGIN_TOGETHER
        for each in _entries(above, anything=True)[1]
    )


def _entries(directory: str, *, anything: bool = False) -> tuple[list[str], list[str]]:
    """Names of the files and of the directories in a directory that can be a launcher's; links are left out."""
    files: list[str] = []
    places: list[str] = []
    try:
        if os.path.islink(directory) and not anything:
            return [], []
        with os.scandir(directory) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                if entry.is_dir(follow_symlinks=False):
                    if anything or _NAME.match(entry.name):
                        places.append(entry.name)
                elif entry.name in _ORDER and entry.is_file(follow_symlinks=False):
                    files.append(entry.name)
    except (OSError, ValueError):
        return [], []
    return files, sorted(places)


def _changed(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except (OSError, ValueError):
        return 0.0
