"""What the optimizer holds and what it should not: decayed norms, parameters of nobody, frozen ones that move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .records import LOW_PRECISION, Parameter, by_name, overflowed, rate_at, shown, windows

if TYPE_CHECKING:
    from ...capsules import Capsule

_NORM = re.compile(r"(^|[._])(\w*norm\w*|ln(_?\d+|_?f|_\w+)?|bn\d*)([._]|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|[._])\w*bias$", re.IGNORECASE)
_SCALAR = re.compile(r"(^|[._])(A_log|D|dt_bias|gamma|beta|layer_?scale\w*|alpha|logit_scale|scale)$")


def kind_without_decay(parameter: Parameter) -> str | None:
    """Why a parameter is one that decay is meant to spare: norm, bias, scalar, 1-D; None for a matrix."""
    if _BIAS.search(parameter.name):
        return "bias"
    if _NORM.search(parameter.name) and (parameter.shape is None or len(parameter.shape) <= 1):
        return "norm"
    if _SCALAR.search(parameter.name):
        return "scale"
    if parameter.shape is not None and len(parameter.shape) <= 1:
        return "one-dimensional"
    return None


@rule(
    "optimizer/decay-on-norm-or-bias",
    stage="numerics",
    severity="warning",
    needs=("records.param_groups.weight_decay",),
)
def decay_on_norm_or_bias(capsule: Capsule) -> Iterator[Finding]:
    """Norms or biases are in a group with weight decay.

    What it checks:
        The weight decay of each parameter's group beside its name and shape.

    Why it matters:
        Decay pulls the gain of a norm from 1 towards 0 and a bias towards 0, which regularises nothing and shifts what
        the layer computes. Nothing fails: it shows as a slightly worse model.

    How it decides:
        A trained norm, bias, scale or other 1-D parameter has weight_decay > 0. Where the job has a group without
        decay, or its configuration says that some parameters are spared, the parameter slipped out of it: a warning.
        Where one decay holds for everything the finding is info and hygiene: torch's default decays all parameters, and
        some well-known recipes do so on purpose.

    Looks like it but is not:
        Embeddings and other matrices in the decayed group; groups with decay 0; frozen parameters; learning rate 0.

    What to try next:
        Print name, shape and weight_decay for each group of the optimizer that the job built.

    Fix:
        Two groups: parameters with two or more dimensions with decay, all others with weight_decay=0.
    """
    groups = windows(capsule)
    if not groups:
        raise NotJudged("named parameters with their groups")
    (step, rank), rows = next(iter(groups.items()))
    trained = [
        each for each in rows if each.trained is not False and each.owned is not False and each.decay is not None
    ]
    decayed = [each for each in trained if (each.decay or 0.0) > 0]
    slipped = [(each, kind) for each in decayed if (kind := kind_without_decay(each)) is not None]
    if not slipped:
        return
    # Groups of another optimizer have settings of their own, and spare nothing for this one.
    kinds_of = {each.optimizer for each, _ in slipped}
    spared = [each for each in trained if each.decay == 0 and each.optimizer in kinds_of]
    declared = _declares_sparing(capsule)
    kinds = {kind: sum(each == kind for _, each in slipped) for kind in sorted({kind for _, kind in slipped})}
    largest = max(each.decay or 0.0 for each, _ in slipped)
    counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    meant = bool(spared) or declared is not None
    yield Finding(
        severity="warning" if meant else "info",
        kind=None if meant else "hygiene",
        confidence="confirmed" if spared else "likely",
        title="Norms and biases are decayed",
        summary=(
            f"{len(slipped)} of {len(decayed)} decayed parameters are norms, biases or other vectors ({counts}), "
            f"weight_decay {largest:g}"
            + ("; others have a group without decay." if spared else "." if meant else "; no group is spared here.")
        ),
        where=Where(step=step, rank=rank, tensor=slipped[0][0].name),
        evidence=(
            Evidence(
                name="decayed vectors", value=shown((each.name for each, _ in slipped), T.NAMES_SHOWN), expected=[]
            ),
            Evidence(name="weight_decay", value=largest, expected=0.0, note="of their groups"),
            Evidence(name="parameters without decay", value=len(spared), note="a group that spares something exists"),
            *([Evidence(name="configuration", value=declared)] if declared else []),
        ),
        cause="the rule that sorts parameters into groups puts vectors with the matrices",
        next=("print name, shape and weight_decay of every group",),
        fix=("put parameters with fewer than two dimensions into a group with weight_decay=0",),
    )


def _declares_sparing(capsule: Capsule) -> str | None:
    """A setting of the resolved configuration that says that some parameters are not decayed."""
    config = capsule.manifest.config
    for key, value in config.items() if isinstance(config, dict) else ():
        name = str(key).lower()
        if re.search(r"no_?decay|decay_?exclu|exclude_?from_?weight_?decay", name) and value:
            return f"{key} = {value!r:.60}"
        if re.search(r"decay_?(norm|bias|ln|1d)", name) and value is False:
            return f"{key} = False"
    return None


@rule(
    "optimizer/not-owned",
    stage="numerics",
    needs=("records.param_groups.in_optimizer",),
    explained_by=("optimizer/order",),
    cases=("loss-stuck-at-ln-v",),
)
def not_owned(capsule: Capsule) -> Iterator[Finding]:
    """The optimizer does not hold parameters that should be trained.

    What it checks:
        Which of the model's trainable parameters are in a group of the optimizer, which of those that are moved in a
        step, and whether there is any trainable parameter at all.

    Why it matters:
        An optimizer that was built before the model was created anew, cast, moved or wrapped steps tensors that nobody
        uses: the loss stays where it was while learning rate and gradients look right.

    How it decides:
        Confirmed: a trainable parameter with a gradient is in no group. Critical where these are all parameters, or a
        tenth of the elements and more; else a warning. Critical, too: every parameter is frozen; or a parameter in
        float32 with a gradient and a learning rate was stepped in two windows and is bit-identical. Where backward and
        zero_grad were seen in three windows and more and no step in any of them, and no weight moved, the optimizer is
        never stepped.

    Looks like it but is not:
        Frozen parameters; parameters without a gradient; tied weights, which are held once; weights that move all the
        same, because the optimizer steps copies in float32 that are written back; parameters in 16-bit types
        (optimizer/no-master-weights); a learning rate of 0, a skipped step, a gradient of exactly 0.

    What to try next:
        Compare id() of the model's parameters with those in optimizer.param_groups, after everything is built.

    Fix:
        Build the optimizer last: after casting, moving, wrapping and adding adapters, from the model that is trained.
    """
    groups = windows(capsule)
    if not groups:
        raise NotJudged("named parameters with their groups")
    (step, rank), rows = next(iter(groups.items()))
    if len(rows) > 0 and all(each.trained is False for each in rows):
        yield Finding(
            confidence="confirmed",
            title="No parameter is trainable",
            summary=f"All {len(rows)} parameters have requires_grad = False at step {step}.",
            where=Where(step=step, rank=rank),
            evidence=(Evidence(name="trainable parameters", value=0, expected="> 0", note=f"of {len(rows)}"),),
            cause="every parameter is frozen",
            next=("print the names with requires_grad before the optimizer is built",),
            fix=("unfreeze what is to be trained, adapters included, before the optimizer is built",),
        )
        return
    found = _orphans(groups) or _never_stepped(capsule, groups) or _still(capsule, groups)
    if found is not None:
        yield found


def _orphans(groups: dict[tuple[int, int], list[Parameter]]) -> Finding | None:
    """Trainable parameters that had a gradient and are in no group in any window."""
    history = by_name(groups.values())
    held = {name for rows in groups.values() for row in rows if row.owned for name in (row.name, *row.shared_with)}
    orphans = [
        rows[-1]
        for name, rows in history.items()
        if name not in held
        and not held & set(rows[-1].shared_with)
        and all(each.owned is False and each.trained is not False for each in rows)
        and any(each.has_grad and each.grad_norm != 0 for each in rows)
    ]
    # What moves is stepped by somebody: through float32 copies, say, or by an optimizer that is none of torch's. Small
    # steps may round to nothing in some of such weights, so those of the same type are left alone with them.
    moving = {each.dtype for each in orphans if _moves(history[each.name])}
    orphans = [each for each in orphans if each.dtype not in moving]
    if not orphans:
        return None
    first = next(iter(groups))
    trained = {name: rows[-1] for name, rows in history.items() if rows[-1].trained is not False}
    elements = sum(each.size for each in trained.values())
    share = sum(each.size for each in orphans) / elements if elements else len(orphans) / len(trained)
    everything = not any(each.owned for each in trained.values())
    large = everything or share >= 0.1
    return Finding(
        severity=None if large else "warning",
        confidence="confirmed",
        title="The optimizer holds none of the model's parameters"
        if everything
        else "Trainable parameters are in no group of the optimizer",
        summary=(
            f"{len(orphans)} of {len(trained)} trainable parameters have gradients and are in no group of the "
            f"optimizer ({100 * share:.3g} % of the elements)."
        ),
        where=Where(step=first[0], rank=first[1], tensor=orphans[0].name),
        evidence=(
            Evidence(
                name="parameters in no group", value=shown((each.name for each in orphans), T.NAMES_SHOWN), expected=[]
            ),
            Evidence(name="share of the trainable elements", value=share, expected=0.0),
            Evidence(name="parameters in a group", value=sum(bool(each.owned) for each in trained.values())),
        ),
        cause="the optimizer was built from other tensors than the model now has"
        if everything
        else "these parameters were left out of the groups, or were made after the optimizer",
        next=("compare id() of the model's parameters with those of the optimizer",),
        fix=("build the optimizer after the model is complete, from model.parameters()",),
    )


def _moves(rows: list[Parameter]) -> bool:
    """Whether a parameter changed in a recorded step, or from one recorded step to another."""
    changed = any((each.moved or 0.0) > 0 or (each.update_norm or 0.0) > 0 for each in rows)
    return changed or len({each.absmedian for each in rows if each.absmedian is not None}) > 1


def _never_stepped(capsule: Capsule, groups: dict[tuple[int, int], list[Parameter]]) -> Finding | None:
    """An optimizer that holds the parameters and is not asked to step in any window."""
    seen: dict[str, set[int]] = {}
    for event in capsule.records("events"):
        if isinstance(event.get("step"), int):
            seen.setdefault(str(event.get("kind")), set()).add(event["step"])
    both = seen.get("backward", set()) & seen.get("zero_grad", set())
    history = by_name(groups.values())
    owned = [rows for rows in history.values() if any(each.owned for each in rows)]
    told = [rows for rows in owned if len([each for each in rows if each.absmedian is not None]) > 1]
    if len(both) < 3 or {"optimizer_step", "optimizer_step_skipped"} & set(seen) or not told:
        return None
    if any(_moves(rows) for rows in history.values()):
        return None  # somebody steps, unseen
    first = min(both)
    return Finding(
        confidence="likely",
        title="The optimizer is never stepped",
        summary=f"In {len(both)} windows from step {first} on backward and zero_grad ran and no optimizer stepped; "
        f"none of {len(told)} recorded parameters moved.",
        where=Where(step=first),
        evidence=(
            Evidence(name="optimizer steps", value=0, expected=len(both), note="events of the loop"),
            Evidence(name="parameters that moved", value=0, expected=len(told)),
        ),
        cause="optimizer.step() is not called, or on an optimizer of other tensors",
        next=("count the calls of optimizer.step() in one pass of the loop",),
        fix=("call optimizer.step() between backward and zero_grad",),
    )


def _still(capsule: Capsule, groups: dict[tuple[int, int], list[Parameter]]) -> Finding | None:
    """Owned float32 parameters with a gradient and a rate that did not change by a bit in two windows."""
    skipped = overflowed(capsule)
    still: list[Parameter] = []
    for rows in by_name(groups.values()).values():
        told = [
            each
            for each in rows
            if each.owned
            and each.trained is not False
            and each.dtype not in (*LOW_PRECISION, None)
            and (each.grad_norm or 0.0) > 0
            and each.moved is not None
            and each.step not in skipped
            and ((each.lr if each.lr is not None else rate_at(capsule, each.step)) or 0.0) > 0
        ]
        # Of optimizers that take turns the recorded windows may show one alone: then it moved in between.
        if len(told) >= 2 and all(each.moved == 0 for each in told) and not _moves(rows):
            still.append(told[0])
    if not still:
        return None
    return Finding(
        severity="warning",
        title="Stepped parameters do not change",
        summary=f"{len(still)} parameters with a gradient and a learning rate do not change by a bit in any window.",
        where=Where(step=still[0].step, rank=still[0].rank, tensor=still[0].name),
        evidence=(
            Evidence(name="parameters", value=shown((each.name for each in still), T.NAMES_SHOWN), expected=[]),
            Evidence(name="moved_fraction", value=0.0, expected="> 0"),
            Evidence(name="grad_norm", value=still[0].grad_norm, note=still[0].name),
            Evidence(name="learning_rate", value=still[0].lr, note=still[0].name),
        ),
        cause="the step is written to other tensors than those the model uses, or its size rounds to nothing",
        next=("compare the update with half a unit in the last place of the weights",),
        fix=("see that the optimizer steps the tensors that the model uses",),
    )


@rule(
    "optimizer/frozen-not-frozen",
    stage="numerics",
    needs=("records.param_groups.requires_grad",),
    cases=("one-batch-not-overfitted",),
)
def frozen_not_frozen(capsule: Capsule) -> Iterator[Finding]:
    """A frozen parameter is trained.

    What it checks:
        Parameters with requires_grad = False: their gradients, their changes in a step, their optimizer state.

    Why it matters:
        Freezing after the first backward leaves old gradients, and an optimizer that holds the parameter goes on
        applying momentum and weight decay to it: the layer that was to be kept is not.

    How it decides:
        Confirmed: requires_grad = False, and the parameter moved in a step. A gradient on it without a movement is a
        warning. Optimizer state alone is info: a layer frozen on schedule keeps the state it had.

    Looks like it but is not:
        A frozen base under adapters; frozen parameters that are listed in the optimizer and have no gradient;
        requires_grad = True at the start and frozen later without a further change.

    What to try next:
        Compare the layer's digest at the start and now. Print requires_grad and grad of its parameters before the step.

    Fix:
        Set grad to None when freezing, and leave frozen parameters out of the optimizer's groups.
    """
    groups = windows(capsule)
    if not groups:
        raise NotJudged("named parameters with requires_grad")
    frozen = [each for rows in groups.values() for each in rows if each.trained is False]
    moved = [each for each in frozen if (each.moved or 0.0) > 0 or (each.update_norm or 0.0) > 0]
    graded = [each for each in frozen if each.has_grad]
    stated = [each for each in frozen if any(rms for _, rms in each.state.values())]
    chosen = moved or graded or stated
    if not chosen:
        return
    names = list(dict.fromkeys(each.name for each in chosen))
    first = chosen[0]
    what = "changed in a step" if moved else "have a gradient" if graded else "have optimizer state"
    yield Finding(
        severity=None if moved else "warning" if graded else "info",
        kind=None if moved or graded else "hygiene",
        confidence="confirmed" if moved else "likely",
        title="Frozen parameters are trained" if moved else f"Frozen parameters {what}",
        summary=f"{len(names)} parameters with requires_grad = False {what}, {first.name} at step {first.step}.",
        where=Where(step=first.step, rank=first.rank, tensor=first.name),
        evidence=(
            Evidence(name="parameters", value=shown(names, T.NAMES_SHOWN), expected=[]),
            *([Evidence(name="moved_fraction", value=first.moved, expected=0.0)] if moved else []),
            *([Evidence(name="has_grad", value=True, expected=False)] if first.has_grad else []),
            *([Evidence(name="optimizer state", value=sorted(first.state), expected=[])] if first.state else []),
            Evidence(name="in_optimizer", value=first.owned, expected=False),
        ),
        cause="the optimizer goes on stepping parameters that were frozen after it had seen them"
        if moved
        else "they were frozen after a backward pass or a step",
        next=("print grad and requires_grad of these parameters right before the step",),
        fix=("when freezing, set grad to None and take the parameter out of the optimizer's groups",),
    )
