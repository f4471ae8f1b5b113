"""What a resume brings back: moments, step counts, the learning rate, the random state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .records import Parameter, windows
from .step_case import number, taken_steps

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Resume:
    """A point at which a run goes on from a checkpoint.

    Attributes:
        step: first window after it.
        loaded: what the job loaded, None where that is not known.
        seen: the load itself is on record, not only a start at a late step.
    """

    step: int
    loaded: frozenset[str] | None
    seen: bool


def resumes(capsule: Capsule) -> list[Resume]:
    """Resumes of a capsule: loads of a checkpoint, and a recording that begins late in a run."""
    begins = [each for each in capsule.records("events") if each.get("kind") == "step_begin"]
    steps = sorted({each["step"] for each in begins if isinstance(each.get("step"), int)})
    if not steps:
        steps = sorted({int(step) for key in capsule.scalar_keys() for step in capsule.scalars(key.name).step[:1]})
    found: dict[int, Resume] = {}
    for event in capsule.records("events"):
        if event.get("kind") == "checkpoint_loaded" and isinstance(event.get("step"), int):
            step = next((each for each in steps if each >= event["step"]), event["step"])
            loaded = event.get("loaded")
            parts = frozenset(map(str, loaded)) if isinstance(loaded, list) else None
            known = found.get(step)
            if known is not None and known.loaded is not None:
                parts = known.loaded | (parts or frozenset())
            found[step] = Resume(step, parts, True)
    if steps and steps[0] >= T.OLD_ENOUGH and steps[0] not in found:
        found[steps[0]] = Resume(steps[0], None, False)
    return [found[step] for step in sorted(found)]


@rule(
    "optimizer/state-not-restored",
    stage="numerics",
    needs=("records.events.kind|records.param_groups.state_step|tensors.optimizer/*/exp_avg",),
    cases=("loss-spike",),
)
def state_not_restored(capsule: Capsule) -> Iterator[Finding]:
    """A resume went on without the optimizer's state.

    What it checks:
        After a checkpoint was loaded, or where a recording begins late in a run: the optimizer's step count, its
        moments, the learning rate and the random state.

    Why it matters:
        Fresh moments make the first steps of Adam as large as the learning rate allows, in the direction of one batch:
        the loss jumps at the resume and comes back slowly, or not at all. A scheduler that starts again repeats its
        warm-up or holds the wrong rate for the rest.

    How it decides:
        Confirmed: the step count after the load is below the count before it; or at a window of number 10 and later it
        is below half of that number, no larger than the windows since the start, and the moments before the step were
        all zero. Without the moments: likely. A learning rate that changes by more than 2 × across a load on record is
        a warning, as is a random state that equals the one the run began with.

    Looks like it but is not:
        Fine-tuning from loaded weights, which begins at step 0; a count that is smaller by the skipped steps;
        optimizers without a count; parameters added later; a schedule that decays or warms up over the same steps.

    What to try next:
        Compare the optimizer's step count and the rms of its moments right before the save and right after the load.

    Fix:
        Save and load optimizer, scheduler, scaler and random states together with the weights; load the optimizer after
        its parameters are in place.
    """
    found = resumes(capsule)
    groups = windows(capsule)
    counts = _counts(capsule, groups)
    if not counts and not found:
        raise NotJudged("a resume on record, or step counts of the optimizer")
    for resume in found:
        finding = _restarted(capsule, resume, counts, groups) or _rate(capsule, resume) or _seed(capsule, resume)
        if finding is not None:
            yield finding
            return


def _counts(capsule: Capsule, groups: dict[tuple[int, int], list[Parameter]]) -> dict[int, int]:
    """Largest step count of the optimizer by window."""
    found: dict[int, int] = {}
    for (step, _), rows in groups.items():
        for each in rows:
            if each.count is not None and each.trained is not False:
                found[step] = max(found.get(step, 0), each.count)
    for tensor in capsule.tensors("optimizer/*/after"):
        before, after = (number(tensor.attributes, key) for key in ("state_step_before", "state_step"))
        count = after if after is not None else before + 1 if before is not None else None
        if count is not None and count >= 0:
            found[tensor.step] = max(found.get(tensor.step, 0), int(count))
    return dict(sorted(found.items()))


def _restarted(
    capsule: Capsule, resume: Resume, counts: dict[int, int], groups: dict[tuple[int, int], list[Parameter]]
) -> Finding | None:
    after = next(((step, count) for step, count in counts.items() if step >= resume.step), None)
    before = max((count for step, count in counts.items() if step < resume.step), default=None)
    zero = _moments_zero(capsule, groups, resume.step)
    if after is None:
        return None
    step, count = after
    since = step - resume.step + 1
    if before is not None:
        restarted = count < before and count <= since
        expected = before + since
    else:
        restarted = step >= T.OLD_ENOUGH and count < T.RESTARTED_SHARE * step and count <= since
        expected = step + 1
    if not restarted:
        return None
    # A new optimizer on a run that goes on may be meant: then weights were loaded and nothing says that state was.
    certain = before is not None or zero is True or (resume.loaded is not None and "optimizer" in resume.loaded)
    left_out = resume.loaded is not None and "optimizer" not in resume.loaded
    return Finding(
        severity=None if certain or resume.seen else "warning",
        confidence="confirmed" if certain else "likely",
        title="The optimizer started anew at a resume",
        summary=(
            f"The run goes on at step {resume.step} and the optimizer has taken {count} steps at window {step} "
            f"(about {expected} expected)" + ("; its moments began at zero." if zero else ".")
        ),
        where=Where(step=resume.step),
        evidence=(
            Evidence(name="state_step", value=count, expected=expected, note=f"at window {step}"),
            *([Evidence(name="state_step before the load", value=before)] if before is not None else []),
            *([Evidence(name="moments before the step", value=0.0, expected="> 0")] if zero else []),
            *([Evidence(name="loaded", value=sorted(resume.loaded), expected="optimizer")] if resume.loaded else []),
        ),
        cause="the checkpoint's optimizer state was not loaded" + (": only " if left_out else "")
        + (", ".join(sorted(resume.loaded or ())) if left_out else ""),
        next=("compare step count and rms of the moments before the save and after the load",),
        fix=("load the optimizer's state with the weights, after its parameters are in place",),
    )  # fmt: skip


def _moments_zero(capsule: Capsule, groups: dict[tuple[int, int], list[Parameter]], step: int) -> bool | None:
    """Whether the first moments were all zero before the first captured step from ``step`` on; None where unknown."""
    later = [each for each in taken_steps(capsule) if each.step >= step]
    first = [each for each in later if each.step == later[0].step]
    told = [bool(np.any(each.arrays["exp_avg"] != 0)) for each in first if "exp_avg" in each.arrays]
    told += [False for each in first if number(each.attributes, "state_step_before") == 0]
    return not any(told) if told else None


def _rate(capsule: Capsule, resume: Resume) -> Finding | None:
    """A learning rate that jumps across a load that is on record."""
    series = capsule.scalars("learning_rate")
    earlier = series.value[(series.step < resume.step) & np.isfinite(series.value)]
    later = series.value[(series.step >= resume.step) & np.isfinite(series.value)]
    if not resume.seen or len(earlier) < 2 or not len(later) or not (earlier[-1] > 0 and later[0] >= 0):
        return None
    before, now = float(earlier[-1]), float(later[0])
    usual = abs(float(earlier[-1] / earlier[-2])) if earlier[-2] > 0 else 1.0
    jump = math.inf if now == 0 else max(now / before, before / now)
    if jump <= T.RATE_JUMP * max(usual, 1 / usual if usual else 1.0):
        return None
    return Finding(
        severity="warning",
        title="The learning rate jumps at a resume",
        summary=f"The learning rate is {before:.3g} before the load and {now:.3g} at step {resume.step}.",
        where=Where(step=resume.step),
        evidence=(
            Evidence(name="learning_rate", value=now, expected=before),
            Evidence(name="factor", value=jump, expected=f"≤ {T.RATE_JUMP:g}"),
        ),
        cause="the scheduler was not restored, or counts from another step",
        next=("print the scheduler's state right after the load",),
        fix=("save and load the scheduler with the optimizer",),
    )


def _seed(capsule: Capsule, resume: Resume) -> Finding | None:
    """A random state after the load that is the one the run began with."""
    steps = capsule.rng_steps()
    first = steps[0] if steps else None
    if first is None or not resume.seen or resume.step not in steps or first >= resume.step:
        return None
    states = [capsule.rng(step) for step in (first, resume.step)]
    begun, now = ((each or {}).get("torch") for each in states)
    if begun is None or now is None or not _equal(begun, now):
        return None
    return Finding(
        severity="warning",
        title="The random state was not restored at a resume",
        summary=f"The random state of step {resume.step}, after the load, is that of step {first}.",
        where=Where(step=resume.step),
        evidence=(Evidence(name="random state", value=f"as at step {first}", expected="another"),),
        cause="the generator was seeded anew instead of restored: dropout and shuffling repeat",
        next=("compare the batches after the load with those of the first steps",),
        fix=("save and load the random states with the checkpoint",),
    )


def _equal(left: Any, right: Any) -> bool:
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))
