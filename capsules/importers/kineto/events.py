"""The events of a Chrome trace, piece by piece: a trace of a gigabyte is never in memory as a whole.

Profilers write one array of objects. It is cut where one object ends and the next begins, and each piece is decoded by
itself; a piece that is no JSON (a bare NaN, a backslash that escapes nothing) is repaired, or read event by event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import msgspec

from ...errors import EvidenceError
from ...limits import MIB
from ..prefix import decode_prefix
from ..source import Source

#: Bytes of one piece, and of what stands before and after the array.
_PIECE, _HEADER = 4 * MIB, 64 * MIB
#: Bytes without the end of an event after which the rest of a file is given up.
_LOST = 256 * MIB
#: Ends of events that are tried, from the last one on, and ends of the array.
_TRIED, _ENDS = 8, 256

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"(?:\}\s*|^\s*)\]")
_NO_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)-?(?:NaN|nan|[iI]nf(?:inity)?)(?=\s*[,}\]])")
_NO_ESCAPE = re.compile(rb'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


class Args(msgspec.Struct):
    """What is used of an event's arguments; the producers' types vary, so all are checked where they are used."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    bytes: Any = msgspec.field(default=None, name="Bytes")
    collective: Any = msgspec.field(default=None, name="Collective name")
    numel_in: Any = msgspec.field(default=None, name="In msg nelems")
    numel_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_desc: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    call_stack: Any = msgspec.field(default=None, name="Call stack")


class Event(msgspec.Struct):
    """One event; ``ts`` and ``dur`` in microseconds, whatever ``displayTimeUnit`` says."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: Args | None = None


_events = msgspec.json.Decoder(list[Event])
_event = msgspec.json.Decoder(Event)
_any = json.JSONDecoder()


class Trace:
    """A trace that is being read.

    Attributes:
        header: what stands beside the events (``distributedInfo``, ``deviceProperties``, …); whole after ``pieces``.
        torn: whether events are missing at the end.
    """

    def __init__(self, source: Source) -> None:
        self.header: dict[str, Any] = {}
        self.torn = False
        self._source = source

    def pieces(self) -> Iterator[list[Event]]:
        """The events, some thousands at a time, in file order.

        Raises:
            EvidenceError: there is no array of events.
        """
        chunks = self._source.chunks(_PIECE)
        rest, bare = self._begin(chunks)
        for chunk in chunks:
            rest += chunk
            found, cut = self._longest(rest)
            if found:
                yield found
                rest = rest[cut:].lstrip().removeprefix(b",")
            if len(rest) > _LOST:
                self.torn = True
                self._source.note("the trace has no end of an event where one is due; the rest was left out")
                return
        yield from self._finish(rest, bare)

    def _begin(self, chunks: Iterator[bytes]) -> tuple[bytes, bool]:
        """What follows the array's bracket, and whether nothing stands around it."""
        head = b""
        for chunk in chunks:
            head += chunk
            found = _ARRAY.search(head)
            if found is not None:
                self.header |= _members(head[: found.start()] + b'"traceEvents":[]}')
                return head[found.end() :], False
            if (bare := _BARE.match(head)) is not None:
                return head[bare.end() :], True
            if len(head) > _HEADER:
                break
        raise EvidenceError("has no array of events", str(self._source.path))

    def _finish(self, rest: bytes, bare: bool) -> Iterator[list[Event]]:
        """The last events, and what stands after the array."""
        if not rest.strip():
            self.torn = True
            self._source.note("the trace is torn: it ends between two events")
            return
        for mended in (False, True):
            rest = _mended(rest) if mended else rest
            for end in islice(_END.finditer(rest), _ENDS):
                closing = end.end() - 1
                if (found := _decoded(rest[:closing])) is not None:
                    yield found
                    if _ARRAY.search(rest, closing) is not None:
                        self._source.note("another trace follows in the file; the first one was read")
                    if not bare:
                        self.header |= _members(b"{" + rest[closing + 1 :].lstrip().removeprefix(b","))
                    return
        yield self._repaired(rest, last=not bare)

    def _longest(self, part: bytes) -> tuple[list[Event], int]:
        """The events up to the last cut between two of them, and where that is."""
        cuts = [found.start() + 1 for found in _BETWEEN.finditer(part, max(0, len(part) - MIB))][: -_TRIED - 1 : -1]
        for mended in (False, True):
            for cut in cuts:
                if found := _decoded(_mended(part[:cut]) if mended else part[:cut]):
                    return found, cut
        return (self._repaired(part[: cuts[0]]), cuts[0]) if cuts else ([], 0)

    def _repaired(self, part: bytes, *, last: bool = False) -> list[Event]:
        """The events of a piece that is no JSON, one by one: those that can be read."""
        part = _mended(part)
        if not last and (found := _decoded(part)) is not None:
            return found
        events: list[Event] = []
        lost, begin, closed = 0, 0, False
        for end in [*(each.start() + 1 for each in _BETWEEN.finditer(part)), len(part)]:
            text = part[begin:end].strip().removeprefix(b",").strip()
            if (event := _one(text)) is not None:
                events.append(event)
            elif end < len(part) and text.count(b"{") > text.count(b"}") and end - begin < MIB:
                continue  # the cut lies inside an event: go on to the next one
            else:
                found, left, closed = _several(text)
                events += found
                lost += left
            begin = end
            if closed:
                break
        if lost:
            self._source.note("events were left out: torn, or no JSON", lost)
        if last and not closed:
            self.torn = True
            self._source.note("the trace is torn: its last events are missing")
        return events


def _mended(part: bytes) -> bytes:
    """A piece without what is no JSON and yet is written: bare NaN, single backslashes, control bytes, broken UTF-8."""
    part = _CONTROL.sub(b" ", _NO_ESCAPE.sub(rb"\\\\", _NO_NUMBER.sub(rb"\1null", part)))
    return part.decode("utf-8", "replace").encode("utf-8", "replace")


def _one(text: bytes) -> Event | None:
    try:
        return _event.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _decoded(part: bytes) -> list[Event] | None:
    try:
        return _events.decode(b"[" + part.strip().removesuffix(b",") + b"]")
    except (msgspec.DecodeError, RecursionError):
        return None


def _several(text: bytes) -> tuple[list[Event], int, bool]:
    """The events at the beginning of a text, how many others were passed over, and whether the array ends there."""
    signs, events, lost, at = text.decode("utf-8", "replace"), list[Event](), 0, 0
    while True:
        at += len(signs[at:]) - len(signs[at:].lstrip(" \t\r\n,"))
        if at >= len(signs) or signs[at] == "]":
            return events, lost, signs[at : at + 1] == "]"
        try:
            value, at = _any.raw_decode(signs, at)
            events.append(msgspec.convert(value, Event))
        except msgspec.ValidationError:
            lost += 1
        except (ValueError, RecursionError):
            return events, lost + 1, False


def _members(text: bytes) -> dict[str, Any]:
    """The members of an object, as far as it can be read."""
    text = _NO_NUMBER.sub(rb"\1null", text)
    try:
        value = decode_prefix(text, "header").value
    except EvidenceError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
