"""The allocator's history of each rank as rules read it: where its stacks stand, and the steps of the job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ...capsules.allocator import ALLOC, CATEGORIES, SMALL, Array, Blocks, History, Stacks
from ...capsules.errors import EvidenceError
from ..finding import Where
from .thresholds import FEW_STEPS, GROWTH_STEPS, STEPS_BEYOND

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Where frames of libraries lie; the line that a person can change is the first one outside.
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages/|/torch/|/lib/python3|^<frozen|\.(?:so|cpp|cc|h|cu)\b|^$")
_BENEATH: Final = re.compile(
    r"/torch/|/lib/python3[.\d]*/(?!(?:site|dist)-packages)|^<frozen|\.(?:so|cpp|cc|h|cu)\b|^$"
)
#: Functions at which a script begins.
_STARTS: Final = ("<module>", "main")
_BACKWARD_CALL: Final = re.compile(r"torch/(?:_tensor|autograd/__init__)\.py$")
#: Snapshots among a recording's files that are read, and the bytes of one.
_MOST_SNAPSHOTS, _MOST_BYTES = 16, 4 << 30
#: Stacks looked at in one history, those with most blocks first.
MOST_STACKS: Final = 200

_HISTORIES: WeakKeyDictionary[Capsule, dict[int, History]] = WeakKeyDictionary()


def histories(capsule: Capsule) -> dict[int, History]:
    """The history of each rank that has one: imported, else from the snapshots that a recording holds as files.

    What is damaged is left out.
    """
    if capsule not in _HISTORIES:
        found: dict[int, dict[str, Any]] = {}
        for tensor in capsule.tensors("allocator/*"):
            found.setdefault(tensor.rank, {})[tensor.name.partition("/")[2]] = tensor
        _HISTORIES[capsule] = (
            _attached(capsule)
            if not found
            else {rank: history for rank, each in found.items() if (history := _restored(each)) is not None}
        )
    return _HISTORIES[capsule]


def _attached(capsule: Capsule) -> dict[int, History]:
    """Of each device the snapshot of its last failure, else of its highest peak."""
    from ...capsules.importers.memory import histories as read
    from ...capsules.plain_pickle import load_plain
    from ...capsules.storage import read_inside

    listed = sorted((each.path for each in capsule.files() if each.kind == "snapshot" and each.path), key=_moment)
    found: dict[int, History] = {}
    for path in filter(None, listed[-_MOST_SNAPSHOTS:]):
        with contextlib.suppress(EvidenceError, OSError):
            for history in read(load_plain(read_inside(capsule.path, path, _MOST_BYTES), path), _unsaid):
                # The number of a device is that of its rank, as far as one can see from within a node.
                rank = history.device if history.device in capsule.ranks else min(capsule.ranks, default=0)
                found[rank] = history
    return found


def _moment(path: str | None) -> tuple[bool, list[int]]:
    """Order of snapshots, the one that counts most last: peaks by their steps, then failures by their number."""
    path = path or ""
    return "oom" in path, [int(each) for each in re.findall(r"\d{1,18}", path)]


def _unsaid(text: str, times: int) -> None:
    """Nobody asked for the notes of a file that a recording brought along."""


def _restored(tensors: dict[str, Any]) -> History | None:
    try:
        arrays = {name: tensor.array() for name, tensor in tensors.items()}
        said = next(iter(tensors.values())).attributes
        prologue, number = said.get("prologue"), said.get("number")
        return History.restored(
            arrays,
            prologue if type(prologue) is int else 0,
            said.get("sound") is True,
            number if type(number) is int else 0,
        )
    except EvidenceError:
        return None


def of_one_process(capsule: Capsule) -> bool:
    """Whether the histories are those of devices that one process uses: then their numbers are no ranks."""
    tensors = capsule.tensors("allocator/action")
    return any(isinstance(count := each.attributes.get("devices"), int) and count > 1 for each in tensors)


def history_of(capsule: Capsule, rank: int | None, device: int | None) -> History | None:
    """The history of a rank; of a device, where one process uses several."""
    traced = histories(capsule)
    if of_one_process(capsule):
        return next((each for each in traced.values() if each.device == device), None)
    return traced.get(rank or 0)


def located(capsule: Capsule, rank: int) -> Where:
    """Where a finding about the history of a rank stands; of devices of one process no rank is known."""
    return Where(rank=None if of_one_process(capsule) else rank)


def of_devices(capsule: Capsule, history: History, others: int) -> str:
    """Which device it is where one process has several, and how many histories show the same, as a sentence."""
    if of_one_process(capsule):
        alike = f", {others} devices of this process do the same" if others > 1 else ""
        return f" It is device {history.device}{alike}."
    return f" {others} ranks do the same." if others > 1 else ""


def own_frame(history: History, stack: int) -> str:
    """``function file:line`` of the line of a stack that a person can change; see ``place``."""
    return place(history.stacks.of(stack))


def place(frames: Sequence[tuple[str, str, int]]) -> str:
    """``function file:line`` of the innermost of frames (function, file, line) outside of libraries, else of all.

    Where only the script's start is outside of them, a library runs the job: then the innermost one beyond torch.
    """
    if not frames:
        return "an unrecorded stack"
    beyond = next((each for each in frames if is_beyond_torch(each[1])), frames[0])
    own = next((each for each in frames if is_own(each[1]) and each[0] not in _STARTS), beyond)
    name, file, line = own
    where = "/".join(file.split("/")[-2:]) + (f":{line}" if line else "")
    return " ".join(each for each in (name, where) if each)


def is_own(file: str) -> bool:
    """Whether a file is the program's, not a library's."""
    return _LIBRARY.search(file) is None


def is_beyond_torch(file: str) -> bool:
    """Whether a file is neither torch's nor Python's own: the program's, or that of a model or trainer library."""
    return _BENEATH.search(file) is None


def lines(stacks: Stacks) -> Array:
    """For each stack the number of the frame that is its innermost line beyond torch; int64[S].

    A stack without one has a number below zero of its own.
    """
    beyond = np.array([is_beyond_torch(file) for _, file, _ in stacks.frames], np.bool_)
    places = np.flatnonzero(beyond[stacks.members]) if len(beyond) else np.zeros(0, np.int64)
    first = np.append(places, len(stacks.members))[np.searchsorted(places, stacks.starts[:-1])]
    has = first < stacks.starts[1:]
    return np.where(has, np.append(stacks.members, 0)[np.where(has, first, -1)], -1 - np.arange(len(stacks)))


def alike(size: Array) -> Array:
    """Which sizes are the usual one, bool[N]; a block above 1 MiB may keep up to 1 MiB that nobody asked for."""
    typical = np.median(size)
    return np.abs(size - typical) <= (SMALL if typical > SMALL else 0)


def by_stack(blocks: Blocks) -> list[tuple[int, int, int]]:
    """(stack, blocks, bytes) of blocks, most bytes first."""
    stacks, which, count = np.unique(blocks.stack, return_inverse=True, return_counts=True)
    size = np.bincount(which, blocks.size.astype(np.float64), len(stacks))
    order = np.argsort(-size, kind="stable")
    return [(int(stacks[at]), int(count[at]), int(size[at])) for at in order]


@dataclass(frozen=True)
class Steps:
    """Events at which a step of the job passes, and how they are known; ``guessed`` where only a rhythm shows them.

    ``after_training``: they are those of another phase, behind the last step of training.
    """

    marks: Array
    known_by: str
    guessed: bool
    after_training: bool = False

    def __len__(self) -> int:
        return len(self.marks)


def steps(history: History, at: int) -> Steps:
    """The steps of a training job up to event ``at``: by its optimizer, else by its calls of backward, else by rhythm.

    The rhythm is that of the stack that comes round least often, and whose blocks are given back. Where the trace is
    too short for any, the few marks that there are still tell how many steps it holds.
    """
    marks, known_by = training_marks(history, at)
    if len(marks) >= FEW_STEPS or (len(marks) and not _goes_on(marks, history.prologue, at)):
        return Steps(marks, known_by, guessed=False)
    places, stack = _allocations(history, at)
    return Steps(_rhythm(history, places, stack, at), "the rhythm of the trace", guessed=True)


def afterwards(history: History, at: int) -> Steps | None:
    """What comes round after the last step of training, where more follows than a step: another phase of the job."""
    marks, _ = training_marks(history, at)
    if len(marks) < FEW_STEPS or not _goes_on(marks, history.prologue, at):
        return None
    places, stack = _allocations(history, at)
    later = places > marks[-1]
    marks = _rhythm(history, places[later], stack[later], at)
    return Steps(marks, "the rhythm after the last step of training", guessed=True, after_training=True)


def training_marks(history: History, at: int) -> tuple[Array, str]:
    """Events up to ``at`` at which training passes, and how they are known: of two signs the one with more of them.

    An optimizer that makes nothing in its steps shows only where it made its state.
    """
    places, stack = _allocations(history, at)
    best, known_by = places[:0], ""
    stepping = history.stacks.category == CATEGORIES.index("optimizer")
    calling = stacks_with(history.stacks, _calls_backward)
    for signs, name in ((stepping, "the optimizer's stacks"), (calling, "the calls of backward")):
        inside = signs[stack]
        marks = places[inside & ~np.append(False, inside[:-1])[: len(inside)]]
        if len(marks) > len(best) and (len(best) < FEW_STEPS):
            best, known_by = marks, name
    return best, known_by


def _allocations(history: History, at: int) -> tuple[Array, Array]:
    """The allocations of the trace up to an event, and their stacks."""
    places = np.flatnonzero(history.action[: at + 1] == ALLOC)
    places = places[places >= history.prologue]
    return places, history.stack[places]


def _goes_on(marks: Array, first: int, at: int) -> bool:
    """Whether so much follows the last of the marks that it belongs to no step of theirs."""
    return at - int(marks[-1]) > STEPS_BEYOND * int(np.diff(marks, prepend=first).max())


def stacks_with(stacks: Stacks, holds: Callable[[str, str], bool]) -> Array:
    """Which stacks have a frame (function, file) for which something holds, bool[S]."""
    frames = np.array([holds(name, file) for name, file, _ in stacks.frames], np.bool_)
    so_far = np.append(0, np.cumsum(frames[stacks.members])) if len(frames) else np.zeros(1, np.int64)
    return so_far[stacks.starts[1:]] > so_far[stacks.starts[:-1]]


def _calls_backward(name: str, file: str) -> bool:
    return name in ("backward", "_make_grads") and _BACKWARD_CALL.search(file) is not None


def _rhythm(history: History, places: Array, stack: Array, at: int) -> Array:
    live = history.live(at)
    key, held = stack, live.stack
    if not stack.any():  # no stacks were recorded: sizes stand for them
        key, held = history.size[places], live.size
    numbers, count = np.unique(key, return_counts=True)
    found, still = np.unique(held, return_counts=True)
    kept = np.zeros(len(numbers), np.int64)
    _, mine, theirs = np.intersect1d(numbers, found, return_indices=True)
    kept[mine] = still[theirs]
    regular = np.flatnonzero((count >= GROWTH_STEPS) & (kept <= 0.2 * count) & (numbers > 0))
    for each in regular[np.argsort(count[regular], kind="stable")][:MOST_STACKS].tolist():
        marks = places[key == numbers[each]]
        early, late = np.searchsorted(places, [marks[0], marks[-1]]) / max(1, len(places))
        if early <= 0.5 and late >= 0.8:
            return marks
    return places[:0]
