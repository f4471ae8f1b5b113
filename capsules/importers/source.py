"""One raw file opened for reading: its first bytes, and its content in bounded pieces, whatever it holds."""

from __future__ import annotations

import codecs
import os
import stat
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO

from ..errors import EvidenceError
from ..limits import GIB, KIB, MIB
from ..plain_pickle import spare_memory

HEAD_BYTES = 64 * KIB
#: A line longer than this is cut, and the cut is noted; no metric line of any producer comes near.
LINE_BYTES = 256 * KIB
#: Decompressed bytes read of one file; a small file can announce petabytes.
MOST_BYTES = 256 * GIB
_CHUNK = MIB
#: What is taken at a time of a file that is read whole: most come in one piece, which need not be put together.
_LARGE_CHUNK = 64 * MIB

_GZIP = b"\x1f\x8b"
#: Window size that tells zlib to expect the frame of gzip.
_GZIP_MEMBER = 16 + zlib.MAX_WBITS
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class Source:
    """A regular file; gzip is taken off, UTF-16 text becomes UTF-8. Each iteration starts at the beginning.

    Attributes:
        path: the file.
        size: bytes on disk.
        modified: Unix seconds of the last modification.
        notes: what a reader of the result should know (a torn archive, cut lines, NUL bytes); grows while reading.
        cut: what was read of a file whose end is surely missing; empty where it is whole. A text that may still grow is
            none: ``unended``.
        unended: whether the line that ``lines`` yields now is the last one, and its end is missing: it may be torn.

    Raises:
        EvidenceError: there is no such file, it cannot be opened, or it is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.notes: dict[str, int] = {}
        self.unended = False
        self.cut = ""
        try:
            with self._raw() as file:
                state = os.fstat(file.fileno())
        except OSError as error:
            raise EvidenceError(error.strerror or str(error), str(self.path)) from None
        except ValueError as error:  # a NUL byte in the name
            raise EvidenceError(str(error), repr(str(self.path))) from None
        if not stat.S_ISREG(state.st_mode):
            raise EvidenceError("is not a regular file", str(self.path))
        self.size = state.st_size
        self.modified = state.st_mtime

    def _raw(self) -> IO[bytes]:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        return os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)

    def note(self, what: str, times: int = 1) -> None:
        """Say something about the file; the same words are counted."""
        self.notes[what] = self.notes.get(what, 0) + times

    def ends_early(self, read: str) -> None:
        """Say that the file's end is missing, and what was ``read`` of it."""
        self.cut = read

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of the content."""
        found = b""
        for chunk in self._pieces(HEAD_BYTES, quiet=True):
            found += chunk
            if len(found) >= HEAD_BYTES:
                break
        return found[:HEAD_BYTES]

    @cached_property
    def tail(self) -> bytes:
        """The last 64 KiB of the file; empty where the head holds them already, or the file is compressed."""
        if self.compressed or self.size <= HEAD_BYTES:
            return b""
        with self._raw() as file:
            file.seek(max(HEAD_BYTES, self.size - HEAD_BYTES))
            return file.read(HEAD_BYTES) or b""

    @cached_property
    def start(self) -> bytes:
        """The first two bytes on disk."""
        with self._raw() as file:
            return file.read(2) or b""

    @property
    def compressed(self) -> bool:
        """Whether the file is a gzip archive."""
        return self.start == _GZIP

    @cached_property
    def text(self) -> bool:
        """Whether the head looks like text: hardly any control bytes other than those of terminals and torn writes."""
        head = self.head[: 8 * KIB]
        odd = sum(
            head.count(byte) for byte in (1, 2, 3, 4, 5, 6, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 28, 29)
        )
        return odd * 50 <= len(head) and head.count(0) * 2 <= len(head)

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        """The content in pieces of about ``size`` bytes. What cannot be read ends the iteration, with a note."""
        return self._pieces(size, quiet=False)

    def read(self, limit: int, growth: int = 0) -> bytes:
        """The whole content.

        Args:
            limit: bytes that are read of such a file.
            growth: how many times its size decoding it takes; what needs more than half of the memory that is free is
                refused, a small archive of much before it has filled that half.

        Raises:
            EvidenceError: it is larger than ``limit`` bytes, or than memory allows.
        """
        where = str(self.path)
        room = spare_memory() // 2 if growth else 0
        parts: list[bytes] = []
        size = 0
        for chunk in self.chunks(_CHUNK if self.compressed else _LARGE_CHUNK):
            size += len(chunk)
            if size > limit:
                raise EvidenceError(f"is larger than the {limit:,} bytes that are read of such a file", where)
            if growth and (taken := growth * max(size, 0 if self.compressed else self.size)) > room:
                needed = f"takes {'more than' if self.compressed else 'about'} {taken / MIB:,.0f} MiB to read"
                what = f"{needed}, and half of what is free is {room / MIB:,.0f}"
                raise EvidenceError(what, where, "read it on a machine with more memory")
            parts.append(chunk)
        return b"".join(parts)

    def lines(self) -> Iterator[bytes]:
        """Lines without their ends, the last one too where its end is missing. NUL bytes are taken out and counted.

        A carriage return ends a line as well: progress bars and Windows write it.
        """
        rest = b""
        self.unended = False
        for chunk in self.chunks():
            if b"\0" in chunk:
                self.note("NUL bytes were taken out", chunk.count(0))
                chunk = chunk.replace(b"\0", b"")
            if b"\r" in chunk:
                chunk = chunk.replace(b"\r", b"\n")
            *lines, last = chunk.split(b"\n")
            if not lines:
                rest = self._bounded(rest + last)
                continue
            lines[0] = rest + lines[0]
            if max(map(len, lines)) > LINE_BYTES:
                lines = [self._bounded(line) for line in lines]
            yield from lines
            rest = self._bounded(last)
        if rest:
            self.unended = True
            yield rest

    def _bounded(self, line: bytes) -> bytes:
        if len(line) <= LINE_BYTES:
            return line
        if len(line) > LINE_BYTES + 1:  # a rest that was cut before is one longer than what it is cut to
            self.note(f"lines were cut after {LINE_BYTES:,} bytes")
        return line[: LINE_BYTES + 1]

    def _pieces(self, size: int, *, quiet: bool) -> Iterator[bytes]:
        encoding = _UTF16.get(self.start, "")
        decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        read = 0
        for chunk in self._decompressed(size, quiet):
            read += len(chunk)
            if read > MOST_BYTES:
                self.note(f"only the first {MOST_BYTES:,} bytes were read")
                return
            yield chunk if decoder is None else decoder.decode(chunk).lstrip("\ufeff").encode("utf-8", "replace")

    def _decompressed(self, size: int, quiet: bool) -> Iterator[bytes]:
        with self._raw() as raw:
            try:
                if self.compressed:
                    yield from _inflated(raw, size)
                else:
                    while chunk := raw.read(size):
                        yield chunk
            except (EOFError, zlib.error, OSError) as error:
                if not quiet:
                    self.note(f"reading stopped before the end ({error})")
                    self.cut = self.cut or "what stands before that was read"


def _inflated(raw: IO[bytes], size: int) -> Iterator[bytes]:
    """The content of a gzip archive of one or more members; of a torn one all that can be had, then an error."""
    inflate, begun = zlib.decompressobj(_GZIP_MEMBER), False
    while packed := raw.read(size):
        while packed:
            begun = True
            if chunk := inflate.decompress(packed, size):
                yield chunk
            packed = inflate.unconsumed_tail
            if inflate.eof:  # zeros may fill up a tape's block; anything else is the next member
                packed = inflate.unused_data.lstrip(b"\0")
                inflate, begun = zlib.decompressobj(_GZIP_MEMBER), False
    if begun:
        yield inflate.flush()
        if not inflate.eof:
            raise EOFError("the archive is torn")
