"""Names inside a capsule that more than one module needs."""

from __future__ import annotations

import re

MANIFEST = "capsule.json"
RANKS = "ranks"
FILES = "files"
#: Written by the console and the incident commands: no evidence, not in the digest.
INCIDENT = "incident.json"

_RANK = re.compile(r"rank(\d{5,9})")


def rank_directory(rank: int) -> str:
    """Path of a rank's directory below the capsule."""
    return f"{RANKS}/rank{rank:05d}"


def rank_of(directory: str) -> int | None:
    """The rank whose directory has this name, or None where it is no rank's."""
    found = _RANK.fullmatch(directory)
    return int(found[1]) if found else None
