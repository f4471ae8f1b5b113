"""A logged value stays on the device with every step: alone, or with the graph that it was computed by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding
from ..registry import NotCaptured, rule
from .allocator import histories, located, of_devices, own_frame
from .growth import Growth, growth, growth_evidence, growth_words, long_enough, too_short
from .names import is_value
from .oom import gib
from .rising import rising
from .standing import NEXT, Standing, open_question, standing
from .thresholds import GRAPH_LINES, LOGGED_A_STEP, LOGGED_ALIKE, LOGGED_BYTES, SCALAR_BYTES, TINY_A_STEP

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History


@rule(
    "memory/logged-tensors",
    stage="runtime",
    severity="warning",
    needs=("tensors.allocator/action|files.snapshot",),
)
def logged_tensors(capsule: Capsule) -> Iterator[Finding]:
    """A logged value is kept as a tensor, step after step, and its graph perhaps with it.

    What it checks:
        The trace of an allocator snapshot: lines that grow as memory/leak asks for, among them one that makes a small
        value a step, and whether what the forward pass computed stays with it. Without a trace, the live blocks.
    Why it matters:
        A loss that goes into a list or into a running sum as a tensor holds its graph, and with it what the graph was
        made of. Kilobytes a step are gigabytes after an epoch.
    How it decides:
        The value: at most 4 blocks at once of at most 16 MiB, 80 % of them of one size. With its graph: 2 lines or more
        of the forward pass keep blocks in the same steps, and the value is none of them. Alone: the line is one of a
        loss, a metric or a log by its names, or the block is a scalar (512 B); nothing is then said of a graph. Likely
        where memory/leak is sure of its growth, else undetermined. Where the trace has fewer than 8 steps: 100 live
        blocks or more of one size and of such a line (undetermined; likely where a log says that allocated memory rises
        by half a block a step or more). Below 4 KiB a step it is info.
    Looks like it but is not:
        Other things that stay with each step or each n-th one: outputs that a hook keeps, copies for a checkpoint,
        batches (memory/leak names their line); parameters, the optimizer's state, activations of many layers, a window
        of the last hundred losses, a list that is cleared every so often, a cache that fills up.
    What to try next:
        Look at the named line, and at what its result is appended or added to; print its grad_fn.
    Fix:
        .detach() what is kept, or .item() where one number is wanted (every so many steps: it waits for the device).
    """
    traced = histories(capsule)
    found = {rank: said for rank, history in traced.items() if (said := _logged(history)) is not None}
    for rank, (value, graph) in found.items():
        yield _growing(capsule, traced[rank], rank, value, graph, len(found))
        return  # the ranks of one job run one program
    blocks = standing(capsule)
    if blocks is not None and is_value(blocks.history, blocks.stack):
        yield _standing(capsule, blocks)
    elif not any(map(long_enough, traced.values())):
        raise NotCaptured(too_short(traced))


def _logged(history: History) -> tuple[Growth, tuple[Growth, ...]] | None:
    """The line of a value that is kept, and the lines of the graph that stay with it."""
    grown = growth(history)
    graph = tuple(each for each in grown if _in_forward(history, each))
    values = [each for each in grown if _is_small(each)]
    alone = [each for each in values if is_value(history, each.stack) or each.typical <= SCALAR_BYTES]
    beside = [each for each in values if each not in graph]
    for named in (alone, beside if len(graph) >= GRAPH_LINES else []):
        if named:
            most = max(named, key=lambda each: (each.sure, each.count))
            kept = tuple(each for each in graph if each is not most and _together(most, each))
            if named is alone or len(kept) >= GRAPH_LINES:
                return most, kept if len(kept) >= GRAPH_LINES else ()
    return None


def _is_small(each: Growth) -> bool:
    return each.typical <= LOGGED_BYTES and each.at_once <= LOGGED_A_STEP and each.alike >= LOGGED_ALIKE


def _in_forward(history: History, each: Growth) -> bool:
    return all(history.stacks.category_of(stack) == "activation" for stack in each.stacks)


def _together(value: Growth, each: Growth) -> bool:
    """Whether two lines grow in the same steps, of which one may be under way at either end."""
    apart = len(set(value.grown.tolist()) ^ set(each.grown.tolist()))
    return apart <= max(2, 0.2 * len(value.grown))


def _growing(
    capsule: Capsule, history: History, rank: int, value: Growth, graph: Sequence[Growth], others: int
) -> Finding:
    tiny = sum(one.pace for one in growth(history)) <= TINY_A_STEP
    words = f"{growth_words(history, value)}, and none is given back."
    cause = "the result of this line is kept as a tensor, step after step"
    fix = (".item() where one number is wanted, .cpu() or nothing of it otherwise",)
    if graph:
        size, place = gib(sum(each.size for each in graph)), own_frame(history, graph[0].stack)
        words += f" {size} of {len(graph)} lines of the forward pass ({place} first) stay with it: its graph is kept."
        cause = "the result of this line is kept with its graph, step after step"
        fix = (".detach() what is kept, or .item() where one number is wanted",)
    return Finding(
        confidence="likely" if value.sure else "undetermined",
        title="Logged tensors are kept" if value.sure else "Small blocks of one line become more and more",
        summary=words + of_devices(capsule, history, others) + (" So little a step fills no device." if tiny else ""),
        severity="info" if tiny else None,
        where=located(capsule, rank),
        evidence=(
            *growth_evidence(history, value),
            Evidence(name="of one size", value=round(value.alike, 3), expected=f"< {LOGGED_ALIKE}"),
            *(
                Evidence(
                    name="forward blocks that stay",
                    value=each.size,
                    expected=0,
                    unit="B",
                    note=f"{each.count:,} of {own_frame(history, each.stack)}",
                )
                for each in graph[:3]
            ),
        ),
        cause=cause if value.sure else None,
        next=("look at what the result of the named line is appended or added to, and at its grad_fn",),
        fix=fix,
    )


def _standing(capsule: Capsule, blocks: Standing) -> Finding:
    risen = next((each for each in rising(capsule) if blocks.is_pace_of(each.slope)), None)
    if risen is None:
        return open_question(capsule, blocks)
    return Finding(
        confidence="likely",
        title="Logged tensors are kept",
        summary=f"{blocks.words} Allocated memory rises by {gib(risen.slope)} a step, about a block or a few of these.",
        where=located(capsule, blocks.rank),
        evidence=(
            *blocks.evidence,
            Evidence(name="growth", value=round(risen.slope), expected=0, unit="B/step"),
        ),
        cause="the result of this line is kept, step after step",
        next=(NEXT,),
        fix=(".detach() what is kept, or .item() where one number is wanted",),
    )
