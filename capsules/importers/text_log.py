"""Text logs of training programs: every line that any of them is known to print is used, whoever prints beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from ..errors import EvidenceError
from ..jsonio import decode
from ..limits import MIB
from .logs import Log, programs
from .run import Run
from .source import Source

FORMAT = "training log"

#: How far into a text file, beyond head and tail, a known line is looked for: set-up can print ten thousand lines.
_SEARCHED = 4 * MIB
#: Bytes of a line that readers see; no line of a program is longer, and patterns stay quick.
_SEEN = 16 * 1024
#: Lines that are looked through at once for what any reader knows.
_LINES = 256
#: Bytes of such lines that are looked at where a sign needs certain bytes: a log has a sign in its first ones.
_SIGNED = 256 * 1024
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: A JSON document may quote any log.
_DOCUMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\{\s*[\"}]|\[\s*[\[{\"])")
#: A name that says which rank of the job wrote the file.
_RANKED = re.compile(r"(?:^|[^a-z])rank[_\-.]?\d", re.IGNORECASE)
#: How a line begins that the runtime of a container keeps in a JSON object.
_BOXED = b'{"log":"'
#: What stands before a line that a mail quotes, and around lines that a text or a model's sample quotes.
_QUOTE = re.compile(r"\s{0,3}>{1,9}\s?")
_FENCE = re.compile(rb"```([\w+-]{0,20})\s*$")
#: Signs after which a last line without its end is complete all the same.
_CLOSED = b"|%})]"


def sniff(source: Source) -> bool:
    """Whether any known line is in the head, the tail or the first megabytes."""
    if not source.text or (_DOCUMENT.match(source.head) and not source.head.startswith(_BOXED)):
        return False
    if _known(_ANSI.sub(b"", source.head)) or _known(_ANSI.sub(b"", source.tail)):
        return True
    read, kept = 0, b""
    for chunk in source.chunks():
        if _known(kept + _ANSI.sub(b"", chunk)):
            return True
        kept = chunk[-4096:]
        read += len(chunk)
        if read > _SEARCHED:
            return False
    return False


def read(source: Source, out: Run) -> None:
    """Every known line, in file order."""
    log = Log(out)
    log.modified, log.named = source.modified, out.told or bool(_RANKED.search(source.path.name))
    head = _ANSI.sub(b"", source.head).decode("utf-8", "replace")
    log.begins(head)
    known = programs()
    readers = [program.Lines(log) for program in known]
    used = [0] * len(readers)
    for lines in _batches(source, out):
        # Most marks are in none of so many lines: those that are in one are looked for line by line.
        block = b"\n".join(lines)
        found = [(at, each, [mark for mark in each.marks if mark in block]) for at, each in enumerate(readers)]
        asked = [(at, each, marks, each.take) for at, each, marks in found if marks or each.open]
        quoted = _fenced(lines) if b"```" in block else ()
        for number, raw in enumerate(lines if asked else ()):
            line = ""
            if number in quoted:
                continue
            for at, reader, marks, take in asked:
                for mark in marks:
                    if mark in raw:
                        break
                else:
                    if not reader.open:
                        continue
                if not line:
                    line = log.owner(raw[:_SEEN].decode("utf-8", "replace"))
                    if ">" in line[:4] and _QUOTE.match(line) is not None:
                        break
                if take(line):
                    used[at] += 1
                    break
    for reader in readers:
        reader.close()
    log.attempts.close()
    names = [program.FORMAT for program, lines in zip(known, used, strict=True) if lines and program.FORMAT]
    out.format = f"log of {', '.join(names)}" if names else FORMAT


def _batches(source: Source, out: Run) -> Iterator[list[bytes]]:
    """Lines as a program printed them, without colours and boxes, some at a time; a torn last one is left out."""
    lines: list[bytes] = []
    size = 0
    for raw in source.lines():
        if source.unended and raw[-1:] not in _CLOSED:
            out.note("the last line has no end: it may be torn, and was left out")
            break
        if raw.startswith(_BOXED):
            raw = _unboxed(raw)
        if b"\x1b" in raw:
            raw = _ANSI.sub(b"", raw)
        lines.append(raw)
        size += len(raw)
        if len(lines) >= _LINES or size >= MIB:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _fenced(lines: list[bytes]) -> set[int]:
    """Numbers of the lines between a fence of three backticks and the bare one that closes it: a quotation.

    One that names a language only opens, and so does one before which the same words stand as before the last one
    that opened: a sample of a model that was cut has no end.
    """
    found: set[int] = set()
    opened = -1
    for number, line in enumerate(lines):
        if (fence := _FENCE.match(line)) is None:
            continue
        introduced = number - 1 > opened >= 1 and _introduction(lines, number) == _introduction(lines, opened) != b""
        if opened >= 0 and not fence[1] and not introduced:
            found.update(range(opened, number))
            opened = -1
        else:
            opened = number
    return found


def _introduction(lines: list[bytes], number: int) -> bytes:
    """The words of the line before another one, without its numbers: ``Sample :``."""
    return b"".join(re.sub(rb"\d+", b"", lines[number - 1]).split())


def _known(part: bytes) -> bool:
    """Whether a line is in it that is certain to come from a training program, or from one that failed."""
    return any(sign.search(_lines_with(needed, part) if needed else part) for sign, needed in _signs())


def _unboxed(line: bytes) -> bytes:
    """What a container printed, of the object that its runtime made of the line."""
    try:
        record = decode(line)
    except EvidenceError:
        return line
    printed = cast("dict[str, Any]", record).get("log") if isinstance(record, dict) else None
    return printed.rstrip("\r\n").encode("utf-8", "replace") if isinstance(printed, str) else line


def _lines_with(needed: bytes, part: bytes) -> bytes:
    """The lines that hold certain bytes, of which a pattern that could begin at any word is spared the rest."""
    lines: list[bytes] = []
    at, left = part.find(needed), _SIGNED
    while at >= 0 and left > 0:
        first = max(part.rfind(b"\n", 0, at) + 1, at - _SEEN)
        last = part.find(b"\n", at)
        lines.append(part[first : min(len(part) if last < 0 else last, at + _SEEN)])
        left -= len(lines[-1])
        at = part.find(needed, last) if last >= 0 else -1
    return b"\n".join(lines)


@cache
def _signs() -> tuple[tuple[re.Pattern[bytes], bytes], ...]:
    """One by one: a pattern that begins with a literal is found ten times faster alone than as an alternative."""
    return tuple((re.compile(program.SIGN), program.NEEDED) for program in programs() if program.SIGN)
