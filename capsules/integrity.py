"""The whole-capsule checks: a survey of all damage, and the digest that a gate record names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .damage import DIED, DIED_EARLY, SILENT, Damage, DamageLog
from .errors import EvidenceError
from .layout import FILES, INCIDENT, MANIFEST
from .limits import HASHED_PER_FILE, MAX_DIGEST_BYTES, MAX_HASHED_AT_A_GLANCE
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
            reader.columns(stream)
        if reader.state and reader.state.status == "recording" and not reader.live:
            how = DIED if reader.status == "crashed" else SILENT
            file = f"{reader.directory}/rank.json"
            log.add(file, Damage(what=f"writer of rank {rank} {how}", where=file, lost="what came after"))
    _ = capsule.scalar_keys(), capsule.stats(), capsule.batches()
    if not ranks and capsule.status in ("crashed", "stale"):
        log.add(MANIFEST, Damage(what=DIED_EARLY, where=MANIFEST))
    room = MAX_HASHED_AT_A_GLANCE
    for file in capsule.files():
        where = file.path or "(no path)"
        fault, hashed = _attached_fault(capsule.path, file, room)
        room -= hashed
        if fault:
            log.add(where, Damage(what=fault, where=where, lost="the original"))


def _attached_fault(root: Path, file: AttachedFile, room: int) -> tuple[str, int]:
    """What is wrong with an attached file, or "", and the bytes hashed; beyond ``room`` only its size is compared."""
    relative = file.path or ""
    if not relative.startswith(f"{FILES}/"):
        return f"attached file lies outside {FILES}/; refused", 0
    if room < 0:
        return "", 0
    try:
        size = _size(root, relative)
        if file.bytes is not None and size != file.bytes:
            return f"attached file has {size:,} bytes instead of {file.bytes:,}", 0
        if file.sha256 is None or size > room:
            return "", 0
        differs = file_digest(root, relative) != file.sha256
    except FileNotFoundError:
        return "attached file is missing", 0
    except EvidenceError as error:
        return error.what, 0
    return "attached file differs from its SHA-256" if differs else "", size + HASHED_PER_FILE


def _size(root: Path, relative: str) -> int:
    descriptor = open_inside(root, relative)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def file_digest(root: Path, relative: str) -> str:
    """SHA-256 of one file of the capsule."""
    with os.fdopen(open_inside(root, relative), "rb") as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise EvidenceError(error.strerror or str(error), relative) from None


def digest(root: Path, limit: int = MAX_DIGEST_BYTES) -> str:
    """SHA-256 of the sorted lines ``path TAB sha256 NEWLINE`` over all files of the capsule.

    Raises:
        EvidenceError: a file is no regular file, or vanished while it was read, or all files together are larger
            than ``limit`` bytes.
    """
    lines: list[bytes] = []
    try:
        listed = [(relative, entry) for relative, entry in walk(root) if relative != INCIDENT]
        total = sum(entry.stat(follow_symlinks=False).st_size for _, entry in listed)
        if total + HASHED_PER_FILE * len(listed) > limit:
            what = f"{len(listed):,} files of {total:,} bytes are more than a digest is made of"
            raise EvidenceError(what, str(root))
        for relative, _ in listed:
            if "\n" in relative or "\t" in relative:
                raise EvidenceError(f"file name {relative!r:.80} cannot be listed", str(root), "rename or remove it")
            lines.append(os.fsencode(relative) + b"\t" + file_digest(root, relative).encode() + b"\n")
    except OSError as error:
        raise EvidenceError(f"cannot be read ({error.strerror or error})", str(root)) from None
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()
