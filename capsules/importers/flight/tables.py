"""Tables of what many calls have in common: operations, shapes, dtypes and stacks, each kept once."""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from ...dtypes import torch_name
from ...limits import MAX_INT64
from ...plain_pickle import integer, text

#: Frames of a stack, tensors of a call, dimensions of a tensor.
_FRAMES, _TENSORS, _DIMENSIONS = 24, 4096, 64
_OPERATION = re.compile(r"(?:(\w+):)?\s*(.*?)(?:\s+(\d{1,9})\s*(?:->|<-)\s*(\d{1,9}))?\s*", re.DOTALL)


@dataclass(frozen=True)
class Operation:
    """What ``nccl:send 0->3`` says: the name without its back end, and for a direct call this rank and the other one.

    Both are numbers within the group.
    """

    name: str
    backend: str = ""
    own: int | None = None
    other: int | None = None

    @property
    def direct(self) -> bool:
        """Whether it is a send or a receive."""
        return self.name in ("send", "recv", "isend", "irecv")


class Table:
    """Different values in the order in which they came up; many calls share each of them.

    Args:
        key: what identifies a value, made from whatever a dump holds in its place.
        show: the value, made from its key.
    """

    def __init__(self, key: Callable[[Any], Hashable], show: Callable[[Any], Any]) -> None:
        self.values: list[Any] = []
        self._key, self._show = key, show
        self._places: dict[Hashable, int] = {}

    def places(self, keys: Sequence[Hashable]) -> list[int]:
        """Where the values stand that have these keys."""
        places = list(map(self._places.get, keys))
        if None in places:
            for key in dict.fromkeys(key for key, place in zip(keys, places, strict=True) if place is None):
                self._places[key] = len(self.values)
                self.values.append(self._show(key))
            places = [self._places[key] if place is None else place for key, place in zip(keys, places, strict=True)]
        return cast("list[int]", places)

    def odd(self, raw: Iterable[Any]) -> list[int]:
        """Where values stand some of which are not as recorders write them; one that is shared is looked at once."""
        seen: dict[int, Hashable] = {}
        keys: list[Hashable] = []
        for each in raw:
            if id(each) not in seen:
                seen[id(each)] = self._key(each)
            keys.append(seen[id(each)])
        return self.places(keys)


class Tables:
    """What the calls of all dumps of a job have in common."""

    def __init__(self) -> None:
        self.operations = Table(lambda value: text(value, 200) or "", _operation)
        self.shapes = Table(_shapes, lambda key: [list(shape) for shape in key])
        self.dtypes = Table(_dtypes, lambda key: [torch_name(each) for each in key])
        self.frames = Table(_frames, _stack)


def all_of(values: Iterable[Any], kind: type[Any]) -> bool:
    """Whether all values are of exactly this type."""
    return set(map(type, values)) <= {kind}


def count(value: Any) -> int | None:
    """A number of at least 0, or None."""
    if type(value) is not int:
        value = integer(value)
    return value if value is not None and 0 <= value <= MAX_INT64 else None


def counts(kept: list[dict[str, Any]], name: str, lost: Counter[str]) -> list[int | None]:
    """The numbers that entries have under a name; ``lost`` counts those that are none, by name."""
    raw = [entry.get(name) for entry in kept]
    if all_of(raw, type(None)):
        return cast("list[int | None]", raw)
    if all_of(raw, int) and raw and min(raw) >= 0 and max(raw) <= MAX_INT64:  # pyright: ignore[reportArgumentType]
        return cast("list[int | None]", raw)
    found = [None if each is None else count(each) for each in raw]
    lost[name] += found.count(None) - raw.count(None)
    return found


def seconds(kept: list[dict[str, Any]], name: str, lost: Counter[str]) -> list[float | None]:
    """Nanoseconds as seconds; 0 is no time."""
    return [each / 1e9 if each else None for each in counts(kept, name, lost)]


def sized(kept: list[dict[str, Any]], name: str, table: Table, lost: Counter[str]) -> list[int]:
    """Places of lists of shapes. What is longer than any shape is looked at once, however many entries share it."""
    raw: list[Any] = [entry.get(name) for entry in kept]
    try:
        if max(map(len, raw)) <= _DIMENSIONS and max(map(len, chain.from_iterable(raw)), default=0) <= _DIMENSIONS:
            keys = [tuple(map(tuple, each)) for each in raw]
            if all(_sizes(list(chain.from_iterable(key))) for key in dict.fromkeys(keys)):
                return table.places(keys)
    except TypeError:
        pass
    return _odd(raw, name, table, lost)


def _odd(raw: list[Any], name: str, table: Table, lost: Counter[str]) -> list[int]:
    """Places of values some of which are not as recorders write them, or of which nothing can be read."""
    places = table.odd(raw)
    empty = {place for place in set(places) if not table.values[place]}
    lost[name] += sum(
        place in empty and each not in (None, "", "[]", [], ()) for each, place in zip(raw, places, strict=True)
    )
    return places


def _sizes(listed: list[Any]) -> bool:
    return all_of(listed, int) and min(listed, default=0) >= 0 and max(listed, default=0) <= MAX_INT64


def typed(kept: list[dict[str, Any]], name: str, table: Table, lost: Counter[str]) -> list[int]:
    """Places of lists of dtypes."""
    raw: list[Any] = [entry.get(name) for entry in kept]
    if all_of(raw, list) and max(map(len, raw)) <= _DIMENSIONS:
        with contextlib.suppress(TypeError):
            keys = [tuple(each) for each in raw]
            if all(all_of(key, str) for key in dict.fromkeys(keys)):
                return table.places(keys)
    return _odd(raw, name, table, lost)


_frame = operator.itemgetter("name", "filename", "line")


def stacked(raw: list[Any], table: Table) -> list[int]:
    """Places of stacks."""
    try:
        return table.places([tuple(map(_frame, frames[:_FRAMES])) if frames else () for frames in raw])
    except (TypeError, KeyError, IndexError):
        return table.odd(raw)


def _operation(value: Any) -> Operation:
    found = _OPERATION.fullmatch((text(value, 200) or "").strip())
    if found is None:
        return Operation((text(value, 80) or "").lower())
    own, other = (int(each) if each else None for each in (found[3], found[4]))
    return Operation(found[2].strip().lower()[:80], (found[1] or "").lower()[:20], own, other)


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes from lists, or from lists that were printed; a flat list of numbers is one shape.

    None at all where one cannot be read: a part of them would be another call.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value[:100_000])
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list | tuple):
        return ()
    rows = list(cast("list[Any]", value))[:_TENSORS]
    if rows and all_of(rows, int):
        rows = [rows]
    shapes: list[tuple[int, ...]] = []
    for row in rows:
        sizes = (
            [count(each) for each in list(cast("list[Any]", row))[:_DIMENSIONS]]
            if isinstance(row, list | tuple)
            else [None]
        )
        if None in sizes:
            return ()
        shapes.append(tuple(each for each in sizes if each is not None))
    return tuple(shapes)


def _dtypes(value: Any) -> tuple[str, ...]:
    """Names of dtypes from lists, or from lists that were printed; none at all where one is no name."""
    if isinstance(value, str):
        value = re.findall(r"\w+", value[:1000])
    listed = list(cast("list[Any]", value))[:_TENSORS] if isinstance(value, list | tuple) else []
    named = [text(each, 60) for each in listed if isinstance(each, str | bytes)]
    return tuple(each for each in named if each) if len(named) == len(listed) else ()


def _frames(value: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Frames as (name, file, line) from mappings or from lines of text."""
    frames: list[tuple[Any, Any, Any]] = []
    for each in list(cast("list[Any]", value))[:_FRAMES] if isinstance(value, list | tuple) else ():
        if isinstance(each, dict):
            entry = cast("dict[str, Any]", each)
            file = text(entry.get("filename"), 1000) or text(entry.get("file"), 1000)
            frames.append((text(entry.get("name"), 500), file, count(entry.get("line"))))
        elif isinstance(each, str):
            frames.append((each[:500], None, None))
    return tuple(frames)


def _stack(key: Any) -> list[dict[str, Any]] | None:
    """Frames as records have them, innermost first; None where there are none."""
    shown: list[dict[str, Any]] = []
    for name, file, line in key:
        parts = {"name": text(name, 500), "file": text(file, 1000), "line": count(line)}
        shown.append({name: part for name, part in parts.items() if part is not None})
    return shown or None
