"""The package versions that lie beside a log: ``requirements.txt`` as pip freeze writes it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ..limits import MIB

_PLACES = ("files/requirements.txt", "requirements.txt")
_PINNED = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]{0,200})\s*==\s*([^\s;#]{1,100})")
_LARGEST = 1 * MIB
_MOST = 5000


def packages_beside(path: Path) -> dict[str, str]:
    """Name → version from the first such file beside ``path``; empty where there is none that can be read."""
    for place in _PLACES:
        try:
            descriptor = os.open(path.parent / place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            continue
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                continue
            lines = file.read(_LARGEST).decode("utf-8", "replace").splitlines()
        found = {match[1]: match[2] for line in lines if (match := _PINNED.match(line))}
        return dict(list(found.items())[:_MOST])
    return {}
