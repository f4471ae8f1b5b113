"""What nvidia-smi prints: its table, ``dmon`` and ``pmon``, and the full report of ``-q``, line by line."""

from __future__ import annotations

import re
from typing import Any

from .samples import Samples, moment, number, share, size

_DEVICE = re.compile(
    r"^\|\s{1,4}(\d{1,4})\s{1,4}(\S.{0,60}?)\s+(?:On|Off|N/A|TCC|WDDM|MCDM|ERR!?)\s*\|\s*([0-9A-Fa-f]{4,8}:)?"
)
_USE = re.compile(
    r"^\|\s*(?:\S{1,8})?\s+(\S{1,6})\s+\S{1,6}\s+(\S{1,8}(?: ?W)?)\s*/\s*\S{1,8}(?: ?W)?\s*\|"
    r"\s*([\d.]+ ?[KMG]i?B|N/A)\s*/\s*([\d.]+ ?[KMG]i?B|N/A)\s*\|\s*(\S{1,8})\s"
)
#: Without a partition in columns, and with one.
_PROCESS = re.compile(
    r"^\|\s{1,6}(\d{1,4})\s+(?:(?:N/A|\d{1,4})\s+(?:N/A|\d{1,4})\s+)?(\d{1,10})\s+([CGM+]{1,5})\s+(\S.{0,200}?)\s+"
    r"(\d{1,12} ?[KMG]i?B|N/A)\s*\|"
)
_PROCESSES = re.compile(r"^\| Processes:")
_CUDA = re.compile(
    r"NVIDIA-SMI ([\d.]{3,20}).{0,40}?Driver Version: ([\d.]{3,20})(?:.{0,40}?CUDA Version: ([\d.]{3,12}))?"
)
_FIELD = re.compile(r"^(\s*)([A-Za-z][\w .()/-]{0,60}?)\s*: ?(.*)$")
_HEADING = re.compile(r"^(\s*)([A-Za-z][\w ()/-]{0,60}?)\s*$")
_BUS = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)")


class Table:
    """The table that nvidia-smi prints without arguments, once or again and again."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._time: float | None = None
        self._device: tuple[int, str] | None = None
        self._processes: dict[int, list[dict[str, Any]]] | None = None
        self._seen: set[int] = set()

    def take(self, line: str) -> bool:
        """Use one line."""
        if not line.startswith(("|", "+")):
            if (time := moment(line)) is not None and len(line.strip()) < 40:
                self.close()
                self._time = time
                return True
            return False
        if (found := _CUDA.search(line)) is not None:
            self.close()
            self._samples.out.manifest({"environment": {"driver": found[2]}})
        elif _PROCESSES.match(line) is not None:
            self._processes = {device: [] for device in self._seen}
        elif self._processes is not None and (found := _PROCESS.match(line)) is not None:
            used = size(found[5])
            entry = {"pid": int(found[2]), "bytes": None if used is None else round(used), "name": found[4]}
            self._processes.setdefault(int(found[1]), []).append({**entry, "type": found[3]})
        elif self._device is not None and (found := _USE.match(line)) is not None:
            device, name = self._device
            self._device = None
            self._seen.add(device)
            used, total = size(found[3]), size(found[4])
            self._samples.add(
                device,
                self._time,
                used=used,
                total=total,
                busy=share(found[5]),
                power=number(found[2]),
                temperature=number(found[1]),
                name=name,
            )
        elif (found := _DEVICE.match(line)) is not None:
            self._device = (int(found[1]), found[2].removesuffix("..."))
        elif line.startswith("+") and self._processes is not None and any(self._processes.values()):
            self.close()
        return True

    def close(self) -> None:
        """The list of processes, if one was begun, is whole."""
        for device, listed in sorted((self._processes or {}).items()):
            self._samples.processes(device, listed, self._time)
        self._processes = None


class Columns:
    """``nvidia-smi dmon`` and ``pmon``: two lines of names and units, then a row a device, or a process."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._names: list[str] = []
        self._units: list[str] = []
        self._date = ""
        self._processes: dict[int, list[dict[str, Any]]] = {}
        self._time: float | None = None
        self._begun = -1

    def take(self, line: str) -> bool:
        """Use one line."""
        text = line.strip()
        separated = "," in text
        cells = [each.strip() for each in text.lstrip("# ").split(",")] if separated else text.lstrip("#").split()
        if text.startswith("#"):
            names = [each.lower() for each in cells]
            if "gpu" in names:
                self._names = names
            elif "idx" in names:
                self._units = names
            return "gpu" in names or "idx" in names
        if not self._names or len(cells) < len(self._names) - ("command" in self._names):
            return False
        if "command" in self._names and not separated:
            last = len(self._names) - 1
            cells = [*cells[:last], " ".join(cells[last:])]
        row = dict(zip(self._names, cells, strict=False))
        device = number(row.get("gpu", ""))
        if device is None:
            return False
        self._time = self._moment(row)
        if "pid" in row:
            self._process(int(device), row)
        else:
            self._samples.add(
                int(device),
                self._time,
                used=size(row["fb"], self._unit("fb")) if "fb" in row else None,
                busy=share(row.get("sm", "-")),
                power=number(row.get("pwr", "-")),
                temperature=number(row.get("gtemp", row.get("temp", "-"))),
                clock=number(row.get("pclk", "-")),
            )
        return True

    def close(self) -> None:
        """The last round of processes is whole."""
        for device, listed in sorted(self._processes.items()):
            self._samples.processes(device, listed, self._time)
        self._processes = {}

    def _unit(self, name: str) -> str:
        at = self._names.index(name)
        return self._units[at] if at < len(self._units) else "MB"

    def _moment(self, row: dict[str, str]) -> float | None:
        """``20261130`` and ``07:25:00``, which ``-o DT`` puts before the columns."""
        date, clock = row.get("date", ""), _CLOCK.match(row.get("time", ""))
        if len(date) != 8 or not date.isdigit() or clock is None:
            return None
        return moment(f"{date[:4]}-{date[4:6]}-{date[6:]} {clock[0]}")

    def _process(self, device: int, row: dict[str, str]) -> None:
        if device < self._begun or any(str(each["pid"]) == row["pid"] for each in self._processes.get(device, ())):
            self.close()  # another round begins
        self._begun = device
        if row["pid"].isdigit():
            used = size(row["fb"], self._unit("fb")) if "fb" in row else None
            entry = {"pid": int(row["pid"]), "bytes": None if used is None else round(used)}
            self._processes.setdefault(device, []).append({**entry, "name": row.get("command", row.get("name"))})


class Report:
    """``nvidia-smi -q``: an indented report of each device."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._time: float | None = None
        self._bus = ""
        self._path: list[tuple[int, str]] = []
        self._said: dict[str, str] = {}
        self._processes: list[dict[str, Any]] = []

    def take(self, line: str) -> bool:
        """Use one line."""
        if (bus := _BUS.match(line)) is not None:
            self.close()
            self._bus = bus[1]
            return True
        if (found := _FIELD.match(line)) is not None:
            indent, name, value = len(found[1]), found[2].strip(), found[3].strip()
            if name == "Timestamp":
                self.close()
                self._time = moment(value)
                return True
            if not self._bus:
                if name == "Driver Version":
                    self._samples.out.manifest({"environment": {"driver": value[:40]}})
                return name in ("Driver Version", "CUDA Version", "Attached GPUs")
            self._up(indent)
            self._field(name, value)
            self._path.append((indent, name))
            return True
        if self._bus and (heading := _HEADING.match(line)) is not None:
            self._up(len(heading[1]))
            self._path.append((len(heading[1]), heading[2]))
            return True
        return False

    def close(self) -> None:
        """A device's report is whole."""
        if self._bus:
            said = self._said.get
            device = self._samples.number(self._bus)
            self._samples.add(
                device,
                self._time,
                used=size(said("used", "")),
                total=size(said("total", "")),
                busy=share(said("busy", "")),
                power=number(said("power", "")),
                temperature=number(said("temperature", "")),
                name=said("name", ""),
            )
            self._samples.processes(device, self._processes, self._time)
        self._bus, self._path, self._said, self._processes = "", [], {}, []

    def _up(self, indent: int) -> None:
        while self._path and self._path[-1][0] >= indent:
            self._path.pop()

    def _field(self, name: str, value: str) -> None:
        under = self._path[-1][1] if self._path else ""
        above = [each for _, each in self._path]
        if name == "Product Name":
            self._said["name"] = value
        elif under == "FB Memory Usage" and name in ("Total", "Used"):
            self._said[name.lower()] = value
        elif under == "Utilization" and name == "Gpu":
            self._said["busy"] = value
        elif under.startswith("Temperature") and name == "GPU Current Temp":
            self._said["temperature"] = value
        elif "Power Readings" in under and name in ("Power Draw", "Average Power Draw", "Instantaneous Power Draw"):
            if number(value) is not None and not under.startswith("Module"):
                self._said.setdefault("power", value)
        elif name == "Process ID" and value.isdigit():
            self._processes.append({"pid": int(value), "bytes": None, "name": None})
        elif "Process ID" in above and self._processes:
            if name == "Name":
                self._processes[-1]["name"] = value
            elif name == "Used GPU Memory" and (used := size(value)) is not None:
                self._processes[-1]["bytes"] = round(used)
            elif name == "Type":
                self._processes[-1]["type"] = value
