"""Logs of device monitors: nvidia-smi (table, CSV, dmon, pmon, -q), gpustat (lines, JSON), rocm-smi."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from ...limits import MIB
from .. import text_log
from ..run import Run
from ..source import Source
from .nvidia import Columns, Report, Table
from .others import Gpustat, Rocm, Rows, columns, gpustat_json, guess, rocm_device
from .samples import Samples, moment

FORMAT = "GPU monitor"

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\(B|\x0f")
_TABLE = re.compile(r"^\| NVIDIA-SMI ", re.MULTILINE)
_GPUSTAT = re.compile(r"^\[\d{1,4}\] .{1,80}\|.{0,80}\|\s*\d+\s*/\s*\d+\s*[KMG]i?B\b", re.MULTILINE)
_COLUMNS = re.compile(
    r"^#\s?(?:date\s+|time\s+|Date\s+|Time\s+){0,2}gpu\b[^\n]*\b(?:sm|pwr|pid|fb|mem)\b", re.MULTILINE
)
_REPORT = re.compile(r"^=+NVSMI LOG=+\s*$", re.MULTILINE)
_ROCM = re.compile(
    r"^=+ ?(?:ROCm System Management Interface|Concise Info) ?=+|^GPU\[\d+\]\s*: (?:VRAM|GPU use)", re.MULTILINE
)
_CARD = re.compile(r"card(\d{1,4})$")
#: ``20261130   07:25:00``, as dmon writes it.
_COMPACT = re.compile(r"\b(20\d\d)(\d\d)(\d\d)\s{1,8}(\d\d:\d\d:\d\d)\b")
#: Share of the shorter one of two files' times that both cover where they are of two hosts.
_COMMON = 0.1
#: First and last moment of the files of a run that were read.
_covered: WeakKeyDictionary[Run, list[tuple[float, float]]] = WeakKeyDictionary()
#: Bytes of one JSON document that is put together from lines.
_DOCUMENT = 4 * MIB


class _Reader(Protocol):
    def take(self, line: str) -> bool: ...

    def close(self) -> None: ...


def sniff(source: Source) -> bool:
    """Whether a monitor begins in the head; a training log that shows nvidia-smi's table is a training log."""
    if not source.text:
        return False
    head = _ANSI.sub("", source.head.decode("utf-8", "replace")).lstrip("\ufeff")
    if head.lstrip().startswith(("{", "[{")):
        return _document(head) is not None
    found = _kind(head)
    return found is not None and (found in (Rows, Columns) or not text_log.sniff(source))


def read(source: Source, out: Run) -> None:
    """Every sample, in file order. A file that covers the time of another one is of another host: it stays apart."""
    samples = Samples(out, side=_host(source, out))
    head = _ANSI.sub("", source.head.decode("utf-8", "replace")).lstrip("\ufeff")
    if head.lstrip().startswith(("{", "[{")):
        _documents(source, samples)
        return
    first = _kind(head) or Table
    readers: list[_Reader] = [first(samples)]
    if first in (Table, Report):  # a script may print one and then the other
        readers += [(Report if first is Table else Table)(samples)]
    for raw in source.lines():
        line = _ANSI.sub("", raw[:4096].decode("utf-8", "replace")).rstrip().lstrip("\ufeff")
        if source.unended and not line.endswith(("|", "+")):
            out.note("the last line has no end: it may be torn, and was left out")
            break
        if line and not any(reader.take(line) for reader in readers):
            continue
    for reader in readers:
        reader.close()


def span(source: Source) -> tuple[int | None, int | None, int | None, str]:
    """Samples are no training steps: one log of a monitor continues another."""
    return None, None, None, ""


def _host(source: Source, out: Run) -> str | None:
    """The file's name where another file covers the same time, which one monitor does not do; else None."""
    times = [
        found
        for part in (source.head, source.tail)
        for line in part.decode("utf-8", "replace").splitlines()
        if (found := moment(_COMPACT.sub(r"\1-\2-\3 \4", line[:4096]))) is not None
    ]
    if not times:
        return None
    first, last = min(times), max(times)
    before = _covered.setdefault(out, [])
    if any(min(last, end) - max(first, begin) > _COMMON * min(last - first, end - begin) for begin, end in before):
        out.note("covers the time of another monitor's file: of another host, and kept apart")
        return source.path.name
    before.append((first, last))
    return None


def _kind(head: str) -> type[Any] | None:
    """Who reads the text."""
    lines = [line for line in head.splitlines()[:40] if line.strip()]
    if _REPORT.search(head) is not None:
        return Report
    if _COLUMNS.search(head) is not None and lines[0].lstrip().startswith("#"):
        return Columns
    if any(columns(line) is not None for line in lines[:3]):
        return Rows
    if _TABLE.search(head) is not None:
        return Table
    if _ROCM.search(head) is not None:
        return Rocm
    if _GPUSTAT.search(head) is not None:
        return Gpustat
    rows = [[cell.strip() for cell in line.split(",")] for line in lines[:5]]
    if len(rows) > 1 and all(len(row) == len(rows[0]) >= 2 and guess(row) is not None for row in rows[:-1]):
        return Rows
    return None


def _document(text: str) -> Any:
    """What a monitor's JSON begins with, or None."""
    sign = re.match(r'\s*\[?\{\s*"(?:hostname|driver_version|query_time|gpus)"|\s*\{\s*"card\d+"\s*:\s*\{', text)
    return sign if sign is not None and ('"gpus"' in text or '"card' in text) else None


def _documents(source: Source, samples: Samples) -> None:
    """JSON documents one after another, each on a line or spread over many."""
    decoder, text = json.JSONDecoder(), ""
    for chunk in source.chunks():
        text = (text + chunk.decode("utf-8", "replace")).lstrip("\ufeff")
        at = 0
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,[]"))
            if at >= len(text):
                break
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            _take(value, samples)
            at = end
        text = text[at:]
        if len(text) > _DOCUMENT:
            break
    if text.strip(" \t\r\n,[]\0"):
        samples.out.note("the last document is torn, and was left out")


def _take(value: Any, samples: Samples) -> None:
    if not isinstance(value, dict):
        return
    document = cast("dict[str, Any]", value)
    if gpustat_json(document, samples):
        return
    for name, said in document.items():
        found = _CARD.match(name)
        if found is not None and isinstance(said, dict):
            rocm_device(int(found[1]), cast("dict[str, Any]", said), samples)
