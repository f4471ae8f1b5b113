"""TensorBoard event files, every point kept: events are decoded by the thousand, not one by one.

Source of the schema: tensorboard/compat/proto/{event,summary,tensor}.proto. Nearly all events of a curve are equal
but for wall time, step and value; so one of them is read field by field, and the others that have the same bytes at
all other places are decoded by where those three stand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import EvidenceError
from . import tags
from .arguments import stated_by
from .run import Run
from .source import Source
from .tfrecord import Group, Losses, first_record, pieces
from .wire import BYTES, FIXED32, FIXED64, VARINT, Field, double, fields, signed, text

FORMAT = "TensorBoard event file"

Array = np.ndarray[Any, Any]

#: Rounds of decoding alike events together before the rest of a group is read one by one.
_ROUNDS = 4
_MOST_TEXTS = 2000
_LONGEST_TEXT = 4000
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = 1, 2, 3, 5
_TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 2, 8, 9
_OTHER_KINDS = {3: "histogram", 4: "image", 5: "histogram", 6: "audio"}
_DTYPE, _SHAPE, _CONTENT, _STRINGS = 1, 2, 4, 8
#: Types of a tensor (tensorboard/compat/proto/types.proto) whose content is one number.
_CONTENTS = {
    **{1: "<f4", 2: "<f8", 3: "<i4", 4: "<u1", 5: "<i2", 6: "<i1", 9: "<i8"},
    **{10: "<u1", 14: "<u2", 17: "<u2", 19: "<f2", 22: "<u4", 23: "<u8"},
}
_BFLOAT16 = 14
_STRING = 7


class Value(NamedTuple):
    """One number of an event: its tag, and the bytes that hold it; or the number itself where it is a varint."""

    tag: str
    start: int
    end: int
    dtype: str
    number: float = 0.0


class _Text(str):
    """The words of a text summary."""

    __slots__ = ()


@dataclass
class _Layout:
    """What an event says, and where: values by place, texts, and how many values of other kinds it holds."""

    values: list[Value] = field(default_factory=list[Value])
    texts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    others: list[str] = field(default_factory=list[str])
    wall: float = float("nan")
    step: int = 0


@dataclass
class _Points:
    """Points of one tag in one piece of the file, in groups that are not in order yet."""

    place: list[Array] = field(default_factory=list[Array])
    step: list[Array] = field(default_factory=list[Array])
    value: list[Array] = field(default_factory=list[Array])
    wall: list[Array] = field(default_factory=list[Array])


def sniff(source: Source) -> bool:
    """Whether the file begins with a record whose checksum holds and which is an event."""
    record = first_record(source.head)
    if not record or record[0] != _WALL_TIME << 3 | FIXED64:
        return False
    return len(record) < 11 or record[9] >> 3 in (_STEP, _FILE_VERSION, _SUMMARY)


def read(source: Source, out: Run) -> None:
    """Write every scalar under its tag; what else the file holds is counted in a note."""
    _Reader(out).read(source)


class _Reader:
    """Decodes one event file."""

    def __init__(self, out: Run) -> None:
        self._out = out
        self._names = tags.Names()
        self._points: dict[str, _Points] = {}
        self._texts: dict[str, str] = {}
        self._others: dict[str, int] = {}
        self._seen = 0
        self._latest = 0.0  # wall time of an event
        self._samples: set[str] = set()

    def read(self, source: Source) -> None:
        losses = Losses()
        events = 0
        for groups in pieces(source.chunks(), losses):
            events += sum(len(group.place) for group in groups)
            for group in groups:
                self._decode(group)
            self._write()
        if not events:
            raise EvidenceError("holds no whole record", str(source.path))
        self._say(losses, source.path.name)

    # -- decoding

    def _decode(self, group: Group) -> None:
        """One group of equally long events: those that begin with wall time and step, by the width of the step."""
        rows, places = group.rows, group.place
        regular = np.zeros(len(rows), np.bool_)
        if rows.shape[1] > 20:
            regular = rows[:, 0] == (_WALL_TIME << 3 | FIXED64)
            stepped = rows[:, 9] == (_STEP << 3 | VARINT)
            goes_on = rows[:, 10:20] >= 0x80
            width = np.where(stepped, np.argmin(goes_on, axis=1) + 1, 0)
            regular &= ~(stepped & goes_on.all(axis=1))
            for each in np.unique(width[regular]):
                members = np.flatnonzero(regular & (width == each))
                self._decode_alike(rows[members], places[members], int(each))
        for at in np.flatnonzero(~regular):
            self._decode_one(rows[at], int(places[at]))

    def _decode_alike(self, rows: Array, places: Array, width: int) -> None:
        """Events whose steps are ``width`` bytes wide (0: left out, as protocol buffers do for zero)."""
        wall = np.ascontiguousarray(rows[:, 1:9]).view("<f8").ravel()
        self._latest = max(self._latest, float(wall[-1]))
        step = np.zeros(len(rows), np.uint64)
        for byte in range(width):
            step |= (rows[:, 10 + byte] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * byte)
        step = step.view(np.int64)
        body = rows[:, 9 + (1 + width if width else 0) :]
        left = np.arange(len(rows))
        for _ in range(_ROUNDS):
            if not len(left):
                return
            layout = self._layout(body[left[0]].tobytes())
            if layout is None:
                break
            spots = _spots(layout)
            bare = body[left]
            for start, end in spots:
                bare[:, start:end] = 0
            unlike: list[Array] = []
            for same in _classes(bare):
                members = left[same]
                found = self._layout(body[members[0]].tobytes())
                if found is None or _spots(found) != spots:
                    unlike.append(members)
                    continue
                for value in found.values:
                    numbers = _numbers(body[members, value.start : value.end], value)
                    self._keep(value.tag, places[members], step[members], numbers, wall[members])
                self._keep_others(found, len(members))
            left = np.concatenate(unlike) if unlike else left[:0]
        for at in left:
            self._decode_one(rows[at], int(places[at]))

    def _decode_one(self, row: Array, place: int) -> None:
        data = row.tobytes()
        layout = self._layout(data)
        if layout is None:
            kind = "unreadable event"
            self._others[kind] = self._others.get(kind, 0) + 1
            return
        for value in layout.values:
            number = _numbers(np.frombuffer(data[value.start : value.end], np.uint8)[None, :], value)
            self._keep(value.tag, np.array([place]), np.array([layout.step]), number, np.array([layout.wall]))
        self._keep_others(layout, 1)

    def _layout(self, data: bytes) -> _Layout | None:
        """What an event, or what of it follows the step, says; None where it is no protocol buffer."""
        layout = _Layout()
        try:
            for each in fields(data):
                if each.number == _WALL_TIME and each.wire == FIXED64:
                    layout.wall = double(data, each)
                elif each.number == _STEP and each.wire == VARINT:
                    layout.step = signed(each.value)
                elif each.number == _SUMMARY and each.wire == BYTES:
                    for value in fields(data, each.start, each.end):
                        if value.number == 1 and value.wire == BYTES:
                            _read_value(data, value, layout)
        except EvidenceError:
            return None
        return layout

    # -- keeping

    def _keep(self, tag: str, place: Array, step: Array, value: Array, wall: Array) -> None:
        points = self._points.setdefault(tag, _Points())
        points.place.append(place)
        points.step.append(step)
        points.value.append(value)
        points.wall.append(wall)

    def _keep_others(self, layout: _Layout, count: int) -> None:
        for tag, words in layout.texts:
            if tag in self._texts or len(self._texts) < _MOST_TEXTS:
                self._texts[tag] = words[:_LONGEST_TEXT]
        for kind in layout.others:
            self._others[kind] = self._others.get(kind, 0) + count

    def _write(self) -> None:
        """Write the points of a piece in the order of the file."""
        for tag, points in sorted(self._points.items(), key=lambda each: min(int(part[0]) for part in each[1].place)):
            place = np.concatenate(points.place)
            order = np.argsort(place, kind="stable")
            step, value, wall = (np.concatenate(each)[order] for each in (points.step, points.value, points.wall))
            named = self._names.of(tag)
            if named.factor != 1.0:
                value = value * named.factor
            if tag.endswith(" vs samples"):
                self._samples.add(tag)
            self._out.scalars(named.name, step, value, wall, unit=named.unit)
            self._seen += len(step)
        self._points.clear()

    def _say(self, losses: Losses, name: str) -> None:
        """Notes about the file, and what its texts state of the job."""
        out = self._out
        if self._texts:
            arguments = {tag.removesuffix("/text_summary"): words for tag, words in self._texts.items()}
            out.manifest({**stated_by(arguments), "config": arguments})
        if not self._seen:
            message = "no scalar was logged: the job ended, or was stopped, before its first report"
            began = self._latest if 0 < self._latest < float("inf") else None
            out.event("log", level="warning", type="nothing_logged", message=f"{name}: {message}", t=began)
            out.note(message)
        if self._samples:
            out.note("the steps of the series named '… vs samples' count samples", len(self._samples))
        for kind, count in self._others.items():
            out.note(f"{kind} values are not imported", count)
        if losses.torn:
            out.note(f"the last record is torn: {losses.torn:,} bytes left out, everything before is kept")
        if losses.damaged:
            out.note("damaged records, or places where the framing is broken, left out", losses.damaged)
        if losses.oversized:
            out.note("records of more than 64 MiB left out", losses.oversized)
        if losses.unread:
            out.note("reading stopped at damage that goes on for too long; everything before is kept")


def _read_value(data: bytes, summary: Field, layout: _Layout) -> None:
    """One value of a summary: a number, a text, or something else."""
    tag, number = "", None
    for each in fields(data, summary.start, summary.end):
        if each.number == _TAG and each.wire == BYTES:
            tag = text(data, each)
        elif each.number == _SIMPLE_VALUE and each.wire == FIXED32:
            number = Value("", each.start, each.end, "<f4")
        elif each.number == _TENSOR and each.wire == BYTES:
            tensor = _read_tensor(data, each)
            if isinstance(tensor, Value):
                number = tensor
            elif isinstance(tensor, _Text):
                layout.texts.append((tag, tensor))  # the tag comes first in the schema
            else:
                layout.others.append("tensor")
        elif each.number in _OTHER_KINDS and each.wire == BYTES:
            layout.others.append(_OTHER_KINDS[each.number])
    if number is not None:
        layout.values.append(number._replace(tag=tag))


def _read_tensor(data: bytes, tensor: Field) -> Value | _Text | None:
    """The one number of a scalar tensor, a text, or None for anything else."""
    dtype, elements = 0, 1
    content: Field | None = None
    listed: list[Field] = []
    for each in fields(data, tensor.start, tensor.end):
        if each.number == _DTYPE:
            dtype = each.value
        elif each.number == _SHAPE and each.wire == BYTES:
            elements = _elements(data, each)
        elif each.number == _CONTENT and each.wire == BYTES:
            content = each
        elif each.number > _CONTENT:
            listed.append(each)
    if dtype == _STRING:
        return _Text("\n".join(text(data, each) for each in listed if each.number == _STRINGS and each.wire == BYTES))
    kind = _CONTENTS.get(dtype)
    if elements != 1 or kind is None:
        return None
    if content is None and len(listed) == 1:
        if kind not in ("<f4", "<f8"):
            return _listed_integer(data, listed[0]) if np.dtype(kind).kind in "iu" and dtype != _BFLOAT16 else None
        content = listed[0]  # a list of one: its bytes are the number's
    if content is None or content.end - content.start != np.dtype(kind).itemsize:
        return None
    return Value("", content.start, content.end, "bf16" if dtype == _BFLOAT16 else kind)


def _listed_integer(data: bytes, listed: Field) -> Value | None:
    """A list of one varint, packed or not."""
    packed = b"\x08" + data[listed.start : listed.end] if listed.wire == BYTES else None
    found = listed if packed is None else next(fields(packed), None)
    if found is None or found.wire != VARINT or (packed is not None and found.end != len(packed)):
        return None
    return Value("", listed.start, listed.start, "", float(signed(found.value)))


def _elements(data: bytes, shape: Field) -> int:
    """Elements of a tensor by its shape."""
    product = 1
    for dimension in fields(data, shape.start, shape.end):
        if dimension.number == 2 and dimension.wire == BYTES:
            sizes = [each.value for each in fields(data, dimension.start, dimension.end) if each.number == 1]
            product *= sizes[0] if sizes else 0
    return product


def _spots(layout: _Layout) -> list[tuple[int, int]]:
    return [(value.start, value.end) for value in layout.values]


def _numbers(content: Array, value: Value) -> Array:
    """float64[N] from uint8[N, W]."""
    if not value.dtype:
        return np.full(len(content), value.number)
    content = np.ascontiguousarray(content)
    if value.dtype == "bf16":
        return (content.view("<u2").ravel().astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return content.view(value.dtype).ravel().astype(np.float64)


def _classes(rows: Array) -> list[Array]:
    """Indices of equal rows of uint8[N, L], class by class."""
    if (rows == rows[0]).all():
        return [np.arange(len(rows))]
    words = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8), np.uint8)
    words[:, : rows.shape[1]] = rows
    mixed = words.view(np.uint64) * _WEIGHTS[: words.shape[1] // 8] if words.shape[1] // 8 <= len(_WEIGHTS) else None
    if mixed is None:  # long rows are rare and few: their bytes are their class
        keys = np.array([hash(row.tobytes()) for row in rows], np.int64).view(np.uint64)
    else:
        mixed ^= mixed >> np.uint64(32)
        keys = mixed.sum(axis=1, dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    classes: list[Array] = []
    for members in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        same = (rows[members] == rows[members[0]]).all(axis=1)
        classes.append(members[same])
        classes += [members[at : at + 1] for at in np.flatnonzero(~same)]  # a collision: each by itself
    return classes


#: Odd numbers that nobody can know before: no file is made so that its rows collide.
_WEIGHTS = np.frombuffer(os.urandom(512), np.uint64) | np.uint64(1)
