"""The smallest reproduction of a hang or mismatch as a script: two ranks over Gloo and the calls at fault, only torch.

Everything that comes from evidence is either looked up in a table of ours or written as a Python literal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..analyzers.distributed.signatures import dtype_name, family
from .text import one_line

if TYPE_CHECKING:
    from ..analyzers.distributed.reproduction import Call, Reproduction

#: Seconds that a call of the script waits.
TIMEOUT_S = 5
#: Shapes up to so many dimensions and elements in all are kept; of larger ones only how they differ is kept.
_DIMENSIONS, _ELEMENTS = 4, 4096
#: Calls of a rank, and tensors of a call, at most.
_CALLS, _TENSORS = 16, 8

#: What each rank does otherwise, in words.
_KINDS = {
    "missing": "one rank leaves out a call",
    "extra": "one rank makes a call more",
    "shape": "one rank calls with another shape",
    "dtype": "one rank calls with another dtype",
    "op": "one rank makes another call",
    "order": "one rank makes the calls of two groups in the other order",
}

#: Each operation as a function of the script; every one checks what it got.
_OPERATIONS = {
    "all_reduce": """\
def all_reduce(shape, dtype, group):
    value = filled(shape, dtype)
    dist.all_reduce(value, group=group)
    check(value, PUT_IN[0] + PUT_IN[1])
""",
    "broadcast": """\
def broadcast(shape, dtype, group, root):
    value = filled(shape, dtype)
    dist.broadcast(value, src=root, group=group)
    check(value, PUT_IN[root])
""",
    "reduce": """\
def reduce(shape, dtype, group, root):
    value = filled(shape, dtype)
    dist.reduce(value, dst=root, group=group)
    if dist.get_rank() == root:
        check(value, PUT_IN[0] + PUT_IN[1])
""",
    "all_gather": """\
def all_gather(shape, dtype, group):
    parts = [torch.empty(shape, dtype=dtype) for _ in PUT_IN]
    dist.all_gather(parts, filled(shape, dtype), group=group)
    for part, value in zip(parts, PUT_IN):
        check(part, value)
""",
    "all_gather_base": """\
def all_gather_base(shape, dtype, group):
    value = filled(shape, dtype).flatten()
    parts = torch.empty(2 * value.numel(), dtype=dtype)
    dist.all_gather_into_tensor(parts, value, group=group)
    for part, value in zip(parts.chunk(2), PUT_IN):
        check(part, value)
""",
    "gather": """\
def gather(shape, dtype, group, root):
    parts = [torch.empty(shape, dtype=dtype) for _ in PUT_IN] if dist.get_rank() == root else None
    dist.gather(filled(shape, dtype), parts, dst=root, group=group)
    for part, value in zip(parts or (), PUT_IN):
        check(part, value)
""",
    "scatter": """\
def scatter(shape, dtype, group, root):
    value = torch.empty(shape, dtype=dtype)
    dist.scatter(value, [filled(shape, dtype) for _ in PUT_IN] if dist.get_rank() == root else None, root, group)
    check(value, PUT_IN[root])
""",
    "reduce_scatter": """\
def reduce_scatter(shape, dtype, group):
    value = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(value, [filled(shape, dtype) for _ in PUT_IN], group=group)
    check(value, PUT_IN[0] + PUT_IN[1])
""",
    "reduce_scatter_base": """\
def reduce_scatter_base(shape, dtype, group):
    parts = filled((2, *shape), dtype).flatten()
    value = torch.empty(parts.numel() // 2, dtype=dtype)
    dist.reduce_scatter_tensor(value, parts, group=group)
    check(value, PUT_IN[0] + PUT_IN[1])
""",
    "all_to_all": """\
def all_to_all(shape, dtype, group):
    parts = filled((2, *shape), dtype).flatten()
    value = torch.empty_like(parts)
    dist.all_to_all_single(value, parts, group=group)
    for part, value in zip(value.chunk(2), PUT_IN):
        check(part, value)
""",
    "barrier": """\
def barrier(shape, dtype, group):
    dist.barrier(group=group)
""",
    "send": """\
def send(shape, dtype, group):
    dist.send(filled(shape, dtype), dst=1 - dist.get_rank(), group=group)
""",
    "recv": """\
def recv(shape, dtype, group):
    value = torch.empty(shape, dtype=dtype)
    dist.recv(value, src=1 - dist.get_rank(), group=group)
    check(value, PUT_IN[1 - dist.get_rank()])
""",
}

#: Operations with a root, and whether the root gives or gets. Who gives need not wait for the other.
_ROOTS = {"broadcast": "gives", "scatter": "gives", "reduce": "gets", "gather": "gets"}
#: Operations of which a call on several tensors is several calls on one.
_EACH = frozenset(("all_reduce", "broadcast", "all_gather_base", "reduce_scatter_base"))

#: dtypes that Gloo reduces, and for the others one of the same size.
_DTYPES = {
    **{each: each for each in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")},
    "bool": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "int8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "int8",
    "int16": "float16",
    "uint16": "bfloat16",
    "uint32": "int32",
    "uint64": "int64",
    "complex64": "float64",
}


class NotWritable(ValueError):
    """The calls at fault cannot be written as a script; the message says why."""


def script(found: Reproduction, source: str) -> str:
    """The script that reproduces ``found``.

    Args:
        found: what two ranks call.
        source: the capsule it was found in, in words.

    Raises:
        NotWritable: an operation or dtype is none that two ranks over Gloo know, or both ranks would do the same.
    """
    sides = (found.a, found.b)
    groups = list(dict.fromkeys(call.group for side in sides for call in side))
    if any(len(side) > _CALLS for side in sides):
        raise NotWritable(f"it takes more than {_CALLS} calls of a rank")
    names = _dtypes([call.dtype for side in sides for call in side])
    small = _smaller([shape for side in sides for call in side for shape in call.shapes[:_TENSORS]])
    waits = int(found.kind == "extra")  # the rank that makes a call alone
    written = [_Writer(names, small, groups, waits).lines(side) for side in sides]
    if written[0] == written[1]:
        raise NotWritable("with small tensors both ranks would do the same")
    used = {line.partition("(")[0] for lines in written for line in lines}
    operations = [_OPERATIONS[each] for each in _OPERATIONS if each in used]
    ranks = " and ".join(str(int(rank)) for rank in found.ranks)
    replaced = sorted(each for each in names if names[each] != each)
    return _SCRIPT.format(
        what=_KINDS.get(found.kind, _KINDS["op"]),
        rule=_comment(found.rule),
        source=_comment(source),
        ranks=ranks,
        site=_comment(found.frame) if found.frame else "not on record",
        small="kept" if all(small[each] == each for each in small) else "made small; how they differ is kept",
        replaced="".join(f"\n#         {_comment(each)} is stood in for by {names[each]}" for each in replaced),
        timeout=TIMEOUT_S,
        most=f"rank {int(found.ranks[0])} of the job",
        odd=f"rank {int(found.ranks[1])} of the job",
        operations="\n\n".join(operations),
        groups=len(groups),
        a="\n".join(f"    {line}" for line in written[0]) or "    pass",
        b="\n".join(f"    {line}" for line in written[1]) or "    pass",
    )


@dataclass(frozen=True)
class _Writer:
    """How calls are written; ``waits`` is the rank that shall wait in vain where there is a choice."""

    dtypes: dict[str, str]
    shapes: dict[tuple[int, ...], tuple[int, ...]]
    groups: list[str]
    waits: int

    def lines(self, calls: Sequence[Call]) -> list[str]:
        return [line for call in calls for line in self._call(call)]

    def _call(self, call: Call) -> Iterator[str]:
        operation = family(call.op)
        if operation not in _OPERATIONS:
            raise NotWritable(f"the operation {one_line(call.op, 60)!r} is none that two ranks over Gloo know")
        dtype = self.dtypes[dtype_name(call.dtype) or "float32"]
        shapes = call.shapes[: _TENSORS if operation in _EACH else 1] or ((1,),)
        root = ""
        if operation in _ROOTS:
            root = f", {self.waits if _ROOTS[operation] == 'gets' else 1 - self.waits}"
        for shape in ((),) if operation == "barrier" else shapes:
            small = self.shapes.get(_whole(shape), (1,))
            yield f"{operation}({small!r}, torch.{dtype}, groups[{self.groups.index(call.group)}]{root})"


def _dtypes(given: Iterable[str | None]) -> dict[str, str]:
    """The dtypes of the calls, each with the one that the script uses; two of them stay two."""
    wanted = dict.fromkeys(dtype_name(each) or "float32" for each in given)
    for each in wanted:
        if each not in _DTYPES:
            raise NotWritable(f"the dtype {one_line(each, 60)!r} is none that two ranks over Gloo know")
    used = {each: _DTYPES[each] for each in wanted}
    if len(set(used.values())) < len(used):
        raise NotWritable(f"Gloo cannot tell {' from '.join(sorted(used))}")
    return used


def _smaller(shapes: Iterable[Sequence[int]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Each shape with the one that the script uses: as it is while all are small, else by its place among all.

    Equal shapes stay equal and different ones different; more elements stay more, and as many as many.
    """
    wanted = list(dict.fromkeys(_whole(shape) for shape in shapes))
    if all(len(shape) <= _DIMENSIONS and math.prod(shape) <= _ELEMENTS for shape in wanted):
        return {shape: shape for shape in wanted}
    counts = sorted({math.prod(shape) for shape in wanted})
    seen = dict.fromkeys(counts, 0)
    small: dict[tuple[int, ...], tuple[int, ...]] = {}
    for shape in wanted:
        count = math.prod(shape)
        cut, seen[count] = seen[count], seen[count] + 1
        elements = 0 if count == 0 else (1 << _ELEMENTS.bit_length() // 2) * (1 + counts.index(count))
        small[shape] = (elements,) if not cut else (*(1,) * (cut - 1), 2, elements // 2)
    return small


def _whole(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(max(int(each), 0) for each in itertools.islice(shape, 64))


def _comment(text: str) -> str:
    """Text of evidence for a comment: a literal on one line, in ASCII."""
    return ascii(one_line(text, 300))


_SCRIPT = '''\
# Two ranks that fail as a job of yours did: {what}.
#
#     python THIS_FILE                          starts both ranks; status 1 where they fail as the job did, else 0
#     torchrun --nproc-per-node 2 THIS_FILE     starts them under the launcher
#
# Found:  {rule}
#         in {source}
# Ranks:  {ranks} of the job are 0 and 1 here
# Called: {site}
# Shapes: {small}{replaced}
#
# Written by llmconsole; it needs torch alone. On the CPU over Gloo, whatever the job ran on: a call that waits in vain
# gives up after {timeout} s; where tensors do not match, Gloo may end a rank with SIGABRT, or give wrong numbers.

import os
import shutil
import signal
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds={timeout})
LIFE = 60  # seconds after which a rank ends in any case
PUT_IN = (1, 3)  # by rank 0 and by rank 1


def rank_0(groups):  # {most}
{a}


def rank_1(groups):  # {odd}
{b}


{operations}

def filled(shape, dtype):
    return torch.full(shape, PUT_IN[dist.get_rank()], dtype=dtype)


def check(got, wanted):
    if not bool((got == wanted).all()):
        raise ValueError(f"wrong numbers: {{got.flatten()[:4].tolist()}} where {{wanted}} is right")


def play(rank, store):
    """One rank: make its calls, and stay until the other has made its own, for leaving would end those."""
    signal.alarm(LIFE)
    torch.set_num_threads(1)
    status = 2
    try:
        store.set(f"here {{rank}}", "")
        store.wait([f"here {{1 - rank}}"], timedelta(seconds=LIFE))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
        groups = [dist.new_group(timeout=TIMEOUT) for _ in range({groups})]
        status = 1
        (rank_0, rank_1)[rank](groups)
        print(f"rank {{rank}}: made its calls", flush=True)
        status = 0
    except Exception as error:
        print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}", flush=True)
    try:
        store.set(f"end {{rank}}", "")
        if status == 0:
            store.wait([f"end {{1 - rank}}"], 3 * TIMEOUT)
    finally:
        os._exit(status)  # a group in which a call failed cannot be taken down


def start():
    """Both ranks on this machine; none of them is left behind."""
    folder, running, worst = tempfile.mkdtemp(), set(), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                play(rank, dist.FileStore(os.path.join(folder, "store"), 2))
            running.add(pid)
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if os.WIFSIGNALED(status):
                print(f"a rank was ended by {{signal.Signals(os.WTERMSIG(status)).name}}", flush=True)
                worst = 1
                break
            worst = max(worst, os.WEXITSTATUS(status))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
    words = ("not reproduced: both ranks made their calls", "reproduced", "not tried: the ranks could not meet")
    print(words[worst], flush=True)
    return worst


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(start())
    here, at = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    hosts = here == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    play(here, dist.TCPStore(*at, 2, is_master=hosts, timeout=timedelta(seconds=LIFE)))
'''
