"""W&B run files (``run-ID.wandb``): history, configuration, summary and system metrics, without the wandb package.

Source of the conventions: wandb/proto/wandb_internal.proto, and core/pkg/leveldb (LevelDB's log format: 32 KiB blocks,
records of checksum, length, kind; a record that does not fit goes on in the next block).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

from ..errors import EvidenceError
from ..jsonio import decode
from ..limits import KIB, MIB
from . import tags
from .arguments import stated_by
from .requirements import packages_beside
from .run import Run
from .source import Source
from .trainer_state import number
from .wire import BYTES, FIXED64, VARINT, Field, double, fields, signed, text, zigzag

FORMAT = "W&B run file"

_MAGIC = b":W&B\xe1\xbe"
_FILE_HEADER = 7
_BLOCK = 32 * KIB
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST = 64 * MIB

_HISTORY, _SUMMARY, _CONFIG, _STATS, _METRIC, _RUN, _EXIT, _ENVIRONMENT = 2, 3, 5, 7, 12, 17, 18, 26
#: History keys that count optimizer steps, where W&B's own ``_step`` counts calls of log.
_STEP_KEYS = ("train/global_step", "trainer/global_step", "global_step", "train/step", "step")
_TIMESTAMP = "_timestamp"


@dataclass
class _Losses:
    torn: int = 0
    damaged: int = 0


@dataclass
class _Job:
    """What the records said so far."""

    config: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0
    step_key: str = ""


def sniff(source: Source) -> bool:
    """Whether the file has W&B's header."""
    return source.head.startswith(_MAGIC)


def read(source: Source, out: Run) -> None:
    """Write every number of the history and of the system metrics; nested keys are joined by dots."""
    losses, job, names = _Losses(), _Job(), tags.Names()
    for record in records(source.chunks(), losses):
        try:
            for each in fields(record):
                if each.wire == BYTES:
                    _read_record(record, each, job, names, out)
        except EvidenceError:
            losses.damaged += 1
    _state(source, job, out)
    if losses.torn:
        out.note(f"the last record is torn: {losses.torn:,} bytes left out, everything before is kept")
    if losses.damaged:
        out.note("damaged records left out", losses.damaged)


def records(chunks: Iterable[bytes], losses: _Losses) -> Iterator[bytes]:
    """The records of a run file; damage costs the rest of its block."""
    pending, whole = bytearray(), False
    for block, last in _blocks(chunks):
        at = _FILE_HEADER if block[: len(_MAGIC)] == _MAGIC else 0
        while len(block) - at >= _RECORD.size:
            checksum, size, kind = _RECORD.unpack_from(block, at)
            content = block[at + _RECORD.size : at + _RECORD.size + size]
            if len(content) < size and last:
                losses.torn += len(block) - at + len(pending)
                return
            if not _FULL <= kind <= _LAST or crc32(content, crc32(block[at + 6 : at + 7])) != checksum:
                losses.damaged += 1
                pending, whole = bytearray(), False
                break
            at += _RECORD.size + size
            if kind in (_FULL, _FIRST):
                pending, whole = bytearray(content), True
            elif whole:
                pending += content
            if kind in (_FULL, _LAST) and whole:
                yield bytes(pending)
                pending, whole = bytearray(), False
            if len(pending) > _LARGEST:
                losses.damaged += 1
                pending, whole = bytearray(), False
        else:
            if last:
                losses.torn += len(block) - at + len(pending)


def _blocks(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The file in blocks, each with whether it is the last one."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        whole = max(0, len(rest) - 1) // _BLOCK * _BLOCK  # one byte more, so that the last block is known to be it
        for at in range(0, whole, _BLOCK):
            yield rest[at : at + _BLOCK], False
        rest = rest[whole:]
    yield rest, True


def _read_record(data: bytes, record: Field, job: _Job, names: tags.Names, out: Run) -> None:
    if record.number == _HISTORY:
        _read_history(dict(_items(data, record)), job, names, out)
    elif record.number == _STATS:
        _read_stats(data, record, job, out)
    elif record.number in (_CONFIG, _SUMMARY):
        _update(job.config if record.number == _CONFIG else job.summary, _items(data, record))
    elif record.number == _RUN:
        _read_run(data, record, job)
    elif record.number == _ENVIRONMENT:
        words = {each.number: text(data, each) for each in fields(data, record.start, record.end) if each.wire == BYTES}
        job.environment |= {"os": words.get(1), "python": words.get(2), "gpu": words.get(18), "cuda": words.get(25)}
        job.run.setdefault("host", words.get(12))
    elif record.number == _METRIC:
        _read_metric(data, record, job)
    elif record.number == _EXIT:
        status = next((each.value for each in fields(data, record.start, record.end) if each.number == 1), 0)
        if status:
            message = f"the job ended with exit status {signed(status)}"
            out.event("log", step=job.step, level="error", message=message)


def _read_history(row: dict[str, Any], job: _Job, names: tags.Names, out: Run) -> None:
    """One row: its step is that of the job's own step key where it logs one, else W&B's count of rows."""
    if not job.step_key:
        job.step_key = next((key for key in _STEP_KEYS if number(row.get(key)) is not None), "")
        if job.step_key:
            out.note(f"steps are those of {job.step_key}; W&B's own count of rows is the series _step")
    given = number(row.get(job.step_key or "_step"))
    if given is not None and 0 <= given < 2**63:
        job.step = int(given)
    at = number(row.get(_TIMESTAMP))
    for key, value in _flat(row):
        if key == _TIMESTAMP or (key == "_step" and not job.step_key) or key == job.step_key:
            continue
        found = number(value) if not isinstance(value, str) or value in ("NaN", "Infinity", "-Infinity") else None
        if found is None:
            out.note("values that are no numbers (texts, histograms, media) left out")
            continue
        named = names.of(key)
        out.scalar(named.name, job.step, found * named.factor, at, named.unit)


def _read_stats(data: bytes, record: Field, job: _Job, out: Run) -> None:
    """System metrics, which have a time and no step: they stand at the step that was logged last."""
    at = None
    for each in fields(data, record.start, record.end):
        if each.number == 2 and each.wire == BYTES:
            parts = {part.number: part.value for part in fields(data, each.start, each.end)}
            at = parts.get(1, 0) + parts.get(2, 0) * 1e-9
    for key, value in _items(data, record, number=3):
        found = number(value)
        if found is not None:
            out.scalar(f"system/{key}", job.step, found, at)


def _read_run(data: bytes, record: Field, job: _Job) -> None:
    for each in fields(data, record.start, record.end):
        if each.wire != BYTES:
            continue
        if each.number == 1:
            job.run["id"] = text(data, each)
        elif each.number == 8:
            job.run["name"] = text(data, each)
        elif each.number == 13:
            job.run["host"] = text(data, each)
        elif each.number == 4:
            _update(job.config, _items(data, each))
        elif each.number == 21:
            words = {part.number: text(data, part) for part in fields(data, each.start, each.end) if part.wire == BYTES}
            if words.get(2):
                job.run["code"] = {"commit": words[2]}


def _read_metric(data: bytes, record: Field, job: _Job) -> None:
    """``define_metric`` may name the key that counts steps."""
    for each in fields(data, record.start, record.end):
        if each.number == 4 and each.wire == BYTES and not job.step_key:
            named = text(data, each)
            job.step_key = named if named not in ("", "_step", _TIMESTAMP, "_runtime") else ""


def _items(data: bytes, message: Field, number: int = 1) -> Iterator[tuple[str, Any]]:
    """Key and value of the items of a history, summary, configuration or statistics record."""
    for item in fields(data, message.start, message.end):
        if item.number != number or item.wire != BYTES:
            continue
        keys: list[str] = []
        value: Any = None
        for each in fields(data, item.start, item.end):
            if each.number in (1, 2) and each.wire == BYTES:
                keys.append(text(data, each))
            elif each.number in (8, 16) and each.wire == BYTES:
                try:
                    value = decode(data[each.start : each.end])
                except EvidenceError:
                    continue
            elif each.number == 4 and each.wire == VARINT:
                value = bool(each.value)
            elif each.number == 5 and each.wire == VARINT:
                value = zigzag(each.value)
            elif each.number == 6 and each.wire == FIXED64:
                value = double(data, each)
            elif each.number == 7 and each.wire == BYTES:
                value = text(data, each)
        yield ".".join(keys), value


def _update(target: dict[str, Any], items: Iterable[tuple[str, Any]]) -> None:
    for key, value in items:
        if len(target) < 100_000:
            target[key] = value


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a row, keys joined by dots; what W&B wraps (histograms, tables, media) stays whole."""
    for key, value in row.items():
        if isinstance(value, dict) and "_type" not in value:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _state(source: Source, job: _Job, out: Run) -> None:
    """What the run says of itself, into the manifest."""
    own: Any = job.config.pop("_wandb", None)
    config = {key: each.get("value") if _wrapped(each) else each for key, each in job.config.items()}
    environment = {name: each for name, each in job.environment.items() if each}
    if isinstance(own, dict):
        described = cast("dict[str, Any]", own)
        described = described.get("value", described)
        if isinstance(described, dict) and isinstance(version := cast("Any", described).get("python_version"), str):
            environment.setdefault("python", version)
    packages = packages_beside(source.path)
    if packages:
        environment["packages"] = packages
        if "torch" in packages:
            environment.setdefault("torch", packages["torch"])
    summary = {key: each for key, each in job.summary.items() if not key.startswith("_wandb")}
    run = {name: each for name, each in job.run.items() if each}
    stated = {**stated_by(config), "config": {**config, **({"wandb_summary": summary} if summary else {})}}
    stated["run"] = {**stated.get("run", {}), **run}
    out.manifest({**stated, **({"environment": environment} if environment else {})})


def _wrapped(value: Any) -> bool:
    return isinstance(value, dict) and set(cast("dict[str, Any]", value)) <= {"desc", "value"} and "value" in value
