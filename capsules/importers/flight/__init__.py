"""Flight-recorder dumps of torch.distributed, pickled or as JSON, as collectives and states of ranks.

A file holds what one rank recorded. Which rank that is, how its local numbers of groups map to the names that the job
knows, and who belongs to a group is settled when all files of the job were read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...collector import collector_still
from ...limits import GIB
from ...plain_pickle import GROWTH, load_plain, looks_like_pickle, top_level_keys
from ..prefix import decode_prefix
from ..run import Run
from ..source import Source
from .dump import parse
from .job import Job
from .tables import Tables

FORMAT = "flight-recorder dump"
KIND = "trace"

_LARGEST = 16 * GIB
#: Memory that decoding JSON takes, as a multiple of the file.
_JSON_GROWTH = 8
#: Keys by which the outermost mapping is known, and words that an entry has wherever it stands.
_KEYS = frozenset(("pg_config", "pg_status", "nccl_comm_state", "entries"))
_OWN_WORDS = (b"profiling_name", b"collective_seq_id", b"process_group", b"pg_config")
#: Keys of the traces of the profiler, which list the groups as well.
_PROFILER = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')

_reading: WeakKeyDictionary[Run, Job] = WeakKeyDictionary()


def sniff(source: Source) -> bool:
    """Whether the outermost mapping is that of a dump."""
    head = source.head
    if looks_like_pickle(head):
        return any(word in head for word in _OWN_WORDS) and bool(_KEYS & set(top_level_keys(head, until=_KEYS)))
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") or any(key in head for key in _PROFILER):
        return False
    if re.search(rb'"(?:pg_config|pg_status)"\s*:\s*\{', head):
        return True
    return b'"collective_seq_id"' in head and b'"profiling_name"' in head


def rank_in_name(path: Path) -> int | None:
    """The rank that a dump's name ends in: ``nccl_trace_rank_12``, ``_dump_12``, ``rank3_dump.json``; None without."""
    named = re.findall(r"rank[_\-.]?(\d{1,7})(?!\d)", path.name, re.IGNORECASE)
    ending = re.search(r"(\d{1,7})(?:\.[A-Za-z]\w*)*$", path.name)
    return int(named[-1]) if named else int(ending[1]) if ending else None


def read(source: Source, out: Run) -> None:
    """Take in one dump; ``finish`` writes what the job's dumps say together.

    Raises:
        EvidenceError: it is no dump, or cannot be read.
    """
    job = _reading.setdefault(out, Job(Tables()))
    where = os.fspath(source.path)
    with collector_still():
        dump = parse(_decoded(source, where, out), where, job.tables, out.note)
    dump.named = rank_in_name(source.path)
    dump.modified = source.modified
    job.dumps.append(dump)


def _decoded(source: Source, where: str, out: Run) -> Any:
    if looks_like_pickle(source.head):
        return load_plain(source.read(_LARGEST, GROWTH), where)
    value, whole = decode_prefix(source.read(_LARGEST, _JSON_GROWTH), where)
    if not whole:
        source.ends_early("what stands before the tear was read")
    return value


def finish(out: Run) -> None:
    """Write the collectives and the states of the ranks of all dumps that were read."""
    job = _reading.pop(out, None)
    if job is not None and job.dumps:
        job.write(out)
