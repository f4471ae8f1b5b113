"""JSON lines of metrics: one object a line, a step in it, numbers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from ..errors import EvidenceError
from ..jsonio import decode
from .names import BEGAN_ANEW, STEPS, TIMES, EpochSteps, Naming, folded, is_loss
from .run import Run
from .source import Source

FORMAT = "JSON lines of metrics"

_LOOKED_AT = 20
_DEEPEST = 4
#: Fields that say whether a line is about training or about validation.
_SPLITS = ("mode", "split", "phase", "kind", "stage", "event", "type")
#: Names of an object that holds the metrics themselves.
_WRAPPERS = ("data", "metrics", "logs", "scalars", "values")
_HELD_OUT = ("val", "eval", "valid", "validation", "test", "dev")


def sniff(source: Source) -> bool:
    """Whether the first lines are objects, and one of them names a loss, or a step beside other numbers."""
    head = source.head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] != b"{":
        return False
    found = 0
    for line in head.split(b"\n")[:_LOOKED_AT]:
        if not line.strip():
            continue
        record = object_of(line)
        if record is None:
            break
        names = [folded(name).rpartition("/")[2] for name, value in _flat(record) if _number(value) is not None]
        found += any(map(is_loss, names)) or (any(name in STEPS for name in names) and len(names) > 1)
    return found > 0


def read(source: Source, out: Run) -> None:
    """Every number of every line, nested names joined by ``/``."""
    records = Records(out)
    for line in source.lines():
        if not line.strip():
            continue
        record = object_of(line)
        if record is None:
            out.note("lines are no JSON objects" if not source.unended else "the last line is torn")
            continue
        records.take(record)


class Records:
    """Writes the numbers of objects, one after another.

    Attributes:
        step: that of the last object; where none has named one yet, how many came before it.
    """

    def __init__(self, out: Run) -> None:
        self._out = out
        self._naming = Naming()
        self._settled: set[str] = set()
        self._epochs = EpochSteps()
        self._stepped, self._count = False, -1
        self.step = 0

    def take(self, record: dict[str, Any], rank: int | None = None) -> None:
        """Write every number of one object; an object without a step is of the step before."""
        for name in _WRAPPERS:
            if isinstance(inner := record.get(name), dict) and not set(inner) & set(record):
                record = {**{key: each for key, each in record.items() if key != name}, **cast("dict[str, Any]", inner)}
        fields = {name: value for name, value in _flat(record)}
        keys = {folded(name): name for name in fields}
        at = next((whole for name in STEPS if name in keys and (whole := _step(fields[keys[name]])) is not None), None)
        self._count += 1
        if at is not None:
            epoch = _number(fields[keys["epoch"]]) if "epoch" in keys else None
            if epoch is not None and 0 <= epoch < 2**53 and epoch == int(epoch):
                at = self._epochs.step(int(epoch), at)
                if self._epochs.began_anew:
                    self._out.note(BEGAN_ANEW, 0)
            self._stepped, self.step = True, min(at, 2**63 - 1)
        elif not self._stepped:
            self._out.note("lines name no step: a step is the number of the line")
            self.step = self._count
        said = (str(fields[keys[name]]).lower() for name in _SPLITS if name in keys)
        before = "eval_" if any(each in _HELD_OUT for each in said) else ""
        if before not in self._settled:
            self._settled.add(before)
            self._naming.settle((name for name, value in fields.items() if _number(value) is not None), before)
        time = next((each for name in TIMES if name in keys and (each := _time(fields[keys[name]])) is not None), None)
        for name, value in fields.items():
            if folded(name) in STEPS or (folded(name) in TIMES and time is not None):
                continue
            if (number := _number(value)) is not None:
                self._out.scalar(self._naming(name, before), self.step, number, time, rank=rank)


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, or None."""
    try:
        record = decode(line.strip())
    except EvidenceError:
        return None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else None


def _flat(record: dict[str, Any], prefix: str = "", depth: int = _DEEPEST) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict) and depth:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}/", depth - 1)
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> float | None:
    """A float from a number, or from the text of one."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or (isinstance(value, str) and len(value) > 60)
    ):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _step(value: Any) -> int | None:
    """A step from ``120``, ``120.0``, ``"120"`` or ``"120/5000"``."""
    number = _number(value.partition("/")[0] if isinstance(value, str) else value)
    return int(number) if number is not None and 0 <= number < 2**63 and number == int(number) else None


def _time(value: Any) -> float | None:
    """Unix seconds; a larger number is in milliseconds, a smaller one is no point in time."""
    number = _number(value)
    if number is None or not 1e8 < number < 1e14:
        return None
    return number if number < 1e11 else number / 1000
