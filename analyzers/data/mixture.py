"""The domains that the samples come from, and whether trouble begins where their shares jump."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..numerics.symptoms import Symptom, first_symptom
from ..registry import NotJudged, rule
from ..samples import MAD_TO_SIGMA
from . import thresholds as T
from .rows import TRAIN

if TYPE_CHECKING:
    from ...capsules import Capsule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shift:
    """A jump of the mixture: from ``step`` on the shares are other ones; ``distance`` is their total variation."""

    step: int
    planned: bool
    distance: float | None
    before: dict[str, float]
    after: dict[str, float]


@rule(
    "data/mixture-shift",
    stage="data",
    severity="warning",
    needs=("records.samples.domain|records.samples.source|records.events",),
    cases=("loss-spike",),
)
def mixture_shift(capsule: Capsule) -> Iterator[Finding]:
    """The mixture of domains jumps where the trouble begins.

    What it checks:
        Shares of the samples' domains (their sources where no domain is on record) in the 24 steps before and after
        each step, and planned changes of the mixture, against the first sign of trouble: a loss or gradient norm out of
        line, a value that is not finite.

    Why it matters:
        A shard of another kind looks like a numerical fault: the loss jumps, and nothing in model or optimizer changed.

    How it decides:
        The shares differ by more than 0.3 (total variation) and three times what samples of one mixture differ by, or a
        change is announced, and within 10 steps the trouble begins. Where nobody announced it a lasting rise of the
        loss (4 robust σ and 5 %) is trouble, too.

    Looks like it but is not:
        A planned change after which loss and gradients stay in line; a change long before the trouble; batches drawn
        from one domain at a time by design, whose shares jump all the time; few samples, whose shares scatter.

    What to try next:
        Compare the loss by domain before and after; train on from the checkpoint with the old mixture.

    Fix:
        Restore the weights of the sampler, or ramp to the new mixture over some hundred steps.
    """
    steps, counts, names = _shares(capsule)
    planned = {int(e["step"]) for e in capsule.records("events") if _is_change(e)}
    if not planned and (len(names) < 2 or len(steps) < 2):
        if len(names) < 2 and not planned:
            raise NotJudged("the domain of the samples, or events of kind mixture_changed, are needed")
        return
    symptom = first_symptom(capsule)
    for shift in _shifts(steps, counts, names, planned):
        trouble = _trouble(capsule, shift, symptom)
        if trouble is not None:
            yield _finding(shift, trouble)
            return


def _is_change(event: dict[str, Any]) -> bool:
    return event.get("kind") == "mixture_changed" and event.get("step") is not None


def _shares(capsule: Capsule) -> tuple[NDArray[np.int64], Floats, list[str]]:
    """Steps [S], samples of each domain in each step [S, D], and the domains' names."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    records = [
        each for each in capsule.records("samples") if each.get("split") in TRAIN and each.get("step") is not None
    ]
    field = "domain" if any(each.get("domain") for each in records) else "source"
    for record in records:
        if record.get(field):
            found[int(record["step"])][str(record[field])] += 1
    names = sorted({name for counter in found.values() for name in counter})
    # Sources may be files, one a sample: then they are no mixture.
    if len(names) > 64 or 2 * len(names) > sum(sum(counter.values()) for counter in found.values()):
        return np.empty(0, np.int64), np.empty((0, 0)), []
    steps = np.array(sorted(found), np.int64)
    counts = np.array([[found[step][name] for name in names] for step in steps.tolist()], np.float64)
    return steps, counts.reshape(len(steps), len(names)), names


def _shifts(steps: NDArray[np.int64], counts: Floats, names: list[str], planned: set[int]) -> list[Shift]:
    """Jumps of the shares at their sharpest step, and planned ones, in order."""
    total = np.vstack([np.zeros(len(names)), np.cumsum(counts, axis=0)]) if len(steps) else np.zeros((1, len(names)))
    distance = np.zeros(len(steps))
    limit = np.full(len(steps), np.inf)
    sides: list[tuple[Floats, Floats] | None] = [None] * len(steps)
    for at in range(1, len(steps)):
        before = total[at] - total[max(0, at - T.MIXTURE_WINDOW)]
        after = total[min(len(steps), at + T.MIXTURE_WINDOW)] - total[at]
        if min(before.sum(), after.sum()) < T.MIXTURE_MIN_SAMPLES:
            continue
        p, q = before / before.sum(), after / after.sum()
        sides[at] = (p, q)
        distance[at] = float(np.abs(p - q).sum()) / 2
        both = (before + after) / (before + after).sum()
        spread = np.sqrt(both * (1 - both) * (1 / before.sum() + 1 / after.sum()))
        limit[at] = max(T.MIXTURE_SHIFT, T.MIXTURE_OVER_NOISE * float(spread.sum()) * np.sqrt(2 / np.pi) / 2)
    found: dict[int, Shift] = {}
    passing = np.flatnonzero(distance > limit)
    while passing.size:
        at = int(passing[np.argmax(distance[passing])])
        pair = sides[at]
        if pair is not None:
            p, q = ({name: float(x) for name, x in zip(names, side, strict=True)} for side in pair)
            found[int(steps[at])] = Shift(int(steps[at]), False, float(distance[at]), p, q)
        passing = passing[abs(passing - at) > T.MIXTURE_WINDOW]
    for step in planned:
        near = next((each for each in found if abs(each - step) <= 2), None)
        shift = found.pop(near) if near is not None else None
        found[step] = Shift(
            step, True, shift.distance if shift else None, shift.before if shift else {}, shift.after if shift else {}
        )
    return [found[step] for step in sorted(found)]


def _trouble(capsule: Capsule, shift: Shift, symptom: Symptom | None) -> Symptom | None:
    """What goes wrong right after the shift."""
    if symptom is not None and shift.step <= symptom.step <= shift.step + T.MIXTURE_LEAD:
        return symptom
    if symptom is not None and symptom.step < shift.step:
        return None  # the run was in trouble before
    return None if shift.planned else _level_rise(capsule, shift.step)


def _level_rise(capsule: Capsule, step: int) -> Symptom | None:
    series = capsule.scalars("loss")
    at, value = np.asarray(series.step), np.asarray(series.value, np.float64)
    keep = np.isfinite(value)
    at, value = at[keep], value[keep]
    before, after = value[at < step][-T.MIXTURE_WINDOW // 2 :], value[at >= step][: T.MIXTURE_LEAD]
    if len(before) < 8 or len(after) < 3:
        return None
    level = float(np.median(before))
    sigma = float(np.median(np.abs(before - level))) * MAD_TO_SIGMA
    limit = level + max(T.MIXTURE_RISE_SIGMA * sigma, T.MIXTURE_RISE_SHARE * abs(level))
    now = float(np.median(after))
    return Symptom(step, "loss-level", now, limit) if now > limit else None


def _finding(shift: Shift, trouble: Symptom) -> Finding:
    moved = sorted(shift.after, key=lambda name: -abs(shift.after[name] - shift.before.get(name, 0.0)))[:4]
    told = ", ".join(
        f"{name} from {100 * shift.before[name]:.3g} to {100 * shift.after[name]:.3g} %" for name in moved[:2]
    )
    what = trouble.kind.replace("-", " ")
    evidence = [
        Evidence(name=f"share of {name}", value=shift.after[name], expected=shift.before[name], note="after, before")
        for name in moved
    ]
    if shift.distance is not None:
        evidence.insert(
            0,
            Evidence(name="total variation", value=shift.distance, expected=f"≤ {T.MIXTURE_SHIFT:g}", note="of shares"),
        )
    evidence += [
        Evidence(name="trouble begins at step", value=trouble.step, note=what),
        Evidence(name=what, value=trouble.value, expected=trouble.expected),
        Evidence(name="planned", value="yes" if shift.planned else "no", note="an event mixture_changed"),
    ]
    return Finding(
        title="The mixture of domains jumps where the trouble begins",
        summary=f"At step {shift.step} the mixture changes ({told or 'as announced'}) and at step {trouble.step} the "
        f"trouble begins: {what}.",
        where=Where(step=shift.step),
        evidence=tuple(evidence),
        cause="the data is of another kind from here on",
        next=("compare the loss by domain before and after", "train on from the checkpoint with the old mixture"),
        fix=("restore the sampler's weights, or ramp to the new mixture",),
    )
