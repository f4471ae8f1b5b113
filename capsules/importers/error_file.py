"""``error.json`` of torch's ``@record``: the exception that ended a process, with the second in which it did."""

from __future__ import annotations

import re
from typing import Any, cast

from ..errors import EvidenceError
from ..limits import MIB
from .prefix import decode_prefix
from .run import Run
from .source import Source

FORMAT = "error file of torch"

_LARGEST = 16 * MIB
_HEAD = re.compile(rb'\s*\{\s*"message"\s*:\s*\{\s*"message"\s*:\s*"')
_FRAME = re.compile(r'^\s*File "([^"\n]{1,1000})", line (\d{1,9}), in (\S{1,200})', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory")
#: Signs of the message that are kept, and frames.
_LONGEST, _MOST_FRAMES = 2000, 24


def sniff(source: Source) -> bool:
    """Whether it is an object that torch writes of an exception."""
    head = source.head
    return _HEAD.match(head) is not None and (b'"py_callstack"' in head or b'"extraInfo"' in head)


def read(source: Source, out: Run) -> None:
    """Write how the rank ended, and its exception where no log of it has told that already.

    Raises:
        EvidenceError: it is no such object, or torn before it says anything.
    """
    found, whole = decode_prefix(source.read(_LARGEST), str(source.path))
    error = cast("dict[str, Any]", found).get("message") if isinstance(found, dict) else None
    words = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
    if not isinstance(words, str):
        raise EvidenceError("is no error file of torch", str(source.path))
    if not whole:
        source.ends_early("what stands before the tear was read")
    more = cast("dict[str, Any]", error).get("extraInfo")
    extra = cast("dict[str, Any]", more) if isinstance(more, dict) else {}
    stamp, stack = str(extra.get("timestamp") or ""), str(extra.get("py_callstack") or "")
    t = float(stamp) if stamp.isdecimal() and len(stamp) <= 12 else None
    kind, _, message = words.partition(": ")
    frames = [
        {"name": name, "file": file, "line": int(line)}
        for file, line, name in _FRAME.findall(stack.rpartition(_TRACEBACK)[2])
    ]
    if out.past or out.rank not in out.raised:
        shown = frames[::-1][:_MOST_FRAMES] or None
        out.event("exception", type=kind[:200], message=message[:_LONGEST], t=t, frames=shown, past=None)
    if not out.past:
        ended = "oom" if _OUT_OF_MEMORY.search(words) else "exception"
        out.record("ranks", {"exit": {"kind": ended, "message": words[:_LONGEST], "t": t}})
