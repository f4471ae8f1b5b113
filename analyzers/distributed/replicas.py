"""Tensors that every replica holds: equal on all of them, or the first step and rank at which they part."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from . import thresholds as T
from .accounts import in_step_until
from .averaging import averaging
from .layout import Layout, declared_shards, layout, shards
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Statistics that each rank takes of its own batch between two synchronisations.
_RUNNING = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked)$")
#: States of generators.
_RANDOM = re.compile(
    r"(?:^|[._/])(?:rng(?:_state)?|torch|numpy|python|cuda|random_state)(?:$|[._/:]?\d*$)", re.IGNORECASE
)
#: Parameters of experts, of which each rank of an expert-parallel group has its own.
_EXPERT = re.compile(r"(?:^|[._])(?:experts?|moe|local_experts)(?:[._]|$)")
#: step → name → rank → digest
Digests = Mapping[int, Mapping[str, Mapping[int, str]]]


@rule(
    "distributed/replicas-diverged",
    stage="distributed",
    needs=("records.checksums.sha256",),
    explained_by=(
        "distributed/collective-mismatch",
        "distributed/gradient-scale",
        "distributed/uneven-steps",
    ),
    cases=("several-gpus-odd-loss",),
)
def replicas_diverged(capsule: Capsule) -> Iterator[Finding]:
    """Replicas of one tensor are no longer equal.

    What it checks:
        Checksums of parameters, buffers and random states that data-parallel ranks hold alike, step by step.

    Why it matters:
        Data parallelism keeps no copy in step by itself: it gives all replicas the same gradient and counts on equal
        starts and equal steps. A replica that has parted stays so; the gradients are then means over different models.

    How it decides:
        At the first step at which digests of one tensor differ between ranks of the same tensor and pipeline
        coordinates: confirmed for parameters. Named are the ranks outside the majority; with two ranks, or no
        majority, it cannot be told which is right. Undetermined where every parameter differs on every rank from the
        first record on and nothing says whether they are sharded. Info where they meet again later, or something as
        large as the model is reduced at some steps only: models that are averaged now and then. Other buffers: a
        warning. Running statistics of batch normalisation, and random states that were equal and part: info.

    Looks like it but is not:
        Shards (FSDP, ZeRO-3), parts of tensor-parallel layers and stages, experts; running statistics, which each
        rank takes of its own batch; random states, which differ by design where dropout must.

    What to try next:
        Compare the checksums after loading, after the first backward and after the first step: the first pair that
        differs says whether start, gradient or step is at fault.

    Fix:
        Load the same checkpoint on every rank and wrap after loading; no change of parameters outside the step; skip
        and clip by values that all ranks share; broadcast once from rank 0 to repair the run.
    """
    where = layout(capsule)
    if where is None:
        raise NotJudged("sizes of the parallel axes that divide the number of ranks")
    found = False
    for kind in ("parameter", "buffer", "rng"):
        digests = _digests(capsule, kind)
        compared = _compared(capsule, digests, where)
        if not compared:
            continue
        if kind == "parameter" and declared_shards(capsule).parameters:
            found = True
            continue
        found = True
        finding = _judge(capsule, where, kind, compared)
        if finding is not None:
            yield finding
    if not found:
        raise NotCaptured("checksums of one tensor on two replicas at one step")
    if declared_shards(capsule).parameters and not _compared(capsule, _digests(capsule, "buffer"), where):
        raise NotJudged("checksums of whole parameters: each rank holds a shard")


_DIGESTS: WeakKeyDictionary[Capsule, dict[str, Digests]] = WeakKeyDictionary()


def _digests(capsule: Capsule, kind: str) -> Digests:
    """Digests of one kind; the last record of a rank, step and name counts."""
    kinds = _DIGESTS.get(capsule)
    if kinds is None:
        read: dict[str, dict[int, dict[str, dict[int, str]]]] = {}
        for record in capsule.records("checksums"):
            name, digest, step = record.get("name"), record.get("sha256"), record.get("step")
            if name and digest and not record.get("side"):
                steps = read.setdefault(record.get("kind") or _kind(name), {})
                names = steps.setdefault(step if isinstance(step, int) else 0, {})
                names.setdefault(name, {})[record["rank"]] = digest
        kinds = _DIGESTS[capsule] = dict(read)
    return kinds.get(kind, {})


def _kind(name: str) -> str:
    """What a tensor is by its name, where the record does not say."""
    if _RUNNING.search(name):
        return "buffer"
    return "rng" if _RANDOM.search(name) else "parameter"


def _compared(
    capsule: Capsule, digests: Digests, where: Layout
) -> dict[int, dict[str, dict[tuple[int, int], dict[int, str]]]]:
    """Step → name → coordinates → rank → digest, of what at least two replicas have."""
    found: dict[int, dict[str, dict[tuple[int, int], dict[int, str]]]] = {}
    until = in_step_until(capsule)
    for step in sorted(digests):
        if until is not None and step >= until:
            break
        names: dict[str, dict[tuple[int, int], dict[int, str]]] = {}
        for name, ranks in digests[step].items():
            if where.experts and _EXPERT.search(name):
                continue
            peers: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
            for rank, digest in sorted(ranks.items()):
                peers[where.parameters(rank)][rank] = digest
            several = {place: each for place, each in peers.items() if len(each) > 1}
            if several:
                names[name] = several
        if names:
            found[step] = names
    return found


@dataclass(frozen=True)
class _Parted:
    """The first step at which digests differ: names in order, and the ranks of the first one by digest."""

    step: int
    names: list[str]
    of: int
    groups: list[list[int]]
    expected: str
    odd: str
    all_apart: bool


def _first_parted(compared: Mapping[int, Mapping[str, Mapping[Any, Mapping[int, str]]]]) -> _Parted | None:
    for step, names in compared.items():
        odd = {
            name: ranks for name, places in names.items() for ranks in places.values() if len(set(ranks.values())) > 1
        }
        if not odd:
            continue
        # Replicas that part in several tensors may part in different ranks: the ranks of most names are named.
        votes = Counter(tuple(map(tuple, _groups(ranks))) for ranks in odd.values())
        chosen = votes.most_common(1)[0][0]
        name, ranks = next((n, r) for n, r in odd.items() if tuple(map(tuple, _groups(r))) == chosen)
        groups = [list(each) for each in chosen]
        names_first = [name, *(each for each in odd if each != name)]
        all_apart = len(odd) == len(names) and all(len(set(r.values())) == len(r) for r in odd.values())
        return _Parted(
            step,
            names_first,
            len(names),
            groups,
            ranks[groups[0][0]],
            ranks[groups[-1][0]],
            all_apart and len(names) > 1,
        )
    return None


def _groups(ranks: Mapping[int, str]) -> list[list[int]]:
    """Ranks with equal digests together, the largest group first."""
    by_digest: dict[str, list[int]] = defaultdict(list)
    for rank, digest in sorted(ranks.items()):
        by_digest[digest].append(rank)
    return sorted(by_digest.values(), key=lambda each: (-len(each), each[0]))


def _meets_again(compared: Mapping[int, Any], parted: _Parted) -> int | None:
    """The first later step at which a tensor that had parted is equal on all replicas again."""
    for step, names in compared.items():
        places = names.get(parted.names[0]) if step > parted.step else None
        if places and all(len(set(ranks.values())) == 1 for ranks in places.values()):
            return step
    return None


def _judge(capsule: Capsule, where: Layout, kind: str, compared: Mapping[int, Any]) -> Finding | None:
    if kind == "buffer":
        running = {s: {n: p for n, p in names.items() if _RUNNING.search(n)} for s, names in compared.items()}
        others = {s: {n: p for n, p in names.items() if not _RUNNING.search(n)} for s, names in compared.items()}
        parted = _first_parted(others)
        if parted is None:
            statistics = _first_parted(running)
            return _finding(where, "running", statistics, compared, capsule) if statistics else None
        return _finding(where, kind, parted, compared, capsule)
    parted = _first_parted(compared)
    if parted is None or (kind == "rng" and parted.step == min(compared)):
        return None  # random states that never were equal are meant to differ
    return _finding(where, kind, parted, compared, capsule)


def _finding(where: Layout, kind: str, parted: _Parted, compared: Mapping[int, Any], capsule: Capsule) -> Finding:
    first = parted.step == min(compared)
    largest, ranks = parted.groups[0], sorted(rank for group in parted.groups for rank in group)
    majority = len(largest) * 2 > len(ranks)
    odd = sorted(rank for group in parted.groups[1:] for rank in group) if majority else []
    again = _meets_again(compared, parted) if kind == "parameter" else None
    unsure = kind == "parameter" and parted.all_apart and first and not shards(capsule).told and not where.known
    local = kind == "parameter" and (again is not None or averaging(capsule) == "now and then")
    remark = local or kind in ("running", "rng")
    confidence: Confidence = "undetermined" if unsure and not local else "confirmed"
    if kind == "buffer" or local:
        confidence = "likely"
    what = {"parameter": "Parameters", "buffer": "Buffers", "running": "Running statistics", "rng": "Random states"}[
        kind
    ]
    others = f" and {len(parted.names) - 1} more of {parted.of}" if len(parted.names) > 1 else ""
    if majority:
        whom = f"on {named_ranks(odd)} it is not that of the other {len(largest)}"
    elif len(ranks) == 2:
        whom = f"on {named_ranks(ranks)} it is not the same, and two cannot tell which is right"
    else:
        whom = f"there are {len(parted.groups)} versions on {len(ranks)} ranks and no majority"
    began = "at the first step recorded" if first else f"equal until step {max(s for s in compared if s < parted.step)}"
    tail = f" They are equal again at step {again}." if again is not None else ""
    tail += " Nothing says whether the parameters are sharded." if unsure else ""
    return Finding(
        severity="info" if remark else "warning" if confidence != "confirmed" else None,
        kind="hygiene" if remark else None,
        confidence=confidence,
        title=f"{what} of the replicas are not equal",
        summary=f"Step {parted.step}: {parted.names[0]}{others}: {whom} ({began}).{tail}",
        where=Where(step=parted.step, rank=odd[0] if len(odd) == 1 else None, tensor=parted.names[0]),
        evidence=(
            Evidence(name="sha256", value=parted.odd[:16], expected=parted.expected[:16], note=parted.names[0]),
            Evidence(name="ranks with equal values", value=[each[: T.RANKS_SHOWN] for each in parted.groups[:8]]),
            Evidence(name="tensors that differ", value=len(parted.names), expected=0, note=f"of {parted.of}"),
            *(Evidence(name="name", value=name) for name in parted.names[1:6]),
        ),
        cause=_cause(kind, first, local),
        next=("compare checksums after loading, after the first backward and after the first step",),
        fix=_fix(kind),
    )


def _cause(kind: str, first: bool, local: bool) -> str:
    if kind == "running":
        return "each rank takes them of its own batch; they are made equal by a broadcast or by SyncBatchNorm"
    if kind == "rng":
        return "the ranks drew different numbers of random values"
    if local:
        return "the replicas are averaged now and then, not at every step"
    if first:
        return (
            "the ranks did not start from the same values (seeds, checkpoints, no broadcast), or the first recorded "
            "step was not the same on all: gradients that were not reduced, a clip, a skip"
        )
    return "a step that was not the same on all replicas: its gradient, its clipping, its skip, or a change outside it"


def _fix(kind: str) -> tuple[str, ...]:
    if kind == "running":
        return ("SyncBatchNorm, or broadcast the statistics before evaluation and saving",)
    if kind == "rng":
        return ("one generator for what all ranks must draw alike (shuffling), another for dropout",)
    return (
        "load one checkpoint on every rank and wrap the model after loading",
        "skip, clip and schedule by values that all ranks share",
    )


# -- what the rule on gradients asks


def parameters_part_at(capsule: Capsule, where: Layout) -> int | None:
    """First step at which parameters of replicas differ, None where they do not or are not known."""
    parted = _first_parted(_compared(capsule, _digests(capsule, "parameter"), where))
    return parted.step if parted is not None else None


def parameters_stay_equal(capsule: Capsule, where: Layout, step: int) -> bool:
    """Whether parameters are known to be equal on all replicas after the update of ``step``."""
    compared: Sequence[int] = [
        each for each in _compared(capsule, _digests(capsule, "parameter"), where) if each >= step
    ]
    return bool(compared) and parameters_part_at(capsule, where) is None
