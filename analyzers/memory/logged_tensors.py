"""One small block of one line stays with every step: a metric that was logged with its graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from .allocator import Growth, alike, by_stack, growth, histories, last_event, long_enough, own_frame
from .leak import growth_evidence, rising
from .oom import gib
from .thresholds import (
    GROWTH_STEPS,
    LOGGED_A_STEP,
    LOGGED_ALIKE,
    LOGGED_BYTES,
    LOGGED_GROWTH,
    MANY_ALIKE,
    TINY_A_STEP,
)

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History

#: Functions by which a model is made or its weights are read, layer after layer.
_MODEL = re.compile(r"load|weight|param|init|build|model|create|buffer", re.IGNORECASE)


@rule(
    "memory/logged-tensors",
    stage="runtime",
    severity="warning",
    needs=("tensors.allocator/action|files.snapshot",),
)
def logged_tensors(capsule: Capsule) -> Iterator[Finding]:
    """A small block of one line stays with every step: a logged value is kept as a tensor.

    What it checks:
        The trace of an allocator snapshot: a line that makes one small block, or a few, in each step, all alike, none
        of which is given back. Without a trace, the live blocks of the snapshot.
    Why it matters:
        A loss that goes into a list or into a running sum as a tensor holds its graph, and with it what the graph was
        made of. Kilobytes a step are gigabytes after an epoch.
    How it decides:
        A stack grows as memory/leak asks for, by at most 4 blocks a step of at most 16 MiB, 80 % of them of one size
        (likely where the steps are known, undetermined where they are guessed). Where the trace has fewer than 8 steps:
        100 live blocks or more of one size and one stack, that is no part of a forward pass (undetermined; likely
        where a log says that allocated memory rises by half a block a step or more). Below 4 KiB a step it is info.
    Looks like it but is not:
        Parameters, the optimizer's state, and activations of many layers, which are alike as well, a window of the last
        hundred losses, a list that is cleared every so often, a cache that fills up.
    What to try next:
        Look at the named line, and at what its result is appended or added to.
    Fix:
        .detach() what is kept, or .item() where one number is wanted (every so many steps: it waits for the device).
    """
    traced = histories(capsule)
    grown = {rank: kept for rank, history in traced.items() if (kept := list(filter(_is_logged, growth(history))))}
    for rank, kept in grown.items():
        most = max(kept, key=lambda each: (each.sure, each.count))
        yield _growing(traced[rank], rank, most, len(grown))
        return  # the ranks of one job run one program
    short = {rank: history for rank, history in traced.items() if not long_enough(history)}
    for rank, history in short.items():
        if (found := _many(history)) is not None:
            yield _alike(capsule, history, rank, *found)
            return
    if len(short) == len(traced):
        raise NotCaptured(f"a trace that tells of all allocations over {GROWTH_STEPS} steps")


def _is_logged(each: Growth) -> bool:
    return each.typical <= LOGGED_BYTES and each.a_step <= LOGGED_A_STEP and each.alike >= LOGGED_ALIKE


def _growing(history: History, rank: int, each: Growth, ranks: int) -> Finding:
    place = own_frame(history, each.stack)
    tiny = sum(one.pace for one in growth(history)) <= TINY_A_STEP
    return Finding(
        confidence="likely" if each.sure else "undetermined",
        title="Logged tensors are kept" if each.sure else "Small blocks of one line become more and more",
        summary=(
            f"{each.count:,} live blocks of {gib(each.typical)} ({gib(each.size)} in all) come from {place}: "
            f"{each.a_step:.3g} a step over {each.steps:,} steps, and none is given back."
        )
        + (f" {ranks} ranks do the same." if ranks > 1 else "")
        + (" So little a step fills no device." if tiny else ""),
        severity="info" if tiny else None,
        where=Where(rank=rank),
        evidence=(
            *growth_evidence(history, each),
            Evidence(name="of one size", value=round(each.alike, 3), expected=f"< {LOGGED_ALIKE}"),
        ),
        cause="the result of this line is kept with its graph, once a step" if each.sure else None,
        next=("look at what the result of the named line is appended or added to",),
        fix=(".detach() what is kept, or .item() where one number is wanted",),
    )


def _many(history: History) -> tuple[int, int, int] | None:
    """(stack, blocks, bytes) of many blocks that are alike, where nothing says that they are meant to be there."""
    live = history.live(last_event(history))
    for stack, count, _ in by_stack(live):
        if stack <= 0 or count < MANY_ALIKE or history.stacks.category_of(stack) != "unknown":
            continue
        if any(_MODEL.search(name) for name, _, _ in history.stacks.of(stack)):
            continue
        sizes = live.size[live.stack == stack]
        same = sizes[alike(sizes)]
        if len(same) >= LOGGED_ALIKE * count and same[0] <= LOGGED_BYTES:
            return stack, len(same), int(same.sum())
    return None


def _alike(capsule: Capsule, history: History, rank: int, stack: int, count: int, size: int) -> Finding:
    place = own_frame(history, stack)
    risen = next((each for each in rising(capsule) if each.slope >= LOGGED_GROWTH * size / count), None)
    words = f"{count:,} live blocks ({gib(size)}) come from {place}."
    if risen is None:
        words += (
            " One a step, and a logged tensor is kept; one a layer or a parameter, and nothing is wrong: the trace is "
            "too short to tell."
        )
    else:
        words += f" Allocated memory rises by {gib(risen.slope)} a step, about a block or a few of these."
    return Finding(
        confidence="undetermined" if risen is None else "likely",
        title="Many small blocks of one line" if risen is None else "Logged tensors are kept",
        summary=words,
        where=Where(rank=rank),
        evidence=(
            Evidence(name="live blocks", value=count, expected=f"< {MANY_ALIKE}", note=place),
            Evidence(name="bytes of them", value=size, unit="B"),
            *([] if risen is None else [Evidence(name="growth", value=round(risen.slope), expected=0, unit="B/step")]),
        ),
        cause=None if risen is None else "the result of this line is kept, once a step",
        next=("record a trace: torch.cuda.memory._record_memory_history() some twenty steps before the snapshot",),
        fix=() if risen is None else (".detach() what is kept, or .item() where one number is wanted",),
    )
