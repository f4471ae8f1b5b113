"""Gradients of earlier steps that are still there when a new one begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .order import Calls, logged_norm, windows
from .step_case import number

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "optimizer/gradients-not-zeroed",
    stage="numerics",
    needs=("records.events.kind",),
    # Nor does zero_grad reach what the optimizer does not hold.
    explained_by=("optimizer/not-owned",),
)
def gradients_not_zeroed(capsule: Capsule) -> Iterator[Finding]:
    """Gradients of earlier steps are still there when a new step begins.

    What it checks:
        The norm of what lies in the gradients of the sampled parameters right before the first backward of a window
        that follows an optimizer step.

    Why it matters:
        Backward adds to what is there. Without zero_grad every step follows the sum of all gradients so far: a momentum
        that never decays, and a loss that swings or diverges.

    How it decides:
        The leftover norm is above 0.1 % of the window's gradient norm in two windows or more, the window before it
        ended in an optimizer step, and no zero_grad ran in either. One such window alone is a warning.

    Looks like it but is not:
        Accumulation over micro-batches, which is one window; zero_grad with set_to_none=False, which leaves zeros; a
        window after a skipped step; several optimizers that take turns; parameters without gradients.

    What to try next:
        Print the gradient norm before and after the first backward of a step.

    Fix:
        optimizer.zero_grad() once a step, after the step or before the first backward.
    """
    calls = windows(capsule)
    if not any(each.first("backward") is not None for each in calls):
        raise NotJudged("events of the backward passes")
    stepped = {(each.step, each.rank) for each in calls if each.first("optimizer_step") is not None}
    zeroed = {(each.step, each.rank) for each in calls if each.first("zero_grad") is not None}
    owners = {record.get("group") for record in capsule.records("param_groups")}
    found: list[tuple[Calls, float, float | None]] = []
    for each in calls:
        first = each.first("backward")
        carried = number(each.events[first], "carried") if first is not None else None
        before = (each.step - 1, each.rank)
        if not carried or before not in stepped or {before, (each.step, each.rank)} & zeroed:
            continue
        norm = logged_norm(capsule, each)
        if norm is None or carried / each.scale > T.CARRIED_SHARE * norm:
            found.append((each, carried, norm))
    if not found:
        return
    worst, carried, norm = found[0]
    sure = len(found) >= T.CARRIED_WINDOWS
    yield Finding(
        severity=None if sure else "warning",
        title="Gradients are not zeroed between steps",
        summary=(
            f"Before the first backward of step {worst.step} the gradients still had a norm of {carried:.3g} from the "
            f"step before; {len(found)} windows began so, and no zero_grad was seen."
        ),
        where=Where(step=worst.step, rank=worst.rank),
        evidence=(
            Evidence(name="leftover gradient norm", value=carried, expected=0.0, note="sampled parameters"),
            Evidence(name="grad_norm", value=norm, note="of the whole window"),
            Evidence(name="windows", value=len(found), expected=0),
            Evidence(name="groups", value=len(owners - {None})),
        ),
        cause="gradients of earlier steps are added to those of this one",
        next=("print the gradient norm before and after the first backward",),
        fix=("call optimizer.zero_grad() once a step",),
    )
