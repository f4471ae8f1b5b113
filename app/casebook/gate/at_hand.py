"""The incident's capsule, found in the repository by what the card says of it: its id or its path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ....capsules.errors import EvidenceError
from ....capsules.jsonio import decode_object
from ....capsules.layout import MANIFEST
from ....capsules.storage import read_inside

_CAPSULE = re.compile(r"\bcapsule:?\s+`?([^\s,;`]+)")
_LARGEST = 16 << 20

#: Capsules lie near the root (``runs/NAME.capsule``). The search ends early where there is much else.
_DEPTH = 3
_ENTRIES = 20_000


def capsule_of(occurrences: str, root: Path) -> Path | None:
    """The capsule of the newest occurrence whose capsule lies in the repository, or None.

    Args:
        occurrences: the card's field, oldest first.
        root: of the work tree.
    """
    names = [name.rstrip(".)") for name in reversed(_CAPSULE.findall(occurrences))]
    for name in names:
        if ((root / name) / MANIFEST).is_file():
            return root / name
    if not names:
        return None
    found = {_id(path): path for path in _capsules(root)}
    return next((found[name] for name in names if name in found), None)


def _capsules(root: Path) -> Iterator[Path]:
    """Capsules at most three directories below the root, hidden directories aside."""
    level, left = [root], _ENTRIES
    for _ in range(_DEPTH):
        below: list[Path] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0:
                            return
                        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                            continue
                        path = Path(entry.path)
                        if (path / MANIFEST).is_file():
                            yield path
                        else:
                            below.append(path)
            except OSError:
                continue
        level = below


def _id(capsule: Path) -> str:
    try:
        return str(decode_object(read_inside(capsule, MANIFEST, _LARGEST)).get("id", ""))
    except (EvidenceError, OSError):
        return ""
