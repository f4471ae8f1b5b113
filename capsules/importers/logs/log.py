"""What the readers of a log's lines share: where the run stands, who prints, how numbers and times are written."""

from __future__ import annotations

import calendar
import datetime
import re
import time
from typing import Any, Protocol

from ..run import Run
from .attempts import Attempts
from .prefixes import WHO, WHO_BEGINS, WRAPPED, common, line_numbers, place

#: A number as programs print it: thousands separators, exponents, nan and inf.
NUMBER = r"[-+]?(?:\d[\d,_]{0,40}\.?\d{0,40}(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf(?:inity)?)"

_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
#: What an actor says of its own rank, as Ray Train and torch print it.
_OWN_RANK = re.compile(r"\[rank=(\d{1,6}), world_size=|\[(?:PG .{1,80}? )?Rank (\d{1,6})\]")
#: Actors of one log that are told apart.
_MOST_ACTORS = 10_000
#: glog's and Python's own: ``[E1206 18:44:12.715298746 …``, ``[rank1]:[E626 06:24:44.9…``: month and day, no year.
_SHORT_TIME = re.compile(r"(?:^|[\[\s:])[DIWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})\b")
#: What names a rank of the whole job; other prefixes may count the processes of one machine.
_GLOBAL = ("[rank", "(rank", "<rank")
#: What torchrun puts before the lines of its own processes, by their number on one machine.
_LOCAL = ("[default", "[trainer")
_TWO_DAYS = 2 * 86_400
_BYTES = {"B": 1, "BYTES": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Reader(Protocol):
    """Reads the lines of one program.

    Attributes:
        marks: bytes of which one is in every line that the reader knows.
    """

    marks: tuple[bytes, ...]

    @property
    def open(self) -> bool:
        """Whether the reader waits for the lines that follow, whatever is in them."""
        ...

    def take(self, line: str) -> bool:
        """Use a line; say whether it was one of this program's."""
        ...

    def close(self) -> None:
        """The log ends here."""
        ...


class Stateless:
    """A reader to which a line is a line, whatever came before."""

    open = False

    def close(self) -> None:
        """Nothing waits for the end."""


class Log:
    """One log while it is read.

    Attributes:
        run: where evidence goes.
        rank: who printed the line that is read now; 0 where the line does not say.
        step: the last training step that any line spoke of.
        numbered: whether ``12: `` before a line is its number, as grep -n writes it, and no rank.
        machines: whether each line begins with the name of the machine, or container, that it comes from.
        machine: the one that the last line came from that names one.
        leader: the program whose lines report training steps; empty before the first.
        local: the process of one machine that prints, where the prefix counts these and not the ranks of the job.
        locals: the processes that such prefixes name.
        told: whether the line, or the file's name, says surely which rank of the job prints.
        anonymous: whether nothing at all says who prints: in the log of several ranks it may be any.
        attempts: of the job, with the events of how they ended.
        modified: Unix seconds of the file's last modification: what tells the year where lines tell none.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.home = run.rank
        self.rank = run.rank
        self.step: int | None = None
        self.leader = ""
        self.numbered = self.machines = False
        self.machine = ""
        self._common: re.Pattern[str] | None = None
        self.told = self.named = self.anonymous = False
        self.local: int | None = None
        self.locals: set[int] = set()
        self.attempts = Attempts(run)
        self.modified = 0.0
        self._day, self._midnight = ("", "", ""), 0
        self._stamp = ""
        self._actors: dict[str, int] = {}

    def begins(self, head: str) -> None:
        """Learn from the first lines of the file what is no part of any of them."""
        self.numbered = line_numbers(head)
        if (found := common(head)) is not None:
            self._common, self.machines = found.pattern, bool(found.places)

    def scalar(
        self, name: str, step: int, value: float, time: float | None = None, unit: str = "", side: str | None = None
    ) -> None:
        """One point of the rank that prints."""
        self.run.scalar(name, step, value, time, unit, side, self.rank)

    def event(self, kind: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        """An event at ``step``, else where the run stands."""
        at = self.step if step is None else step
        self.run.event(kind, step=at, rank=self.rank if rank is None else rank, **fields)

    def incident(self, kind: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        """An event of how the job, or a rank, ended; it is past where training goes on after it."""
        at = self.step if step is None else step
        self.attempts.event(kind, self.rank if rank is None else rank, step=at, **fields)

    def reached(self, step: int, by: str) -> None:
        """A program logged a training step."""
        self.attempts.reached(step, None if self.anonymous else self.rank)
        self.step = step
        self.leader = self.leader or by

    def time(self, line: str) -> float | None:
        """Unix seconds of the time stamp near the beginning of a line. Logs name no time zone: read as UTC."""
        found = _TIME.search(line, 0, 120)
        if found is None and (short := self._short_time(line)) is not None:
            return short
        if found is None and (found := _TIME.match(self._stamp)) is None:
            return None
        year, month, day, hour, minute, second, fraction = found.groups()
        if (year, month, day) != self._day:
            try:
                self._midnight = calendar.timegm((int(year), int(month), int(day), 0, 0, 0))
            except (ValueError, OverflowError):
                return None
            self._day = (year, month, day)
        whole = self._midnight + int(hour) * 3600 + int(minute) * 60 + int(second)
        return whole + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)

    def _short_time(self, line: str) -> float | None:
        """A time without its year: that of the lines before, else of the file, which is no older than its lines."""
        found = _SHORT_TIME.search(line, 0, 120)
        if found is None or not self.modified:
            return None
        month, day, hour, minute, second = (int(each) for each in found.groups()[:5])
        year = int(self._day[0]) if self._day[0] else time.gmtime(self.modified).tm_year
        try:
            datetime.date(year, month, day)
            whole = calendar.timegm((year, month, day, hour, minute, second))
            if not self._day[0] and whole > self.modified + _TWO_DAYS:
                whole = calendar.timegm((year - 1, month, day, hour, minute, second))
        except (ValueError, OverflowError):
            return None
        return whole + int(found[6]) / 10 ** len(found[6])

    def owner(self, line: str) -> str:
        """Take the prefix off that says which rank printed the line, and remember the rank."""
        self.rank, self.told, self.local, self._stamp = self.home, self.named, None, ""
        said = self.named
        if line[:1] in "2[(" and (wrapped := WRAPPED.match(line)) is not None:
            line, self._stamp = line[wrapped.end() :], wrapped[1] or ""
            if wrapped[2]:
                said = self._acted(wrapped[2], line) or said
        if self._common is not None and (begun := self._common.match(line)) is not None:
            self._stamp, self.machine = begun.groupdict().get("time") or self._stamp, place(begun)
            line = line[begun.end() :]
        while line[:1] in WHO_BEGINS and (found := WHO.match(line)) is not None:
            if not (found[3] and self.numbered):
                self.rank = int(next(filter(None, found.groups())))
                self.told, said = line.startswith(_GLOBAL) or bool(found[6]), True
                self.local = self.rank if line.startswith(_LOCAL) else None
                if self.local is not None:
                    self.locals.add(self.local)
            line = line[found.end() :]
        self.anonymous = not said
        return line

    def _acted(self, actor: str, line: str) -> bool:
        """Take the rank of an actor that has told it once; whether it has."""
        if (found := _OWN_RANK.search(line)) is not None and len(self._actors) < _MOST_ACTORS:
            self._actors.setdefault(actor, int(found[1] or found[2]))
        if actor in self._actors:
            self.rank, self.told = self._actors[actor], True
        return actor in self._actors


def number(text: str) -> float | None:
    """A float from what a program printed, or None."""
    try:
        return float(text)
    except ValueError:
        try:
            return float(text.replace(",", ""))
        except ValueError:
            return None


def count(text: str) -> int | None:
    """A step or another count, thousands separators allowed; None where it does not fit 63 bits."""
    try:
        value = int(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 <= value < 1 << 63 else None


def size(text: str, unit: str) -> int | None:
    """Bytes of ``1.5`` and ``GiB``; GB and MB are taken for GiB and MiB, as every program here means them."""
    value = number(text)
    unit = unit.upper()
    factor = _BYTES.get(unit) or _BYTES.get(f"{unit[:1]}I{unit[1:]}")
    if value is None or factor is None or not 0 <= value * factor < 1 << 62:
        return None
    return round(value * factor)
