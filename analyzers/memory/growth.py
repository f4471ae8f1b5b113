"""What grows in an allocator's history: lines whose live blocks become more with the steps of the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from ...capsules.allocator import Array, Blocks, History
from ..finding import Evidence
from .allocator import MOST_STACKS, Steps, afterwards, alike, lines, own_frame, steps
from .names import is_collected, is_store
from .records import gib
from .thresholds import (
    EARLIER_BLOCKS,
    FEW_STEPS,
    GROWTH_GAP,
    GROWTH_STEPS,
    GUESSED_BLOCKS,
    NET_GROWTH,
    RARE_BYTES,
    RARE_GAP,
    RARE_TIMES,
    STILL_GROWING,
)

#: Categories of what a job makes piece by piece and keeps on purpose.
_KEPT: Final = frozenset({"parameter", "optimizer", "kv_cache"})


@dataclass(frozen=True)
class Growth:
    """A line whose live blocks become more, step after step, up to the instant looked at.

    Attributes:
        stacks: numbers of the stacks of which it is the innermost line beyond torch, those with most blocks first.
        count, size: its live blocks, and their bytes.
        typical: the usual size of one block.
        alike: share of blocks that have it, but for what a large one keeps beyond what was asked for.
        at_once: blocks that come with each step of growth.
        every: how many steps pass from one step of growth to the next, usually.
        grown: numbers of the steps of growth, int64[G].
        span: steps of the trace.
        known_by: how the steps are known.
        sure: the steps are not guessed, there are many, and nothing says that these blocks are meant to be kept.
    """

    stacks: tuple[int, ...]
    count: int
    size: int
    typical: int
    alike: float
    at_once: float
    every: int
    grown: Array
    span: int
    known_by: str
    sure: bool

    @property
    def stack(self) -> int:
        """The stack with most blocks."""
        return self.stacks[0]

    @property
    def pace(self) -> float:
        """Bytes a step, on average."""
        return self.at_once * self.typical / self.every

    @property
    def rate(self) -> str:
        """How fast it grows, in words."""
        if self.every == 1:
            return f"{self.at_once:.3g} a step over {len(self.grown):,} steps"
        return f"{self.at_once:.3g} every {self.every} steps, {len(self.grown):,} times in {self.span:,} steps"


def growth_evidence(history: History, each: Growth) -> Iterator[Evidence]:
    """What one growing line shows: blocks, bytes, the pace, and the frames of its largest stack."""
    place = own_frame(history, each.stack)
    yield Evidence(name="live blocks", value=each.count, expected=f"< {GROWTH_STEPS}", note=place)
    yield Evidence(name="bytes of them", value=each.size, expected=0, unit="B", note=f"usually {each.typical:,} B each")
    note = f"{each.rate}, by {each.known_by}"
    yield Evidence(name="blocks a step", value=round(each.at_once / each.every, 3), expected=0, note=note)
    frames = [
        f"{name} {file}:{line}" if line else f"{name} {file}" for name, file, line in history.stacks.of(each.stack)
    ]
    if frames:
        yield Evidence(name="stack", value=" < ".join(frames[:6]))


def growth_words(history: History, each: Growth) -> str:
    """A clause of one growing line: ``60 live blocks of 8.00 MiB (480.00 MiB in all) come from …: 3 every …``."""
    return (
        f"{each.count:,} live blocks of {gib(each.typical)} ({gib(each.size)} in all) come from "
        f"{own_frame(history, each.stack)}: {each.rate}"
    )


def last_event(history: History) -> int:
    """The last failure, else the end of the trace: up to where growth is looked for."""
    failures = history.failures
    return int(failures[-1]) if len(failures) else history.end


def long_enough(history: History) -> bool:
    """Whether a trace accounts for the memory over so many steps that what stays is told from what is of one step."""
    return history.sound and len(steps(history, last_event(history))) >= GROWTH_STEPS


def too_short(traced: dict[int, History]) -> str:
    """What would be needed to judge growth, for the reason of a rule that is skipped."""
    needed = f"a trace that tells of all allocations over {GROWTH_STEPS} steps or more"
    seen = max((len(steps(each, last_event(each))) for each in traced.values() if each.sound), default=0)
    return f"{needed} (this one holds {seen})" if seen else needed


_GROWTH: WeakKeyDictionary[History, tuple[Growth, ...]] = WeakKeyDictionary()


def growth(history: History) -> tuple[Growth, ...]:
    """What grows up to the last failure, else up to the end of the trace; most bytes first.

    Where the last failure lies behind the last step of training, growth among what comes round there counts, too.
    """
    if history not in _GROWTH:
        at = last_event(history)
        found: list[_Grown] = []
        if history.sound and at > history.prologue:
            found = list(_growing(history, at, steps(history, at)))
            later = afterwards(history, at) if len(history.failures) else None
            if later is not None and not found:
                found = list(_growing(history, at, later))
        by_line: dict[int, list[_Grown]] = {}
        for each in found:
            by_line.setdefault(each.line, []).append(each)
        joined = (_joined(history, each) for each in by_line.values())
        _GROWTH[history] = tuple(sorted(joined, key=lambda each: -each.size))
    return _GROWTH[history]


@dataclass(frozen=True)
class _Grown:
    """Live blocks of one stack, or of all of one line, that become more: with the steps that the new ones came in."""

    line: int
    blocks: Blocks
    born_in: Array  # int64[F], the step of each block that came within the trace
    passed: Steps
    sure: bool


def _joined(history: History, parts: list[_Grown]) -> Growth:
    """What the stacks of one line have together."""
    size = np.concatenate([each.blocks.size for each in parts])
    stack = np.concatenate([each.blocks.stack for each in parts])
    born_in = np.concatenate([each.born_in for each in parts])
    grown = np.unique(born_in)
    numbers, count = np.unique(stack, return_counts=True)
    return Growth(
        stacks=tuple(numbers[np.argsort(-count, kind="stable")].tolist()),
        count=len(size),
        size=int(size.sum()),
        typical=int(np.median(size)),
        alike=float(alike(size).mean()),
        at_once=len(born_in) / len(grown),
        every=max(1, round(float(np.median(np.diff(grown))))),
        grown=grown,
        span=len(parts[0].passed),
        known_by=parts[0].passed.known_by,
        sure=all(each.sure for each in parts),
    )


def _growing(history: History, at: int, passed: Steps) -> Iterator[_Grown]:
    """Stacks that grow, and lines that do where none of their stacks does alone: each layer has its turn, say."""
    live = history.live(at)
    line_of = lines(history.stacks)
    # Without stacks, blocks of one size stand for what one line of code makes.
    by_stack = np.where(live.stack > 0, live.stack << 44, live.size)
    found: set[int] = set()
    for mine in _most(live, by_stack):
        stack = int(mine.stack[0])
        line = int(line_of[stack]) if stack > 0 else -(len(line_of) + 1 + int(mine.size[0]))
        if (grown := _grown(history, mine, line, passed, of_size=stack <= 0)) is not None:
            found.add(line)
            yield grown
    by_line = line_of[live.stack]
    for mine in _most(live.where(by_line >= 0), by_line[by_line >= 0]):
        line = int(line_of[mine.stack[0]])
        if line in found or (mine.stack == mine.stack[0]).all():
            continue
        if (grown := _grown(history, mine, line, passed, of_size=False)) is not None:
            yield grown


def _most(live: Blocks, key: Array) -> Iterator[Blocks]:
    """The groups of live blocks with one key that are large enough to have grown, those with most blocks first."""
    _, which, count = np.unique(key, return_inverse=True, return_counts=True)
    many = np.flatnonzero(count >= RARE_TIMES)
    for each in many[np.argsort(-count[many], kind="stable")][:MOST_STACKS].tolist():
        yield live.where(which == each)


def _grown(history: History, mine: Blocks, line: int, passed: Steps, of_size: bool) -> _Grown | None:
    stacks = np.unique(mine.stack)
    numbers: list[int] = stacks.tolist()
    if passed.guessed and (
        any(is_collected(history, each) for each in numbers) if not of_size else len(mine) < GUESSED_BLOCKS
    ):
        return None
    every = history.blocks
    same = every.where(np.isin(every.stack, stacks) & ((every.size == mine.size[0]) | (not of_size)))
    fresh = mine.where(mine.born >= history.prologue)
    born_in = np.searchsorted(passed.marks, fresh.born, side="right")
    steady = _steady(mine, fresh, born_in, same, passed)
    rarely = not steady and not passed.guessed and _rarely(fresh, born_in, same, passed)
    if not steady and not rarely:
        return None
    known = {history.stacks.category_of(each) for each in numbers}
    enough = not passed.guessed or (len(mine) >= GUESSED_BLOCKS and known == {"unknown"} and not of_size)
    meant = bool(known & _KEPT) or bool(mine.pool.any()) or any(is_store(history, each) for each in numbers)
    # What goes on after the last step of training may be a phase that gives all back at its end.
    ended = passed.after_training
    return _Grown(line, mine, born_in, passed, sure=bool(steady) and enough and not meant and not ended)


def _steady(mine: Blocks, fresh: Blocks, born_in: Array, same: Blocks, passed: Steps) -> bool:
    """Whether blocks come evenly, step after step, to the end, and stay.

    ``mine`` are the blocks that are live at the end, ``fresh`` those of them that came within the trace, in the steps
    ``born_in``; ``same`` are all that their stacks ever made. A trace of a few steps will do where many blocks from
    before it stand for the others.
    """
    grown, births = np.unique(born_in, return_counts=True)
    if len(mine) < GROWTH_STEPS or len(grown) < FEW_STEPS:
        return False
    before = (len(mine) - len(fresh)) / float(np.median(births))
    if len(grown) < GROWTH_STEPS and (passed.guessed or before < EARLIER_BLOCKS):
        return False
    gaps = np.diff(grown)
    usual = float(np.median(gaps))
    if gaps.max() > max(GROWTH_GAP * usual, usual + 2) or len(passed) - grown[-1] > max(2.0, 2 * usual):
        return False
    half = len(grown) // 2
    if births[-half:].sum() < STILL_GROWING * births[:half].sum() or births.max() > 0.5 * births.sum():
        return False
    return _stay(mine, fresh, same)


def _rarely(fresh: Blocks, born_in: Array, same: Blocks, passed: Steps) -> bool:
    """Whether large blocks come in equal bouts at equal distances, from the start of the trace to its end, and stay.

    Too few for a pace, as of a checkpoint every so many steps; what happens once, or ever rarer, is none of it.
    """
    grown, births = np.unique(born_in, return_counts=True)
    if len(grown) < RARE_TIMES or float(fresh.size.sum()) < RARE_BYTES:
        return False
    gaps = np.diff(grown)
    usual = float(np.median(gaps))
    around = np.concatenate([gaps, [usual]])
    edges = max(float(grown[0]), float(len(passed) - grown[-1]))
    even = around.max() <= RARE_GAP * usual and around.min() * RARE_GAP >= usual and edges <= RARE_GAP * usual
    equal = births.max() <= RARE_GAP * float(np.median(births))
    return even and usual >= 2 and equal and _stay(fresh, fresh, same)


def _stay(mine: Blocks, fresh: Blocks, same: Blocks) -> bool:
    """Whether what came within the trace is more than what was given back meanwhile, and more than there ever was."""
    # A window of the last losses gets a block and gives one back: what was there when these came must still be.
    begun, now = int(fresh.born.min()), int(fresh.born.max())
    given_back = int(((same.born < begun) & (same.freed > begun) & (same.freed <= now)).sum())
    if given_back > (1 - NET_GROWTH) * len(fresh):
        return False
    # A list that is cleared every so often held as much before: what is within that is no growth.
    return _most_at_once(same.where(same.freed < begun)) < len(mine)


def _most_at_once(blocks: Blocks) -> int:
    """The largest number of blocks that were live at one time."""
    change = np.concatenate([np.ones(len(blocks), np.int64), -np.ones(len(blocks), np.int64)])
    order = np.argsort(np.concatenate([blocks.born, blocks.freed]), kind="stable")
    return int(np.cumsum(change[order]).max(initial=0))
