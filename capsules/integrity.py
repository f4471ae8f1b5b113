"""The whole-capsule checks: a survey of all damage, and the digest that a gate record names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .damage import Damage, DamageLog
from .errors import EvidenceError
from .layout import FILES, INCIDENT, MANIFEST
from .manifest import AttachedFile
from .rank_reader import RankReader
from .storage import open_inside, walk

if TYPE_CHECKING:
    from .reader import Capsule


def survey(capsule: Capsule, ranks: Mapping[int, RankReader], log: DamageLog) -> None:
    """Read everything once, so that each file reports its damage."""
    for rank, reader in ranks.items():
        _ = reader.arrays
        for stream in reader.streams:
            reader.records(stream)
        if reader.state and reader.state.status == "recording" and not reader.live:
            how = "died without sealing" if reader.status == "crashed" else "has not been heard of for long"
            file = f"{reader.directory}/rank.json"
            log.add(file, Damage(what=f"writer of rank {rank} {how}", where=file, lost="what came after"))
    _ = capsule.scalar_keys(), capsule.stats(), capsule.batches()
    if not ranks and capsule.status in ("crashed", "stale"):
        log.add(MANIFEST, Damage(what="writer died before it wrote any evidence", where=MANIFEST))
    for file in capsule.files():
        where = file.path or "(no path)"
        if fault := _attached_fault(capsule.path, file):
            log.add(where, Damage(what=fault, where=where, lost="the original"))


def _attached_fault(root: Path, file: AttachedFile) -> str | None:
    """What is wrong with an attached file, or None."""
    try:
        if not (file.path or "").startswith(f"{FILES}/"):
            return f"attached file lies outside {FILES}/; refused"
        size, sha256 = file_digest(root, file.path or "")
    except FileNotFoundError:
        return "attached file is missing"
    except EvidenceError as error:
        return error.what
    if file.bytes is not None and size != file.bytes:
        return f"attached file has {size:,} bytes instead of {file.bytes:,}"
    if file.sha256 is not None and sha256 != file.sha256:
        return "attached file differs from its SHA-256"
    return None


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
            if "\n" in relative or "\t" in relative:
                raise EvidenceError(f"file name {relative!r:.80} cannot be listed", str(root), "rename or remove it")
            if relative != INCIDENT:
                lines.append(os.fsencode(relative) + b"\t" + file_digest(root, relative)[1].encode() + b"\n")
    except OSError as error:
        raise EvidenceError(f"cannot be read ({error.strerror or error})", str(root)) from None
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()
