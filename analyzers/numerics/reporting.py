"""Numbers of a log that nobody wired: a placeholder is no measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding
from ..registry import rule
from ..series import PLACEHOLDER_VALUES, curve, placeholder
from .gradients import zero_norm

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Series that are never 0 throughout a job that works; of others 0 may be the truth (overflows, retries, decay).
NEVER_ZERO = (
    *("grad_norm", "grad_norm_clipped", "grad_norm_local", "grad_norm_reduced", "param_norm", "loss_scale"),
    *("memory_allocated", "memory_reserved", "memory_peak", "memory_device_used", "step_time", "throughput"),
    *("num_zeros", "num-zeros", "params_norm", "params-norm", "tflops", "mfu"),
)


@rule(
    "numerics/not-reported",
    stage="numerics",
    kind="hygiene",
    severity="info",
    needs=("scalars.loss|scalars.grad_norm|scalars.loss_scale|scalars.learning_rate|scalars.throughput",),
)
def not_reported(capsule: Capsule) -> Iterator[Finding]:
    """A number in the log was never measured.

    What it checks:
        Every series of the record for values that stand for "not reported".

    Why it matters:
        A norm of 0.000 or a loss scale of −1 looks like a catastrophe and is only an empty column. Whoever reads it as
        a number chases a fault that is not there, and whoever wants the number does not have it.

    How it decides:
        At least three values, all of them −1; or all 0 in a series that cannot be 0 while a job runs (norms, loss
        scale, memory, times, throughput); or all NaN. Info: it says what not to rely on. A gradient norm of 0 counts
        only while the loss falls; with a flat loss it is numerics/gradients-lost.

    Looks like it but is not:
        Counters that are rightly 0 (overflows, retries, weight decay); a learning rate of 0; NaN in part of a series,
        which is a hole or an incident; a constant that is neither 0 nor −1.

    What to try next:
        Look where the logger takes the number from: with a wrapped engine it is often the engine that has it.

    Fix:
        Wire the metric, or leave the column out.
    """
    zero = zero_norm(capsule)
    lost = zero is not None and not zero.is_artefact and zero.wired
    evidence: list[Evidence] = []
    for key in capsule.scalar_keys():
        found = curve(capsule, key.name, key.rank, key.side)
        value = placeholder(found)
        if value == 0 and (key.name not in NEVER_ZERO or (lost and key.name.startswith("grad_norm"))):
            continue
        empty = len(found) >= PLACEHOLDER_VALUES and bool(np.isnan(found.value).all())
        if value is None and not empty:
            continue
        rank = f", rank {key.rank}" if key.rank else ""
        evidence.append(
            Evidence(
                name=key.name,
                value=value if value is not None else "NaN",
                note=f"at all {len(found)} points from step {int(found.step[0])} to {int(found.step[-1])}{rank}",
            )
        )
    if not evidence:
        return
    names = list(dict.fromkeys(each.name for each in evidence))
    yield Finding(
        title="Numbers that were never reported" if len(names) > 1 else "A number that was never reported",
        summary=f'{", ".join(names[:6])}: one value throughout that stands for "not reported".',
        confidence="likely",
        evidence=tuple(evidence[:16]),
        cause="the metric is not wired to what the engine measures",
        next=("take the number from the engine that owns it",),
        fix=("wire the metric, or leave the column out",),
    )
