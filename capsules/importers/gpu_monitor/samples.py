"""What monitors of devices measure, in standard names and units, one sample of a device at a time."""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Sequence
from typing import Any

from ..placement import placed
from ..run import Run

_UNITS = {"B": 1, "KB": 1 << 10, "KIB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20, "GB": 1 << 30, "GIB": 1 << 30}
_NUMBER = re.compile(r"\s*([-+]?\d{1,18}(?:[.,]\d{1,9})?(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z%°']{0,4})")
_MONTHS = {name: at + 1 for at, name in enumerate(re.findall("...", "JanFebMarAprMayJunJulAugSepOctNovDec"))}
#: ``Mon Nov 30 07:25:00 2026``, and in other orders ``30 Nov 2026 07:25:00``.
_WORDS = re.compile(r"\b([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: [A-Z]{2,5})? (\d{4})\b")
_WORDS_TOO = re.compile(r"\b(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}),? (\d\d):(\d\d):(\d\d)(?: ([AP]M))?")
_DIGITS = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
#: Most processes of one device that are listed.
_MOST = 200


class Samples:
    """Writes them: ``memory_device_used``, ``gpu_utilization``, ``gpu_power``, ``gpu_temperature``, and who is there.

    The rank of a series is the device's number; a step is the number of the device's sample, or ``step`` where that is
    set: below 0 no point is written. ``side`` tells the devices of one host from those of another.
    """

    def __init__(self, out: Run, *, step: int | None = None, side: str | None = None) -> None:
        self.out = out
        self.step = step
        self.side = side
        self._count: dict[int, int] = {}
        self._devices: dict[str, int] = {}
        self._listed: dict[int, tuple[tuple[Any, ...], ...]] = {}

    def number(self, identity: str) -> int:
        """The number of a device that is named by its address or serial: in the order in which they come up."""
        return self._devices.setdefault(identity.lower(), len(self._devices))

    def add(
        self,
        device: int,
        time: float | None = None,
        *,
        used: float | None = None,
        total: float | None = None,
        busy: float | None = None,
        power: float | None = None,
        temperature: float | None = None,
        name: str = "",
        clock: float | None = None,
        occupied: float | None = None,
    ) -> None:
        """One sample of one device.

        Args:
            device: its number.
            time: Unix seconds.
            used: bytes that all processes hold together.
            total: its capacity in bytes.
            busy: share of the time in which a kernel ran, 0 to 1.
            power: watts.
            temperature: of the chip, °C.
            name: what its maker calls it.
            clock: of the chip, MHz.
            occupied: share of the memory in use, where a monitor tells no bytes.
        """
        if not 0 <= device < 4096:
            return
        step = self._count.get(device, 0)
        self._count[device] = step + 1
        step = step if self.step is None else self.step
        for series, value, unit in (
            ("memory_device_used", used, "B"),
            ("gpu_utilization", busy, ""),
            ("gpu_power", power, "W"),
            ("gpu_temperature", temperature, "°C"),
            ("gpu_clock", clock, "MHz"),
            ("gpu_memory_share", occupied, ""),
        ):
            if value is not None and step >= 0:
                self.out.scalar(series, step, value, time, unit, self.side, device)
        if (total or name) and self.side is None:
            placed(self.out, device, name=name[:200], memory=round(total) if total else None)

    def processes(self, device: int, found: Sequence[dict[str, Any]], time: float | None = None) -> None:
        """Who is on a device; said again only where it changed."""
        if self.side is not None:
            if found:
                self.out.note("processes on the devices of a second host were left out")
            return
        said = tuple(tuple(sorted(each.items())) for each in found[:_MOST])
        if self._listed.get(device, ()) == said:
            return
        self._listed[device] = said
        step = max(0, self._count.get(device, 1) - 1) if self.step is None else self.step
        step = None if step < 0 else step
        listed = [{key: value for key, value in each.items() if value is not None} for each in found[:_MOST]]
        self.out.event("other_processes", step=step, rank=device, device=device, other_processes=listed, t=time)


def number(text: str) -> float | None:
    """A number before its unit, ``44.00 W``; None for ``N/A``, ``[Not Supported]``, ``-`` and ``ERR!``."""
    found = _NUMBER.match(text)
    return float(found[1].replace(",", ".")) if found else None


def size(text: str, unit: str = "MiB") -> float | None:
    """Bytes of ``1234 MiB``; without a unit in that of the column."""
    found = _NUMBER.match(text)
    if found is None:
        return None
    factor = _UNITS.get((found[2] or unit).upper()) or _UNITS.get(unit.upper(), 1)
    return float(found[1].replace(",", ".")) * factor


def share(text: str) -> float | None:
    """``87 %`` as 0.87."""
    value = number(text)
    return value / 100 if value is not None and 0 <= value <= 100 else None


def moment(text: str) -> float | None:
    """Unix seconds of a date in one of the spellings of monitors, which name no time zone: read as UTC."""
    if (found := _DIGITS.search(text)) is not None:
        parts = [int(each) for each in found.groups()[:6]]
        fraction = int(found[7]) / 10 ** len(found[7]) if found[7] else 0.0
    elif (found := _WORDS.search(text)) is not None:
        parts = [int(found[6]), _MONTHS.get(found[1], 0), *(int(found[at]) for at in (2, 3, 4, 5))]
        fraction = 0.0
    elif (found := _WORDS_TOO.search(text)) is not None:
        hour = int(found[4]) % 12 + 12 * (found[7] == "PM") if found[7] else int(found[4])
        parts = [int(found[3]), _MONTHS.get(found[2], 0), int(found[1]), hour, int(found[5]), int(found[6])]
        fraction = 0.0
    else:
        return None
    year, month, day, hour, minute, second = parts
    if not (1970 < year < 2100 and 0 < month < 13 and 0 < day < 32 and hour < 24 and minute < 60 and second < 61):
        return None
    return timegm((year, month, day, hour, minute, second)) + fraction
