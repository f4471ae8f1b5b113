"""Pickles read as plain data: dict, list, tuple, str, bytes, int, float, bool and None. Nothing in a file is run.

Python's own unpickler does the work, and every opcode that would look up a class, call something or ask for an object
by name is refused. What an opcode only claims (a string of terabytes, a memo of four thousand million places) ends at
a limit of the address space that holds while the file is read. A pickle may still hold a list that contains itself,
or one list a million times, and sets or byte arrays, which ``text`` and ``integer`` take for nothing: whoever walks
the result does so to a bounded depth and a bounded number of values.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import pickletools
import re
import resource
import threading
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .collector import collector_still
from .errors import EvidenceError
from .limits import MIB

#: What reading takes, as a multiple of the file: measured 9 on dumps and snapshots.
GROWTH = 10
#: Address space for reading one file: a multiple of it (small numbers in many lists take more than the measured), and
#: a floor, since the allocator asks for its memory in large pieces.
_MOST_GROWTH, _LEAST_ROOM = 40, 96 * MIB
#: What the unpickler asks for at a time; it reads ahead where a file can be peeked into.
_CHUNK = 1 << 17
#: Opcodes looked at to find the keys of the outermost mapping.
_GLANCE = 600
_TWO_64 = 1 << 64

#: Tuples in tuples. The hash of one visits each path anew and recurses in C: twenty-odd doublings take hours, and some
#: ten thousand levels the process. No dump nests tuples; so many opcodes that make one, so close together, are no
#: accident. (Those that are far apart pass: the process that reads foreign files is one that may be ended.)
_TUPLES = b"\x85\x86\x87"
_RUN, _BYTES_APART = 24, 8
#: The same for the older opcode, which is also a letter: closer together than any text has it.
_MARKED, _LETTERS_APART = b"t", 4
#: Bytes looked at together: what is made of them stays in the cache of the processor.
_SCANNED = MIB // 4
_MEMOIZING = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
#: A protocol of 2 to 5, perhaps a frame, and then a container, a mark or a memo's place.
_START = re.compile(rb"\x80[\x02-\x05](?:\x95.{6}\0\0)?[\]}()]", re.DOTALL)

_reading = threading.Lock()


class _Refusing(pickle.Unpickler):
    """Admits no class and no persistent object: what remains can build nothing but plain data."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise EvidenceError(f"asks for the object {module[:60]}.{name[:60]}; only plain data is read of a pickle")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise EvidenceError("asks for a persistent object; only plain data is read of a pickle")


def load_plain(data: bytes, where: str | os.PathLike[str] = "") -> Any:
    """Read one pickle (protocol 2 to 5) that holds plain data only.

    Args:
        data: the whole pickle.
        where: the file, for the error's line.

    Returns:
        The object; see the module for what can be in it.

    Raises:
        EvidenceError: it asks for anything but plain data, is torn, claims more than it holds, nests tuples, is
            followed by something else, or takes more memory than there is to spare.
    """
    place = os.fspath(where)
    if data[:1] != b"\x80" or not b"\x02" <= data[1:2] <= b"\x05":
        raise EvidenceError("is no pickle of protocol 2 to 5", place)
    room = spare_memory() // 2
    if GROWTH * len(data) > room:
        raise EvidenceError(
            f"takes about {GROWTH * len(data) / MIB:,.0f} MiB to read, and half of what is free is {room / MIB:,.0f}",
            place,
            "read it on a machine with more memory",
        )
    if _nests_tuples(data):
        raise EvidenceError("nests tuples as no dump does", place, "it was made to harm its reader, or is damaged")
    stream = io.BufferedReader(io.BytesIO(data), _CHUNK)  # pyright: ignore[reportArgumentType]
    try:
        with _guarded(_MOST_GROWTH * len(data) + _LEAST_ROOM), _hushed(data):
            value = _Refusing(stream, fix_imports=False, encoding="utf-8", errors="replace").load()
    except EvidenceError as error:
        raise EvidenceError(error.what, place, error.hint) from None
    except MemoryError:
        raise EvidenceError("claims more than a file of its size can hold", place, "the file is damaged") from None
    except EOFError:
        raise EvidenceError("is torn: the pickle has no end", place) from None
    except Exception as error:  # each malformed opcode has its own kind of error
        raise EvidenceError(f"is no valid pickle of plain data ({str(error)[:120]})", place) from None
    if stream.read(1):
        raise EvidenceError("goes on after the end of the pickle", place, "the file is damaged, or no such dump")
    return value


def looks_like_pickle(head: bytes) -> bool:
    """Whether a file that begins with ``head`` may be a pickle of a container."""
    return bool(_START.match(head))


def top_level_keys(head: bytes, until: Collection[str] = ()) -> tuple[str, ...]:
    """Keys of the outermost mapping, as far as the beginning of a file shows them; nothing is loaded.

    Args:
        head: the first bytes of the file; a few hundred opcodes of them are looked at.
        until: keys after any of which nothing more is looked at.
    """
    if not looks_like_pickle(head):
        return ()
    keys: list[str] = []
    stack: list[object] = []  # strings as themselves, marks, and None for what does not matter
    memo: dict[object, object] = {}
    with contextlib.suppress(Exception):  # the head ends where it ends
        for opcode, argument, _ in itertools.islice(pickletools.genops(head), _GLANCE):
            if opcode.name in _MEMOIZING:
                memo[len(memo) if argument is None else argument] = stack[-1]
                continue
            marks = stack.count(pickletools.markobject)
            if (opcode.name == "SETITEMS" and marks == 1) or (opcode.name == "SETITEM" and len(stack) == 3):
                keys += _pairs(stack)
            for kind in reversed(opcode.stack_before):
                if kind is pickletools.stackslice:
                    while stack[-1] is not pickletools.markobject:
                        stack.pop()
                else:
                    stack.pop()
            stored = memo.get(argument) if "GET" in opcode.name else argument
            if stored in until and _pairs([*stack, stored])[-1:] == [stored]:
                stack.append(stored)
                break
            for kind in opcode.stack_after:
                stack.append(kind if kind is pickletools.markobject else stored if isinstance(stored, str) else None)
    return tuple(dict.fromkeys(keys + _pairs(stack)))


def _pairs(stack: list[object]) -> list[str]:
    """The keys on a stack that holds a mapping and pairs for it."""
    pairs = stack[2:] if stack[1:2] == [pickletools.markobject] else stack[1:]
    if pickletools.markobject in pairs:  # of a value: what stands before it is whole, but for the value's container
        pairs = pairs[: pairs.index(pickletools.markobject)]
    return [key for key in pairs[::2] if isinstance(key, str)]


def text(value: Any, most: int = 4096) -> str | None:
    """A string, or a number as one, of at most ``most`` signs; None for anything else. Never raises."""
    if type(value) is str:
        return value[:most]
    if type(value) is int and -_TWO_64 < value < _TWO_64:
        return str(value)
    if type(value) is bytes:
        return value[:most].decode("utf-8", "replace")
    return None


def integer(value: Any) -> int | None:
    """An integer of 64 bits, also where it comes as a string or a whole float; None for the rest. Never raises."""
    if type(value) is int:
        return value if -_TWO_64 < value < _TWO_64 else None
    if type(value) is str and len(value) <= 21:
        try:
            return int(value)
        except ValueError:
            return None
    if type(value) is float and value.is_integer() and abs(value) < _TWO_64:
        return int(value)
    return None


def _nests_tuples(data: bytes) -> bool:
    """Whether opcodes that make tuples stand as close together as only tuples of tuples have them."""
    for start in range(0, len(data), _SCANNED):
        part = np.frombuffer(data, np.uint8, min(_SCANNED + _RUN * _BYTES_APART, len(data) - start), start)
        for opcodes, apart in ((_TUPLES, _BYTES_APART), (_MARKED, _LETTERS_APART)):
            at = np.flatnonzero((part >= opcodes[0]) & (part <= opcodes[-1]))
            if np.any(at[_RUN - 1 :] - at[: 1 - _RUN] < _RUN * apart):
                return True
    return False


def spare_memory() -> int:
    """Bytes that this process can still take: what the machine has free, within the process's own limit."""
    spare = _TWO_64
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                spare = int(line.split()[1]) * 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return spare if soft == resource.RLIM_INFINITY else max(0, min(spare, soft - _address_space()))


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _hushed(data: bytes) -> contextlib.AbstractContextManager[Any]:
    """Python itself prints an error about a byte array that could not be had, whose opcode is 0x96."""
    return contextlib.redirect_stderr(io.StringIO()) if b"\x96" in data else contextlib.nullcontext()


@contextlib.contextmanager
def _guarded(room: int) -> Generator[None]:
    """Hold the process to ``room`` bytes more of address space, and the collector still, while a file is read."""
    with _reading, collector_still():
        used = _address_space()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + room
        lowered = used > 0 and (soft == resource.RLIM_INFINITY or wanted < soft)
        try:
            if lowered:
                resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
            yield
        finally:
            if lowered:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
