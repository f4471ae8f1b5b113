"""What the console remembers of a directory between two visits. Losing it loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

import msgspec

from .. import paths

_FILE = "console.json"
#: Directories remembered; the one not visited for longest is forgotten first.
_MOST = 200


class State(msgspec.Struct, kw_only=True):
    """The state of one directory; ``view`` is the one that ``viewed``, the capsule last opened, was left on."""

    capsule: str = ""
    filter: str = ""
    viewed: str = ""
    view: int = 1
    theme: str = ""


def load(directory: Path) -> State:
    """State of a directory; a fresh one where none was kept or it cannot be read."""
    found = _read().get(str(directory.resolve()), {})
    try:
        return msgspec.convert(found, State)
    except msgspec.ValidationError:
        return State()


def save(directory: Path, state: State) -> None:
    """Keep the state; a read-only or full home directory is no reason to complain."""
    kept = _read()
    key = str(directory.resolve())
    kept.pop(key, None)
    kept[key] = msgspec.to_builtins(state)
    for old in list(kept)[:-_MOST]:
        del kept[old]
    folder = paths.state_directory()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{_FILE}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(kept, stream)
            os.replace(temporary, folder / _FILE)
        except OSError:
            os.unlink(temporary)


def _read() -> dict[str, object]:
    try:
        found = json.loads((paths.state_directory() / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
