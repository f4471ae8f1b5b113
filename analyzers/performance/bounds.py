"""What bounds a step, from traces: input, communication, launches, computation, or nothing in particular."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .traced import Bottleneck, Traced, coverage, hottest, kind, traced, world_size

if TYPE_CHECKING:
    from ...capsules import Capsule

_NEEDS = ("records.profile.window_ms",)  # what a trace of a CPU alone lacks is said by `traced`


@rule(
    "performance/input-bound",
    stage="runtime",
    severity="warning",
    needs=(*_NEEDS, "records.profile.idle_data_ms|records.profile.data_ms"),
    cases=("utilisation-saw-tooth",),
)
def input_bound(capsule: Capsule) -> Iterator[Finding]:
    """The device waits for data.

    What it checks:
        In traces of the profiler: the time in which the device has nothing to do while the step's own thread is inside
        the data loader.

    Why it matters:
        A device that waits for input costs as much as one that computes. More or faster devices change nothing.

    How it decides:
        The device idles during data loading for 15 % of the judged steps' time or more, and for 8 % of the median step.
        Of a torn trace the steps are judged whose launches and device work are both there.
        The slowest rank is named: in a synchronous job the others wait for it in their collectives. Steps at the
        beginning that take twice as long as those after them are warm-up and left out.

    Looks like it but is not:
        Loading that the device does not notice, because it is still computing the step before; one long wait, where an
        epoch begins and workers start; loading in another thread; the first batch. Traces of a CPU alone, traces
        without steps, and steps of a torn trace that lack launches or their work are not judged.

    What to try next:
        The same steps with one batch kept and used again: if they are faster by what is shown, the loader is the cause.
        Then time one sample of the data set, in one process.

    Fix:
        Workers of their own for loading (num_workers ≥ 4 a device, persistent), pinned memory and prefetching; decode
        and resize beforehand; move augmentation to the device; larger files read in order.
    """
    found = traced(capsule)
    bound = {rank: each for rank, each in found.items() if "input" in each.bottlenecks}
    if not bound:
        return
    worst = max(bound.values(), key=lambda each: each.share("idle_data_ms"))
    own = "SingleProcess" in worst.loader
    others = f"; {len(bound)} of {len(found)} traced ranks are" if len(found) > 1 else ""
    yield Finding(
        kind=kind(capsule),
        title="The device waits for data",
        summary=(
            f"{worst.share('idle_data_ms'):.0%} of the time of {worst.where_from()} the device is idle while data is "
            f"loaded ({worst.parts['idle_data_ms'] / len(worst.steps):.1f} ms a step of "
            f"{worst.window / len(worst.steps):.1f} ms); it computes {worst.share('compute_ms'):.0%} of it{others}."
        ),
        where=Where(step=worst.steps[0], rank=worst.rank),
        evidence=(
            Evidence(
                name="idle while data is loaded",
                value=round(worst.share("idle_data_ms"), 4),
                expected=f"< {T.INPUT}",
                unit="of the step",
                note=f"median step {worst.medians['idle_data_ms']:.1%}",
            ),
            *_loading(capsule, worst),
            *worst.evidence(),
            *coverage(capsule, found),
        ),
        cause="samples are loaded in the training process itself"
        if own
        else "loading a batch takes longer than computing",
        next=("run the same steps with one batch kept and used again, and compare the time of a step",),
        fix=("more loader workers (persistent, pinned memory, prefetching); cheaper or earlier decoding",),
    )


def _loading(capsule: Capsule, rank: Traced) -> Iterator[Evidence]:
    records = [
        each for each in capsule.records("profile") if each.get("rank") == rank.rank and each.get("step") in rank.steps
    ]
    spent = [each["data_ms"] for each in records if isinstance(each.get("data_ms"), int | float)]
    if spent:
        yield Evidence(name="data loading", value=round(math.fsum(spent), 3), unit="ms", note=rank.loader[: T.SIGNS])


@rule(
    "performance/communication-bound",
    stage="runtime",
    severity="warning",
    needs=(*_NEEDS, "records.profile.communication_ms"),
    explained_by=("distributed/straggler", "performance/input-bound"),
    cases=("more-gpus-slower",),
)
def communication_bound(capsule: Capsule) -> Iterator[Finding]:
    """Collectives that no computation hides take a large part of the step.

    What it checks:
        In traces of the profiler: the time in kernels of NCCL or RCCL during which no other kernel runs.

    Why it matters:
        That time grows with the number of ranks, and more devices make the job no faster.

    How it decides:
        25 % of the judged steps' time or more on the rank that spends least in it, and half of that in the median step.
        Where one rank spends less than half of what the median rank does, the others wait for it: that is a straggler
        and not reported here. Where only some of the job's ranks left a trace, moving data and waiting for another rank
        cannot be told apart: undetermined.

    Looks like it but is not:
        Communication beside computation (hidden); waiting for one slow rank inside a collective; an evaluation or a
        checkpoint in the traced steps; the first steps, in which communicators are built.

    What to try next:
        Traces of all ranks of one node, for the same steps. Then the same job on one node, and the bandwidth of the
        same operation and size in nccl-tests.

    Fix:
        More overlap (bucket sizes, prefetching of sharded parameters), fewer and larger messages, gradient
        accumulation, sharding inside a node; check topology and network settings before.
    """
    found = traced(capsule)
    shares = {rank: each.share("communication_ms") for rank, each in found.items()}
    known = {rank: share for rank, share in shares.items() if math.isfinite(share)}
    if not known:
        return
    least = min(known, key=lambda rank: known[rank])
    lasting = "communication" in found[least].bottlenecks
    middle = float(np.median(list(known.values())))
    waiting = len(known) > 1 and known[least] < T.WAITING * middle
    if waiting or not lasting:
        return
    each, world = found[least], world_size(capsule)
    alone = world is None or world > len(known)
    total = f", of {len(known)} traced ranks the least" if len(known) > 1 else ""
    yield Finding(
        confidence="undetermined" if alone else "likely",
        kind=kind(capsule),
        title="Communication is not hidden",
        summary=(
            f"{known[least]:.0%} of the time of {each.where_from()} rank {least} is in collectives while nothing is "
            f"computed{total}; it computes {each.share('compute_ms'):.0%} of the time."
            + (
                f" Traces of {len(known)} of {world:,} ranks are here: whom they wait for is not known."
                if alone and world
                else ""
            )
        ),
        where=Where(step=each.steps[0], rank=least),
        evidence=(
            Evidence(
                name="communication not hidden",
                value=round(known[least], 4),
                expected=f"< {T.COMMUNICATION}",
                unit="of the step",
                note=f"rank {least}",
            ),
            *_range(known),
            *(one for one in each.evidence() if one.name != "communication not hidden"),
            *coverage(capsule, found),
        ),
        cause="the messages take longer than the computation that could hide them",
        next=("traces of all ranks of a node for the same steps: who arrives last at the collectives?",)
        if alone
        else ("the bandwidth of the same operation and size alone, in nccl-tests",),
        fix=("overlap more, send less often and more at once, keep sharding inside a node",),
    )


def _range(shares: Mapping[int, float]) -> Iterator[Evidence]:
    if len(shares) > 1:
        most = max(shares, key=lambda rank: shares[rank])
        yield Evidence(name="most of all ranks", value=round(shares[most], 4), unit="of the step", note=f"rank {most}")


@rule(
    "performance/launch-bound",
    stage="runtime",
    severity="warning",
    needs=(*_NEEDS, "records.profile.idle_gaps_ms", "records.profile.kernels"),
    cases=("utilisation-saw-tooth",),
)
def launch_bound(capsule: Capsule) -> Iterator[Finding]:
    """The device idles between many short kernels: the host launches them too slowly.

    What it checks:
        In traces of the profiler: idle time of the device in gaps of a millisecond or less, the number of kernels a
        step and their mean length.

    Why it matters:
        A kernel of a few microseconds ends before the host has launched the next one. A faster device changes nothing.

    How it decides:
        30 % of the judged steps' time or more is in such gaps, half of that in the median step; there are 100 kernels a
        step or more, and they take 25 µs or less in the mean. A trace with Python's stacks is not judged: recording
        them slows the host itself.

    Looks like it but is not:
        Waiting for data (input-bound); one long gap, in which the host synchronises, writes or compiles (gpu-idle);
        the profiler's own time.

    What to try next:
        The time of a step without the profiler, beside the kernels' time in the trace: the difference is the host's.
        Then a larger batch: if the step takes equally long, the launches bound it.

    Fix:
        Capture the step in a CUDA graph, or compile it (mode="reduce-overhead"); fused optimizers and losses; larger
        batches; no .item() and no Python loops over tensors in the step.
    """
    found = traced(capsule)
    bound = {rank: each for rank, each in found.items() if "launch" in each.bottlenecks}
    if not bound:
        return
    if all(each.stacks for each in bound.values()):
        raise NotJudged("a trace without stacks (with_stack=False): recording them slows the host that launches")
    worst = max((each for each in bound.values() if not each.stacks), key=lambda each: each.share("idle_gaps_ms"))
    steps = len(worst.steps)
    yield Finding(
        kind=kind(capsule),
        title="The host launches kernels too slowly",
        summary=(
            f"{worst.share('idle_gaps_ms'):.0%} of the time of {worst.where_from()} the device idles in short gaps "
            f"between kernels: {worst.kernels / steps:,.0f} of them a step, {worst.kernel_us:.1f} µs each."
        ),
        where=Where(step=worst.steps[0], rank=worst.rank),
        evidence=(
            Evidence(
                name="idle between kernels",
                value=round(worst.share("idle_gaps_ms"), 4),
                expected=f"< {T.GAPS}",
                unit="of the step",
            ),
            Evidence(name="kernels a step", value=round(worst.kernels / steps), expected=f"< {T.GAP_KERNELS}"),
            Evidence(name="mean kernel", value=round(worst.kernel_us, 2), expected=f"> {T.SHORT_KERNEL:g}", unit="µs"),
            *worst.evidence(),
            *coverage(capsule, found),
        ),
        cause="kernels are shorter than the host takes to launch the next one",
        next=("a larger batch: does a step take equally long?",),
        fix=("CUDA graphs or torch.compile, fused optimizer, larger batches",),
    )


@rule("performance/compute-bound", stage="runtime", kind="hygiene", severity="info", needs=_NEEDS)
def compute_bound(capsule: Capsule) -> Iterator[Finding]:
    """The device computes nearly all the time: which operation takes most of it.

    What it checks:
        In traces of the profiler: the share of the judged steps in which a kernel other than communication runs, and
        the operations with the longest time.

    Why it matters:
        It is the healthy state of a job. Only fewer or cheaper operations make it faster from here.

    How it decides:
        Computation takes 80 % of the time or more on the traced rank that computes least.

    Looks like it but is not:
        A device that is busy with kernels that hardly use it: this says how long, not how well, it computes.

    What to try next:
        The shapes of the longest operation, beside the device's peak.

    Fix:
        A lower precision for matrix products, fused kernels (attention, normalisation, optimizer), fewer recomputed
        activations where memory allows.
    """
    found = traced(capsule)
    least = min(found.values(), key=lambda each: each.share("compute_ms"))
    if "compute" not in least.bottlenecks:
        return
    name = next(iter(least.top), "")
    spent = least.top[name][0] / len(least.steps) if name else 0.0
    longest = f" Longest: {name[: T.SIGNS]}, {spent:.3g} ms a step of {least.window / len(least.steps):.3g} ms."
    longest = (
        "" if not name else longest if spent <= least.window / len(least.steps) else f"{longest[:-1]} (streams added)."
    )
    yield Finding(
        title="The device computes nearly all the time",
        summary=f"{least.share('compute_ms'):.0%} of the time of {least.where_from()} is computation.{longest}",
        where=Where(step=least.steps[0], rank=least.rank),
        evidence=(
            Evidence(
                name="computing",
                value=round(least.share("compute_ms"), 4),
                expected=f"≥ {T.COMPUTE}",
                unit="of the step",
            ),
            *hottest(least),
            *coverage(capsule, found),
        ),
        cause="computation bounds the step",
        next=("the shapes of the longest operation beside the device's peak",),
        fix=("lower precision, fused kernels, less recomputation",),
    )


@rule("performance/no-bottleneck", stage="runtime", kind="hygiene", severity="info", needs=_NEEDS)
def no_bottleneck(capsule: Capsule) -> Iterator[Finding]:
    """No single cause bounds the traced steps.

    What it checks:
        In traces of the profiler: whether input, communication, launches, idling or computation takes so much of the
        judged steps that a rule of this family speaks.

    Why it matters:
        It is an answer: looking for one cause in these steps is a waste of time.

    How it decides:
        None of the shares reaches its threshold on any traced rank.

    Looks like it but is not:
        Steps that were not traced, or ranks: a stall that comes every thousand steps is seldom in a trace of three.

    What to try next:
        Where the job is slow at times only: the curves of step_time and throughput over the whole run.

    Fix:
        Nothing in particular; the shares show where little is left to win.
    """
    found = traced(capsule)
    named: set[Bottleneck] = {each for one in found.values() for each in one.bottlenecks}
    if named:
        return
    worst = max(found.values(), key=lambda each: each.share("idle_ms"))
    yield Finding(
        title="No bottleneck in the traced steps",
        summary=(
            f"In {worst.where_from()} the device computes {worst.share('compute_ms'):.0%} of the time and idles "
            f"{worst.share('idle_ms'):.0%}; no cause takes enough of it to be named."
        ),
        where=Where(step=worst.steps[0], rank=worst.rank),
        evidence=(*worst.evidence(), *hottest(worst), *coverage(capsule, found)),
        cause="time goes to several things, none of them large",
        next=("step_time over the whole run, where the job is slow at times only",),
    )
