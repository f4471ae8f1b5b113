"""Opens a capsule for reading. A reader never changes a capsule, and may read while it is written."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .batches import Batch, Tensor, tensors_in, unpack_state
from .blocks import HISTOGRAMS, ROWS, SCALARS, STATS
from .collector import collector_still
from .damage import Damage, DamageLog
from .dtypes import Array
from .errors import EvidenceError
from .jsonio import decode_object, present
from .layout import MANIFEST, RANKS, rank_directory, rank_of
from .limits import MAX_MANIFEST_BYTES, MAX_RANKS, MAX_SCALARS_BYTES, MAX_STATS_BYTES, MIB
from .manifest import FORMAT, AttachedFile, Manifest, Trigger
from .rank_reader import RankReader
from .record_columns import RecordColumns
from .status import DerivedStatus, capsule_status
from .storage import read_inside
from .tables import BINS, COMPACT, Name, Series, SeriesKey, Stats
from .typed import salvage

if TYPE_CHECKING:
    from .inventory import Inventory
    from .replayable import ReplayItem


class Capsule:
    """A capsule as it was when each of its files was first read; open it again to see what was added since."""

    def __init__(self, path: Path, manifest: Manifest, damage: DamageLog, clock: Callable[[], float]) -> None:
        self.path = path
        self.manifest = manifest
        self._damage = damage
        self._clock = clock
        self._columns: dict[str, RecordColumns] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> Self:
        """Open a capsule; reads ``capsule.json`` only.

        Args:
            path: the capsule's directory.
            clock: Unix seconds, for the age of heartbeats.

        Raises:
            EvidenceError: there is no capsule, its manifest is unreadable, or its format is of a later version.
        """
        root = Path(path)
        where = str(root)
        try:
            raw = decode_object(read_inside(root, MANIFEST, MAX_MANIFEST_BYTES), f"{where}/{MANIFEST}")
        except FileNotFoundError:
            what = f"is no capsule: it has no {MANIFEST}" if root.is_dir() else "there is no such directory"
            raise EvidenceError(what, where) from None
        except OSError as error:
            raise EvidenceError(error.strerror or str(error), where) from None
        except EvidenceError as error:
            raise EvidenceError(error.what, f"{where}/{MANIFEST}", error.hint) from None
        raw = present(raw)
        _check_format(raw.get("format"), f"{where}/{MANIFEST}")
        manifest, sentences = salvage(raw, Manifest)
        vars(manifest)["raw_mapping"] = raw
        damage = DamageLog()
        for sentence in sentences:
            damage.add(MANIFEST, Damage(what=sentence, where=MANIFEST, lost="the field"))
        return cls(root, manifest, damage, clock)

    @property
    def id(self) -> str:
        """Identifier, the same for all ranks."""
        return self.manifest.id

    @property
    def title(self) -> str:
        """What a person recognises the incident by; the directory's name where nothing was given."""
        run = self.manifest.run
        return self.manifest.title or (run.name if run is not None and run.name else self.path.name)

    @cached_property
    def status(self) -> DerivedStatus:
        """recording, sealed, crashed or stale, at the time of the first call."""
        if self.manifest.status != "recording":
            return self.manifest.status  # without reading any rank, so that long lists stay quick
        states = [each.state for each in self._ranks.values() if each.state is not None]
        return capsule_status(self.manifest, states, self._clock())

    @cached_property
    def trigger(self) -> Trigger | None:
        """The manifest's trigger, else the earliest that any rank has."""
        if self.manifest.trigger is not None:
            return self.manifest.trigger
        found = [
            (np.inf if trigger.step is None else trigger.step, rank, trigger)
            for rank, reader in self._ranks.items()
            if reader.state is not None and (trigger := reader.state.trigger) is not None
        ]
        return min(found, key=lambda each: each[:2])[2] if found else None

    @cached_property
    def _ranks(self) -> dict[int, RankReader]:
        directory = self.path / RANKS
        try:
            if directory.is_symlink():
                raise OSError("is a symbolic link; refused")
            with os.scandir(directory) as entries:
                listed = [(rank, each) for each in entries if (rank := rank_of(each.name)) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._damage.add(RANKS, Damage(what=error.strerror or str(error), where=RANKS, lost="all ranks"))
            return {}
        found: dict[int, RankReader] = {}
        for rank, entry in sorted(listed, key=lambda each: each[0])[:MAX_RANKS]:
            if entry.is_dir(follow_symlinks=False):
                found[rank] = RankReader(self.path, rank, self._damage, self._clock)
            else:
                what = "is a symbolic link; refused" if entry.is_symlink() else "is no directory"
                self._damage.add(RANKS, Damage(what=what, where=rank_directory(rank), lost="the rank"))
        if len(listed) > MAX_RANKS:
            lost = f"{len(listed) - MAX_RANKS:,} ranks"
            self._damage.add(RANKS, Damage(what="more ranks than are read", where=RANKS, lost=lost))
        return found

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a directory."""
        return tuple(self._ranks)

    @property
    def last_step(self) -> int | None:
        """The furthest step any rank's heartbeat speaks of; cheap, for lists."""
        steps = [each.state.step for each in self._ranks.values() if each.state is not None]
        return max((each for each in steps if each is not None), default=None)

    def _of(self, rank: int | None) -> list[RankReader]:
        return list(self._ranks.values()) if rank is None else [self._ranks[rank]] if rank in self._ranks else []

    # -- scalars

    @cached_property
    def _series(self) -> dict[SeriesKey, Series]:
        found: dict[SeriesKey, Series] = {}
        for rank, reader in self._ranks.items():
            rows = reader.read_scalars(self._share(MAX_SCALARS_BYTES))
            if not len(rows):
                continue
            written = np.argsort(rows["step"], kind="stable")
            rows = rows[written]
            by_id = np.argsort(rows["id"], kind="stable")
            ids = rows["id"][by_id]
            named: dict[tuple[str, str | None], list[Name]] = {}  # several ids may stand for one series
            for name in reader.names.values():
                if name.table == "scalars":
                    named.setdefault((name.name, name.side), []).append(name)
            for (name, side), same in named.items():
                cuts = (np.searchsorted(ids, [each.id, each.id + 1]) for each in same)
                picked = np.sort(np.concatenate([by_id[start:end] for start, end in cuts]))
                if len(picked):
                    unit = next((each.unit for each in same if each.unit), "")
                    key = SeriesKey(name, rank, side, unit)
                    found[key] = series(key, rows[picked], written[picked])
        return found

    def scalar_keys(self) -> tuple[SeriesKey, ...]:
        """Every series that has rows, by rank and in the order of first use."""
        return tuple(self._series)

    def scalars(self, name: str, rank: int | None = None, side: str | None = None) -> Series:
        """One series; an empty one where it is absent.

        Args:
            name: standard names are listed in ``README.md``.
            rank: without it, the lowest rank that has the series.
            side: without it, the series that has no side, else the alphabetically first side.
        """
        matching = [
            key
            for key in self._series
            if key.name == name and rank in (None, key.rank) and (side is None or key.side == side)
        ]
        if not matching:
            return series(SeriesKey(name, rank or 0, side, ""), np.empty(0, ROWS[SCALARS]), np.empty(0, np.int64))
        return self._series[min(matching, key=lambda key: (key.rank, key.side or ""))]

    # -- statistics

    @cached_property
    def _all_stats(self) -> Stats:
        rows, details, bins = [np.empty(0, COMPACT)], [np.empty(0, ROWS[STATS])], [np.empty(0, BINS)]
        names: dict[int, Name] = {}
        for rank, reader in self._ranks.items():
            read = reader.read_stats(self._share(MAX_STATS_BYTES))
            if read is None:
                continue
            compact, full, own_bins = read
            # Ids are a rank's own: give them numbers that are unique in the capsule.
            renamed = {old: len(names) + at for at, old in enumerate(reader.names)}
            names |= {renamed[old]: each for old, each in reader.names.items()}
            compact["id"] = _renumbered(compact["id"], renamed)
            compact["detail"] += np.where(compact["detail"] >= 0, sum(map(len, details)), 0)
            bins.append(np.empty(len(own_bins), BINS))
            for column in ROWS[HISTOGRAMS].names or ():
                bins[-1][column] = own_bins[column]
            bins[-1]["id"], bins[-1]["rank"] = _renumbered(own_bins["id"], renamed), rank
            rows.append(compact)
            details.append(full)
        merged = np.concatenate(rows)
        merged = merged[np.lexsort((merged["order"], merged["rank"], merged["step"]))]
        return Stats(merged, np.concatenate(details), np.concatenate(bins), names)

    def _share(self, limit: int) -> int:
        """What one rank may take of a limit for all."""
        return max(MIB, limit // max(1, len(self._ranks)))

    def stats(
        self,
        rank: int | None = None,
        role: str | None = None,
        name: str | None = None,
        step: int | range | None = None,
    ) -> Stats:
        """Statistics of tensors, sorted by (step, rank, order); of all ranks where ``rank`` is None.

        Args:
            rank: only this rank.
            role: only rows of this role.
            name: only rows of this name, or of names that match this ``fnmatch`` pattern.
            step: only this step, or the steps of this range.
        """
        return self._all_stats.where(rank, role, name, step)

    # -- arrays

    @cached_property
    def _batches(self) -> list[Batch]:
        found: list[Batch] = []
        for reader in self._ranks.values():
            for description, file in reader.arrays:
                if description.kind == "batch":
                    found.append(Batch(description, reader.rank, partial(reader.load, file)))
                    for fault in found[-1].faults:
                        self._damage.add(file.relative, Damage(what=fault, where=file.relative, lost="the field"))
        return sorted(found, key=lambda each: (each.step, each.rank, each.micro))

    def batches(self, rank: int | None = None, step: int | None = None) -> list[Batch]:
        """Captured micro-batches, sorted by (step, rank, micro); arrays are loaded when touched."""
        return [each for each in self._batches if rank in (None, each.rank) and step in (None, each.step)]

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return [
            Tensor(description, reader.rank, load, key, start)
            for reader in self._ranks.values()
            for whole, file in reader.arrays
            for load in (cache(partial(reader.load, file)),)  # many tensors may lie in one array
            for description, key, start in tensors_in(whole)
        ]

    def tensors(self, pattern: str = "*", rank: int | None = None) -> list[Tensor]:
        """Full arrays whose ``group/name`` matches the ``fnmatch`` pattern, by rank and in the order written."""
        return [each for each in self._tensors if rank in (None, each.rank) and fnmatchcase(each.name, pattern)]

    def rng(self, step: int, rank: int = 0, micro: int = 0) -> dict[str, Any] | None:
        """Random-generator states as they were given (bytes, tuples, arrays), or None where none were captured."""
        for reader in self._of(rank):
            for description, file in reader.arrays:
                if description.kind == "rng" and description.step == step and (description.micro or 0) == micro:
                    try:
                        return {name: unpack_state(each, file.read) for name, each in description.attributes.items()}
                    except (EvidenceError, KeyError, ValueError, TypeError) as error:
                        what = error.what if isinstance(error, EvidenceError) else "not a random-generator state"
                        self._damage.add(file.relative, Damage(what=what, where=file.relative, lost="the state"))
        return None

    def rng_steps(self) -> tuple[int, ...]:
        """Steps for which random-generator states were captured."""
        found = (description for reader in self._ranks.values() for description, _ in reader.arrays)
        return tuple(sorted({each.step for each in found if each.kind == "rng"}))

    # -- records

    def record_streams(self) -> tuple[str, ...]:
        """Names of the record streams, sorted."""
        return tuple(sorted({name for reader in self._ranks.values() for name in reader.streams}))

    def records(self, stream: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Records of a stream in file order, rank after rank; ``rank`` is always set.

        A known number field holds NaN and infinities as floats; fields that the format does not know are kept.
        """
        with collector_still():
            found = [record for reader in self._ranks.values() for record in reader.records(stream)]
        return found if rank is None else [record for record in found if record["rank"] == rank]

    def columns(self, stream: str) -> RecordColumns:
        """The same records of all ranks as columns; for streams of many records, of which few fields are looked at."""
        if stream not in self._columns:
            with collector_still():
                self._columns[stream] = RecordColumns(
                    [chunk for reader in self._ranks.values() for chunk in reader.columns(stream)]
                )
        return self._columns[stream]

    # -- the whole

    def files(self) -> tuple[AttachedFile, ...]:
        """Originals kept under ``files/``, as the manifest and the ranks list them."""
        listed = list(self.manifest.files or [])
        for reader in self._ranks.values():
            listed += (reader.state.files or []) if reader.state else []
        return tuple(listed)

    def has(self, need: str) -> bool:
        """Whether the evidence named by a rule's need is there; alternatives are joined by ``|``."""
        from .inventory import has

        return any(has(self, each.strip()) for each in need.split("|"))

    def inventory(self) -> Inventory:
        """What the capsule holds, as ``show`` prints it."""
        from .inventory import take_inventory

        return take_inventory(self)

    def replay_items(self) -> tuple[ReplayItem, ...]:
        """The eight items without which a failure cannot be replayed, each present or with what is missing."""
        from .replayable import replay_items

        return replay_items(self)

    def damage(self) -> tuple[Damage, ...]:
        """Everything that is not as it was written, after reading all of the capsule."""
        from .integrity import survey

        survey(self, self._ranks, self._damage)
        return self._damage.all()

    def digest(self) -> str:
        """SHA-256 over all files except ``incident.json`` and temporary ones, as hex (``README.md``)."""
        from .integrity import digest

        return digest(self.path)


def _renumbered(ids: Array, renamed: dict[int, int]) -> Array:
    used, inverse = np.unique(ids, return_inverse=True)
    return np.array([renamed[each] for each in used.tolist()], np.int64)[inverse]


def series(key: SeriesKey, rows: Array, written: Array) -> Series:
    """Columns from packed rows; ``written`` is where each stood in the file."""
    time_ = rows["time"]
    return Series(
        name=key.name,
        rank=key.rank,
        step=rows["step"].astype(np.int64),
        value=rows["value"].astype(np.float64),
        time=None if np.isnan(time_).all() else time_.astype(np.float64),
        unit=key.unit,
        side=key.side,
        written=written,
    )


def _check_format(value: Any, where: str) -> None:
    prefix, _, ours = FORMAT.rpartition("/")
    found = re.fullmatch(rf"{re.escape(prefix)}/(\d{{1,9}})", value) if isinstance(value, str) else None
    if found is None:
        raise EvidenceError(f"format is {value!r:.60}, expected {FORMAT}", where)
    if int(found[1]) > int(ours):
        hint = "upgrade llmconsole"
        raise EvidenceError(
            f"format version {found[1]} is newer than {ours}, the newest this program reads", where, hint
        )
