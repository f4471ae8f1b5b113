"""Whether the gradient reaches every parameter that is to be trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .records import Parameter, by_name, overflowed, shown, windows

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Parts of names of what may lawfully be idle: experts without tokens, modalities that a batch does not have.
_EXPERT = re.compile(r"expert|(^|\.)moe\.|router|gate_up_proj_\d", re.IGNORECASE)
_MODALITY = re.compile(r"visi|visual|image|img|pixel|audio|speech|video|mm_proj|multi_?modal|perceiver", re.IGNORECASE)
_ZERO_ADAPTER = re.compile(r"lora_B|lora_up|lora_embedding_B")


@dataclass(frozen=True)
class Reach:
    """Which trained parameters get a gradient, and in which order modules ran.

    Attributes:
        dead: trained, owned parameters that never had a gradient.
        alive: those that had one.
        steps: windows that were looked at.
        ran: module → place of its first output in a step; empty where activations were not recorded.
    """

    dead: list[Parameter]
    alive: list[Parameter]
    steps: int
    ran: dict[str, int]

    def place(self, name: str) -> int | None:
        """Where in the forward pass the module of a parameter ran; None where it did not."""
        module = name.rpartition(".")[0]
        for candidate in (module, module.rpartition(".")[0]):
            if candidate in self.ran:
                return self.ran[candidate]
        inner = [place for ran, place in self.ran.items() if module and ran.startswith(module + ".")]
        return min(inner, default=None)


def reach(capsule: Capsule) -> Reach:
    """Gradients of trained parameters over all windows.

    Raises:
        NotJudged: fewer than three windows tell.
    """
    skipped = overflowed(capsule)
    groups = {key: rows for key, rows in windows(capsule).items() if key[0] not in skipped}
    told = {key[0] for key, rows in groups.items() if any(each.has_grad is not None for each in rows)}
    stats = capsule.stats(role="gradient")
    measured = {int(step) for step in np.unique(stats.step)} - skipped
    names = set(np.unique(stats.name.astype(str)).tolist()) if len(stats) else set()
    trained = {name: rows for name, rows in by_name(groups.values()).items() if rows[-1].trained is not False}
    trained = {name: rows for name, rows in trained.items() if not all(each.owned is False for each in rows)}
    if not names & set(trained):
        measured = set()
    steps = len(told | measured) if told else 0
    if steps < T.NO_GRADIENT_STEPS or not trained:
        raise NotJudged(f"which parameters had a gradient, in {T.NO_GRADIENT_STEPS} windows or more")
    dead: list[Parameter] = []
    alive: list[Parameter] = []
    for name, every in trained.items():
        rows = [each for each in every if each.trained is not False]  # it may have been frozen at first
        without = all(each.has_grad is False or each.grad_norm == 0 for each in rows)
        zero = without and all(each.grad_norm == 0 for each in rows if each.has_grad)
        known = steps if len(rows) == len(every) else len(rows)
        enough = known if not any(each.has_grad for each in rows) else sum(each.has_grad is True for each in rows)
        if without and zero and name not in (names - _zero_named(rows)) and enough >= T.NO_GRADIENT_STEPS:
            dead.append(rows[0])
        elif not without:
            alive.append(rows[-1])
    ran: dict[str, int] = {}
    forward = capsule.stats(role="activation")
    for name, order in zip(forward.name.astype(str).tolist(), forward.order.tolist(), strict=True):
        ran.setdefault(name.partition(":")[0], int(order))
    return Reach(dead, alive, steps, ran)


def _zero_named(rows: list[Parameter]) -> set[str]:
    """The name, where its gradients were there and zero: then a row of statistics contradicts nothing."""
    return {each.name for each in rows if each.has_grad and each.grad_norm == 0}


@rule(
    "optimizer/gradient-chain-cut",
    stage="numerics",
    needs=("records.param_groups.has_grad|stats.parameter",),
    # A loss over no token has a gradient of exactly zero, as has attention to padding alone; what was zeroed had one.
    explained_by=("objective/all-masked", "optimizer/order", "data/attention-mask-mismatch"),
    cases=("loss-stuck-at-ln-v",),
)
def gradient_chain_cut(capsule: Capsule) -> Iterator[Finding]:
    """No gradient reaches parameters that are to be trained.

    What it checks:
        Trainable parameters in the optimizer that never have a gradient, where in the forward pass they ran, and
        adapters whose second matrix is still exactly zero.

    Why it matters:
        A detach, a .data, an argmax or a reentrant checkpoint whose input needs no gradient cuts the chain: everything
        before it stays as it was initialised while the rest adapts around it. The loss falls, a little.

    How it decides:
        No gradient, or one of exactly zero, in three recorded windows or more, for a parameter whose module ran in the
        forward pass and was followed by modules that do have gradients. Critical where that is everything that ran
        before some point, or half of the trainable tensors; else a warning. Adapters' B matrices that are zero after
        three steps or more at a learning rate above 0: critical where half of them are.

    Looks like it but is not:
        Experts without tokens; an image or audio tower in a batch of text; a module that did not run; one whose output
        is not used (a pooler: info); frozen parameters; B matrices before the first steps; skipped steps.

    What to try next:
        Set requires_grad on the input and print grad_fn of each module's output: the first None is the cut. Look for
        detach, no_grad, .data, item, numpy and round trips through another dtype.

    Fix:
        Take the detach out; for checkpointed blocks use_reentrant=False or enable_input_require_grads().
    """
    adapter = _zero_adapters(capsule)
    if adapter is not None:
        yield adapter
        return
    found = reach(capsule)
    dead = [each for each in found.dead if not _idle(each, found)]
    if not dead:
        return
    places = {each.name: found.place(each.name) for each in dead}
    live = [place for each in found.alive if (place := found.place(each.name)) is not None]
    cut = [each for each in dead if not live or (places[each.name] or 0) < max(live)]
    chosen = cut or dead
    first_live = min(live, default=None)
    before = [each for each in cut if first_live is None or (places[each.name] or 0) < first_live]
    whole = bool(found.ran) and first_live is not None and len(before) > 1 and len(before) == len(cut)
    most = len(cut) >= T.MOST_OF_THEM * (len(found.dead) + len(found.alive))
    last = max(cut or dead, key=lambda each: places[each.name] or 0)
    following = [each for each in found.alive if (found.place(each.name) or 0) > (places[last.name] or 0)]
    following.sort(key=lambda each: found.place(each.name) or 0)
    yield Finding(
        severity="info" if not cut else None if whole or most else "warning",
        kind=None if cut else "hygiene",
        title="The gradient chain is cut" if cut else "Parameters whose output is not used",
        summary=(
            f"{len(chosen)} of {len(found.dead) + len(found.alive)} trainable tensors have no gradient in "
            f"{found.steps} windows, {chosen[0].name} to {last.name}"
            + (f"; {following[0].name}, which comes after, has one." if following and cut else ".")
        ),
        where=Where(step=min(each.step for each in chosen), tensor=last.name),
        evidence=(
            Evidence(
                name="without a gradient", value=shown((each.name for each in chosen), T.NAMES_SHOWN), expected=[]
            ),
            Evidence(name="with a gradient", value=len(found.alive)),
            Evidence(name="windows", value=found.steps, note="recorded, skipped steps left out"),
            *([Evidence(name="first after the cut", value=following[0].name)] if following and cut else []),
            Evidence(name="ran in the forward pass", value=bool(found.ran) or None),
        ),
        cause=f"the graph is cut behind {last.name.rpartition('.')[0] or last.name}: a detach, no_grad or checkpoint"
        if cut
        else "these modules ran and their output does not enter the loss",
        next=("print grad_fn of each module's output in forward order: the first None is the cut",),
        fix=("take the detach out, or use_reentrant=False for checkpointed blocks",)
        if cut
        else ("leave them out of the optimizer, or use what they compute",),
    )


def _idle(parameter: Parameter, found: Reach) -> bool:
    """Whether a parameter may lawfully be without a gradient."""
    if found.ran and found.place(parameter.name) is None:
        return True
    if _EXPERT.search(parameter.name):
        pattern = re.sub(r"\d+", "N", parameter.name)
        return any(re.sub(r"\d+", "N", each.name) == pattern for each in found.alive) or not found.alive
    return not found.ran and bool(_MODALITY.search(parameter.name))


def _zero_adapters(capsule: Capsule) -> Finding | None:
    """Adapters that are zero long after they started to be trained."""
    rates = capsule.scalars("learning_rate")
    if len(rates) and not (rates.value > 0).any():
        return None
    skipped = overflowed(capsule)
    norms: dict[str, tuple[int, float]] = {}
    parameters = capsule.stats(role="parameter")
    for name, step, rms in zip(parameters.name, parameters.step, parameters.rms, strict=True):
        if _ZERO_ADAPTER.search(str(name)) and np.isfinite(rms) and int(step) >= norms.get(str(name), (-1, 0.0))[0]:
            norms[str(name)] = (int(step), float(rms))
    for (step, _), rows in windows(capsule).items():
        for each in rows:
            if _ZERO_ADAPTER.search(each.name) and each.trained is not False and each.moved is not None:
                value = each.absmedian if each.absmedian is not None else None
                if value is not None and step > norms.get(each.name, (-1, 0.0))[0] and (value > 0 or each.moved == 0):
                    norms[each.name] = (step, value)
    first = min((int(each) for each in rates.step), default=0)
    late = {name: pair for name, pair in norms.items() if pair[0] - first - len(skipped) >= T.ADAPTER_MOVED_BY}
    zero = [name for name, (_, value) in late.items() if value == 0]
    if not zero:
        return None
    step = min(late[name][0] for name in zero)
    every = len(zero) == len(late)
    return Finding(
        severity=None if every or len(zero) >= T.MOST_OF_THEM * len(late) else "warning",
        title="Adapters are still zero",
        summary=f"{len(zero)} of {len(late)} second adapter matrices are exactly 0 at step {step}.",
        where=Where(step=step, tensor=zero[0]),
        evidence=(
            Evidence(name="zero adapters", value=len(zero), expected=0, note=f"of {len(late)}"),
            Evidence(name="names", value=shown(zero, T.NAMES_SHOWN), expected=[]),
            Evidence(name="steps since the first", value=step - first, note="with a learning rate above 0"),
        ),
        cause="no gradient reaches the adapters: a checkpointed block whose input needs no gradient, or a detach",
        next=("print the gradient norm of every B matrix after one backward",),
        fix=("enable_input_require_grads() or use_reentrant=False; put the adapters' parameters into the optimizer",),
    )
