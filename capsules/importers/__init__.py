"""Raw evidence to capsules: each importer is one module, recognised by content, listed here.

An importer has a ``FORMAT`` (what a person would call it), ``sniff(source)`` and ``read(source, run)``. Everything it
reads becomes an ordinary capsule, so that rules and screens know one thing only.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import EvidenceError
from ..writer import CapsuleWriter
from .launched import Origin, name_of, origins, place_of
from .run import Run
from .source import Source

#: Importers, asked in this order: what has a signature first, text last. Where several files bring one series, the
#: file of the earlier importer keeps the name.
MODULES = (
    "tensorboard",
    "wandb",
    "flight",
    "memory",
    "kineto",
    "gpu_monitor",
    "trainer_state",
    "golden",
    "json_history",
    "json_lines",
    "csv_metrics",
    "text_log",
    "error_file",  # after the logs, which tell more of the same error
)


class Importer(Protocol):
    """One format."""

    @property
    def FORMAT(self) -> str:
        """What a person would call the format."""
        ...

    def sniff(self, source: Source) -> bool:
        """Whether a file is of this format, by its head (and tail)."""
        ...

    def read(self, source: Source, out: Run) -> None:
        """Write all of the file's points and records, in file order."""
        ...


@dataclass(frozen=True)
class Imported:
    """A capsule made from files: where it is, and a line for each file that could not be read whole."""

    path: Path
    problems: tuple[str, ...]


def importers() -> Iterator[Importer]:
    """Every importer, in the order in which they are asked; each is loaded when its turn comes."""
    return map(_importer, MODULES)


@cache
def _importer(name: str) -> Importer:
    return cast("Importer", import_module(f".{name}", __name__))


def recognise(path: str | os.PathLike[str]) -> Importer | None:
    """The importer of a file, by its content; None where nobody knows it or it cannot be opened. Never raises."""
    try:
        return _recognised(Source(path))
    except EvidenceError:
        return None


def import_files(paths: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *, attach: bool) -> Path:
    """Make one capsule of the files of one job.

    Args:
        paths: the files; those of one format are taken to continue one another, in this order.
        target: directory in which the capsule is created.
        attach: copy the originals into the capsule.

    Returns:
        The capsule's directory, ``NAME.capsule`` after the file, or after its directory where there are several.

    Raises:
        EvidenceError: a file is of no known format, or holds nothing that could be read.
    """
    return import_job(paths, target, attach=attach).path


def import_job(paths: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *, attach: bool) -> Imported:
    """``import_files`` that also says what could not be read, while the rest was."""
    found = [(source, known(source)) for source in map(Source, paths)]
    if not found:
        raise EvidenceError("no file was given to import")
    found.sort(key=lambda each: _turn(each[1]))  # stable: files of one format stay in order
    path = _free(Path(target), name_of([source.path for source, _ in found]))
    manifest: dict[str, Any] = {
        "id": _identity([source for source, _ in found]),
        "title": _title([source.path for source, _ in found]),
        "phase": "training",
        "trigger": {"kind": "imported"},
    }
    problems: list[str] = []
    with CapsuleWriter(path, manifest=manifest) as writer:
        run = Run(writer)
        listed: list[dict[str, Any]] = []
        whose = origins([source.path for source, _ in found])
        for source, importer in found:
            origin = whose.get(source.path) or Origin(rank_of(source.path, importer), told=False, past=False)
            # A launcher's own log may repeat what its processes print: its series are another side's.
            part = f"{importer.FORMAT} of a launcher" if whose and source.path not in whose else importer.FORMAT
            run.begin(part, source.path.name, origin.rank, told=origin.told, past=origin.past)
            problem = _read(importer, source, run)
            problems += [problem] if problem else []
            notes = [
                f"{text} ({times:,})" if times > 1 else text for text, times in {**run.notes, **source.notes}.items()
            ]
            run.notes.clear()
            listed.append(
                {
                    "path": os.fspath(source.path),
                    "bytes": source.size,
                    "modified": source.modified,
                    "format": run.format or importer.FORMAT,
                    "notes": [*notes, *filter(None, (problem, origin.note))],
                }
            )
        if attach:
            writer.attach_all((source.path, getattr(importer, "KIND", "log")) for source, importer in found)
        for importer in dict.fromkeys(importer for _, importer in found):
            problem = _finished(importer, found, listed, run)
            problems += [problem] if problem else []
        if not run.points and not run.records and not problems and _says(run.stated):
            said = (
                f"{found[0][0].path.name}: no number was logged: the job ended, or was stopped, before its first report"
            )
            run.event("log", level="warning", type="nothing_logged", message=said)
            run.flush()
        for field, value in run.stated.items():
            try:
                writer.update({field: value})
            except EvidenceError as error:  # a log can state anything
                problems.append(f"{error.what} ({error.where})")
        kinds = ", ".join(dict.fromkeys(each["format"] for each in listed))
        writer.update({"producer": f"llmconsole, from {kinds}", "trigger": {"message": f"read from {kinds}"}})
        writer.update({"imported": {"files": listed, "points": run.points, "records": run.records}})
    if not run.points and not run.records:
        raise EvidenceError(
            problems[0] if problems else f"is of the format {kinds}, and nothing in it is a measurement",
            "" if problems else str(found[0][0].path),
        )
    return Imported(path, tuple(problems))


def known(source: Source) -> Importer:
    """The importer of an open file.

    Raises:
        EvidenceError: nobody knows the format; the line says what was looked for.
    """
    importer = _recognised(source)
    if importer is None:
        if not source.size:
            raise EvidenceError("is empty", str(source.path))
        kind = "" if source.text else ", a binary file"
        tried = ", ".join(each.FORMAT for each in importers())
        raise EvidenceError(f"of no known format{kind} (looked for {tried})", str(source.path))
    return importer


def _turn(importer: Importer) -> int:
    return next(turn for turn, each in enumerate(importers()) if each is importer)


def rank_in_name(path: Path) -> int:
    """The rank that a file's name speaks of (``rank3.log``, ``train_rank_03.out``), else 0."""
    found = re.search(r"(?:^|[^a-z])rank[_\-.]?(\d{1,6})(?!\d)", path.name, re.IGNORECASE)
    return int(found[1]) if found else 0


def rank_of(path: Path, importer: Importer) -> int:
    """The rank that wrote a file, by its place or name: as the format names its files, where it has its own way."""
    if (place := place_of(path)) is not None:
        return place.rank
    own: Callable[[Path], int | None] | None = getattr(importer, "rank_in_name", None)
    found = rank_in_name(path) if own is None else own(path)
    return found or 0


def _recognised(source: Source) -> Importer | None:
    for importer in importers():
        try:
            if importer.sniff(source):
                return importer
        except MemoryError:
            raise
        except Exception:  # an odd file must not keep the next importer from being asked
            continue
    return None


def _read(importer: Importer, source: Source, run: Run) -> str:
    """Read one file; what was read before something went wrong is kept, and what went wrong is returned."""
    problem = ""
    try:
        importer.read(source, run)
        problem = f"{source.path}: is cut at its end: {source.cut}" if source.cut else ""
    except EvidenceError as error:
        problem = str(error)
    except MemoryError:
        raise
    except OSError as error:
        if error.filename is None or Path(str(error.filename)) != source.path:
            raise  # the disk is full: no fault of the file
        problem = f"{source.path}: {error.strerror}"
    except Exception as error:
        problem = f"{source.path}: reading stopped at something unexpected ({type(error).__name__}: {error})"
    run.flush()
    return problem


def _finished(
    importer: Importer, found: Sequence[tuple[Source, Importer]], listed: list[dict[str, Any]], run: Run
) -> str:
    """Let an importer write what its files say together, where it has such a part; what went wrong is returned."""
    finish: Callable[[Run], None] | None = getattr(importer, "finish", None)
    if finish is None:
        return ""
    first = next(at for at, (_, each) in enumerate(found) if each is importer)
    problem = ""
    try:
        finish(run)
    except EvidenceError as error:
        problem = str(error)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        problem = f"{found[first][0].path}: putting the files together stopped ({type(error).__name__}: {error})"
    run.flush()
    listed[first]["notes"] += [f"{text} ({times:,})" if times > 1 else text for text, times in run.notes.items()]
    run.notes.clear()
    return problem


def _says(stated: Any) -> bool:
    """Whether anything at all is stated, however deep."""
    return any(map(_says, cast("dict[str, Any]", stated).values())) if isinstance(stated, dict) else stated is not None


def _title(paths: Sequence[Path]) -> str:
    return name_of(paths) if len(paths) == 1 else f"{name_of(paths)} ({len(paths)} files)"


def _free(directory: Path, name: str) -> Path:
    """A name for the capsule in ``directory`` that is not taken."""
    stem = re.sub(r"[^\w.\-+=@]", "_", name).lstrip(".")[:180] or "file"
    for number in range(1, 10_000):
        path = directory / (f"{stem}.capsule" if number == 1 else f"{stem}-{number}.capsule")
        if not os.path.lexists(path):
            return path
    return directory / f"{stem}-{secrets.token_hex(4)}.capsule"


def _identity(sources: Sequence[Source]) -> str:
    """An id that the same files always get: 26 signs as a ULID has, from names, sizes, times and heads."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.path.name}\t{source.size}\t{source.modified}\n".encode("utf-8", "replace"))
        digest.update(source.head)
    value = int(min(source.modified for source in sources) * 1000) % (1 << 48) << 80
    value |= int.from_bytes(digest.digest()[:10], "big")
    return "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[value >> shift & 31] for shift in range(125, -1, -5))


__all__ = ["Imported", "Importer", "Run", "Source", "import_files", "import_job", "importers", "recognise"]
