"""Which raw files belong to one job: they lie in one directory and are of one run.

Files of different formats beside one another (a trainer state, its event files, the log) are one job. Of one format,
a file continues another where its steps begin well after the other's; two that begin alike are two runs, and then
every file of the directory stands alone, unless their names say that they are ranks of one. Of processes that a
launcher gave directories of their own (``launched``) the files of one run are one job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EvidenceError
from . import Importer, known, rank_of
from .launched import place_of, runs_of
from .run import Run
from .source import Source

#: Formats whose files are written by one run after another in one directory, whatever their steps.
_SUCCESSIVE = ("TensorBoard", "flight")
#: A file continues another where it begins after this share of the other's steps.
_WELL_AFTER = 0.25


@dataclass(frozen=True)
class Job:
    """Files of one job, in the order in which they continue one another."""

    files: tuple[Path, ...]


@dataclass(frozen=True)
class Part:
    """What grouping needs to know of a file: its format, whose it is, and which steps it covers, where it tells.

    ``run`` is what all files of one run and format have in common; empty where nothing is told.
    """

    path: Path
    format: str
    rank: int = 0
    first: int | None = None
    last: int | None = None
    run: str = ""


def jobs(paths: Sequence[str | os.PathLike[str]], *, separate: bool = False) -> tuple[list[Job], list[EvidenceError]]:
    """Group files to jobs; what nobody can read comes back as errors, one a file.

    Args:
        paths: files, of any directories.
        separate: treat each alone.
    """
    problems: list[EvidenceError] = []
    parts: list[Part] = []
    for path in dict.fromkeys(map(Path, paths)):
        try:
            parts.append(part(path, spanned=not separate and len(paths) > 1))
        except EvidenceError as error:
            problems.append(error)
    return ([Job((each.path,)) for each in parts] if separate else grouped(parts)), problems


def part(path: Path, *, spanned: bool = True) -> Part:
    """Look at the head and the tail of a file; ``spanned`` asks for its steps too.

    An importer whose files tell more than head and tail do has a function ``span(source)`` of its own: rank, first and
    last step, and what the files of one run have in common.

    Raises:
        EvidenceError: nobody can read it.
    """
    source = Source(path)
    importer = known(source)
    rank, first, last = rank_of(path, importer), None, None
    tells: Callable[[Source], tuple[int | None, int | None, int | None, str]] | None = getattr(importer, "span", None)
    run = ""
    if spanned and tells is not None:
        named, first, last, run = tells(source)
        rank = rank if named is None else named
    elif spanned and place_of(path) is None:
        first, last = _span(source, importer)
    return Part(path, importer.FORMAT, rank, first, last, run)


def grouped(parts: Sequence[Part]) -> list[Job]:
    """The jobs that files belong to, by directories in the order in which they first come up."""
    places: dict[tuple[str, bool], list[Part]] = {}
    runs = runs_of([each.path for each in parts])
    for each in parts:
        run = runs.get(each.path)
        place = os.path.abspath(each.path.parent) if run is None else run
        places.setdefault((place, run is not None), []).append(each)
    found: list[Job] = []
    for (_, launched), those in places.items():
        ordered = _launched(those) if launched else _one_job(those)
        groups = _apart(those) if ordered is None else [ordered]
        found += [Job(tuple(each.path for each in group)) for group in groups]
    return found


def _launched(parts: list[Part]) -> list[Part]:
    """Files of the processes of one run: attempt by attempt, and in each rank by rank; the launcher's own come last."""
    places = [(place_of(each.path), each) for each in parts]
    own = sorted(((place.turn, place.run), at) for at, (place, _) in enumerate(places) if place is not None)
    return [*(parts[at] for _, at in own), *(each for place, each in places if place is None)]


def _apart(parts: list[Part]) -> list[list[Part]]:
    """Every file alone, but for dumps of ranks: they show one moment of one job, whatever lies beside them."""
    dumps = sorted((each for each in parts if each.format.startswith("flight")), key=lambda each: each.rank)
    return ([dumps] if dumps else []) + [[each] for each in parts if not each.format.startswith("flight")]


def _one_job(parts: list[Part]) -> list[Part] | None:
    """The parts in order where they are of one run, else None."""
    chains: dict[tuple[str, int], list[Part]] = {}
    for each in parts:
        chains.setdefault((each.format, each.rank), []).append(each)
    runs = {(each.format, each.run) for each in parts if each.run}
    if len(runs) > len({kind for kind, _ in runs}):
        return None
    ordered: list[Part] = []
    kinds = [kind for kind, _ in chains]
    for (kind, _), chain in sorted(chains.items(), key=lambda each: (kinds.index(each[0][0]), each[0][1])):
        chain.sort(key=lambda each: (-1 if each.first is None else each.first, natural(each.path.name)))
        if not kind.startswith(_SUCCESSIVE) and not all(map(_continues, chain, chain[1:])):
            return None
        ordered += chain
    return ordered


def _continues(before: Part, after: Part) -> bool:
    if before.first is None or after.first is None:
        return True
    return after.first > before.first + _WELL_AFTER * ((before.last or before.first) - before.first)


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts ``run2`` before ``run10``."""
    return [(0, int(each)) if each.isdigit() else (1, each) for each in re.split(r"(\d{1,18})", name) if each]


class _Excerpt(Source):
    """Head and tail of a file only."""

    def chunks(self, size: int = 0) -> Iterator[bytes]:
        yield self.head
        if self.tail:
            yield b"\n" + self.tail.partition(b"\n")[2]


class _Steps(Run):
    """Takes the first and the last step of what an importer reads, and keeps nothing."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.rank, self.format = 0, ""
        self.first: int | None = None
        self.last: int | None = None

    def scalar(
        self,
        name: str,
        step: int,
        value: float,
        time: float | None = None,
        unit: str = "",
        side: str | None = None,
        rank: int | None = None,
    ) -> None:
        if self.first is None or name == "loss":
            self.first = step if self.first is None else min(self.first, step)
            self.last = step if self.last is None else max(self.last, step)

    def scalars(
        self,
        name: str,
        steps: Any,
        values: Any,
        times: Any = None,
        unit: str = "",
        side: str | None = None,
        rank: int | None = None,
    ) -> None:
        for step in (min(steps, default=None), max(steps, default=None)):
            if step is not None:
                self.scalar(name, int(step), 0.0)

    def event(self, kind: str, step: int | None = None, rank: int | None = None, **fields: Any) -> None:
        pass

    def record(self, stream: str, record: Mapping[str, Any], rank: int | None = None) -> None:
        pass

    def tensor(self, name: str, array: Any, rank: int | None = None, **attributes: Any) -> None:
        pass

    def columns(self, stream: str, length: int, columns: Any, rank: int | None = None) -> None:
        pass

    def manifest(self, fields: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str, times: int = 1) -> None:
        pass


def _span(source: Source, importer: Importer) -> tuple[int | None, int | None]:
    """First and last step, as head and tail tell them; None where they tell none."""
    if importer.FORMAT.startswith(_SUCCESSIVE):
        return None, None
    steps = _Steps()
    try:
        importer.read(_Excerpt(source.path), steps)
    except MemoryError:
        raise
    except Exception:  # a format that cannot be read in part
        return None, None
    return steps.first, steps.last
