"""What other monitors print: nvidia-smi's queries as CSV, gpustat's lines and JSON, rocm-smi's tables and JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .samples import Samples, moment, number, share, size

_COLUMN = re.compile(r"^([a-z_][\w.]{0,60}?)(?: \[(.{1,12})\])?$")
_ROCM = re.compile(r"^GPU\[(\d{1,4})\]\s*: (.{1,80}?): (.{0,200})$")
_ROCM_HEAD = re.compile(r"^(?:GPU|Device)\b.*\bVRAM%.*\bGPU%")
_GPUSTAT = re.compile(r"^\[(\d{1,4})\] (.{1,80}?)\s*\|(.*)$")
_OWNER = re.compile(r"([\w.$-]{1,64})(?::([^/()|]{1,200}))?(?:/(\d{1,10}))?\((\d{1,10})([KMG]i?B?|)\)")

Process = dict[str, Any]


class Rows:
    """``nvidia-smi --query-gpu=… --format=csv``, with and without header, units in cells or only above them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._names: list[str] = []
        self._units: list[str] = []
        self._processes: dict[str, list[Process]] = {}
        self._times: dict[str, float | None] = {}

    def take(self, line: str) -> bool:
        """Use one line."""
        cells = [each.strip() for each in next(csv.reader([line], skipinitialspace=True), [])]
        if (header := columns(line)) is not None:
            self._names, self._units = [each[0] for each in header], [each[1] for each in header]
            return True
        if not self._names:
            guessed = guess(cells)
            if guessed is None:
                return False
            self._names, self._units = guessed, [""] * len(guessed)
            self._samples.out.note("the rows have no header: their columns were told by the units in their cells")
        if len(cells) != len(self._names):
            return False
        row = dict(zip(self._names, cells, strict=True))
        time = moment(row.get("timestamp", ""))
        if "pid" in row:
            self._process(row, time)
            return True
        used, total, free = (self._bytes(row, f"memory.{each}") for each in ("used", "total", "free"))
        if used is None and total is not None and free is not None:
            used = total - free
        self._samples.add(
            self._device(row),
            time,
            used=used,
            total=total,
            busy=share(row.get("utilization.gpu", "")),
            power=number(row.get("power.draw", row.get("power.draw.instant", row.get("power.draw.average", "")))),
            temperature=number(row.get("temperature.gpu", "")),
            name=row.get("name", row.get("gpu_name", "")),
        )
        return True

    def close(self) -> None:
        """The list of processes is whole."""
        for device, listed in self._processes.items():
            self._samples.processes(self._samples.number(device), listed, self._times.get(device))
        self._processes = {}

    def _bytes(self, row: Mapping[str, str], name: str) -> float | None:
        if name not in row:
            return None
        return size(row[name], self._units[self._names.index(name)] or "MiB")

    def _device(self, row: Mapping[str, str]) -> int:
        for name in ("index", "gpu_index"):
            if row.get(name, "").isdigit():
                return int(row[name])
        for name in ("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial"):
            if row.get(name):
                return self._samples.number(row[name])
        self._samples.out.note("the rows name no device: they count as device 0", 0)
        return 0

    def _process(self, row: Mapping[str, str], time: float | None) -> None:
        device = next((row[each] for each in ("gpu_uuid", "gpu_bus_id", "gpu_serial") if row.get(each)), "0")
        listed = self._processes.setdefault(device, [])
        if not row["pid"].isdigit():
            return
        pid = int(row["pid"])
        if any(each["pid"] == pid for each in listed):
            self.close()
            listed = self._processes.setdefault(device, [])
        name = next((each for each in ("used_gpu_memory", "used_memory") if each in row), "")
        used = self._bytes(row, name) if name else None
        named = row.get("process_name", row.get("name"))
        listed.append({"pid": pid, "bytes": None if used is None else round(used), "name": named})
        self._times[device] = time


def columns(line: str) -> list[tuple[str, str]] | None:
    """Names and units of a header of nvidia-smi's CSV; None where the line is none."""
    cells = [each.strip() for each in line.split(",")]
    found = [_COLUMN.match(each) for each in cells]
    if not cells or any(each is None for each in found):
        return None
    names = [(each[1], each[2] or "") for each in found if each is not None]
    known = {name for name, _ in names}
    if known & {"utilization.gpu", "memory.used", "memory.free", "memory.total", "power.draw", "temperature.gpu"}:
        return names
    return names if "pid" in known and known & {"used_gpu_memory", "used_memory", "gpu_uuid", "gpu_bus_id"} else None


def guess(cells: Sequence[str]) -> list[str] | None:
    """The columns of a row without header, by the units in it; None where they do not tell."""
    names: list[str] = []
    memory = [size(each) for each in cells if each.endswith(("MiB", "GiB"))]
    for at, cell in enumerate(cells):
        if cell.endswith("%"):
            names.append("utilization.gpu" if "utilization.gpu" not in names else f"utilization.{at}")
        elif cell.endswith(("MiB", "GiB")):
            value = size(cell)
            largest = len(memory) > 1 and value == max(each for each in memory if each is not None)
            kind = "memory.total" if largest else "memory.used"
            names.append(kind if kind not in names else f"memory.{at}")
        elif cell.endswith(" W"):
            names.append("power.draw" if "power.draw" not in names else f"power.{at}")
        elif moment(cell) is not None:
            names.append("timestamp")
        elif cell.startswith("GPU-"):
            names.append("uuid")
        elif re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", cell):
            names.append("pci.bus_id")
        elif cell.isdigit() and "index" not in names and at <= 1:
            names.append("index")
        elif re.match(r"(?:NVIDIA|Tesla|GeForce|Quadro|RTX|A\d|H\d)", cell):
            names.append("name")
        else:
            names.append(f"column.{at}")
    return names if any(each in names for each in ("utilization.gpu", "memory.used")) and memory else None


class Gpustat:
    """``gpustat``, once or again and again: ``[0] A100 | 35'C,  56 % | 1234 / 81920 MB | me:python/12(1200M)``."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._time: float | None = None

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _GPUSTAT.match(line)
        if found is None:
            time = moment(line)
            self._time = time if time is not None else self._time
            return time is not None
        fields = [each.strip() for each in found[3].split("|")]
        memory = next((each for each in fields if re.search(r"\d\s*/\s*\d+\s*[KMG]i?B", each)), "")
        if not memory:
            return False
        used, _, total = memory.partition("/")
        unit = (re.search(r"[KMG]i?B", total) or ["MB"])[0]
        percent = re.findall(r"(\d{1,3})\s*%", fields[0])
        power = re.search(r"(\d{1,5})\s*/\s*\S{1,5}\s*W|(\d{1,5})\s*W", fields[0])
        device = int(found[1])
        self._samples.add(
            device,
            self._time,
            used=size(used, unit),
            total=size(total, unit),
            busy=share(percent[-1]) if percent else None,  # a fan's share comes before it
            power=float(power[1] or power[2]) if power else None,
            temperature=number(fields[0]),
            name=found[2],
        )
        owners = _OWNER.findall(fields[fields.index(memory) + 1]) if fields.index(memory) + 1 < len(fields) else []
        listed: list[Process] = [
            {
                "pid": int(pid) if pid else None,
                "bytes": round(size(f"{amount} {unit_ or 'M'}".replace("M", "MB").replace("MBB", "MB")) or 0) or None,
                "name": command or None,
                "user": user,
            }
            for user, command, pid, amount, unit_ in owners
        ]
        self._samples.processes(device, listed, self._time)
        return True

    def close(self) -> None:
        """Nothing waits for the end."""


def gpustat_json(document: Mapping[str, Any], samples: Samples) -> bool:
    """``gpustat --json``: one document a query."""
    devices = document.get("gpus")
    if not isinstance(devices, list):
        return False
    time = moment(str(document.get("query_time", "")))
    for at, each in enumerate(cast("list[Any]", devices)):
        if not isinstance(each, dict):
            continue
        device = cast("dict[str, Any]", each)
        index = device.get("index")
        place = index if type(index) is int else at
        used, total = (_real(device.get(f"memory.{name}")) for name in ("used", "total"))
        busy = _real(device.get("utilization.gpu"))
        samples.add(
            place,
            time,
            used=used * 2**20 if used is not None else None,
            total=total * 2**20 if total is not None else None,
            busy=busy / 100 if busy is not None else None,
            power=_real(device.get("power.draw")),
            temperature=_real(device.get("temperature.gpu")),
            name=str(device.get("name") or ""),
        )
        found = device.get("processes")
        listed = cast("list[Any]", found) if isinstance(found, list) else []
        samples.processes(place, [_process(one) for one in listed if isinstance(one, dict)], time)
    if isinstance(driver := document.get("driver_version"), str):
        samples.out.manifest({"environment": {"driver": driver[:40]}})
    return True


def _process(said: Mapping[str, Any]) -> Process:
    pid, used = said.get("pid"), _real(said.get("gpu_memory_usage"))
    name, user = said.get("command"), said.get("username")
    return {
        "pid": pid if type(pid) is int and pid >= 0 else None,
        "bytes": round(used * 2**20) if used is not None else None,
        "name": str(name)[:200] if name else None,
        "user": str(user)[:64] if user else None,
    }


class Rocm:
    """``rocm-smi``: its table, and the lines ``GPU[0] : VRAM Total Used Memory (B): …`` of its options."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._names: list[str] = []
        self._said: dict[int, dict[str, str]] = {}

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _ROCM.match(line)) is not None:
            said = self._said.setdefault(int(found[1]), {})
            if found[2] in said:
                self.close()
                said = self._said.setdefault(int(found[1]), {})
            said[found[2]] = found[3].strip()
            return True
        if _ROCM_HEAD.match(line) is not None:
            self.close()
            self._names = line.split()
            return True
        if not self._names:
            return False
        cells = line.split()
        if not cells or not cells[0].isdigit() or len(cells) < 6:
            return False
        # The last columns are VRAM% and GPU% whatever stands before them; temperature and power tell their units.
        places = {name: len(self._names) - at for at, name in enumerate(self._names)}
        busy, memory = (cells[-places[name]] if places[name] <= len(cells) else "" for name in ("GPU%", "VRAM%"))
        temperature = next((each for each in cells[1:] if re.fullmatch(r"[\d.]+°?[cC]", each)), "")
        power = next((each for each in cells[1:] if re.fullmatch(r"[\d.]+W", each)), "")
        self._samples.add(
            int(cells[0]),
            busy=share(busy),
            power=number(power),
            temperature=number(temperature),
            occupied=share(memory),
        )
        return True

    def close(self) -> None:
        """What was said of each device belongs to one sample."""
        for device, said in sorted(self._said.items()):
            rocm_device(device, said, self._samples)
        self._said = {}


def rocm_device(device: int, said: Mapping[str, Any], samples: Samples) -> bool:
    """Fields of one device in rocm-smi's words, as its lines and its JSON have them; False where none is known."""
    words = {name: str(value) for name, value in said.items()}

    def first(*parts: str) -> str:
        return next((text for name, text in words.items() if all(part in name for part in parts)), "")

    values = {
        "used": size(first("VRAM Total Used Memory (B)"), "B"),
        "total": size(first("VRAM Total Memory (B)"), "B"),
        "busy": share(first("GPU use (%)")),
        "power": number(first("Graphics Package Power (W)") or first("Socket", "Power (W)")),
        "temperature": number(first("Temperature (Sensor edge)") or first("Temperature (Sensor junction)")),
    }
    if all(each is None for each in values.values()):
        return False
    name = first("Card series") or first("Card Series") or first("Device Name")
    samples.add(device, None, **values, name=name)  # pyright: ignore[reportArgumentType]
    return True


def _real(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and value >= 0 else None
