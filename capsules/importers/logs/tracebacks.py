"""A traceback that one rank prints: its frames, and how its error and the message of that begin and end."""

from __future__ import annotations

import re
from typing import Any

Frame = dict[str, Any]

_ERROR = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80})(?::\s?(.*))?$")
_ERROR_NAME = re.compile(r"(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Warning|Abort|StopIteration)\w*$")
_FRAME = re.compile(r'\s*File "([^"\n]{1,1000})", line (\d{1,9}), in (\S{1,200})')
#: How a log record of torch's launcher and of glog begins.
_RECORD = re.compile(r"[DIWEF]\d{4} \d\d:")
#: How a line of steps begins, which no message of an error goes on with.
_COUNTS = re.compile(r"(?:[Gg]lobal[ _])?(?:[Ss]tep|[Ii]ter(?:ation)?|[Ee]poch)[\s:=#\[]{1,4}\d")
#: Lines between a traceback's beginning and its error, of the same rank, and signs of its words that are kept.
LONGEST = 2000
#: Lines after an error that still belong to its message; signs of its text that are read, and frames that are kept.
_MORE, _READ, _MOST_FRAMES = 4, 16_384, 24


class Trace:
    """A traceback that is being printed by one rank, at the step where the run stands when it begins.

    Attributes:
        indent: of the line by which it began; that of its error, too.
        summary: whether a launcher repeats it.
        anonymous: whether nothing says which rank prints it.
        ignored: whether Python says before it that it goes on without.
        local: which process of its machine prints it, where the line counts these.
        alive: what tells later whether its rank lived on.
        error: type and message, as soon as they are known.
        text: the message with its first lines.
        frames: of the stack, outermost first, as it is printed.
        order: which error of the log it is.
    """

    def __init__(self, indent: int, rank: int, step: int | None, order: int) -> None:
        self.indent, self.rank, self.step, self.order, self.lines = indent, rank, step, order, 0
        self.summary = self.anonymous = self.ignored = False
        self.local: int | None = None
        self.alive: int | None = None
        self.error: dict[str, Any] | None = None
        self.text = ""
        self.frames: list[Frame] = []
        self._more = _MORE

    def goes_on(self, line: str) -> bool:
        """Whether a line belongs to the message of the error."""
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if self.error is None or not (text and self._more) or indent < self.indent or _begins_anew(text):
            return False
        self._more -= 1
        self.error["message"] = f"{self.error['message']} {text}"[:LONGEST]
        self.text = f"{self.text}\n{text}"[:_READ]
        return True

    def inside(self, line: str) -> bool:
        """Whether a line is of the stack."""
        indent = len(line) - len(line.lstrip())
        if indent <= self.indent or (indent == self.indent + 1 and line[:1] != "\t"):
            return False
        if (frame := _FRAME.match(line)) is not None:
            self.frames.append({"name": frame[3], "file": frame[1], "line": int(frame[2])})
            del self.frames[:-_MOST_FRAMES]
        return True

    def ends(self, kind: str, message: str) -> None:
        """Its error is known."""
        self.error, self.text = {"type": kind, "message": message[:LONGEST]}, message[:_READ]


def error_of(line: str) -> tuple[str, str] | None:
    """Type and message of the error that ends a traceback; None where a line is none."""
    found = _ERROR.match(line.strip())
    if found is None or not (found[2] is not None or _ERROR_NAME.search(found[1]) or "." in found[1]):
        return None
    if found[2] is not None and not (_ERROR_NAME.search(found[1]) or "." in found[1] or found[1][:1].isupper()):
        return None
    return found[1], found[2] or ""


def _begins_anew(text: str) -> bool:
    """Whether a line is no continuation of a message: a log record, a rule of signs, a frame."""
    return (
        text[:1] in "[{=*-+"
        or text.startswith(("File ", "During handling", "The above exception", "Traceback (most"))
        or _RECORD.match(text) is not None
        or _COUNTS.match(text) is not None
    )
