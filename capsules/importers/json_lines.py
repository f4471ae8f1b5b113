"""JSON lines of metrics: one object a line, a step in it, numbers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from ..errors import EvidenceError
from ..jsonio import decode
from .names import STEPS, TIMES, Naming, folded, is_loss
from .run import Run
from .source import Source

FORMAT = "JSON lines of metrics"

_LOOKED_AT = 20
_DEEPEST = 4
#: Fields that say whether a line is about training or about validation.
_SPLITS = ("mode", "split", "phase", "kind", "stage")
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
        record = _object(line)
        if record is None:
            break
        names = [folded(name) for name, value in _flat(record) if _number(value) is not None]
        found += any(map(is_loss, names)) or (any(name in STEPS for name in names) and len(names) > 1)
    return found > 0


def read(source: Source, out: Run) -> None:
    """Every number of every line, nested names joined by ``/``."""
    naming = Naming()
    step, counted = 0, False
    settled: set[str] = set()
    for count, line in enumerate(source.lines()):
        if not line.strip():
            continue
        record = _object(line)
        if record is None:
            out.note("lines are no JSON objects" if not source.unended else "the last line is torn")
            continue
        fields = {name: value for name, value in _flat(record)}
        keys = {folded(name): name for name in fields}
        at = next((whole for name in STEPS if name in keys and (whole := _step(fields[keys[name]])) is not None), None)
        if at is None:
            at = step if step or not counted else count
            if not any(name in keys for name in STEPS) and not step:
                out.note("lines name no step: a step is the number of the line")
                at = count
        else:
            step = at
        counted = True
        said = (str(fields[keys[name]]).lower() for name in _SPLITS if name in keys)
        before = "eval_" if any(each in _HELD_OUT for each in said) else ""
        if before not in settled:
            settled.add(before)
            naming.settle((name for name, value in fields.items() if _number(value) is not None), before)
        _write(out, naming, at, fields, keys, before)


def _write(out: Run, naming: Naming, step: int, fields: dict[str, Any], keys: dict[str, str], before: str) -> None:
    time = next((each for name in TIMES if name in keys and (each := _time(fields[keys[name]])) is not None), None)
    for name, value in fields.items():
        if folded(name) in STEPS or (folded(name) in TIMES and time is not None):
            continue
        if (number := _number(value)) is not None:
            out.scalar(naming(name, before), step, number, time)


def _object(line: bytes) -> dict[str, Any] | None:
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
