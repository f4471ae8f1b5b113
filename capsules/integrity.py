"""The whole-capsule checks: a survey of all damage, and the digest that a gate record names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .damage import Damage, DamageLog
from .errors import EvidenceError
from .manifest import AttachedFile
from .rank_reader import RankReader
from .status import rank_status
from .storage import open_inside, walk

if TYPE_CHECKING:
    from .reader import Capsule

#: Written by the console and the incident commands: no evidence.
NOT_EVIDENCE = ("incident.json",)


def survey(capsule: Capsule, ranks: Mapping[int, RankReader], log: DamageLog, now: float) -> None:
    """Read everything once, so that each file reports its damage."""
    for rank, reader in ranks.items():
        _ = reader.names, reader.scalars, reader.stats, reader.arrays
        for stream in reader.streams:
            reader.records(stream)
        state = reader.state
        status = rank_status(state, now) if state else "stale"
        if status in ("crashed", "stale") and capsule.status != "recording":
            how = "died without sealing" if status == "crashed" else "has not been heard of"
            if state and state.status == "crashed":
                continue  # it said so itself: an exception, with its trigger
            where = f"{reader.directory}/rank.json"
            log.report(f"{where} status", [Damage(what=f"writer of rank {rank} {how}", where=where)])
    for file in capsule.files():
        _check_attached(capsule.path, file, log)


def _check_attached(root: Path, file: AttachedFile, log: DamageLog) -> None:
    where = file.path or "(no path)"
    try:
        if not where.startswith("files/"):
            raise EvidenceError("attached file lies outside files/; refused")
        size, sha256 = file_digest(root, where)
    except FileNotFoundError:
        log.report(where, [Damage(what="attached file is missing", where=where, lost="the file")])
        return
    except EvidenceError as error:
        log.report(where, [Damage(what=error.what, where=where, lost="the file")])
        return
    if file.bytes is not None and size != file.bytes:
        what = f"attached file has {size:,} bytes instead of {file.bytes:,}"
        log.report(where, [Damage(what=what, where=where, kept="what is left of it")])
    elif file.sha256 is not None and sha256 != file.sha256:
        log.report(where, [Damage(what="attached file differs from its SHA-256", where=where)])


def file_digest(root: Path, relative: str) -> tuple[int, str]:
    """Size and SHA-256 of one file of the capsule."""
    with os.fdopen(open_inside(root, relative), "rb") as file:
        try:
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), digest.hexdigest()
        except OSError as error:
            raise EvidenceError(error.strerror or str(error), relative) from None


def digest(root: Path) -> str:
    """SHA-256 of the sorted lines ``path TAB sha256 NEWLINE`` over all files of the capsule.

    Raises:
        EvidenceError: a file is no regular file, or vanished while it was read.
    """
    lines: list[bytes] = []
    try:
        for relative, _ in walk(root):
            if relative not in NOT_EVIDENCE:
                lines.append(os.fsencode(relative) + b"\t" + file_digest(root, relative)[1].encode() + b"\n")
    except OSError as error:
        raise EvidenceError(f"cannot be read ({error.strerror or error})", str(root)) from None
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()
