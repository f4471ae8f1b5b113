"""The directory for what is made of raw files: it belongs to the process that asks, which removes it."""

from __future__ import annotations

import os
import shutil
import tempfile

#: Environment variable by which the asking process names the scratch directory.
SCRATCH = "LLMCONSOLE_SCRATCH"
#: How scratch directories are called, with the asking process's id behind it.
PREFIX = "llmconsole-scratch-"


def scratch() -> str:
    """The scratch directory that the asking process gave, else one of this process."""
    given = os.environ.get(SCRATCH, "")
    if not os.path.isdir(given):
        given = os.environ[SCRATCH] = new_scratch()
    return given


def new_scratch() -> str:
    """A scratch directory of this process, readable by its owner only; those of dead processes are removed."""
    place = tempfile.gettempdir()
    for entry in os.scandir(place):
        if entry.name.startswith(PREFIX) and not _alive(entry.name.removeprefix(PREFIX).partition("-")[0]):
            shutil.rmtree(entry.path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
