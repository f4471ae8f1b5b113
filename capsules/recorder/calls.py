"""What Python asks of process groups: who calls, how long the call holds it up, and what becomes of async handles.

The methods of ``ProcessGroup`` are followed rather than the functions of ``torch.distributed``: names that were bound
earlier end here too, and no function that torch compares or compiles by identity changes. What C++ asks by itself
(DDP's buckets, functional collectives) is not seen here, but by torch's flight recorder (``flight``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from .flight import Group, Groups
from .internals import caller, is_view, sequence_number, version
from .replaced import Function, Replaced

#: Method → the name that the flight recorder gives it.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "_all_gather_base",
    "all_gather_single_coalesced": "_all_gather_base",
    "_allgather_base": "_all_gather_base",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
P2P = frozenset(("send", "recv"))
#: What works on one tensor in place; of the others only the input (the second argument) is watched for writes, since
#: back ends copy into outputs when they complete.
_IN_PLACE = frozenset(("all_reduce", "broadcast", "reduce", "send", "recv"))
#: What Gloo does, under the names of torch's flight recorder.
_BY_GLOO = {
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "all_reduce",
    "reduce_scatter": "all_reduce",
}
#: Tensors of one call that are described and watched.
MOST_TENSORS = 64
#: Calls that nobody has taken are kept up to this many: a job that records no windows must not grow.
MOST_CALLS = 8192
MOST_FRAMES = 24

Shapes = list[list[int]]


@dataclass(eq=False, slots=True)
class Call:
    """One call as the caller saw it; times in Unix seconds."""

    op: str
    group: Group
    before: int  # operations of the group before it
    thread: int
    after: int = 0
    began: float = field(default_factory=time.time)
    returned: float | None = None  # the caller went on: from the call, or from the wait that belongs to it
    async_op: bool | None = None
    waited: bool | None = None
    reused: bool | None = None
    failed: bool = False
    settled: bool = False  # nothing more will become known of it
    own_row: bool = False  # the flight recorder will not see it
    peer: int | None = None
    inputs: list[Tensor | Any] = field(default_factory=list[Any])
    dtype: str | None = None
    shapes_in: Shapes | None = None
    shapes_out: Shapes | None = None
    frames: list[dict[str, Any]] | None = None
    watched: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])  # weak tensor, version at issue
    work: Any = None  # weak
    shown: str = ""  # op, where the back end makes another of it
    number: int = 0  # in the journal
    written: dict[str, Any] = field(default_factory=dict[str, Any])  # there

    @property
    def p2p(self) -> bool:
        """Whether it is between two ranks only."""
        return self.op in P2P


class Calls:
    """The calls of this process, newest last.

    Args:
        groups: knows the process groups.
    """

    def __init__(self, groups: Groups) -> None:
        self.on = False
        self.seconds = 0.0  # inside calls and waits so far
        self.blocked: dict[int, Call] = {}  # thread → what holds it up now
        self.pairs: Counter[str] = Counter()  # sends and receives so far, by group
        self.journal: Callable[[Call], None] | None = None  # takes a call before it is made, and when it has returned
        self.reductions = 0  # calls that may have reduced gradients
        self._groups = groups
        self._issued: deque[Call] = deque(maxlen=MOST_CALLS)
        self._works: dict[int, Call] = {}
        self._replaced = Replaced()

    def install(self) -> None:
        """Put the followers on."""
        import torch.distributed as distributed

        self.on = True
        for name, op in METHODS.items():
            self._replaced.put(distributed.ProcessGroup, name, lambda original, op=op: self._method(original, op))
        self._replaced.put(distributed.Work, "wait", self._wait)
        self._replaced.put(distributed.Work, "is_completed", self._is_completed)
        self._replaced.put(distributed.Work, "get_future", self._get_future)

    def close(self) -> None:
        """Take them off; calls that were seen can still be taken."""
        self.on = False
        self._replaced.put_back()

    def take(self) -> list[Call]:
        """The calls issued since the last time; some of them may still be under way."""
        taken: list[Call] = []
        while self._issued:
            taken.append(self._issued.popleft())
        return taken

    # -- followers

    def _method(self, original: Function, op: str) -> Function:
        def method(group: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.on or torch.compiler.is_compiling():
                return original(group, *arguments, **keywords)
            call = self._begin(group, op, arguments)
            if call is None:
                return original(group, *arguments, **keywords)
            outer, began = self.blocked.get(call.thread), time.perf_counter()
            self.blocked[call.thread] = call
            try:
                work = original(group, *arguments, **keywords)
            except BaseException:
                call.failed = call.settled = True
                raise
            finally:
                self._left(call.thread, outer, began)
                call.after = sequence_number(group)
            self._issue(call, work, arguments)
            return work

        return method

    def _wait(self, original: Function) -> Function:
        def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.on or torch.compiler.is_compiling():
                return original(work, *arguments, **keywords)
            call = self._of(work)
            if call is not None:
                self._before_wait(call, caller(1))
            thread, began = threading.get_ident(), time.perf_counter()
            outer = self.blocked.get(thread)
            if call is not None:
                self.blocked[thread] = call
            try:
                result = original(work, *arguments, **keywords)
            except BaseException:
                if call is not None:
                    call.failed = call.settled = True
                raise
            finally:
                self._left(thread, outer, began)
            if call is not None:
                self._finished(call)
            return result

        return wait

    def _is_completed(self, original: Function) -> Function:
        def is_completed(work: Any) -> Any:
            result = original(work)
            if self.on and result and (call := self._of(work)) is not None and call.async_op is not False:
                call.waited = True  # asking is as good as waiting
                self._compare(call)
                self._finished(call)
            return result

        return is_completed

    def _get_future(self, original: Function) -> Function:
        def get_future(work: Any) -> Any:
            if self.on and (call := self._of(work)) is not None:
                call.async_op, call.settled = True, True  # whoever waits for the future is not seen
                call.watched = []
                self._works.pop(id(work), None)
            return original(work)

        return get_future

    # -- what they do

    def _begin(self, group: Any, op: str, arguments: tuple[Any, ...]) -> Call | None:
        try:
            about = self._groups.of(group)
            call = Call(op, about, sequence_number(group), threading.get_ident())
            call.own_row = not about.recorded or op == "monitored_barrier" or (op in P2P and about.gloo)
            self.pairs[about.name] += call.p2p
            self.reductions += "reduce" in op
            journal = self.journal if about.gloo else None
            if call.own_row or journal is not None:
                self._describe(call, arguments)
            if journal is not None:
                journal(call)
            self._issued.append(call)
            return call
        except Exception:  # an odd group or argument is the job's business
            return None

    def _describe(self, call: Call, arguments: tuple[Any, ...]) -> None:
        call.frames = frames_of(caller(3))
        first = _tensors(arguments[0]) if arguments else []
        second = _tensors(arguments[1]) if len(arguments) > 1 else []
        inputs, outputs = (first, first) if call.op in _IN_PLACE else (second, first)
        call.shapes_in, call.shapes_out = [list(each.shape) for each in inputs], [list(each.shape) for each in outputs]
        if call.group.gloo:
            _as_gloo(call)
        if inputs or outputs:
            call.dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        if call.p2p and len(arguments) > 2:
            call.peer = call.group.global_rank(arguments[1])

    def _issue(self, call: Call, work: Any, arguments: tuple[Any, ...]) -> None:
        """The call has returned; whether it was meant to be waited for shows with the wait."""
        try:
            if work is None:
                call.async_op = False
                self._finished(call)
                return
            key = id(work)
            call.work = weakref.ref(work, lambda _: self._dropped(call, key))
            self._works[key] = call
            given = arguments[0] if call.op in _IN_PLACE else arguments[1] if len(arguments) > 1 else None
            for tensor in _tensors(given):
                if _watchable(tensor, call.group):
                    call.watched.append((weakref.ref(tensor), version(tensor)))
        except Exception:  # a handle of another kind
            call.settled = True

    def _of(self, work: Any) -> Call | None:
        call = self._works.get(id(work))
        return call if call is not None and call.work() is work else None

    def _before_wait(self, call: Call, frame: FrameType) -> None:
        code = frame.f_code
        own = code.co_filename.endswith("distributed_c10d.py") and code.co_name != "wait"
        if own and call.async_op is None:
            call.async_op = False
        elif call.waited is None and call.async_op is not False:
            call.async_op = call.waited = True
            self._compare(call)

    def _compare(self, call: Call) -> None:
        """Whether anything was written into the buffers since the call: torch counts writes."""
        versions = [(tensor, then) for reference, then in call.watched if (tensor := reference()) is not None]
        if call.watched:
            call.reused = any(version(tensor) != then for tensor, then in versions)
        call.watched = []

    def _finished(self, call: Call) -> None:
        call.returned, call.settled, call.watched = time.time(), True, []
        if call.number and self.journal is not None:
            self.journal(call)

    def _dropped(self, call: Call, key: int) -> None:
        """Nobody holds the handle any more."""
        if self._works.get(key) is call:
            del self._works[key]
        if not call.settled:
            call.async_op = True if call.async_op is None else call.async_op
            if call.group.gloo:  # on a device, streams may have been synchronised instead
                call.waited = False
                self._compare(call)
            call.settled, call.watched = True, []

    def _left(self, thread: int, outer: Call | None, began: float) -> None:
        if outer is None:
            self.blocked.pop(thread, None)
            self.seconds += time.perf_counter() - began
        else:
            self.blocked[thread] = outer


def _as_gloo(call: Call) -> None:
    """Name and shapes as the flight recorder gives them: one tensor a rank is one tensor of all ranks."""
    op, ranks = call.op, len(call.group.ranks)
    call.shown = _BY_GLOO.get(op, op)
    if call.shown in ("all_gather", "gather") and call.shapes_out and call.shapes_in:
        call.shapes_out = [[ranks, *call.shapes_in[0]]]
    elif op == "scatter" and call.shapes_in and call.shapes_out:
        call.shapes_in = [[ranks, *call.shapes_out[0]]]
    elif op == "_reduce_scatter_base":
        call.shapes_out = call.shapes_in


def _tensors(value: Any) -> list[Tensor]:
    """Tensors of an argument: one, a list, or lists in a list."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for each in value[:MOST_TENSORS]:
            found += _tensors(each)
    return found[:MOST_TENSORS]


def _watchable(tensor: Tensor, group: Group) -> bool:
    """Whether a count of writes says something of this tensor: it is no view beside others into one storage."""
    direct = group.gloo if tensor.device.type == "cpu" else "nccl" in group.backend
    if not direct or version(tensor) < 0 or tensor.layout is not torch.strided:
        return False
    return not is_view(tensor) or tensor.untyped_storage().nbytes() == tensor.nbytes


_known: dict[tuple[CodeType, int], dict[str, Any]] = {}
_OWN = __file__.rpartition("/")[0]


def is_inside(file: str) -> bool:
    """Whether a frame of this file is only in the way of the call: ours, or torch's logger of errors."""
    return file.startswith(_OWN) or file.endswith("c10d_logger.py")


def frames_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """A stack, innermost frame first, without what follows the call."""
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < MOST_FRAMES:
        key = (frame.f_code, frame.f_lineno)
        about = _known.get(key)
        if about is None:
            if len(_known) > MOST_CALLS:
                _known.clear()
            code = frame.f_code
            seen = {"name": code.co_name, "file": code.co_filename, "line": frame.f_lineno}
            about = _known[key] = {} if is_inside(code.co_filename) else seen
        if about:
            found.append(about)
        frame = frame.f_back
    return found
