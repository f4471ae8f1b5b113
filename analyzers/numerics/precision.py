"""Too few bits: gradients that fall below what a type can hold, and sums and norms taken in a narrow type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...capsules.errors import EvidenceError
from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import curve
from . import thresholds as T
from .symptoms import has_scaler

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Types whose smallest normal number lies within the range of ordinary gradients.
SHORT_RANGE = ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
#: Unit roundoff of the types that are too coarse for long sums.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Words in a kernel's name that say it normalises, exponentiates or sums.
SUMS = ("norm", "softmax", "loss", "cross_entropy", "logsumexp", "reduce", "sum", "mean")


@rule(
    "numerics/underflow",
    stage="numerics",
    severity="warning",
    needs=("stats.gradient",),
    explained_by=("numerics/gradients-lost",),
)
def underflow(capsule: Capsule) -> Iterator[Finding]:
    """Gradients fall below the smallest numbers of their type.

    What it checks:
        Zero and subnormal elements of float16 and float8 gradients, in runs without a loss scale.

    Why it matters:
        float16 has no normal number below 6.1e-5 and nothing at all below 6e-8. Gradients of a mean over many tokens
        lie there. What is lost is lost without a message: the smallest gradients first, the layers next to the input
        before the others.

    How it decides:
        No loss scale above 1 is on record. Of the elements of a float16 or float8 gradient, the subnormal ones are at
        least half of those that are not 0, in the median over the tensors of one step; or zero and subnormal
        elements together rise by 0.2 of all, some of them subnormal, between the first and the last full records.

    Looks like it but is not:
        Zeros that have a reason (inactive units, masked positions, tokens that did not occur): they stay as they are
        and bring no subnormal numbers; bfloat16 and float32, whose range ends at 1e-38; the scaled gradients of a
        job that uses a loss scale; a few subnormal elements at the end of a wide distribution.

    What to try next:
        Multiply the loss by 2¹⁰, divide the gradients by it, and compare the gradient norm: if it grows, it was lost.

    Fix:
        A dynamic loss scale (GradScaler), a higher static one, or bfloat16. For float8: a scale for each tensor.
    """
    if has_scaler(capsule):
        return
    stats = capsule.stats(role="gradient")
    stats = stats.select(np.isin(stats.dtype.astype(str), SHORT_RANGE) & (stats.subnormals >= 0) & (stats.numel > 1))
    if not len(stats):
        return
    numel = stats.numel.astype(np.float64)
    alive = np.maximum(numel - np.maximum(stats.zeros, 0), 0)
    subnormal = np.divide(stats.subnormals, alive, out=np.zeros(len(stats)), where=alive > 0)
    lost = (np.maximum(stats.zeros, 0) + stats.subnormals) / numel
    steps = np.unique(stats.step)
    by_step = [np.median(subnormal[(stats.step == step) & (alive > 0)] if alive.any() else 0.0) for step in steps]
    high = np.flatnonzero(np.nan_to_num(by_step) >= T.SUBNORMAL_SHARE)
    if high.size:
        step = int(steps[high[0]])
        rows = np.flatnonzero(stats.step == step)
        row = int(rows[np.argmax(subnormal[rows])])
        share, limit, what = float(by_step[int(high[0])]), T.SUBNORMAL_SHARE, "subnormal share (median)"
    else:
        first, last = (np.flatnonzero(stats.step == step) for step in (steps[0], steps[-1]))
        rise = float(np.median(lost[last]) - np.median(lost[first]))
        if len(steps) < 2 or rise < T.UNDERFLOW_RISE or float(np.median(subnormal[last])) < T.SUBNORMAL_TRACE:
            return
        row = int(last[np.argmax(lost[last])])
        step = int(steps[-1])
        share, limit, what = float(np.median(lost[last])), float(np.median(lost[first])), "zero or subnormal (median)"
    name, dtype = str(stats.name[row]), str(stats.dtype[row])
    yield Finding(
        title=f"{dtype} gradients underflow",
        summary=(
            f"At step {step} the {what.replace(' (median)', '')} of the {dtype} gradients is {100 * share:.0f} % in "
            f"the median tensor, {100 * float(lost[row]):.0f} % in {name}; no loss scale is in use."
        ),
        where=Where(step=step, rank=int(stats.rank[row]), tensor=name, order=int(stats.order[row])),
        evidence=(
            Evidence(name=what, value=share, expected=f"< {limit:.2g}", note=f"over {len(steps)} full records"),
            Evidence(name="zero elements", value=int(stats.zeros[row]), note=f"of {int(stats.numel[row])} in {name}"),
            Evidence(name="subnormal elements", value=int(stats.subnormals[row]), expected=0, note=name),
            Evidence(name="loss_scale", value="none", expected="> 1", note="on record"),
        ),
        cause=f"the gradients are smaller than {dtype} can hold, and nothing scales them up",
        next=("scale the loss by 1024, unscale the gradients and compare their norm",),
        fix=("use a gradient scaler, or bfloat16",),
    )


@rule(
    "numerics/low-precision-op",
    stage="numerics",
    severity="warning",
    needs=("stats.loss|batches.loss_dtype|records.kernel_checks.dtypes|tensors.norm/output",),
)
def low_precision_op(capsule: Capsule) -> Iterator[Finding]:
    """A loss, a normalisation, a softmax or a long sum is computed in 16 bits.

    What it checks:
        The type in which the loss was computed, declared types of accumulators and reductions of kernels, and captured
        inputs and outputs of normalisations.

    Why it matters:
        bfloat16 keeps 8 bits: a loss of 2.5 moves in steps of 0.016, and a sum stops growing once a term is below half
        a unit of its last place. The run trains, a little worse than it should, and no number says why.

    How it decides:
        The loss tensor is float16 or bfloat16 and so are the logits that it was made from; or a kernel that
        normalises, exponentiates or sums declares a 16-bit accumulator or reduction; or in a captured normalisation
        whole rows are off the float64 result by factors that scatter by more than 0.3 units of roundoff, which
        computing in float32 and rounding once cannot do. A 16-bit output alone is no finding: most kernels compute in
        float32.

    Looks like it but is not:
        A bfloat16 model whose normalisation and softmax compute in float32 and round the result; a loss computed in
        float32 and cast for the log; gradients reduced in bfloat16 by a setting of the sharding; norms printed by a
        logger with few digits.

    What to try next:
        Compute the same loss from logits.float() and compare; print the dtype inside the normalisation.

    Fix:
        logits.float() before the loss; float32 inside normalisation and softmax; a float32 accumulator.
    """
    finding = _coarse_loss(capsule)
    if finding is not None:
        yield finding
    yield from _declared(capsule)
    yield from _coarse_norms(capsule)


def _coarse_loss(capsule: Capsule) -> Finding | None:
    """A loss in 16 bits, from logits in 16 bits; the type as the recorder or the batch states it."""
    losses = capsule.stats(role="loss")
    logits = capsule.stats(role="logits")
    wide = bool(np.isin(logits.dtype.astype(str), ["float32", "float64"]).any())
    low = np.flatnonzero(np.isin(losses.dtype.astype(str), list(ROUNDOFF)))
    if low.size and not wide:
        step, dtype = int(losses.step[low[0]]), str(losses.dtype[low[0]])
    else:
        batches = [each for each in capsule.batches() if each.loss_dtype in ROUNDOFF]
        if not batches or any(each.logits_dtype in ("float32", "float64") for each in batches):
            return None
        step, dtype = batches[0].step, str(batches[0].loss_dtype)
    value = curve(capsule, "loss").at(step)
    places: list[Evidence] = []
    if math.isfinite(value) and value != 0:
        unit = 2.0 ** math.floor(math.log2(abs(value))) * 2 * ROUNDOFF[dtype]
        places = [Evidence(name="smallest change of the loss", value=unit, unit="nats/token", note=f"at {value:.4g}")]
    return Finding(
        title=f"The loss is computed in {dtype}",
        summary=f"Logits and loss are {dtype} at step {step}"
        + (f": around {value:.4g} the loss can only move in steps of {places[0].value:.2g}." if places else "."),
        where=Where(step=step),
        evidence=(Evidence(name="dtype of the loss", value=dtype, expected="float32"), *places),
        cause=f"cross-entropy, with its sum over the vocabulary, runs in {dtype}",
        next=("compute the loss from logits.float() and compare",),
        fix=("cast the logits to float32 before the loss",),
    )


def _declared(capsule: Capsule) -> Iterator[Finding]:
    """Kernels whose own declaration names a 16-bit accumulator or reduction."""
    said: set[str] = set()
    for check in capsule.records("kernel_checks"):
        kernel, dtypes = str(check.get("kernel") or ""), check.get("dtypes")
        if kernel in said or not isinstance(dtypes, dict) or not any(word in kernel.lower() for word in SUMS):
            continue
        low = {part: dtypes.get(part) for part in ("accumulator", "reduction") if dtypes.get(part) in ROUNDOFF}
        if not low:
            continue
        said.add(kernel)
        part, dtype = next(iter(low.items()))
        yield Finding(
            title=f"{kernel} accumulates in {dtype}",
            summary=f"{kernel} declares its {part} as {dtype}; its sums need float32.",
            where=Where(step=check.get("step"), tensor=kernel),
            evidence=tuple(Evidence(name=f"{each} dtype", value=low[each], expected="float32") for each in low),
            cause=f"the {part} of {kernel} is narrower than its sum needs",
            next=("compare with the same kernel and a float32 accumulator",),
            fix=("a float32 accumulator",),
        )


def _coarse_norms(capsule: Capsule) -> Iterator[Finding]:
    """Captured normalisations whose rows are scaled by a factor that was itself rounded to 16 bits.

    Rounding the result once scatters single elements and hardly moves the scale of a row; a mean or a root that is
    rounded moves the whole row.
    """
    inputs = {(each.step, each.rank): each for each in capsule.tensors("norm/input")}
    weights = {(each.step, each.rank): each for each in capsule.tensors("norm/weight")}
    model = capsule.manifest.model
    for output in capsule.tensors("norm/output"):
        key, dtype = (output.step, output.rank), str(output.dtype)
        eps = output.attributes.get("eps", model.norm_eps if model is not None else None)
        if dtype not in ROUNDOFF or key not in inputs or not isinstance(eps, int | float):
            continue
        try:
            arrays = [each.array() for each in (inputs[key], output)]
            arrays += [weights[key].array()] if key in weights else []
        except EvidenceError:
            continue  # capsule/damaged says what could not be read
        x, y = (np.asarray(each, np.float64) for each in arrays[:2])  # [..., D]
        w = np.asarray(arrays[2], np.float64) if key in weights else np.ones(x.shape[-1:])
        if x.shape != y.shape or x.ndim < 2 or w.shape != x.shape[-1:] or x[..., 0].size < T.NORM_ROWS:
            continue
        found = [_row_scales(y, _normalised(x - centre, w, eps)) for centre in (0.0, x.mean(axis=-1, keepdims=True))]
        residual, scatter, offset = min(found)  # root-mean-square or layer normalisation, whichever it is
        unit = ROUNDOFF[dtype]
        limit = unit * max(T.NORM_SCALE, 6 * T.ROUNDED_ONCE / math.sqrt(x.shape[-1]))
        if not residual < unit or not scatter > limit or not offset < unit:
            continue  # a common factor, or another function: another epsilon, a bias, a weight that was not captured
        yield Finding(
            title=f"A normalisation is computed in {dtype}",
            summary=(
                f"The rows of a normalisation at step {output.step} are scaled by factors that scatter by "
                f"{scatter:.2g} around their float64 values; rounding once to {dtype} gives less than {limit:.2g}."
            ),
            where=Where(step=output.step, rank=output.rank, tensor=output.name),
            evidence=(
                Evidence(name="scatter of the row scales", value=scatter, expected=f"≤ {limit:.2g}", note=dtype),
                Evidence(name="error beside the scale", value=residual, note="what rounding the result leaves"),
            ),
            cause=f"the mean or the root of the normalisation is rounded to {dtype}",
            next=("cast the input of the normalisation to float32 and compare",),
            fix=("float32 inside the normalisation, rounding its result once",),
        )


def _normalised(x: Any, weight: Any, eps: float) -> Any:
    """Compute x / √(mean x² + ε) · w over the last axis, in float64."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _row_scales(observed: Any, reference: Any) -> tuple[float, float, float]:
    """Error left after each row was scaled to fit best (relative); scatter of those scales, and their mean off 1."""
    scale = (observed * reference).sum(-1) / (reference * reference).sum(-1)
    left = observed - scale[..., None] * reference
    size = float(np.sqrt(np.mean(reference * reference)))
    residual = float(np.sqrt(np.mean(left * left))) / size if size > 0 else math.inf
    if not math.isfinite(residual):
        return math.inf, math.nan, math.nan
    return residual, float(scale.std()), abs(float(scale.mean()) - 1)
