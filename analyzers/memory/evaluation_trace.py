"""What an evaluation keeps of its batches, as the allocator's trace shows it: a graph, or outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...capsules.allocator import ALLOC, Array, Blocks, History
from .allocator import histories, is_own, own_frame, stacks_with, training_marks
from .growth import last_event
from .names import evaluates, generates, is_store
from .thresholds import (
    EVAL_BATCHES,
    EVAL_BYTES,
    EVAL_KEPT,
    EVAL_RISE,
    GRAPH_LINES,
    GRAPH_SHARE,
    GROWTH_GAP,
    OUTPUTS_SHARE,
    REPEATED,
)

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Kept:
    """Blocks of the batches of an evaluation that are live at one instant.

    Attributes:
        rank, history: whose they are.
        what: ``graph`` where most of the forward pass stays, ``outputs`` where little of it does; None in between.
        blocks: the blocks, of the stacks that keep one or more a batch.
        stacks: those stacks, the one with most bytes first.
        batches: batches of the evaluation up to the instant.
        passes, held: evaluations of which such blocks are live, and the bytes of all of them.
        start: bytes that were allocated when the evaluation began.
        failed: an allocation failed in it.
        given_back: they are gone at the end of the trace.
        sure: it is known that these are batches, and not the layers of one.
    """

    rank: int
    history: History
    what: Literal["graph", "outputs"] | None
    blocks: Blocks
    stacks: tuple[int, ...]
    batches: int
    passes: int
    held: int
    start: int
    failed: bool
    given_back: bool
    sure: bool

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return int(self.blocks.size.sum())

    @property
    def place(self) -> str:
        """The line that keeps most."""
        return own_frame(self.history, self.stacks[0])


@dataclass(frozen=True)
class _Pass:
    """The allocations of one evaluation: their events and stacks, and how many there are of each stack."""

    first: int
    last: int
    places: Array
    stack: Array
    numbers: Array  # int64[K], the stacks
    count: Array  # int64[K], allocations of each
    in_body: Array  # bool[K], made by a line of the evaluation's own function

    def of(self, stack: int) -> Array:
        """The events of one stack."""
        return self.places[self.stack == stack]


def holds_evaluations(capsule: Capsule) -> bool:
    """Whether a trace tells of all allocations of an evaluation over several batches."""
    return any(
        found is not None and int(found.count.max(initial=0)) >= EVAL_BATCHES
        for history in histories(capsule).values()
        if history.sound
        for found in [_last_pass(history, last_event(history))]
    )


def kept(capsule: Capsule) -> Kept | None:
    """What the last evaluation keeps, of the first rank that shows it, up to the last failure, else the end or peak."""
    for rank, history in histories(capsule).items():
        if not history.sound:
            continue
        for at in (last_event(history),) if len(history.failures) else (history.end, history.peak):
            if (found := _kept(rank, history, at)) is not None:
                return found
    return None


def _last_pass(history: History, at: int) -> _Pass | None:
    """The last evaluation up to an event, that is: between two steps of training or behind the last one."""
    evaluating = stacks_with(history.stacks, evaluates)
    places = np.flatnonzero(history.action[: at + 1] == ALLOC)
    places = places[(places >= history.prologue) & evaluating[history.stack[places]]]
    if not len(places):
        return None
    marks, _ = training_marks(history, at)
    number = np.searchsorted(marks, places)
    places = places[number == number[-1]]
    stack = history.stack[places]
    numbers, count = np.unique(stack, return_counts=True)
    in_body = np.array([_in_body(history, each) for each in numbers.tolist()], np.bool_)
    last = int(marks[number[-1]]) if number[-1] < len(marks) else at
    return _Pass(int(places[0]), last, places, stack, numbers, count, in_body)


def _in_body(history: History, stack: int) -> bool:
    """Whether the innermost line of the program is one of the evaluation's own function, which no layer repeats."""
    if history.stacks.category_of(stack) == "activation":
        return False
    frames = history.stacks.of(stack)
    return next((evaluates(name, file) for name, file, _ in frames if evaluates(name, file) or is_own(file)), False)


def _kept(rank: int, history: History, at: int) -> Kept | None:
    found = _last_pass(history, at)
    if found is None:
        return None
    live = history.live(at)
    inside = live.where((live.born >= found.first) & (live.born <= found.last))
    batches, sure = _batches(found)
    if batches < EVAL_BATCHES:
        return None
    grown = [each for each in found.numbers.tolist() if _grows(history, found, inside, each, batches)]
    blocks = inside.where(np.isin(inside.stack, grown))
    start = int(history.allocated[found.first - 1]) if found.first else 0
    if not grown or int(blocks.size.sum()) < max(EVAL_BYTES, EVAL_RISE * start):
        return None
    size = {stack: int(blocks.size[blocks.stack == stack].sum()) for stack in grown}
    marks, _ = training_marks(history, at)
    every = live.where(np.isin(live.stack, grown) & (live.born >= history.prologue))
    return Kept(
        rank=rank,
        history=history,
        what=_what(history, found, grown, batches),
        blocks=blocks,
        stacks=tuple(sorted(grown, key=lambda each: -size[each])),
        batches=batches,
        passes=len(np.unique(np.searchsorted(marks, every.born))),
        held=int(every.size.sum()),
        start=start,
        failed=len(history.failures) > 0 and found.last == at,
        given_back=not (blocks.freed > history.end).any(),
        sure=sure and not any(is_store(history, each) for each in grown),
    )


def _batches(found: _Pass) -> tuple[int, bool]:
    """How many batches an evaluation has had, and whether they are no layers of one batch.

    The lines of the evaluation's own function come round with the batches. Without such lines the rarest stack that
    comes again and again does; where other stacks come once or twice, all may be one forward pass of many layers.
    """
    body = found.count[found.in_body & (found.count >= EVAL_BATCHES)]
    if len(body):
        return int(body.min()), True
    inner = found.count[~found.in_body]
    often = inner[inner >= EVAL_BATCHES]
    if not len(often):
        return 0, False
    return int(often.min()), not (inner <= REPEATED).any()


def _grows(history: History, found: _Pass, inside: Blocks, stack: int, batches: int) -> bool:
    """Whether a stack keeps what it makes in each batch, or joins it to what it has, evenly and to the end."""
    born = found.of(stack)
    if len(born) < EVAL_KEPT * batches or generates(history, stack):
        return False
    # Counted in allocations of the evaluation, so that it does not matter how much else goes on.
    order = np.searchsorted(found.places, born)
    gaps = np.diff(order, append=len(found.places))
    if len(gaps) < 2 or gaps.max() > GROWTH_GAP * max(float(np.median(gaps)), 1.0) + 2:
        return False
    mine = inside.where(inside.stack == stack)
    if len(mine) >= EVAL_KEPT * len(born):
        return True
    sizes = history.size[born]
    forward = history.stacks.category_of(stack) == "activation"
    return len(mine) > 0 and not forward and _joins(sizes) and int(mine.size.max()) >= sizes[-2]


def _joins(sizes: Array) -> bool:
    """Whether each block holds what the one before held and a batch more, from the first or second batch on."""
    steps = np.diff(sizes)
    usual = float(np.median(steps))
    even = float((np.abs(steps - usual) <= 0.5 * usual).mean()) >= 0.5
    return bool((steps > 0).mean() >= EVAL_KEPT) and even and float(sizes[0]) <= 3 * usual


def _what(history: History, found: _Pass, grown: list[int], batches: int) -> Literal["graph", "outputs"] | None:
    """A graph keeps most of what the forward pass makes; a loop that collects outputs keeps a line or two of it."""
    forward = [
        stack
        for stack, count in zip(found.numbers.tolist(), found.count.tolist(), strict=True)
        if count >= EVAL_KEPT * batches and history.stacks.category_of(stack) == "activation"
    ]
    stays = len(set(forward) & set(grown))
    if stays < GRAPH_LINES or stays <= OUTPUTS_SHARE * len(forward):
        return "outputs"
    return "graph" if stays >= GRAPH_SHARE * len(forward) else None
