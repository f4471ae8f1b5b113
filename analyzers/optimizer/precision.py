"""Updates that a 16-bit weight cannot hold, and optimizer state that is narrower than its work needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .records import LOW_PRECISION, Parameter, by_name, overflowed, rate_at, shown, windows
from .step_case import Floats, StepCase, cases_by_window, taken_steps
from .step_faults import lawful_specs, take_step

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Bits of the mantissa that are stored, and least exponent of a normal number.
MANTISSA = {"bfloat16": 7, "float16": 10}
LEAST_EXPONENT = {"bfloat16": -126, "float16": -14}
WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def half_gap(values: Floats, change: Floats, dtype: str) -> Floats:
    """Half the distance from each value of a 16-bit type to the next one in the direction of ``change``.

    A change of less than that rounds back to the value. Right below a power of two numbers lie twice as dense.
    """
    mantissa, exponent = np.frexp(np.abs(values))
    least = LEAST_EXPONENT[dtype]
    exponent = np.where(values == 0, least, np.maximum(exponent - 1, least))
    gap = np.exp2(exponent - float(MANTISSA[dtype]))
    inwards = (mantissa == 0.5) & (np.sign(change) == -np.sign(values)) & (exponent > least)
    return np.where(inwards, gap / 4, gap / 2)


@dataclass(frozen=True)
class Loss:
    """What becomes of the updates of 16-bit weights.

    Attributes:
        step: of the first window.
        name: a parameter.
        lost: updates that round away, out of ``updates`` that are not zero.
        updates: see ``lost``.
        expected: how many of the lost ones would have moved their weight had there been master weights.
        moved: how many did.
        change: median size of the updates.
        limit: median half gap.
        genuine: the optimizer is torch's own, which keeps no master weights.
        dtype: of the weights.
    """

    step: int
    name: str
    lost: int
    updates: int
    expected: float
    moved: int
    change: float
    limit: float
    genuine: bool
    dtype: str


def measured_loss(cases: list[StepCase]) -> Loss | None:
    """Lost updates over cases of one 16-bit type, from the step computed again; None without an update."""
    changes: list[Floats] = []
    limits: list[Floats] = []
    lost = updates = moved = 0
    expected = 0.0
    for case in cases:
        spec = lawful_specs([case])[0]
        change = take_step(case, spec, None).parameter - case.parameter
        limit = half_gap(case.parameter, change, case.dtype)
        some = change != 0
        gone = some & (np.abs(change) < T.SURELY_LOST * limit)
        stepped = case.observed["after"] != case.parameter
        lost, updates, moved = lost + int(gone.sum()), updates + int(some.sum()), moved + int((gone & stepped).sum())
        expected += float((np.abs(change[gone]) / (2 * limit[gone])).sum())
        changes.append(np.abs(change[some]))
        limits.append(limit[some])
    if not updates:
        return None
    return Loss(
        step=min(case.step for case in cases),
        name=cases[0].names[0],
        lost=lost,
        updates=updates,
        expected=expected,
        moved=moved,
        change=float(np.median(np.concatenate(changes))),
        limit=float(np.median(np.concatenate(limits))),
        genuine=all(case.declared.genuine for case in cases),
        dtype=cases[0].dtype,
    )


@rule(
    "optimizer/no-master-weights",
    stage="numerics",
    needs=("records.param_groups.moved_fraction|tensors.optimizer/*/after",),
)
def no_master_weights(capsule: Capsule) -> Iterator[Finding]:
    """Updates of 16-bit weights round away.

    What it checks:
        Parameters in bfloat16 or float16 that the optimizer steps directly: the size of the update beside half the
        distance to the next number of the type, and how many weights moved at all.

    Why it matters:
        A bfloat16 weight has 8 significant bits: an update below |w|/256 to |w|/512 rounds to no change, at every step.
        With a learning rate of 6e-4 a weight of 0.3 never moves. The loss flattens with healthy gradients.

    How it decides:
        With captured steps: the update is computed in FP64; confirmed where more than half of the updates are below
        0.9 of half a gap and none of these weights moved, while master weights would have moved 20 or more of them (or
        torch's own optimizer steps the weights, which keeps no master copy). Else from the records: gradient and
        learning rate above 0, no float32 master, moved fraction exactly 0, and the rate (the size of an Adam update)
        below the median |w|/256 (float16: /2048) for half of the elements. Critical from 90 % lost.

    Looks like it but is not:
        Master weights in the optimizer, whose 16-bit copies move now and then; stochastic rounding; updates that are
        large enough; skipped steps, learning rate 0, zero gradients; a single norm whose weights are all 1.

    What to try next:
        Take the same steps with float32 weights and compare how many weights moved.

    Fix:
        Keep float32 weights and compute in bfloat16 with autocast; or an optimizer with master weights or stochastic
        rounding.
    """
    cases: list[StepCase] = []
    skipped = overflowed(capsule)
    if capsule.has("tensors.optimizer/*/after"):
        try:
            found = cases_by_window(capsule, taken_steps(capsule))
            cases = [c for each in found.values() for c in each if c.dtype in LOW_PRECISION and c.step not in skipped]
        except NotJudged:
            pass  # another optimizer: the records may tell
    for dtype in LOW_PRECISION:
        loss = measured_loss([case for case in cases if case.dtype == dtype])
        if loss is not None:
            finding = _from_elements(loss)
            if finding is not None:
                yield finding
                return
            return
    groups = windows(capsule)
    if not groups and not cases:
        raise NotJudged("captured steps of Adam, or records of the parameters")
    finding = _from_records(capsule, groups)
    if finding is not None:
        yield finding


def _from_elements(loss: Loss) -> Finding | None:
    share = loss.lost / loss.updates
    proven = loss.moved == 0 and (loss.genuine or loss.expected >= T.EXPECTED_MOVED)
    if share <= T.LOST or not proven:
        return None
    return Finding(
        severity=None if share >= T.LOST_CRITICAL else "warning",
        confidence="confirmed",
        title=f"{100 * share:.0f} % of the updates round away in {loss.dtype}",
        summary=(
            f"{loss.lost:,} of {loss.updates:,} captured updates are below half a unit in the last place of their "
            f"{loss.dtype} weight, and none of these weights moved: there are no master weights."
        ),
        where=Where(step=loss.step, tensor=loss.name),
        evidence=(
            Evidence(
                name="lost updates", value=share, expected=f"≤ {T.LOST:g}", note="share of the updates that are not 0"
            ),
            Evidence(
                name="weights moved among them", value=loss.moved, expected=loss.expected, note="with master weights"
            ),
            Evidence(name="size of an update", value=loss.change, expected=f"≥ {loss.limit:.3g}", note="medians"),
            Evidence(name="dtype", value=loss.dtype),
        ),
        cause=f"the optimizer updates {loss.dtype} weights in place, and most updates are too small for the type",
        next=("take the same steps with float32 weights",),
        fix=("keep float32 weights and compute under bfloat16 autocast, or use master weights or stochastic rounding",),
    )


def _from_records(capsule: Capsule, groups: dict[tuple[int, int], list[Parameter]]) -> Finding | None:
    """The same from moved fractions, rates and medians of the weights."""
    skipped = overflowed(capsule)
    told: list[tuple[Parameter, float]] = []
    for (step, _), rows in groups.items():
        for each in rows:
            rate = each.lr if each.lr is not None else rate_at(capsule, step)
            usable = each.dtype in LOW_PRECISION and each.trained is not False and each.owned is not False
            usable = usable and each.moved is not None and step not in skipped and (each.grad_norm or 0.0) > 0
            if usable and rate and rate > 0 and WIDTH.get(each.master or "", 0) < 32:
                told.append((each, rate))
    if not told:
        return None

    def sizes(rows: list[tuple[Parameter, float]]) -> int:
        return sum(max(each.size, 1) for each, _ in rows)

    def below(each: Parameter, rate: float) -> bool:
        bits = MANTISSA[each.dtype or "bfloat16"] + 1
        return each.absmedian is None or rate < each.absmedian / 2**bits

    still = [(each, rate) for each, rate in told if each.moved == 0 and below(each, rate)]
    share = sizes(still) / sizes(told)
    if not still or share <= T.LOST:
        return None
    # Weights that master copies would have moved in these windows: a gap takes several updates to cross.
    expected = sum(
        max(each.size, 1) * min(1.0, rate * 2 ** MANTISSA[each.dtype or "bfloat16"] / each.absmedian)
        for each, rate in still
        if each.absmedian
    )
    if any(each.absmedian for each, _ in still) and expected < T.EXPECTED_MOVED:
        return None
    each, rate = max(still, key=lambda pair: pair[0].size)
    unit = 2 ** (MANTISSA[each.dtype or "bfloat16"] + 1)
    limit = each.absmedian / unit if each.absmedian else None
    return Finding(
        severity=None if share >= T.LOST_CRITICAL else "warning",
        title=f"No {each.dtype} weight moves",
        summary=(
            f"{len({p.name for p, _ in still})} {each.dtype} parameters ({100 * share:.0f} % of the elements) have "
            f"gradients and do not move at all at learning rate {rate:.3g}"
            + (f", below |w|/{unit} = {limit:.3g}." if limit else ".")
        ),
        where=Where(step=still[0][0].step, rank=each.rank, tensor=each.name),
        evidence=(
            Evidence(name="moved_fraction", value=0.0, expected="> 0", note=f"{each.name}, shape {each.shape}"),
            Evidence(
                name="learning_rate",
                value=rate,
                expected=f"≥ {limit:.3g}" if limit else None,
                note=f"size of an Adam update, beside |w|/{unit} at the median weight",
            ),
            Evidence(name="weight_absmedian", value=each.absmedian),
            Evidence(name="grad_norm", value=each.grad_norm, note="not zero"),
            Evidence(name="master_dtype", value=each.master, expected="float32"),
            Evidence(name="parameters", value=shown(dict.fromkeys(p.name for p, _ in still), T.NAMES_SHOWN)),
        ),
        cause=f"updates are below half a unit in the last place of {each.dtype}, and there are no master weights",
        next=("capture an optimizer step: the update of each element beside its gap decides",),
        fix=("keep float32 weights and compute under bfloat16 autocast, or use master weights or stochastic rounding",),
    )


@rule("optimizer/state-dtype", stage="numerics", severity="warning", needs=("records.param_groups.state",))
def state_dtype(capsule: Capsule) -> Iterator[Finding]:
    """Optimizer state is kept in a type that is too narrow, or has changed its type.

    What it checks:
        The dtype of moments and master weights beside that of the parameters, and from one recorded window to the next.

    Why it matters:
        Squared gradients below 6e-8 are zero in float16: the step is then divided by ε alone and explodes. A resume
        that casts state to the parameters' type loses the bits that slow averages live on.

    How it decides:
        Warning: a second moment in float16; master weights narrower than float32; the dtype of a state tensor differs
        between two windows. Info and hygiene: a moment narrower than its parameter, or a second moment in bfloat16,
        whose 8 bits cannot follow a decay of 0.999 a step. Large runs do that on purpose, so it is no divergence.

    Looks like it but is not:
        8-bit optimizers, whose state has scales of its own; float32 state for 16-bit parameters; momentum of SGD.

    What to try next:
        Compare the state's dtype right before a save and right after the load.

    Fix:
        Keep moments and master weights in float32; load optimizer state without a cast to the parameters' type.
    """
    groups = windows(capsule)
    if not groups:
        raise NotJudged("named parameters with their state")
    changed: list[tuple[Parameter, str, str, str]] = []
    narrow: list[tuple[Parameter, str, str]] = []
    wide_enough: list[tuple[Parameter, str, str]] = []
    for rows in by_name(groups.values()).values():
        seen: dict[str, str] = {}
        for each in rows:
            held = {key: dtype for key, (dtype, _) in each.state.items() if dtype in WIDTH}
            held |= {"master weights": each.master} if each.master in WIDTH else {}
            for key, dtype in held.items():
                if seen.setdefault(key, dtype) != dtype:
                    changed.append((each, key, seen[key], dtype))
                    seen[key] = dtype
        last = rows[-1]
        if last.master in LOW_PRECISION:
            narrow.append((last, "master weights", str(last.master)))
        for key, (dtype, _) in last.state.items():
            if key == "exp_avg_sq" and dtype == "float16":
                narrow.append((last, key, dtype))
            elif (
                dtype in LOW_PRECISION
                and key.startswith("exp_avg")
                and (key == "exp_avg_sq" or WIDTH.get(last.dtype or "", 0) > WIDTH[dtype])
            ):
                wide_enough.append((last, key, dtype))
    if changed:
        each, key, old, new = changed[0]
        yield Finding(
            title="Optimizer state has changed its dtype",
            summary=f"{key} of {each.name} went from {old} to {new} by step {each.step}; {len(changed)} tensors did.",
            where=Where(step=each.step, rank=each.rank, tensor=each.name),
            evidence=(
                Evidence(name="dtype", value=new, expected=old, note=key),
                Evidence(name="parameters", value=shown((p.name for p, *_ in changed), T.NAMES_SHOWN)),
            ),
            cause="the state was cast, as a rule while a checkpoint was loaded",
            next=("compare the dtype in the checkpoint with that after the load",),
            fix=("load the state without a cast, or cast it back to float32",),
        )
    elif narrow or wide_enough:
        each, key, dtype = (narrow or wide_enough)[0]
        chosen = narrow or wide_enough
        yield Finding(
            severity=None if narrow else "info",
            kind=None if narrow else "hygiene",
            title="Optimizer state is too narrow" if narrow else "Moments are kept in a 16-bit type",
            summary=f"{key} is kept in {dtype} for {len({p.name for p, *_ in chosen})} parameters, {each.name} first.",
            where=Where(step=each.step, rank=each.rank, tensor=each.name),
            evidence=(
                Evidence(name="dtype", value=dtype, expected="float32", note=f"{key}; parameter in {each.dtype}"),
                Evidence(name="parameters", value=shown(dict.fromkeys(p.name for p, *_ in chosen), T.NAMES_SHOWN)),
            ),
            cause=f"{dtype} has too few bits or too small a range for {key}",
            next=("look at the share of zeros in the second moment",),
            fix=("keep moments and master weights in float32",),
        )
