"""How many ranks a job has, where a line says so: NCCL's communicators, torchrun, Lightning, and what people print.

``… comm 0x55d rank 3 nranks 8 cudaDev …``, ``global_world_sizes=[16, 16]``, ``using world size: 8``, ``WORLD_SIZE=8``.
A communicator may be of some ranks only, so that the largest number counts.
"""

from __future__ import annotations

import re

from .log import Log

FORMAT = ""
NEEDED = b""
SIGN = b""

_COMMUNICATOR = re.compile(r"\brank \d{1,6} nranks (\d{1,6})\b")
_MEMBER = re.compile(r"\bGLOBAL_RANK: \d{1,6}, MEMBER: \d{1,6}/(\d{1,6})\b")
_AGENT = re.compile(r"\bglobal_world_sizes=\[(\d{1,6})\b")
#: The command by which a job was started; a number of machines that may vary states nothing.
_COMMAND = re.compile(
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch))\b(?=.{0,2000}--nproc[-_]per[-_]node[= ](\d{1,6})\b)"
)
_MACHINES = re.compile(r"--nnodes[= ]([^\s'\",]{1,6})")
_STATED = re.compile(
    r"(?P<of>[\w-]{0,40}[ _-])?\b(?:world[ _-]?size|WORLD_SIZE|World[ _]?[Ss]ize)\b"
    r"['\"]?\s{0,3}[:=]?\s{0,3}(?:is )?['\"]?(\d{1,6})\b(?!\.\d)"
)
#: Part of a job that has a world of its own.
_PART = re.compile(r"parallel|local|group|role|node|model|tensor|pipeline|data|expert|\b[tpdec]p\b", re.IGNORECASE)


class Lines:
    """Reads them, and states at the end the largest number."""

    open = False
    marks = (b" nranks ", b"orld_size", b"orld size", b"WORLD_SIZE", b"orldSize", b"orld Size", b"MEMBER: ", b"--nproc")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._largest = 0

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _COMMUNICATOR.search(line) or _AGENT.search(line) or _MEMBER.search(line)
        if found is None:
            found = next((each for each in _STATED.finditer(line) if not _PART.search(each["of"] or "")), None)
        if found is None:
            return (command := _COMMAND.search(line)) is not None and self._started(line, int(command[1]))
        self._largest = max(self._largest, int(found[found.lastindex or 0]))
        return True

    def _started(self, line: str, processes: int) -> bool:
        """Processes of each machine times machines, where the command says both."""
        machines = _MACHINES.search(line)
        if machines is not None and not machines[1].isdecimal():
            return False
        self._largest = max(self._largest, processes * (int(machines[1]) if machines is not None else 1))
        return True

    def close(self) -> None:
        """The log ends here."""
        if self._largest:
            self._log.run.manifest({"run": {"world_size": self._largest}})
