"""The slow rank that the others wait for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from ..series import curve, spread
from . import thresholds as T
from .layout import Layout, hosts, layout
from .timing import ARRIVALS, INPUTS, THROUGHPUT, Timing, last_arrivals, steady_lag, timings
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/straggler",
    stage="distributed",
    severity="warning",
    needs=(
        "scalars.communication_time|scalars.step_time|scalars.data_time|scalars.estimated_throughput"
        "|scalars.round_trip_time|records.ranks.compute_ms|records.ranks.communication_ms|records.profile"
        "|records.collectives.t_created",
    ),
    cases=("more-gpus-slower",),
)
def straggler(capsule: Capsule) -> Iterator[Finding]:
    """One rank is slower than the others, which wait for it at every step.

    What it checks:
        The time that each rank spends inside collectives and outside of them: of every step, of traces, as means a
        rank, or from the creation and completion of the calls themselves.

    Why it matters:
        A synchronous job runs at the pace of its slowest rank. The steps of all ranks take equally long, and the ranks
        with the longest time in communication are the ones that wait: the slow one is the rank that hardly waits.

    How it decides:
        A rank's own time is the step without its collectives. Relative speed is the median own time of the others of
        the same pipeline stage over that of the rank: below 0.7, in the median over the steps after the warm-up and in
        at least 60 % of them, while it costs 10 % of the step and 5 ms or more; waiting for input is judged by itself,
        too, from 20 % of the step on. Three steps are enough where the times of the others are steady; twelve, and
        slowness in 80 % of them, where they scatter by a quarter of their size; or fewer where the rank takes three
        times as long, and 100 ms longer, at each as any other at any, and chance would have it so in less than 1 of
        1,000 jobs. The share of calls to which it came last is shown beside the 95th percentile of ranks that take
        turns. Info where a large loss moves from rank to rank: that is work of unequal length, no slow rank.
        Undetermined where a rank only queues its calls after all others: its host may run less far ahead, and no device
        wait. Where fewer steps are on record than the scatter asks for, the rule is skipped.

    Looks like it but is not:
        Ranks that wait: they show the longest times in collectives. Warm-up, one slow step for a checkpoint or an
        evaluation on rank 0; stages of a pipeline with different work; clocks that differ; the rank that reads the data
        for its tensor-parallel peers.

    What to try next:
        Swap the node of the rank with a spare: the slowness moves with the node (hardware) or stays with the rank
        (data, code). Clocks, temperature and other processes of the device; time of the loader alone.

    Fix:
        Replace or repair the device; take logging, checkpoints and evaluation off the rank's critical path; more
        loader workers, or data near the node.
    """
    where = layout(capsule)
    looked = queued = False
    wanted = 0
    taking_turns: Finding | None = None
    for timing in timings(capsule):
        looked, queued = True, queued or timing.source == ARRIVALS
        slow, more = _slow(timing, where)
        wanted = max(wanted, more)
        if slow is not None:
            yield _finding(capsule, timing, slow)
            return
        taking_turns = taking_turns or _turns(timing, where)
    if not looked:
        raise NotCaptured("times of at least two ranks")
    if taking_turns is not None:
        yield taking_turns
    elif queued and (lag := steady_lag(capsule)) and lag[1] >= max(T.LAG_SECONDS, T.LOST_SHARE * lag[2]):
        yield _lagging(*lag)
    elif wanted:
        raise NotJudged(f"{wanted} steps behind the warm-up: a rank looks slow, and the times of the others scatter")


@dataclass(frozen=True)
class _Slow:
    """A rank, its speed beside the others, and what it costs a step (seconds)."""

    ranks: list[int]
    speed: float
    own: float
    others: float
    lost: float
    whole: float
    share: float
    first: int
    pieces: int
    inputs: bool


def _pieces(timing: Timing) -> list[int]:
    """Steps to judge: without the warm-up."""
    steps = sorted(timing.own)
    skip = min(T.WARM_UP_STEPS, len(steps) // 3)
    return steps[skip : skip + T.STEPS_READ]


def _peers(ranks: Sequence[int], where: Layout | None) -> list[list[int]]:
    """Ranks with the same work."""
    by_stage: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        by_stage[where.stage(rank) if where is not None else 0].append(rank)
    return [each for each in by_stage.values() if len(each) > 1]


def _losses(timing: Timing, where: Layout | None) -> dict[int, dict[int, tuple[float, float]]]:
    """Rank → piece → (own time, that of its peers), in seconds."""
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for piece in _pieces(timing):
        own = timing.own[piece]
        for peers in _peers(sorted(own), where):
            values = np.array([own[rank] for rank in peers], np.float64)
            for rank, mine, others in zip(peers, values.tolist(), _medians_of_others(values).tolist(), strict=True):
                found[rank][piece] = (mine, others)
    return found


def _medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[N] of float64[N ≥ 2]: for each value the median of all but it, from one sorting."""
    order = np.argsort(values)
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    ordered, middle = values[order], ((len(values) - 2) // 2, (len(values) - 1) // 2)
    low, high = (ordered[at + (at >= place)] for at in middle)
    return (low + high) / 2


def _slow(timing: Timing, where: Layout | None) -> tuple[_Slow | None, int]:
    """The ranks that are slow at most steps, with the numbers of the slowest; and steps that it would take, else 0."""
    losses = _losses(timing, where)
    pieces = len(_pieces(timing))
    alone = len(timing.own) == 1 and not timing.steps  # a mean a rank
    found: list[_Slow] = []
    wanted = 0
    for rank, each in losses.items():
        most = max(pieces, len(each))
        slow = _judge(timing, rank, each, T.PERSISTENT * most)
        if slow is None:  # as nearly all of a thousand ranks
            continue
        noise = _noise(losses, rank)
        needed = min(T.NOISY_PIECES, T.FEWEST_PIECES + int(T.PIECES_PER_NOISE * noise))
        if noise > T.NOISE:
            slow = _judge(timing, rank, each, T.PERSISTENT_IN_NOISE * most)
        if slow is not None and not alone and pieces < needed and not _apart(losses, rank):
            wanted = max(wanted, needed)
            continue
        # A rank that reads for its peers is late with its input by design.
        if slow is not None and not (
            slow.inputs and where is not None and (where.has("tensor") or where.has("context"))
        ):
            found.append(slow)
    if not found or len(found) > max(1, len(losses) // 2):  # where most are slow, there is no norm
        return None, wanted
    found.sort(key=lambda each: each.speed)
    return replace(found[0], ranks=[each.ranks[0] for each in found]), 0


def _noise(losses: Mapping[int, Mapping[int, tuple[float, float]]], rank: int) -> float:
    """Scatter of the other ranks' own times over the steps, as a share of their median."""
    values = np.array([own for other, each in losses.items() if other != rank for own, _ in each.values()])
    median, deviation = spread(values)
    return deviation / median if median > 0 else T.NOISY_PIECES


def _apart(losses: Mapping[int, Mapping[int, tuple[float, float]]], rank: int) -> bool:
    """Whether a rank took several times as long at each step as any other at any, which no scatter brings about.

    Steps are not independent: another process on its core holds a rank up for many of them, and halves its speed.
    """
    mine = [own for own, _ in losses[rank].values()]
    theirs = [own for other, each in losses.items() if other != rank for own, _ in each.values()]
    orders = math.comb(len(mine) + len(theirs), len(mine))
    longest = max(theirs, default=math.inf)
    return min(mine) > max(T.APART * longest, T.APART_SECONDS + longest) and len(losses) <= T.BY_LUCK * orders


def _judge(timing: Timing, rank: int, pieces: Mapping[int, tuple[float, float]], most: float) -> _Slow | None:
    """Whether one rank is slow in so many pieces: its own times beside its peers', piece by piece."""
    whole = float(np.median([timing.whole[piece] for piece in pieces]))
    own, others = np.array(list(pieces.values())).T
    speeds = np.array([theirs / mine if mine > 0 else math.inf for mine, theirs in pieces.values()])
    speed, cost = float(np.median(speeds)), float(np.median(own - others))
    least = max(T.LOST_SECONDS, timing.share * whole)
    slow = (speeds < T.SLOW) & (own - others >= least)
    # Where only extremes are reported, a rank has no point at the steps at which it was none.
    if slow.sum() < most or speed >= T.SLOW or cost < least:
        return None
    waits: list[float] = []
    for piece in pieces:
        data = timing.data.get(piece, {})
        peers = [value for other, value in data.items() if other != rank]
        if rank in data and peers:
            waits.append(data[rank] - float(np.median(peers)))
    return _Slow(
        ranks=[rank],
        speed=speed,
        own=float(np.median(own)),
        others=float(np.median(others)),
        lost=cost,
        whole=whole,
        share=cost / whole if whole > 0 else 0.0,
        first=next(piece for piece, is_slow in zip(pieces, slow, strict=True) if is_slow),
        pieces=len(pieces),
        inputs=bool(waits) and float(np.median(waits)) >= T.EXPLAINED * cost,
    )


def _turns(timing: Timing, where: Layout | None) -> Finding | None:
    """A large loss at most steps, by another rank each time."""
    losses = _losses(timing, where)
    if not losses or not timing.waited or len(_pieces(timing)) < T.TURNS:
        return None
    worst: Counter[int] = Counter()
    shares: list[float] = []
    for piece in _pieces(timing):
        lost = {rank: each[piece][0] - each[piece][1] for rank, each in losses.items() if piece in each}
        if not lost or timing.whole[piece] < T.TURNS_SECONDS:
            continue
        rank = max(lost, key=lambda each: lost[each])
        worst[rank] += 1
        shares.append(lost[rank] / timing.whole[piece])
    if len(shares) < T.TURNS or float(np.median(shares)) < T.TURNS_SHARE or max(worst.values()) > len(shares) / 2:
        return None
    share = float(np.median(shares))
    return Finding(
        severity="info",
        kind="hygiene",
        title="Ranks take turns at being slow",
        summary=(
            f"In the median step {share:.0%} is lost waiting for the slowest rank, and it is another one each time: "
            f"{len(worst)} ranks in {len(shares)} steps."
        ),
        evidence=(
            Evidence(name="share of the step lost", value=share, expected=f"< {T.TURNS_SHARE:g}", note=timing.source),
            Evidence(
                name="steps of the most frequent rank", value=max(worst.values()), expected=f"≤ {len(shares) / 2:g}"
            ),
        ),
        cause="the ranks' work differs from step to step, as with rows of unequal length",
        next=("compare tokens a rank and step with the time of the step",),
        fix=("batches of equal token counts, or rows sorted by length across the ranks",),
    )


def _finding(capsule: Capsule, timing: Timing, slow: _Slow) -> Finding:
    rank = slow.ranks[0]
    host = hosts(capsule).get(rank)
    who = f"Rank {rank}{f' on {host}' if host else ''}"
    of = "of a step" if timing.steps or slow.pieces == 1 else "of the time between its calls"
    if timing.source == INPUTS:
        words = f"waits {_ms(slow.own)} for its input, the others {_ms(slow.others)}: {slow.share:.0%} {of}"
    elif timing.source == THROUGHPUT:
        words = f"runs at {slow.speed:.2f} of the speed of the others and costs {slow.share:.0%} {of}"
    else:
        own = f"{_ms(slow.own)} of its own {'waiting for its input' if slow.inputs else 'outside collectives'}"
        words = f"runs at {slow.speed:.2f} of the speed of the others ({own}, the others {_ms(slow.others)}) and costs "
        words += f"{_ms(slow.lost)}, {slow.share:.0%} {of}"
    if slow.ranks[1:]:
        words += f"; {named_ranks(slow.ranks[1:])} are slow, too"
    if slow.inputs:
        cause = "its input comes late, or other work keeps it between two steps (logging, saving)"
        first, fix = "time the loader of this rank alone", "more loader workers, or data near the node"
    else:
        cause = "this rank computes more slowly"
        first = "swap the rank to a spare node and see whether the slowness moves"
        fix = "replace or repair the device, or take the extra work off this rank"
    return Finding(
        confidence="likely",
        title="A rank is slower than the others",
        summary=f"{who} {words}.",
        where=Where(step=slow.first if timing.steps else None, rank=rank),
        evidence=tuple(_numbers(capsule, timing, slow)),
        cause=cause,
        next=(first, "other processes, clocks and temperature of the device"),
        fix=(fix,),
    )


def _numbers(capsule: Capsule, timing: Timing, slow: _Slow) -> Iterator[Evidence]:
    rank = slow.ranks[0]
    which = f"rank {rank}"
    note = f"{which}; {timing.source}"
    if timing.source != INPUTS:
        yield Evidence(name="relative speed", value=slow.speed, expected=f"≥ {T.SLOW:g}", note=note)
    if timing.source != THROUGHPUT:
        yield Evidence(name="own time", value=slow.own, expected=slow.others, unit="s", note=note)
    waits = _median(timing.waited, rank)
    others = [_median(timing.waited, each) for each in _ranks(timing) if each not in slow.ranks]
    known = [each for each in others if each is not None]
    if waits is not None and known:
        least = f"{which}; the least of all is that of the slow rank"
        yield Evidence(name="time in collectives", value=waits, expected=float(np.median(known)), unit="s", note=least)
    yield Evidence(name="share of the step lost", value=slow.share, expected=f"< {timing.share:g}")
    last, calls = last_arrivals(capsule)
    if calls and rank in last:
        turns = f"≤ {_percentile_of_turns(calls, len(last)):.2f}"
        share = last[rank] / calls
        yield Evidence(name="share of calls it came to last", value=share, expected=turns, note=f"{calls} calls")
    yield from _device(capsule, rank)


def _lagging(rank: int, lag: float, between: float, calls: int) -> Finding:
    """A rank whose calls are queued later than all others': slow, or its host's thread is only less far ahead."""
    return Finding(
        confidence="undetermined",
        title="A rank comes last to nearly every collective",
        summary=(
            f"Rank {rank} makes its calls {_ms(lag)} after the others, in nearly all of {calls} calls, {_ms(between)} "
            "apart. Whether their devices wait for it, or only its host runs less far ahead, the calls do not show."
        ),
        where=Where(rank=rank),
        evidence=(
            Evidence(name="distance from the others", value=lag, expected=f"< {T.LAG_SECONDS:g}", unit="s"),
            Evidence(name="time between calls", value=between, unit="s"),
            Evidence(name="calls", value=calls),
        ),
        next=("a trace of this rank and of another: time inside the collectives' kernels decides",),
    )


def _device(capsule: Capsule, rank: int) -> list[Evidence]:
    """Temperature, power, clock and load of the slow device beside the others', where they were logged."""
    found: list[Evidence] = []
    for name, unit in (("gpu_temperature", "°C"), ("gpu_power", "W"), ("gpu_clock", "MHz"), ("gpu_utilization", "")):
        ranks = {key.rank for key in capsule.scalar_keys() if key.name == name and key.side is None}
        values = {each: curve(capsule, name, each).finite().value for each in ranks}
        medians = {each: float(np.median(value)) for each, value in values.items() if value.size}
        others = [value for each, value in medians.items() if each != rank]
        if rank in medians and others:
            expected = float(np.median(others))
            found.append(Evidence(name=name, value=medians[rank], expected=expected, unit=unit, note=f"rank {rank}"))
    return found


def _percentile_of_turns(calls: int, ranks: int) -> float:
    """95th percentile of the share of last arrivals of one of ``ranks`` that take turns, normal approximation."""
    share = 1 / ranks
    return min(1.0, share + 1.645 * math.sqrt(share * (1 - share) / calls))


def _ranks(timing: Timing) -> list[int]:
    return sorted({rank for each in timing.own.values() for rank in each})


def _median(values: Mapping[int, Mapping[int, float]], rank: int) -> float | None:
    listed = [each[rank] for each in values.values() if rank in each]
    return float(np.median(listed)) if listed else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
