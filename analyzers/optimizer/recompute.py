"""Activation checkpointing: the second forward pass must be the first one again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .step_case import number

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule("optimizer/recompute-rng", stage="numerics", needs=("records.recompute.module",))
def recompute_rng(capsule: Capsule) -> Iterator[Finding]:
    """A checkpointed module is recomputed from another random state.

    What it checks:
        The random state that each checkpointed module began with in forward and again in its recomputation, and the
        largest difference of its outputs.

    Why it matters:
        With dropout, another random state means another mask: the gradients then belong to a network that never made
        the loss. The loss looks ordinary and training is noisier or stalls.

    How it decides:
        Random states differ and outputs differ by more than 1e-4: confirmed. States differ and the difference is not
        known: a warning. The states agree and outputs differ by more than 1e-2: a warning (something else is not
        deterministic). States differ and outputs do not: the module draws no numbers, no finding.

    Looks like it but is not:
        Modules without dropout; differences of the size of reordered arithmetic; an autotuned kernel.

    What to try next:
        Recompute the module with preserve_rng_state=True, and with dropout 0: the difference must vanish.

    Fix:
        torch.utils.checkpoint with preserve_rng_state=True, and every generator of one's own saved and restored in it.
    """
    rows = [record for record in capsule.records("recompute") if isinstance(record.get("module"), str)]
    judged = [(each, _differs(each), number(each, "max_abs_difference")) for each in rows]
    if not any(differs is not None or difference is not None for _, differs, difference in judged):
        raise NotJudged("digests of the random states, or the difference of the outputs")
    wrong = [pair for pair in judged if pair[1] and (pair[2] or 0.0) > T.RECOMPUTE_DRAWN]
    unknown = [pair for pair in judged if pair[1] and pair[2] is None]
    other = [pair for pair in judged if not pair[1] and (pair[2] or 0.0) > T.RECOMPUTE_ROUNDING]
    chosen = wrong or unknown or other
    if not chosen:
        return
    record, differs, difference = chosen[0]
    step = record.get("step")
    modules = list(dict.fromkeys(str(each["module"]) for each, *_ in chosen))
    yield Finding(
        severity=None if wrong else "warning",
        confidence="confirmed" if wrong else "likely",
        title="Recomputed activations differ" if not differs else "Recomputation starts from another random state",
        summary=f"{len(modules)} checkpointed modules, {modules[0]} first: "
        + ("the random state differs" if differs else "the random state is the same")
        + (f" and outputs differ by {difference:.3g}." if difference is not None else "."),
        where=Where(step=step if isinstance(step, int) else None, rank=record["rank"], tensor=modules[0]),
        evidence=(
            Evidence(
                name="recompute_rng_sha256",
                value=record.get("recompute_rng_sha256"),
                expected=record.get("forward_rng_sha256"),
            ),
            Evidence(name="max_abs_difference", value=difference, expected=0.0),
            Evidence(name="modules", value=modules[: T.NAMES_SHOWN]),
        ),
        cause="the recomputation draws other random numbers than the forward pass"
        if differs
        else "the module is not deterministic apart from its random numbers",
        next=("repeat with dropout 0: the difference must vanish",),
        fix=("checkpoint with preserve_rng_state=True and restore generators of your own",),
    )


def _differs(record: dict[str, Any]) -> bool | None:
    forward, again = record.get("forward_rng_sha256"), record.get("recompute_rng_sha256")
    return forward != again if isinstance(forward, str) and isinstance(again, str) else None
