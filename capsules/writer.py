"""Writes a capsule: the manifest first, evidence as it comes, the seal last."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time as clocks
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec

from . import storage
from .arrays import Description
from .batches import check_batch, check_tensor, pack, pack_state
from .columns import Columns
from .dtypes import Plain
from .errors import EvidenceError
from .jsonio import encode, plain, present
from .layout import FILES, MANIFEST
from .manifest import FORMAT, AttachedFile, Manifest, Phase, Trigger
from .masking import mask
from .one_at_a_time import alone
from .process import host, process_start, utc
from .rank_writer import NormRow, RankWriter, count
from .storage import Appender, Reserve, create_exclusively, make_directory, replace
from .typed import check

Kind = Literal["log", "trace", "snapshot", "config", "other"]

#: Parts of the manifest that may hold what a user typed; secrets in them are masked.
_MASKED = ("config", "run", "environment", "placement")


class CapsuleWriter:
    """Writes one capsule, or joins one that another rank has created.

    Every call that returns has its evidence in the file: a killed process loses nothing that was written before.
    A clean exit of the ``with`` block seals the capsule, an exception marks it crashed. Several threads may write: one
    call at a time, and a call never waits for anything but the disk.

    Args:
        path: the capsule's directory, by habit ``NAME.capsule``; created, readable by its owner only.
        title: one line that a person recognises the incident by.
        phase: training, evaluation, serving, kernel, rag, agent or multimodal.
        manifest: any fields of the manifest; of a joining rank they are ignored.
        rank: the rank whose evidence this process writes unless a call names another.
        producer: the program that writes, as name and version.
        clock: Unix seconds.

    Raises:
        EvidenceError: a field of the manifest has a wrong type, or the rank has a writer already.
        OSError: the directory cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "",
        phase: Phase | None = None,
        manifest: Mapping[str, Any] | None = None,
        rank: int = 0,
        producer: str = "llmconsole",
        clock: Callable[[], float] = clocks.time,
    ) -> None:
        self.path = Path(path)
        self.rank = count(rank, "rank")
        self.closed = False
        self.lock = threading.RLock()
        self._clock = clock
        self._appender = Appender()
        self._ranks: dict[int, RankWriter] = {}
        started = utc(clock())
        pid = os.getpid()
        writer = {"host": host(), "pid": pid, "started": started, "process_start": process_start(pid)}
        own = {"status": "recording", "writer": present(writer)} | ({"title": title} if title else {})
        self._manifest = _checked(
            {"format": FORMAT, "id": new_id(clock()), "producer": producer, "created": started}
            | _masked(manifest or {})
            | {**own, "format": FORMAT}
            | ({"phase": phase} if phase else {})
        )
        make_directory(self.path)
        #: Whether this process created the capsule, and so is the one to replace its manifest.
        self.creator = create_exclusively(self.path / MANIFEST, encode(self._manifest))
        if self.creator:
            self.path.chmod(0o700)  # the directory may have been there already
        self._reserve = Reserve(self._of(None).directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self.closed:
            trigger = Trigger(kind="exception", rank=self.rank, message=f"{type(error).__name__}: {error}")
            with contextlib.suppress(OSError):  # a full disk must not hide the error that is under way
                self.close(status="crashed", trigger=self._of(None).state.trigger or trigger)

    def _of(self, rank: int | None) -> RankWriter:
        if self.closed:
            raise EvidenceError("the capsule is closed", str(self.path), "open a new CapsuleWriter")
        rank = self.rank if rank is None else count(rank, "rank")
        if rank not in self._ranks:
            self._ranks[rank] = RankWriter(self.path, rank, self._appender, self._clock)
        return self._ranks[rank]

    # -- tables

    @alone
    def scalars(
        self,
        name: str,
        step: int | Sequence[int],
        value: float | Sequence[float],
        time: float | Sequence[float] | None = None,
        rank: int | None = None,
        unit: str = "",
        side: str | None = None,
    ) -> None:
        """Append rows of one series: optimizer windows, values, and Unix seconds where known."""
        self._of(rank).scalars(str(name), step, value, time, unit, side)

    @alone
    def scalar_row(
        self, step: int, values: Mapping[str, float], time: float | None = None, rank: int | None = None
    ) -> None:
        """Append one row to each of several series in one write: what a loop has to say about one step."""
        self._of(rank).scalar_row(step, values, time)

    @alone
    def stats(self, rows: Iterable[Mapping[str, Any]], rank: int | None = None) -> None:
        """Append statistics of tensors, one mapping a tensor (fields of ``tables.StatRow``), in one write.

        ``order`` is the execution order inside the step and defaults to the position in ``rows``.
        """
        self._of(rank).stats(rows)

    @alone
    def norms(self, step: int, rows: Sequence[NormRow], rank: int | None = None, order: int = 0) -> None:
        """Append norm-only rows of one step in one write: (name, role, dtype, shape, norm, micro, call).

        Args:
            step: optimizer window.
            rows: ``shape`` a tuple, ``norm`` the Euclidean norm, NaN and Inf included.
            rank: the rank.
            order: execution order of the first row; the others follow.
        """
        self._of(rank).norms(step, rows, order)

    # -- arrays

    @alone
    def batch(
        self, step: int, rank: int | None = None, split: str | None = None, micro: int = 0, **evidence: Any
    ) -> None:
        """Write one micro-batch: arrays and attributes of ``batches`` (``README.md``) as keywords.

        Raises:
            EvidenceError: an array has the wrong dtype or shape, or an attribute the wrong type.
        """
        arrays, attributes = check_batch(evidence | {"split": split})
        description = Description(
            kind="batch", step=count(step, "batch.step"), micro=count(micro, "batch.micro"), attributes=attributes
        )
        self._of(rank).arrays(description, arrays)

    @alone
    def tensor(
        self,
        name: str,
        array: Any,
        step: int,
        order: int | None = None,
        dtype: str | None = None,
        rank: int | None = None,
        **attributes: Any,
    ) -> None:
        """Write one full array under ``group/name``.

        Args:
            name: ``group/name``, see the groups with a meaning in ``README.md``.
            array: NumPy array, torch tensor or nested lists; raw bits where ``dtype`` is bfloat16 or float8.
            step: optimizer window.
            order: execution order.
            dtype: name of the dtype; may be left out where the array's own type says it.
            rank: the rank.
            attributes: anything JSON can hold; ``stride`` (elements) and ``device`` describe the original tensor.
        """
        stored = check_tensor(name, array, dtype, attributes)
        description = Description(
            kind="tensor",
            name=name,
            step=count(step, f"tensor {name}, step"),
            order=None if order is None else count(order, f"tensor {name}, order"),
            attributes=plain(attributes),
        )
        self._of(rank).arrays(description, {"data": stored})

    @alone
    def tensors(self, step: int, groups: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Write many small arrays of one step into one file, those of one dtype end to end.

        A file or a dataset each would cost more than the arrays; their strides are not kept.

        Args:
            step: optimizer window.
            groups: (``group/name``, arrays by their last name, attributes that all of these share).
        """
        arrays, attributes = pack(groups)
        if arrays:
            description = Description(kind="tensors", step=count(step, "tensors.step"), attributes=attributes)
            self._of(None).arrays(description, arrays)

    @alone
    def rng(self, step: int, rank: int | None = None, micro: int = 0, **states: Any) -> None:
        """Write random-generator states (``torch``, ``numpy``, ``python``, ``cuda`` …) as they were before the step."""
        arrays: dict[str, Plain] = {}
        packed = {name: pack_state(state, arrays) for name, state in states.items() if state is not None}
        description = Description(
            kind="rng", step=count(step, "rng.step"), micro=count(micro, "rng.micro"), attributes=packed
        )
        self._of(rank).arrays(description, arrays)

    # -- records and files

    @alone
    def record(self, stream: str, record: Mapping[str, Any], rank: int | None = None) -> None:
        """Append one record to a stream.

        Raises:
            EvidenceError: naming stream, record number, field, value and what was expected.
        """
        self._of(rank).records(stream, (record,))

    @alone
    def records(self, stream: str, records: Iterable[Mapping[str, Any]], rank: int | None = None) -> None:
        """Append records to a stream; those before a faulty one are written."""
        self._of(rank).records(stream, records)

    def columns(self, stream: str, length: int, columns: Columns, rank: int | None = None) -> None:
        """Append many records of a stream at once, as columns; a reader gives them as any other records.

        Args:
            stream: name of the stream.
            length: number of records.
            columns: field → one value a record (None: no such field), or ``Distinct`` values where few differ.
            rank: the rank.

        Raises:
            EvidenceError: naming the column, and what is wrong with it.
        """
        self._of(rank).columns(stream, length, columns)

    @alone
    def attach(
        self,
        path: str | os.PathLike[str],
        kind: Kind = "other",
        data: bytes | None = None,
        rank: int | None = None,
    ) -> str:
        """Copy an original into ``files/``, list it with its SHA-256, and return its path inside the capsule.

        Args:
            path: the file; with ``data`` only its last part is used, as the name.
            kind: log, trace, snapshot, config or other.
            data: the content, where there is no file.
            rank: the rank that lists it, where this process did not create the capsule.
        """
        return self.attach_all([(path, kind)], data, rank)[0]

    @alone
    def attach_all(
        self, files: Iterable[tuple[str | os.PathLike[str], Kind]], data: bytes | None = None, rank: int | None = None
    ) -> list[str]:
        """``attach`` for paths and their kinds; the manifest, which lists them all, is written once."""
        listed: list[AttachedFile] = []
        names: list[str] = []
        for path, kind in files:
            name, size, digest = storage.keep(Path(path), data, self.path / FILES)
            names.append(f"{FILES}/{name}")
            listed.append(AttachedFile(path=names[-1], kind=kind, bytes=size, sha256=digest))
        if self.creator and listed:
            self.update({"files": [*self._manifest.get("files", []), *map(msgspec.to_builtins, listed)]})
        elif listed:
            writer = self._of(rank)
            writer.state.files = [*(writer.state.files or []), *listed]
            writer.heartbeat()
        return names

    @alone
    def rewrite(self, stream: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Put these records in the place of all that this rank has written to a stream, at once."""
        self._of(None).rewrite(stream, records)

    # -- life

    @alone
    def update(self, manifest: Mapping[str, Any]) -> None:
        """Merge fields into the manifest and replace it; does nothing in a process that did not create the capsule."""
        if self.creator:
            merged = _checked(_merged(self._manifest, _masked(manifest)))
            replace(self.path / MANIFEST, encode(merged))
            self._manifest = merged

    @alone
    def heartbeat(
        self,
        status: Literal["recording", "sealed", "crashed"] | None = None,
        trigger: Trigger | Mapping[str, Any] | None = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Say that the rank is alive; appending does so by itself every few seconds."""
        self._of(rank).heartbeat(status, _trigger(trigger), step)

    @alone
    def withdraw(self) -> None:
        """Take back the trigger that this rank has given."""
        self._of(None).state.trigger = None
        self.heartbeat()

    @alone
    def flush(self) -> None:
        """Ask the operating system to put everything on disk, and renew the heartbeats."""
        self._appender.sync()
        for writer in self._ranks.values():
            writer.heartbeat()

    @alone
    def release(self) -> None:
        """Give back the few KiB that are kept for the seal, before the last that is written."""
        self._reserve.release()

    @alone
    def close(
        self,
        status: Literal["sealed", "crashed"] = "sealed",
        trigger: Trigger | Mapping[str, Any] | None = None,
    ) -> None:
        """Seal this process's ranks and, where it created the capsule, the manifest. Closing twice does nothing."""
        if self.closed:
            return
        try:
            found = _trigger(trigger)
            self.release()
            for writer in self._ranks.values():
                writer.heartbeat(status, found if writer.rank == self.rank else None)
            own = self._ranks[self.rank].state.trigger
            last = {"trigger": msgspec.to_builtins(own)} if own and not self._manifest.get("trigger") else {}
            self.update({"status": status, **last})
        finally:
            self.closed = True
            self._appender.close()


def new_id(seconds: float) -> str:
    """A new ULID: 48 bits of Unix milliseconds and 80 random bits in Crockford's base 32, so ids sort by time."""
    value = (int(seconds * 1000) & (1 << 48) - 1) << 80 | secrets.randbits(80)
    return "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[value >> shift & 31] for shift in range(125, -1, -5))


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as builtins, without empty fields.

    Raises:
        EvidenceError: naming the field, its value and what was expected.
    """
    mapping, _ = check(plain(manifest), Manifest, "manifest")
    return present(mapping)


def _masked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    masked = {key: mask(plain(value)) if key in _MASKED else value for key, value in manifest.items()}
    environment = manifest.get("environment")
    if isinstance(environment, Mapping) and "packages" in environment:
        masked["environment"]["packages"] = environment["packages"]  # google-auth is a package, not a secret
    return masked


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, Mapping):
        return new
    merged = dict(cast("dict[str, Any]", old))
    for key, value in cast("Mapping[str, Any]", new).items():
        merged[key] = _merged(merged.get(key), value)
    return merged


def _trigger(trigger: Trigger | Mapping[str, Any] | None) -> Trigger | None:
    return check(trigger, Trigger, "trigger")[1] if isinstance(trigger, Mapping) else trigger
