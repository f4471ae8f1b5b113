"""How many ranks a job has, where a line says so and nothing says otherwise.

A number of ranks is stated of many things: a shard, an engine for inference, a group, a node. What counts is what
speaks of the whole job: the launcher (``global_world_sizes=[16, 16]``, ``MEMBER: 1/16``, its command), its environment
(``WORLD_SIZE=16``), and a plain ``world size: 16``, before and after which nothing narrows it. A communicator of NCCL
may be of some ranks only: it counts where no more devices are known than it has ranks. Statements that differ are none.
"""

from __future__ import annotations

import re

from .log import Log

FORMAT = ""
NEEDED = b""
SIGN = b""

#: torchrun's own, at each start of the processes: the last one is of the last attempt.
_ELASTIC = re.compile(r"\bglobal_world_sizes=\[(\d{1,6})\b")
#: Lightning (two), DeepSpeed, Ray Train, accelerate.
_LAUNCHER = re.compile(
    r"\bGLOBAL_RANK: \d{1,6}, MEMBER: \d{1,6}/(\d{1,6})\b"
    r"|distributed processes registered\. Starting with (\d{1,6}) processes"
    r"|\bdist_world_size=(\d{1,6})\b|env:// \[rank=\d{1,6}, world_size=(\d{1,6})\]|^Num processes: (\d{1,6})$"
)
#: The command that a shell shows as it starts the job; a number of machines that may vary states nothing.
_COMMAND = re.compile(
    r"(?:[+$]{1,4} )?(?:exec )?(?:torchrun|\S{0,200}python[\d.]{0,6} (?:-\w )?-m torch\.distributed\.(?:run|launch)) "
    r"(?=.{0,2000}--nproc[-_]per[-_]node[= ](\d{1,6})\b)"
)
_MACHINES = re.compile(r"--nnodes[= ]([^\s'\",]{1,6})")
_STATED = re.compile(
    r"(?<![\w-])(?:world[ _-]?size|WORLD_SIZE|World[ _]?[Ss]ize)"
    r"['\"]?\s{0,3}[:=]?\s{0,3}(?:is )?['\"]?(\d{1,6})\b(?!\.\d)"
)
_COMMUNICATOR = re.compile(
    r"(?:([\w.-]{1,80}):\d{1,9}:\d{1,9} \[(\d{1,4})\] NCCL INFO .{0,80}?)?\brank \d{1,6} nranks (\d{1,6})\b"
    r"(?: cudaDev \d{1,4} nvmlDev (\d{1,4}))?"
)
#: Before a statement: where the line was printed, values, and what lists arguments; what is left must be plain words.
_PRINTED = re.compile(r"[\w./-]{1,200}\.(?:py|cc|cpp)(?::\d{1,6})?(?::\w{1,80})?|\d{4}-\d\d-\d\dT|\d(?:st|nd|rd|th)\b")
_VALUE = re.compile(r"=\s?['\"]?[^\s,;'\"]{1,200}|(?<=['\"]): ['\"][^'\"]{0,200}['\"]")
_ARGUMENTS = re.compile(r"\b(?:Namespace\(|[Aa]rg(?:ument)?s\b)")
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_PLAIN = re.compile(
    r"info|debug|warning|root|main|__main__|titan|torchtitan|(?:local_|global_|node_)?ranks?|global|total|using|with|the|on"
    r"|(?:torch\.)?(?:dist|distributed)|torchrun|backend|nccl|gloo|mpi|(?:(?:torch\.)?dist(?:ributed)?\.)?init_process_group"
    r"|init|initiali[sz]\w{1,4}|job|is|device|cuda|and|export|declare|env|environment|start\w{0,3}|launch\w{0,3}|setup|x"
)
#: Words that are plain only where a group of processes is initialised: the first one is of all.
_FIRST_GROUP = re.compile(r"\binit\w* (?:the )?(?:distributed )?process groups?\b", re.IGNORECASE)
#: After a statement: of what it is, and of when.
_NARROWED = re.compile(
    r"['\"]?\s{0,3}(?:\(|[^,;|]{0,30}\b(?:per|of|for|in|within|over|saved|was)\b)|.*distributed_init_method"
)
#: Ranks of the largest job that anybody states; places of communicators that are told apart.
_MOST, _MOST_PLACES = 100_000, 10_000


class Lines:
    """Reads them, and states at the end the number on which they agree."""

    open = False
    marks = (
        *(b" nranks ", b"orld_size", b"orld size", b"WORLD_SIZE", b"orldSize", b"orld Size", b"MEMBER: "),
        *(b"processes registered", b"Num processes: ", b"--nproc"),
    )

    def __init__(self, log: Log) -> None:
        self._log = log
        self._elastic = self._largest = 0
        self._started: int | None = None
        self._launcher: set[int] = set()
        self._said: set[int] = set()
        self._places: set[tuple[str, str]] = set()

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _COMMUNICATOR.search(line)) is not None:
            self._largest = max(self._largest, int(found[3]))
            if found[1] and len(self._places) < _MOST_PLACES:
                self._places.add((found[1], found[4] or found[2]))
        elif (found := _ELASTIC.search(line)) is not None:
            self._elastic = int(found[1])
        elif (found := _LAUNCHER.search(line)) is not None:
            self._launcher.add(int(found[found.lastindex or 0]))
        elif (command := _COMMAND.match(line)) is not None:
            machines = _MACHINES.search(line)
            each = 1 if machines is None else int(machines[1]) if machines[1].isdecimal() else 0
            self._started = (int(command[1]) * each) if self._started is None else 0  # of two nothing tells which
        else:
            stated = [each for each in _STATED.finditer(line) if _of_the_job(line, each)]
            self._said.update(int(each[1]) for each in stated)
            return bool(stated)
        return True

    def close(self) -> None:
        """The log ends here."""
        if 0 < (ranks := self._ranks()) <= _MOST:
            self._log.run.manifest({"run": {"world_size": ranks}})

    def _ranks(self) -> int:
        """The number of ranks; 0 where nothing states it, or several numbers are stated."""
        if self._elastic:
            return self._elastic
        if stated := self._launcher or (self._said | ({self._started} if self._started else set())):
            return max(stated) if len(stated) == 1 and max(stated) >= self._largest else 0
        return self._largest if len(self._places) <= self._largest else 0


def _of_the_job(line: str, found: re.Match[str]) -> bool:
    """Whether a statement is of the whole job: nothing before or after it says that it is of something else."""
    before = line[: found.start()][-2000:]
    if _NARROWED.match(line, found.end()) is not None:
        return False
    if (listed := _ARGUMENTS.search(before)) is not None:
        before = before[: listed.start()]
    for each in (_PRINTED, _VALUE, _FIRST_GROUP):
        before = each.sub("", before)
    words = _WORD.findall(before)
    of_environment = found[0].startswith("WORLD_SIZE")
    return all(_PLAIN.fullmatch(each.lower()) is not None or (of_environment and each.isupper()) for each in words)
