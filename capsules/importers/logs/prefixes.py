"""What stands before the lines of a log: who printed them, and what a cluster, a container or a logger adds to all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_ISO = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
#: Who printed a line, by torchrun (``[default3]:``) and mpirun (``[1,3]<stdout>:``), behind which the line begins at
#: once; by torch (``[rank3]: ``), srun -l (``3: ``), and what people write: ``[rank1] ``, ``[Rank 1] ``,
#: ``(rank=1/8) ``, ``rank 1: ``, ``RANK1 | ``, ``[1]: ``.
WHO = re.compile(
    r"(?:\[(?:default|trainer)(\d{1,6})\]:|\[\d+,(\d{1,6})\]<std(?:out|err)>:)(?: (?=\[))?"
    r"|(?:(\d{1,6}):(?= )|\[rank(\d{1,6})\]:"
    r"|[\[(<](?:[Gg]lobal[ _])?(?:[Rr]ank|RANK)[ _=:#-]{0,2}(\d{1,6})(?:/\d{1,6})?[\])>]:?(?=\s)"
    r"|(?:[Rr]ank|RANK)[ _=#-]?(\d{1,6})(?:/\d{1,6})?(?::| [|>-])(?= )|\[(\d{1,6})\]:(?= )) ?"
)
#: The signs with which it can begin.
WHO_BEGINS = "[(<0123456789rR"
#: What a container's runtime (time, stream and tag), kubectl (a time or a pod) and Ray (an actor with its process) add.
WRAPPED = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}(?:Z|[+-]\d\d:\d\d) )(?:std(?:out|err) [FP] )?|\[pod/[\w./-]{1,300}\] "
    r"|(\((?:[A-Za-z_][\w.()]{0,100} )?pid=\d{1,9}(?:, ip=[\w.:]{1,60})?\)) "
)
#: A name of a machine has a letter or a dot, and a digit: ``step: `` and ``3: `` are none.
_NAMED = r"(?=[\d.-]{0,40}[A-Za-z.])(?=[A-Za-z_.-]{0,60}\d)[\w.-]{2,80}"
_LEVEL = r"(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)"
#: What may stand before each line of a log: pdsh and dshbak ``node02: `` and ``2026-11-30 10:02:11 node02 ``; syslog
#: ``Nov 30 10:02:11 node02 python3[41000]: ``; docker compose ``trainer-1  | ``; a logger that prints for others,
#: ``2026-11-30 10:02:11,123 - INFO - `` or ``[2026-11-30 10:02:11] ``; and the blanks of srun -l before ``  3: ``.
_COMMON = (
    re.compile(rf"(?P<place>{_NAMED}): ?|(?P<time>{_ISO}) (?P<host>{_NAMED}):? "),
    re.compile(
        rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|(?P<time>{_ISO})\S{{0,6}}) (?P<place>[\w.-]{{1,80}}) "
        r"[\w./-]{1,60}(?:\[\d{1,9}\])?: "
    ),
    re.compile(r"(?P<place>[A-Za-z][\w.-]{1,80}) {1,40}\| "),
    re.compile(rf"\[?(?P<time>{_ISO})\]?(?: - [\w.]{{1,80}})?(?:(?: - | \| | )\[?{_LEVEL}\]?)?(?: -| \||:)? "),
    re.compile(r" {0,5}(?=\d{1,6}: )"),
)
_MACHINE = _COMMON[0]
_NUMBERED = re.compile(r"^ {0,6}(\d{1,9}): ", re.MULTILINE)
#: Lines that are looked at, those of them that must begin alike, and lines of each name.
_LOOKED_AT, _ALIKE, _FEWEST, _OF_A_NAME = 200, 0.9, 4, 3


@dataclass(frozen=True)
class Common:
    """What nearly all lines of a log begin with; ``places`` are the machines or containers that it names."""

    pattern: re.Pattern[str]
    places: frozenset[str]


def common(head: str) -> Common | None:
    """What nearly all lines begin with, and what is no part of any of them; None where there is no such thing."""
    lines = [each for each in head.splitlines()[:_LOOKED_AT] if each.strip()]
    for pattern in _COMMON:
        found = [each for each in map(pattern.match, lines) if each is not None]
        if len(found) < max(_FEWEST, _ALIKE * len(lines)) or not any(each[0] for each in found):
            continue
        places = [named for each in found if (named := place(each))]
        if not places or _OF_A_NAME * len(set(places)) <= len(places):
            return Common(pattern, frozenset(places))
    return None


def place(found: re.Match[str]) -> str:
    """The machine or container that a prefix names; empty where it names none."""
    named = found.groupdict()
    return named.get("place") or named.get("host") or ""


def line_numbers(head: str) -> bool:
    """Whether the numbers before the lines are those of lines: they only grow, where ranks come again."""
    found = [int(each) for each in _NUMBERED.findall(head)[:50]]
    return len(found) > 2 and found[0] > 0 and all(before < after for before, after in pairwise(found))
