"""float16 has no number above 65504: activations that grow into the limit, and a loss scale that never settles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import Ints
from . import thresholds as T
from .scale import collapse_finding, forward_nonfinite, scale_collapse, scale_search
from .symptoms import (
    FLOAT16_NEAR,
    FLOAT16_SIZED,
    FORWARD,
    execution_order,
    first_nonfinite,
    has_scaler,
    mask_filled,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

LIMIT = T.DTYPE_MAX["float16"]

MEASURED, ESTIMATED, RMS = "largest element", "largest element, estimated from the norm", "root mean square"


@dataclass(frozen=True)
class Level:
    """How large a tensor was at one step.

    ``value`` is its largest magnitude, measured or estimated from the norm, or its root mean square where no record
    of the tensor tells the two apart; ``how`` says which.
    """

    step: int
    value: float
    how: str

    def within(self, factor: float) -> bool:
        """Whether the largest element is, or may well be, within ``factor`` of the largest float16 number."""
        return self.value * (T.USUAL_CREST if self.how == RMS else 1.0) >= LIMIT / factor


@dataclass(frozen=True)
class Overflow:
    """A float16 tensor at (``reached`` False: near) the limit, with the levels that led there."""

    row: int
    reached: bool
    grew: bool
    levels: tuple[Level, ...]


def levels(stats: Any, rows: Ints, crest_rows: Ints) -> list[Level]:
    """Size of one tensor over its records, in step order.

    A norm-only record holds the root mean square. Where a full record of the same tensor exists (``crest_rows``), the
    ratio absmax/rms of the nearest one turns it into an estimate of the largest magnitude.
    """
    full = crest_rows[np.isfinite(stats.absmax[crest_rows]) & (stats.rms[crest_rows] > 0)]
    crest = stats.absmax[full] / stats.rms[full]
    found: list[Level] = []
    for row in rows:
        step, rms = int(stats.step[row]), float(stats.rms[row])
        if math.isfinite(stats.absmax[row]):
            found.append(Level(step, float(stats.absmax[row]), MEASURED))
        elif math.isfinite(rms) and full.size:
            nearest = float(crest[np.argmin(np.abs(stats.step[full] - step))])
            found.append(Level(step, min(rms * nearest, LIMIT), ESTIMATED))
        elif math.isfinite(rms):
            found.append(Level(step, rms, RMS))
    return found


def growth(history: list[Level], last: float) -> bool:
    """Whether earlier levels lead up to ``last``: larger than before, and not in one jump from nowhere."""
    if not history:
        return False
    typical = float(np.median([level.value for level in history]))
    return last >= T.GROWTH_FACTOR * typical and history[-1].value >= last / T.JUMP_NOT_GROWTH


def find_overflow(capsule: Capsule, stats: Any) -> Overflow | None:
    """The first float16 tensor that left the range, or the first that grew to within 2 × of it; None otherwise.

    Non-finite values downstream of an earlier non-finite tensor say nothing about float16, so only the first unlawful
    tensor counts, or the float16 tensor right before it that was at the limit.
    """
    dtype, role = stats.dtype.astype(str), stats.role.astype(str)
    forward = np.isin(role, FORWARD)
    # A scaler raises its scale until gradients overflow and then skips the step: lawful, whatever their size.
    eligible = (dtype == "float16") & (forward | ((role == "gradient") & (not has_scaler(capsule))))
    if not eligible.any():
        return None
    first_bad = first_nonfinite(capsule, stats)
    large = eligible & np.isfinite(stats.absmax) & (stats.absmax >= FLOAT16_NEAR)
    # A norm alone proves a large element only where the root mean square is itself that large.
    large |= eligible & ~np.isfinite(stats.absmax) & np.isfinite(stats.rms) & (stats.rms >= FLOAT16_NEAR)

    filled = mask_filled(stats)

    def history(row: int) -> list[Level]:
        same = (stats.name == stats.name[row]) & (stats.rank == stats.rank[row]) & (stats.role == stats.role[row])
        return levels(
            stats,
            np.flatnonzero(same & (stats.step < stats.step[row])),
            np.flatnonzero(same & (stats.step <= stats.step[row])),
        )

    if first_bad is not None:
        suspect = first_bad if eligible[first_bad] else _limit_before(stats, large, first_bad)
        if suspect is not None:
            before = history(suspect)
            infinite = bool(stats.posinf[suspect] > 0 or stats.neginf[suspect] > 0)
            # An Inf beside small finite values is a division or a logarithm, whatever the dtype.
            sized = infinite and max(stats.absmax[suspect], _sized_before(stats, suspect)) >= FLOAT16_SIZED
            # NaN alone needs a past that stood close to the limit; with an Inf it may have come from further away.
            grew = len(before) > 1 and growth(before[:-1], before[-1].value)
            grew = grew and before[-1].within(T.JUMP_NOT_GROWTH if sized else T.NAN_NEAR_FACTOR)
            if large[suspect] and not filled[suspect]:
                grew |= growth(before, float(stats.absmax[suspect]))
            if grew or sized:
                return Overflow(suspect, True, grew, tuple(before[-T.TRAJECTORY :]))
        # Whatever is large after the first non-finite tensor may be its product.
        large &= stats.step < stats.step[first_bad]

    checked: dict[tuple[str, int], float] = {}
    for row in execution_order(stats, np.flatnonzero(large)):
        last = float(stats.absmax[row]) if math.isfinite(stats.absmax[row]) else float(stats.rms[row])
        tensor = (str(stats.name[row]), int(stats.rank[row]))
        if last < T.GROWTH_FACTOR * checked.get(tensor, 0.0):
            continue  # no larger than a record that was not growth
        checked[tensor] = last
        before = history(int(row))
        if not filled[row] and growth(before, last):
            return Overflow(int(row), False, True, tuple(before[-T.TRAJECTORY :]))
    return None


def _limit_before(stats: Any, large: Any, first_bad: int) -> int | None:
    """The last float16 tensor at the limit that ran before the first non-finite one in the same step and rank."""
    here = (stats.step == stats.step[first_bad]) & (stats.rank == stats.rank[first_bad])
    rows = np.flatnonzero(here & large & (stats.order < stats.order[first_bad]))
    return int(execution_order(stats, rows)[-1]) if rows.size else None


def _sized_before(stats: Any, row: int) -> float:
    """Largest float16 gradient that the backward pass made before ``row``, where that is a gradient with Inf alone.

    A job that scales its loss by hand divides the gradients of the parameters again before anybody sees them: the Inf
    then stands beside small numbers, and only the gradients between the layers still have the size that overflowed.
    """
    if stats.role[row] != "gradient" or stats.nan[row] != 0:
        return 0.0
    here = (stats.step == stats.step[row]) & (stats.rank == stats.rank[row]) & (stats.order < stats.order[row])
    sizes = stats.absmax[here & (stats.role == "gradient") & (stats.dtype == "float16")]
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


@rule(
    "numerics/fp16-overflow",
    cases=("nan-in-mid-run",),
    stage="numerics",
    needs=("stats|scalars.loss_scale|records.events.scale_after",),
    explained_by=("numerics/learning-rate", "data/poison-sample", "data/token-out-of-vocabulary"),
)
def fp16_overflow(capsule: Capsule) -> Iterator[Finding]:
    """A float16 tensor grew beyond 65504, the largest number of its type.

    What it checks:
        Magnitudes of float16 activations, logits and, without a gradient scaler, gradients over the steps; and
        whether the loss scale ever settles.

    Why it matters:
        One element above 65504 becomes Inf, the next normalisation or softmax makes NaN of it, and every later layer,
        the loss and the gradients follow. No loss scale helps against an overflow in the forward pass.

    How it decides:
        The first non-finite tensor of the run is float16 (or follows a float16 tensor at the limit), and its earlier
        records grew towards 65504, or it holds Inf beside finite elements above 1,023 (a gradient: beside them or after
        gradients of that size in the same step). A float16 tensor that grew to within 2 × of 65504 (32,752) and is
        still finite is a warning. Growth: 1.3 × the median of its earlier records, the last of them within 16 ×.
        Without full statistics the norm bounds the largest element: rms ≤ absmax ≤ rms·√numel. Loss scale: five or more
        halvings in a row without a rise, down to 2 or less, or five skipped steps in a row at such a scale.

    Looks like it but is not:
        The scale search at the start of a run (info, where it begins at 2²⁴ or more and takes four logged steps); steps
        that the scaler skipped because scaled gradients overflowed; −inf in masked scores or logits; a mask constant of
        −65504; activations that are large but stable; large values in bfloat16 or float32; Inf that came in from an
        earlier non-finite tensor; a division by zero.

    What to try next:
        Run the same batch from the captured state in bfloat16 or float32: if it stays finite, range is the cause. Plot
        the magnitude of the named layer over the steps and look where its growth began.

    Fix:
        bfloat16; or float32 for the layer that overflows; or stop the growth (normalisation of queries and keys,
        smaller initialisation of the residual branch, weight decay, a lower learning rate).
    """
    if capsule.has("stats"):
        stats = capsule.stats()
        found = find_overflow(capsule, stats)
        if found is not None:
            yield _tensor_finding(stats, found)
            return
    collapse = scale_collapse(capsule)
    if collapse is not None and not forward_nonfinite(capsule, collapse.step):
        yield collapse_finding(collapse)
    elif (search := scale_search(capsule)) is not None:
        yield search


def _tensor_finding(stats: Any, found: Overflow) -> Finding:
    """Finding for a tensor at the limit; a near miss is a warning."""
    row, name, step = found.row, str(stats.name[found.row]), int(stats.step[found.row])
    largest = float(stats.absmax[row]) if math.isfinite(stats.absmax[row]) else float(stats.rms[row])
    path = " → ".join(f"{level.value:,.0f}" for level in found.levels)
    measure = found.levels[-1].how.partition(",")[0] if found.levels else MEASURED
    infinite = max(int(stats.posinf[row]), 0) + max(int(stats.neginf[row]), 0)
    lost = infinite + max(int(stats.nan[row]), 0)
    if found.reached:
        trail = f"its {measure} went {path} → overflow" if found.grew else "it left the range in one step"
        title = "A float16 tensor overflowed"
        summary = f"{name} ({stats.role[row]}) exceeded 65,504 at step {step}: {trail}."
    else:
        title = "A float16 tensor is about to overflow"
        summary = (
            f"{name} ({stats.role[row]}): {measure} {path} → {largest:,.0f} by step {step}; float16 ends at 65,504."
        )
    evidence = [
        Evidence(
            name="absmax",
            value=largest,
            expected=f"< {FLOAT16_NEAR:,.0f}",
            note="largest finite element; half of what float16 can hold is the margin",
        ),
        Evidence(name="largest float16", value=LIMIT),
        Evidence(
            name=f"{measure} over the steps",
            value=[level.value for level in found.levels],
            note=f"steps {', '.join(str(level.step) for level in found.levels)}; "
            + "; ".join(sorted({level.how for level in found.levels})),
        ),
        Evidence(name="dtype", value="float16"),
    ]
    if found.reached:
        evidence.insert(0, Evidence(name="non-finite elements", value=lost, expected=0, note=f"{infinite} of them Inf"))
    return Finding(
        severity=None if found.reached else "warning",
        title=title,
        summary=summary,
        where=Where(step=step, rank=int(stats.rank[row]), tensor=name, order=int(stats.order[row])),
        evidence=tuple(evidence),
        cause=f"the magnitude of {name} exceeds what float16 can hold",
        next=("run the captured step in bfloat16", f"look where the growth of {name} began"),
        fix=("bfloat16, or float32 for this layer", "stop the growth: normalise, smaller initialisation, lower rate"),
    )
