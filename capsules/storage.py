"""Files of a capsule: reading without leaving it, appending with one write, replacing atomically, all of it 0700."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .errors import EvidenceError

#: Names of files that are being written; they are no evidence and not in the digest.
TEMPORARY = ".tmp-"


def make_directory(path: Path) -> None:
    """Create a directory readable by its owner only; parents get the default mode. An existing one is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def temporary_name(directory: Path) -> Path:
    """A name in ``directory`` that no reader takes for evidence."""
    return directory / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"


def write_new(path: Path, data: bytes | memoryview) -> None:
    """Write a file that does not exist yet; a failed write leaves nothing behind.

    Raises:
        OSError: the disk is full, the file exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, data)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes | memoryview) -> None:
    """Replace a file atomically: a reader sees the old bytes or the new ones."""
    temporary = temporary_name(path.parent)
    write_new(temporary, data)
    os.replace(temporary, path)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Make ``path`` appear with its whole content, unless it exists; say whether this call made it.

    Of several processes exactly one gets True.
    """
    temporary = temporary_name(path.parent)
    write_new(temporary, data)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        try:  # a file system without hard links
            write_new(path, data)
            return True
        except FileExistsError:
            return False
    finally:
        os.unlink(temporary)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:  # one turn, unless the data is beyond what a single write takes
        rest = rest[os.write(descriptor, rest) :]


def keep(original: Path, data: bytes | None, directory: Path) -> tuple[str, int, str]:
    """Copy a file, or bytes under its name, into a directory; return the name there, size and SHA-256."""
    make_directory(directory)
    temporary = temporary_name(directory)
    try:
        size, digest = _copy_new(original, data, temporary)
        return _link_free(temporary, directory, original.name.lstrip(".") or "file"), size, digest
    finally:
        temporary.unlink(missing_ok=True)


def _copy_new(source: Path, data: bytes | None, target: Path) -> tuple[int, str]:
    """Copy a file or bytes; return size and SHA-256."""
    digest = hashlib.sha256()
    size = 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if data is not None:
            file.write(data)
            return len(data), hashlib.sha256(data).hexdigest()
        with source.open("rb") as original:
            while chunk := original.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
    return size, digest.hexdigest()


def _link_free(temporary: Path, directory: Path, name: str) -> str:
    """Give the finished file its name, or ``stem-2.suffix`` and so on where that is taken."""
    wanted = Path(name)
    for number in range(1, 10_000):
        candidate = name if number == 1 else f"{wanted.stem}-{number}{wanted.suffix}"
        try:
            os.link(temporary, directory / candidate)
            return candidate
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if not (directory / candidate).exists():
                os.rename(temporary, directory / candidate)
                return candidate
    raise EvidenceError(f"10,000 files are called {name}", str(directory))


class Reserve:
    """Bytes kept back on the disk for the last that a writer has to say, which a full disk would refuse otherwise.

    A good run that cannot say so reads as crashed. A process keeps them once, whatever number of ranks it writes.
    """

    SIZE = 64 << 10

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{TEMPORARY}reserve"
        with contextlib.suppress(OSError):  # a disk that is full already says so at the first append
            write_new(self._path, os.urandom(self.SIZE))  # zeros would take no room on some file systems

    def release(self) -> None:
        """Give the bytes back to the disk; what follows is the seal."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class Appender:
    """Appends to many files, each call one ``write``; keeps a bounded number of them open."""

    MAX_OPEN = 48

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def append(self, path: Path, data: bytes) -> None:
        """Append ``data``; where that fails, take off again what was written of it.

        Raises:
            OSError: the disk is full; what was appended before stays readable.
        """
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = self._opened(path)
        written = os.write(descriptor, data)
        if written == len(data):
            return
        start = os.fstat(descriptor).st_size - written
        try:
            _write_all(descriptor, memoryview(data)[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise

    def _opened(self, path: Path) -> int:
        if len(self._open) >= self.MAX_OPEN:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = self._open[path] = os.open(path, flags, 0o600)
        return descriptor

    def forget(self, path: Path) -> None:
        """Close a file that another has taken the name of; the next append goes into that one."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def sync(self) -> None:
        """Ask the operating system to put everything on disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])


def open_inside(root: Path, relative: str) -> int:
    """Open a regular file of the capsule for reading, following no symbolic link; return the descriptor.

    Args:
        root: the capsule's directory.
        relative: path with ``/`` below it.

    Raises:
        FileNotFoundError: there is no such file.
        EvidenceError: the path leaves the capsule, meets a symbolic link, or names no regular file.
    """
    parts = PurePosixPath(relative).parts
    if not parts or relative.startswith("/") or ".." in parts or "\0" in relative or "\\" in relative:
        raise EvidenceError("path leaves the capsule", relative or "(empty path)", "refused")
    try:
        directory = root
        for part in parts[:-1]:
            directory = directory / part
            if stat.S_ISLNK(directory.lstat().st_mode):
                raise EvidenceError("is a symbolic link", relative, "refused")
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(directory / parts[-1], flags)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(relative) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise EvidenceError("is a symbolic link", relative, "refused") from None
        raise EvidenceError(error.strerror or str(error), relative) from None
    except ValueError as error:
        raise EvidenceError(str(error), relative) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EvidenceError("is not a regular file", relative, "refused")
    return descriptor


def read_inside(root: Path, relative: str, limit: int) -> bytes:
    """Read a whole file of the capsule.

    Raises:
        FileNotFoundError: there is no such file.
        EvidenceError: see ``open_inside``; or the file is larger than ``limit`` bytes.
    """
    with os.fdopen(open_inside(root, relative), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise EvidenceError(f"file of {size:,} bytes is larger than {limit:,}", relative)
        return _read(file.fileno(), size, limit, relative)


def read_tail(root: Path, relative: str, limit: int) -> tuple[bytes, int]:
    """Read the newest ``limit`` bytes of a file; return them and how many older bytes were left out."""
    with os.fdopen(open_inside(root, relative), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        skipped = max(0, size - limit)
        os.lseek(file.fileno(), skipped, os.SEEK_SET)
        return _read(file.fileno(), size - skipped, limit, relative), skipped


def _read(descriptor: int, expected: int, limit: int, relative: str) -> bytes:
    """Read to the end, ``limit`` bytes at most; the ``expected`` ones in one piece: joining would copy a gigabyte."""
    chunks: list[bytes] = []
    room = limit
    try:
        while room > 0 and (chunk := os.read(descriptor, min(room, max(expected, 1 << 16)))):
            chunks.append(chunk)
            room -= len(chunk)
            expected -= len(chunk)
    except OSError as error:
        raise EvidenceError(error.strerror or str(error), relative) from None
    return b"".join(chunks) if len(chunks) != 1 else chunks[0]


def walk(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every entry below ``root`` that is no directory, as (path with ``/``, entry), following no symbolic link.

    Temporary files are left out. Entries come in no particular order.
    """
    pending = [("", root)]
    while pending:
        prefix, directory = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
                else:
                    yield f"{prefix}{entry.name}", entry
