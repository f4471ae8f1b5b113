"""Files of people, replaced in one step: whoever reads meanwhile sees the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Write a file in one step; it keeps its mode, a new one gets that of the umask."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def restore_file(file: Path, content: bytes | None) -> None:
    """Give a file the content that it had before; None where it was not there."""
    if content is None:
        file.unlink(missing_ok=True)
    else:
        replace_file(file, content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
