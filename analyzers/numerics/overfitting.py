"""Validation that rises while training falls, group by group."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from ..series import Curve, Floats, carried, curve, noise
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Names of losses that are measured on held-out data: eval_loss, eval_g0_loss, val/loss, "lm loss validation" …
HELD_OUT = re.compile(r"(?:^|[^a-z])(?:eval|val|valid|validation|dev|test|heldout|held_out|tel)(?:[^a-z]|$)")


def held_out_losses(capsule: Capsule) -> dict[str, Curve]:
    """Every evaluation loss on record by its name (with rank and side where there are several)."""
    found: dict[str, Curve] = {}
    for key in capsule.scalar_keys():
        name = key.name.lower()
        if "loss" not in name or not HELD_OUT.search(name.replace("loss", " loss ")):
            continue
        shown = key.name + (f" ({key.side})" if key.side else "")
        if shown not in found:  # the lowest rank speaks for all
            found[shown] = curve(capsule, key.name, key.rank, key.side).finite()
    return found


@dataclass(frozen=True)
class Rise:
    """An evaluation loss that went up for good after its best value."""

    name: str
    best_step: int
    best: float
    first_step: int
    first: float
    last: float
    points: int


def lasting_rise(name: str, found: Curve) -> Rise | None:
    """The rise of an evaluation loss from its minimum to the end, or None where it is noise or a short one.

    Nine tenths of the evaluations after the best are above it, the last third is above it by 2 % and by three times
    the scatter, the second half of what follows is no lower than the first; and a small rise goes on (Kendall).
    """
    value = found.value
    if len(value) < T.EVALUATIONS:
        return None
    best = len(value) - 1 - int(np.argmin(value[::-1]))  # of equal ones, as few decimals make them, the last
    after = value[best + 1 :]
    if len(after) < T.EVALUATIONS_AFTER:
        return None
    scatter = noise(value[max(0, best - len(after)) :])
    margin = max(T.OVERFIT_RISE * abs(float(value[best])), 0.0 if math.isnan(scatter) else T.OVERFIT_SIGMA * scatter)
    half = len(after) // 2
    end = float(np.median(after[-max(1, len(after) // 3) :]))
    if end - value[best] <= margin or float(np.mean(after > value[best] + 0.1 * margin)) < 0.9:
        return None
    if half and float(np.median(after[half:])) < float(np.median(after[:half])):
        return None
    if end - value[best] < T.OVERFIT_PLAIN * abs(float(value[best])) and not _climbs(after):
        return None
    return Rise(
        name=name,
        best_step=int(found.step[best]),
        best=float(value[best]),
        first_step=int(found.step[best + 1]),
        first=float(after[0]),
        last=float(after[-1]),
        points=len(after),
    )


def _climbs(values: Floats) -> bool:
    """Whether later values are higher than chance has it: Kendall's S, one-sided at 5 %."""
    count = len(values)
    left, right = np.triu_indices(count, 1)
    score = float(np.sign(values[right] - values[left]).sum())
    return score > 1.645 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


@rule(
    "numerics/overfitting",
    cases=("parrot-after-finetuning",),
    stage="numerics",
    severity="warning",
    needs=("scalars.loss",),
    explained_by=("numerics/learning-rate", "numerics/first-nonfinite", "data/poison-sample"),
)
def overfitting(capsule: Capsule) -> Iterator[Finding]:
    """The validation loss rises while the training loss falls.

    What it checks:
        Every evaluation loss on record, each group by itself, beside the training loss.

    Why it matters:
        From that step on the model learns its training set by heart. The checkpoint to keep is the one before, and
        everything after it cost compute and made it worse.

    How it decides:
        At least three evaluations, two of them after the best one; nine tenths of those are above the best, their last
        third by 2 % and by three times the scatter of the evaluations, and they do not come down again; a rise of less
        than 10 % must go on (Kendall's test at 5 %). The training loss fell over the same steps by more than 2 % and
        its noise. The first step is the first evaluation after the best. Several groups are one finding, at the
        earliest.

    Looks like it but is not:
        An evaluation that scatters around its level; one bump after which it falls again; training and validation that
        rise together, which is divergence; a single last evaluation above the best; another evaluation set from some
        step on.

    What to try next:
        Evaluate the best checkpoint again and compare; count epochs × samples.

    Fix:
        Keep the best checkpoint. Fewer epochs, more or more varied data, a lower rate, dropout or weight decay.
    """
    groups = held_out_losses(capsule)
    if not groups:
        raise NotCaptured("an evaluation loss (eval_loss, val_loss …) beside the training loss")
    train = curve(capsule, "loss").finite()
    rises = [rise for name, found in groups.items() if (rise := lasting_rise(name, found)) is not None]
    rises = [rise for rise in rises if _training_falls(train, rise, groups[rise.name])]
    if not rises:
        return
    first = min(rises, key=lambda rise: (rise.first_step, rise.best_step))
    epoch = curve(capsule, "epoch").finite()
    at = carried(epoch, np.array([first.first_step]))[0]
    when = f"step {first.first_step}" + (f" (epoch {at:g})" if math.isfinite(at) else "")
    before, after = _levels(train, first, groups[first.name])
    yield Finding(
        title="The validation loss rises while the training loss falls",
        summary=(
            f"{first.name} is best at step {first.best_step} ({first.best:.4g}) and rises from {when} on to "
            f"{first.last:.4g}, while the training loss falls from {before:.4g} to {after:.4g}"
            + (f"; {len(rises)} of {len(groups)} evaluation groups do." if len(groups) > 1 else ".")
        ),
        where=Where(step=first.first_step),
        evidence=(
            Evidence(name="best checkpoint", value=first.best_step, unit="step", note=f"{first.name} {first.best:.4g}"),
            *(
                Evidence(
                    name=rise.name,
                    value=rise.last,
                    expected=f"≤ {rise.best:.4g}",
                    unit="nats/token",
                    note=f"best at step {rise.best_step}, {rise.points} evaluations after it",
                )
                for rise in rises[:12]
            ),
            Evidence(name="training loss", value=after, note=f"{before:.4g} at the best checkpoint", unit="nats/token"),
        ),
        cause="the model learns its training set by heart",
        next=(f"evaluate the checkpoint of step {first.best_step} again", "count epochs × samples"),
        fix=(f"keep the checkpoint of step {first.best_step}", "fewer epochs, or more varied data"),
    )


def _levels(train: Curve, rise: Rise, found: Curve) -> tuple[float, float]:
    """Training loss at the best evaluation and at the end: medians of up to five points, as the log has them."""
    until = train.where(train.step <= max(rise.best_step, int(train.step[0])) if len(train) else slice(0, 0))
    late = train.where(train.step > rise.best_step)
    if not len(until) or not len(late):
        return math.nan, math.nan
    points = max(1, min(5, len(late) // 3, len(until)))
    return float(np.median(until.value[-points:])), float(np.median(late.value[-points:]))


def _training_falls(train: Curve, rise: Rise, found: Curve) -> bool:
    before, after = _levels(train, rise, found)
    late = train.where(train.step > rise.best_step).value
    scatter = noise(late) / math.sqrt(max(1, min(5, len(late) // 3)))
    margin = max(T.TRAIN_FALL * abs(before), 0.0 if math.isnan(scatter) else 2 * scatter)
    return after < before - margin
