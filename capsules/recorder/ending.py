"""How a recording ends: by an exception on its way out (not by one that the job deals with), and sealed."""

from __future__ import annotations

import contextlib
import dis
import sys
import time
from bisect import bisect_right
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from ..writer import CapsuleWriter
from .failure import said_by

if TYPE_CHECKING:
    from .finish import Finisher
    from .window import Window

_RAISES = frozenset(("RERAISE", "RAISE_VARARGS"))
_LEAVES = frozenset(("POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST"))
_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"))


class Ending(NamedTuple):
    """An exception, and whether it leaves the code that the recorder is closed from in any case."""

    error: BaseException
    passing: bool


def handled() -> int:
    """What the thread is dealing with at a moment of the job, to be told again; 0: nothing."""
    error = sys.exception()
    return 0 if error is None else id(error)


def under_way(before: int) -> Ending | None:
    """The exception under which the recorder is being closed.

    Args:
        before: ``handled`` when the job last trained; what it trained under is not what ends it.
    """
    error = sys.exception()
    return None if error is None or id(error) == before else Ending(error, _passes_on(error))


def uncaught() -> Ending | None:
    """The exception that ends the interpreter, where one does: it was printed before anything at exit runs."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):  # at a prompt it ended a line that was typed
        return None
    return Ending(error, True)


def tell(ending: Ending, finisher: Finisher, window: Window | None) -> None:
    """Record how the job ends.

    A signal that the job turned into an exception (KeyboardInterrupt, or an exit out of a handler) is a signal; an exit
    that asks for no status but 0 is a good end; a failing exit out of the handling of an exception is that exception.
    """
    error, passing = ending
    if isinstance(error, SystemExit):
        if not error.code:
            return
        if finisher.signal is not None:
            _stopped(finisher)
        else:
            cause = error.__context__
            finisher.failed(cause if isinstance(cause, Exception) else error, window)
    elif isinstance(error, KeyboardInterrupt):
        if finisher.signal is None:
            finisher.signalled("SIGINT", False, window)
        _stopped(finisher)
    elif passing and not isinstance(error, GeneratorExit):
        finisher.failed(error, window)
    elif isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        finisher.remark(f"closed while {type(error).__name__} was handled: {said_by(error)}"[:2000])


def _stopped(finisher: Finisher) -> None:
    if finisher.ranks is not None:
        finisher.ranks.ends("signal", finisher.signal)


def _passes_on(error: BaseException) -> bool:
    """Whether every way on raises: out of a ``finally``, a ``with``, an ``except`` that ends in ``raise``.

    The traceback begins with the frame that deals with the exception. Leaving a handler for good pops the exception.
    """
    at = error.__traceback__
    try:
        return at is not None and _only_raises(at.tb_frame)
    except Exception:  # bytecode of a Python to come, or made by a tool: not known, and nothing that a job may feel
        return False


def _only_raises(frame: FrameType) -> bool:
    steps = list(dis.get_instructions(frame.f_code))
    place = {step.offset: index for index, step in enumerate(steps)}
    here = bisect_right(steps, frame.f_lasti, key=lambda step: step.offset) - 1  # it may lie in the cache behind one
    if steps[here].opname == "WITH_EXCEPT_START":
        return True
    raises, seen, todo = False, set[int](), [here + 1]
    while todo:
        index = todo.pop()
        if index in seen or index >= len(steps):
            continue
        seen.add(index)
        step = steps[index]
        if step.opname in _LEAVES:
            return False
        if step.opname in _RAISES:
            raises = True
            continue
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            todo.append(place[step.argval])
        if step.opname not in _JUMPS:
            todo.append(index + 1)
    return raises


def seal(writer: CapsuleWriter, reason: str | None, step: int = 0, crashed: bool = False) -> None:
    """Close a capsule whose recorder ends before the job, with the reason in it where there is one.

    Never raises, and does nothing where the capsule is closed. ``crashed``: by an exception of the job.
    """
    try:
        if reason is not None and not writer.closed:
            writer.release()
            fields = {"level": "warning", "logger": "llmconsole.recorder", "message": f"recording ended: {reason}"}
            with contextlib.suppress(OSError):
                writer.record("events", {"kind": "log", "step": step, "t": time.time(), **fields})
        writer.close(status="crashed" if crashed else "sealed")
    except Exception:  # not even the reserve was left: readers will see that its writer is gone
        return
