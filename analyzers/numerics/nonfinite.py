"""The first NaN or Inf: in which tensor it appeared, and when the loss lost its number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import rule
from ..samples import samples_by_step, worst_sample
from ..series import Curve, curve
from . import thresholds as T
from .overflow import find_overflow
from .symptoms import first_nonfinite, unlawful

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Series that a working job reports with every loss; where they are absent too, the step was not logged.
LOGGED_TOGETHER = ("memory_allocated", "memory_reserved", "memory_peak", "step_time", "throughput", "learning_rate")


@rule(
    "numerics/first-nonfinite",
    cases=("nan-in-mid-run",),
    stage="numerics",
    needs=("stats",),
    explained_by=(
        "numerics/learning-rate",
        "numerics/fp16-overflow",
        "data/poison-sample",
        "data/token-out-of-vocabulary",
        "objective/all-masked",
        "optimizer/overflow-step-applied",
    ),
)
def first_nonfinite_tensor(capsule: Capsule) -> Iterator[Finding]:
    """The first tensor that holds NaN or Inf.

    What it checks:
        Every tensor on record in the order of execution, forward before backward, over all ranks.

    Why it matters:
        NaN spreads to everything computed from it. Only the first place says where to look; the loss, the gradients
        and the later layers merely repeat it.

    How it decides:
        The unlawful non-finite tensor with the smallest (step, execution order, rank). The tensor that ran right before
        it on that rank is named as the last finite one: the fault lies in between. Likely where both ends of this
        interval are on record, undetermined where nothing before it is.

    Looks like it but is not:
        −inf alone in attention scores, logits or additive masks; gradients of a step that the gradient scaler skipped;
        an infinite norm (no counts) of a masked tensor in a step whose loss is finite.

    What to try next:
        Replay the captured step and look at every operation between the two named tensors; compare the magnitude of
        the last finite one with the range of its type.

    Fix:
        At the operation that was found: a larger type, a bound inside the logarithm, root or division, or rows without
        an allowed key kept out of the softmax.
    """
    stats = capsule.stats()
    row = first_nonfinite(capsule, stats)
    if row is None:
        return
    step, rank, name, role = int(stats.step[row]), int(stats.rank[row]), str(stats.name[row]), str(stats.role[row])
    dtype = str(stats.dtype[row])
    direction = "backward" if role == "gradient" else "forward"
    before = _ran_before(stats, row)
    counts = ", ".join(
        f"{int(column[row])} {word}"
        for column, word in ((stats.nan, "NaN"), (stats.posinf, "+Inf"), (stats.neginf, "−Inf"))
        if column[row] > 0
    )
    evidence = [
        Evidence(
            name="non-finite elements",
            value=counts or "norm is not finite",
            expected=0,
            note=f"of {int(stats.numel[row])}" if stats.numel[row] > 0 else "",
        ),
        Evidence(name="role", value=role, note=direction),
        Evidence(name="dtype", value=dtype, note=f"largest {T.DTYPE_MAX[dtype]:.5g}" if dtype in T.DTYPE_MAX else ""),
    ]
    same = np.flatnonzero(
        (stats.name == name) & (stats.rank == rank) & (stats.role == role) & (stats.step < step) & ~stats.nonfinite
    )
    if same.size:
        last = int(same[-1])
        evidence.append(
            Evidence(name="same tensor, last finite", value=_size(stats, last), note=f"step {int(stats.step[last])}")
        )
    if before is not None:
        evidence.insert(
            0, Evidence(name="last finite", value=str(stats.name[before]), note=f"{stats.role[before]}, same step")
        )
        evidence.append(Evidence(name="largest of last finite", value=_size(stats, before)))
        summary = (
            f"{name} ({role}, {dtype or 'dtype unknown'}) is the first tensor that is not finite, in the {direction} "
            f"pass of step {step}: {counts or 'its norm is not finite'}; {stats.name[before]} before it was finite."
        )
    else:
        summary = (
            f"{name} ({role}, {dtype or 'dtype unknown'}) is the first recorded tensor that is not finite, in the "
            f"{direction} pass of step {step}: {counts or 'its norm is not finite'}; nothing before it is on record."
        )
    yield Finding(
        title="First non-finite tensor",
        summary=summary,
        where=Where(step=step, rank=rank, tensor=name, order=int(stats.order[row])),
        confidence="undetermined" if before is None else "likely",
        evidence=tuple(evidence),
        cause=None
        if before is None
        else f"an operation between {stats.name[before]} and {name} made it from finite inputs",
        next=(
            "replay the captured step and check each operation of the interval",
            "record statistics of the tensors that run before it" if before is None else "compare with float32",
        ),
        fix=(f"at {name}: larger type, or a bound where it divides, takes a root, a logarithm or a softmax",),
    )


def _ran_before(stats: Any, row: int) -> int | None:
    """Row of the recorded tensor that ran right before ``row`` on the same rank in the same step, if any."""
    here = np.flatnonzero(
        (stats.step == stats.step[row]) & (stats.rank == stats.rank[row]) & (stats.order < stats.order[row])
    )
    return int(here[np.argmax(stats.order[here])]) if here.size else None


def _size(stats: Any, row: int) -> float:
    """Largest magnitude where it was measured, else the root mean square."""
    return float(stats.absmax[row]) if math.isfinite(stats.absmax[row]) else float(stats.rms[row])


@rule(
    "numerics/loss-nonfinite",
    cases=("nan-at-first-step", "nan-in-mid-run"),
    stage="numerics",
    needs=("scalars.loss",),
    explained_by=(
        "numerics/first-nonfinite",
        "numerics/learning-rate",
        "numerics/fp16-overflow",
        "numerics/gradient-explosion",
        "data/poison-sample",
        "data/token-out-of-vocabulary",
    ),
)
def loss_nonfinite(capsule: Capsule) -> Iterator[Finding]:
    """The loss is NaN or Inf.

    What it checks:
        The loss series of every rank.

    Why it matters:
        From the first step whose gradient is NaN every weight is lost. The step at which it began narrows the search
        to one batch and one state.

    How it decides:
        The first step whose loss is not finite. Candidates for the cause are listed with their numbers: update ratio
        of the steps before, a float16 tensor at its limit, one sample that alone is not finite, a step without
        supervised tokens (0/0), Inf from finite logits (log 0), another result where Megatron computed the step again.
        None of them at hand: undetermined.

    Looks like it but is not:
        A step that was not logged: other series are absent at the same step, too, or finite losses come at a regular
        interval.

    What to try next:
        Look at the first non-finite tensor; without tensor statistics, attach the recorder and run from the last
        checkpoint.

    Fix:
        That of the cause. Stop or skip on a non-finite loss before the optimizer step, so that the weights survive.
    """
    onsets: list[tuple[int, int, Curve]] = []
    for rank in capsule.ranks:
        loss = curve(capsule, "loss", rank)
        lost = loss.step[~np.isfinite(loss.value)]
        if lost.size and not _not_logged(capsule, loss, int(lost[0]), rank):
            onsets.append((int(lost[0]), rank, loss))
    if not onsets:
        return
    step, rank, loss = min(onsets, key=lambda onset: onset[:2])
    value = loss.at(step)
    before = loss.finite()
    before = Curve(before.step[before.step < step], before.value[before.step < step])
    causes = list(_candidates(capsule, step, value))
    confidence: Confidence = "likely" if causes else "undetermined"
    after = loss.value[loss.step > step]
    came_back = bool(after.size and np.isfinite(after).any())
    level = f"; it was {before.value[-1]:.4g} at step {int(before.step[-1])}" if len(before) else ""
    yield Finding(
        severity="warning" if came_back else None,
        title="The loss is not finite",
        summary=f"The loss is {_word(value)} from step {step} on{level}"
        + (", and finite again later." if came_back else "."),
        where=Where(step=step, rank=rank),
        confidence=confidence,
        evidence=(
            Evidence(name="loss", value=value, expected="finite", unit="nats/token"),
            *(
                [Evidence(name="last finite loss", value=float(before.value[-1]), note=f"step {int(before.step[-1])}")]
                if len(before)
                else []
            ),
            *([again] if (again := _again(capsule, step)) is not None and again.note == "reproducible" else []),
            *(evidence for _, evidence in causes),
        ),
        cause=causes[0][0] if causes else None,
        next=("see numerics/first-nonfinite for the tensor", "replay the captured batch of this step"),
        fix=("skip the optimizer step where the loss is not finite, and cure the cause",),
    )


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _not_logged(capsule: Capsule, loss: Curve, step: int, rank: int) -> bool:
    """Whether NaN only means that nothing was written at this step."""
    if any(
        math.isnan(found.at(step)) and len(found) > 1 and step in found.step for found in _companions(capsule, rank)
    ):
        return True
    finite = loss.finite()
    gaps = np.diff(np.flatnonzero(np.isfinite(loss.value)))
    return len(finite) > 3 and bool(finite.step[-1] > step) and bool((gaps == gaps[0]).all()) and int(gaps[0]) > 1


def _companions(capsule: Capsule, rank: int) -> Iterator[Curve]:
    for name in LOGGED_TOGETHER:
        yield curve(capsule, name, rank)


def _again(capsule: Capsule, step: int) -> Evidence | None:
    """What Megatron found when it computed the step again, where its log says so: the last word counts."""
    said = [
        str(each["verdict"])
        for each in capsule.records("events")
        if each.get("logger") == "rerun" and each.get("step") == step and each.get("verdict")
    ]
    words = {"reproducible": "the same result", "transient": "another result", "persistent": "another one elsewhere"}
    if not said or said[-1] not in words:
        return None
    return Evidence(name="computed again", value=words[said[-1]], expected="the same result", note=said[-1])


def _candidates(capsule: Capsule, step: int, value: float) -> Iterator[tuple[str, Evidence]]:
    """Causes that the evidence supports, best first, each with its number."""
    if (again := _again(capsule, step)) is not None and again.note in ("transient", "persistent"):
        yield "the device of this rank computes wrongly: the same step gave another result", again
    if capsule.has("stats"):
        stats = capsule.stats()
        overflow = find_overflow(capsule, stats)
        if overflow is not None and int(stats.step[overflow.row]) <= step:
            yield (
                f"{stats.name[overflow.row]} exceeded the float16 range",
                Evidence(
                    name="float16 absmax", value=_size(stats, overflow.row), expected=f"< {T.DTYPE_MAX['float16']:.0f}"
                ),
            )
    ratio = update_ratio(capsule).between(step - T.CAUSE_WINDOW, step - 1)
    if len(ratio) and float(ratio.value.max()) >= T.UPDATE_RATIO:
        yield (
            "the updates before it replaced the weights: the learning rate",
            Evidence(name="update_norm / param_norm", value=float(ratio.value.max()), expected=f"< {T.UPDATE_RATIO:g}"),
        )
    worst = worst_sample(samples_by_step(capsule).get(step, []), [], far=T.SAMPLE_SIGMA)
    if worst is not None and worst.others_finite and not math.isfinite(worst.sample.loss):
        yield (
            f"sample {worst.sample.id} alone is not finite",
            Evidence(name="sample loss", value=worst.sample.loss, expected="finite", note=f"sample {worst.sample.id}"),
        )
    tokens = curve(capsule, "tokens").at(step)
    if tokens == 0:
        yield (
            "no supervised token in the step: 0 divided by 0",
            Evidence(name="tokens", value=0, expected="> 0", unit="supervised tokens"),
        )
    if capsule.has("stats"):
        stats = capsule.stats(step=step)
        logits = stats.role == "logits"
        bad = unlawful(capsule, stats) & (stats.role != "loss") & (stats.role != "gradient")
        if logits.any() and not bad.any() and value == math.inf:
            yield (
                "the logits are finite and the loss is infinite: a logarithm of zero or an overflow inside the loss",
                Evidence(name="logits", value="finite", expected="finite", note="role logits, same step"),
            )


def update_ratio(capsule: Capsule) -> Curve:
    """‖Δw‖/‖w‖ of each step, over the recorder's sample of parameters; empty where either norm is absent."""
    update, parameter = curve(capsule, "update_norm"), curve(capsule, "param_norm")
    step, left, right = np.intersect1d(update.step, parameter.step, return_indices=True)
    top, bottom = update.value[left], parameter.value[right]
    keep = np.isfinite(top) & np.isfinite(bottom) & (bottom > 0)
    return Curve(step[keep], top[keep] / bottom[keep])
