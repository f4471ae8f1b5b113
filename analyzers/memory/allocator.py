"""The allocator's history of each rank as rules read it: live blocks by stack, the steps of the job, what grows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ...capsules.allocator import ALLOC, CATEGORIES, SMALL, Array, Blocks, History, Stacks
from ...capsules.errors import EvidenceError
from .thresholds import EARLIER_BLOCKS, FEW_STEPS, GROWTH_GAP, GROWTH_STEPS, GUESSED_BLOCKS, NET_GROWTH, STILL_GROWING

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Where frames of libraries lie; the line that a person can change is the first one outside.
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages/|/torch/|/lib/python3|^<frozen|\.(?:so|cpp|cc|h|cu)\b|^$")
#: Functions by which a stack stands in a phase that keeps what it computes, and gives it back at its end.
_COLLECTS: Final = re.compile(r"eval|valid|predict|generate|inference|rollout|prefill|decode|warm_?up|calibrat", re.I)
_CHECKPOINT: Final = re.compile(r"checkpoint")
#: Names of what fills up and stays full, which cannot be told from a leak while it fills.
_STORES: Final = re.compile(r"cache|replay|buffer|memory_bank|queue|pool", re.I)
_BACKWARD_CALL: Final = re.compile(r"torch/(?:_tensor|autograd/__init__)\.py$")
#: Snapshots among a recording's files that are read, and the bytes of one.
_MOST_SNAPSHOTS, _MOST_BYTES = 16, 4 << 30
#: Stacks looked at in one history, those with most blocks first.
_MOST_STACKS = 200

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


def own_frame(history: History, stack: int) -> str:
    """``function file:line`` of the innermost frame outside of libraries, else of the innermost one."""
    return place(history.stacks.of(stack))


def place(frames: Sequence[tuple[str, str, int]]) -> str:
    """``function file:line`` of the innermost of frames (function, file, line) outside of libraries, else of all."""
    if not frames:
        return "an unrecorded stack"
    name, file, line = next((each for each in frames if not _LIBRARY.search(each[1])), frames[0])
    where = "/".join(file.split("/")[-2:]) + (f":{line}" if line else "")
    return " ".join(each for each in (name, where) if each)


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
    """Events at which a step of the job passes, and how they are known; ``guessed`` where only a rhythm shows them."""

    marks: Array
    known_by: str
    guessed: bool

    def __len__(self) -> int:
        return len(self.marks)


def steps(history: History, at: int) -> Steps:
    """The steps of a training job up to event ``at``: by its optimizer, else by its calls of backward, else by rhythm.

    The rhythm is that of the stack that comes round least often, and whose blocks are given back.
    """
    places = np.flatnonzero(history.action[: at + 1] == ALLOC)
    places = places[places >= history.prologue]
    stack = history.stack[places]
    stepping = history.stacks.category == CATEGORIES.index("optimizer")
    calling = _with_frame(history.stacks, _calls_backward)
    for signs, known_by in ((stepping, "the optimizer's stacks"), (calling, "the calls of backward")):
        inside = signs[stack]
        marks = places[inside & ~np.append(False, inside[:-1])[: len(inside)]]
        if len(marks) >= FEW_STEPS:
            return Steps(marks, known_by, guessed=False)
    return Steps(_rhythm(history, places, stack, at), "the rhythm of the trace", guessed=True)


def _with_frame(stacks: Stacks, holds: Callable[[str, str], bool]) -> Array:
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
    for each in regular[np.argsort(count[regular], kind="stable")][:_MOST_STACKS].tolist():
        marks = places[key == numbers[each]]
        early, late = np.searchsorted(places, [marks[0], marks[-1]]) / max(1, len(places))
        if early <= 0.5 and late >= 0.8:
            return marks
    return places[:0]


@dataclass(frozen=True)
class Growth:
    """A stack whose live blocks become more, step after step, up to the instant looked at.

    Attributes:
        stack: number of the stack.
        count, size: its live blocks, and their bytes.
        typical: the usual size of one block.
        alike: share of blocks that have it, but for what a large one keeps beyond what was asked for.
        a_step: blocks that come with each step of growth.
        steps: the number of steps in the trace in which it grew.
        known_by: how the steps are known.
        sure: neither are the steps guessed nor may the stack be one that is meant to keep what it makes.
    """

    stack: int
    count: int
    size: int
    typical: int
    alike: float
    a_step: float
    steps: int
    known_by: str
    sure: bool

    @property
    def pace(self) -> float:
        """Bytes with each step of growth."""
        return self.a_step * self.typical


def long_enough(history: History) -> bool:
    """Whether a trace accounts for the memory over so many steps that what stays is told from what is of one step."""
    return history.sound and len(steps(history, last_event(history))) >= GROWTH_STEPS


def last_event(history: History) -> int:
    """The last failure, else the end of the trace: up to where growth is looked for."""
    failures = history.failures
    return int(failures[-1]) if len(failures) else history.end


_GROWTH: WeakKeyDictionary[History, tuple[Growth, ...]] = WeakKeyDictionary()


def growth(history: History) -> tuple[Growth, ...]:
    """What grows up to the last failure, else up to the end of the trace; most bytes first."""
    if history not in _GROWTH:
        at = last_event(history)
        found = _growing(history, at) if history.sound and at > history.prologue else ()
        _GROWTH[history] = tuple(sorted(found, key=lambda each: -each.size))
    return _GROWTH[history]


def _growing(history: History, at: int) -> Iterator[Growth]:
    live = history.live(at)
    # Without stacks, blocks of one size stand for what one line of code makes.
    key = np.where(live.stack > 0, live.stack << 44, live.size)
    keys, which, count = np.unique(key, return_inverse=True, return_counts=True)
    many = np.flatnonzero(count >= GROWTH_STEPS)
    if not len(many):
        return
    passed = steps(history, at)
    every = history.blocks
    for each in many[np.argsort(-count[many], kind="stable")][:_MOST_STACKS].tolist():
        mine = live.where(which == each)
        stack = int(mine.stack[0])
        if passed.guessed and (_keeps(history, stack) if stack > 0 else len(mine) < GUESSED_BLOCKS):
            continue
        same = every.where((every.stack == stack) & ((every.size == int(keys[each])) | (stack > 0)))
        grown = _steady(mine, same, passed, history.prologue)
        if grown is None:
            continue
        typical = int(np.median(mine.size))
        category = history.stacks.category_of(stack)
        enough = not passed.guessed or (len(mine) >= GUESSED_BLOCKS and category == "unknown" and stack > 0)
        yield Growth(
            stack=stack,
            count=len(mine),
            size=int(mine.size.sum()),
            typical=typical,
            alike=float(alike(mine.size).mean()),
            a_step=int((mine.born >= history.prologue).sum()) / grown,
            steps=grown,
            known_by=passed.known_by,
            sure=enough and not _stores(history, stack),
        )


def _keeps(history: History, stack: int) -> bool:
    """Whether a stack makes what a job keeps on purpose, one after the other, and outside of its steps."""
    if history.stacks.category_of(stack) not in ("unknown", "activation"):
        return True
    return any(_COLLECTS.search(name) or _CHECKPOINT.search(file) for name, file, _ in history.stacks.of(stack))


def _stores(history: History, stack: int) -> bool:
    """Whether the program's own frames are named after something that fills up and stays full."""
    own = ((name, file.rpartition("/")[2]) for name, file, _ in history.stacks.of(stack) if not _LIBRARY.search(file))
    return any(_STORES.search(name) or _STORES.search(file) for name, file in own)


def _steady(mine: Blocks, same: Blocks, passed: Steps, prologue: int) -> int | None:
    """The steps in which blocks come, evenly, step after step, to the end; None where they do not.

    ``mine`` are the blocks that are live at the end, ``same`` all that their stack ever made. A trace of a few steps
    will do where many blocks from before it stand for the others.
    """
    fresh = mine.where(mine.born >= prologue)
    step = np.searchsorted(passed.marks, fresh.born, side="right")
    grown, births = np.unique(step, return_counts=True)
    if len(grown) < FEW_STEPS:
        return None
    before = (len(mine) - len(fresh)) / float(np.median(births))
    if len(grown) < GROWTH_STEPS and (passed.guessed or before < EARLIER_BLOCKS):
        return None
    gaps = np.diff(grown)
    usual = float(np.median(gaps))
    if gaps.max() > max(GROWTH_GAP * usual, usual + 2) or len(passed) - grown[-1] > max(2.0, 2 * usual):
        return None
    half = len(grown) // 2
    if births[-half:].sum() < STILL_GROWING * births[:half].sum() or births.max() > 0.5 * births.sum():
        return None
    # A window of the last losses gets a block and gives one back: what was there when these came must still be.
    begun, now = int(fresh.born.min()), int(fresh.born.max())
    given_back = int(((same.born < begun) & (same.freed > begun) & (same.freed <= now)).sum())
    if given_back > (1 - NET_GROWTH) * len(fresh):
        return None
    # A list that is cleared every so often held as much before: what is within that is no growth.
    if _most_at_once(same.where(same.freed < begun)) >= len(mine):
        return None
    return len(grown)


def _most_at_once(blocks: Blocks) -> int:
    """The largest number of blocks that were live at one time."""
    change = np.concatenate([np.ones(len(blocks), np.int64), -np.ones(len(blocks), np.int64)])
    order = np.argsort(np.concatenate([blocks.born, blocks.freed]), kind="stable")
    return int(np.cumsum(change[order]).max(initial=0))
