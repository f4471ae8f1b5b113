"""How long each rank worked by itself and how long it waited in collectives, from whatever was recorded.

All ranks leave a collective together, so their steps take equally long: what tells the slow one is that it hardly
waits. Time of a rank's own is what its collectives leave of the step, on that rank's clock alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ..series import curve
from . import thresholds as T
from .shared_calls import LONGEST, shared_calls, within

if TYPE_CHECKING:
    from ...capsules import Capsule

ByRank = dict[int, float]

#: Sources whose numbers mean something else than the own time in seconds, or are less sure.
ARRIVALS, INPUTS, THROUGHPUT = "arrivals at the same calls", "data_time of each step", "reported throughput"


@dataclass(frozen=True)
class Timing:
    """Seconds of each rank, piece by piece; a piece is a step, or the calls between two others.

    ``own`` is the time outside collectives, ``waited`` inside them, ``whole`` that of the slowest rank; ``data`` the
    waiting for input, where known. ``source`` says in words where the numbers are from. ``share`` is the least part of
    the whole that a rank must cost.
    """

    source: str
    own: Mapping[int, ByRank]
    whole: Mapping[int, float]
    waited: Mapping[int, ByRank] = field(default_factory=dict[int, ByRank])
    data: Mapping[int, ByRank] = field(default_factory=dict[int, ByRank])
    steps: bool = True
    share: float = T.LOST_SHARE


def timings(capsule: Capsule) -> Iterator[Timing]:
    """The most telling view of waiting that the evidence allows; where there is none, those of other times."""
    waiting = next(
        (found for each in (_scalars, _profiles, _summaries, _calls, _arrivals) if (found := each(capsule))), None
    )
    if waiting is not None:
        yield waiting  # coarser views of the same times would only add their noise
    for source in (_inputs,) if waiting is not None else (_inputs, _reported, _unsynchronised):
        found = source(capsule)
        if found is not None:
            yield found


def _series(capsule: Capsule, name: str) -> dict[int, dict[int, float]]:
    """Step → rank → finite value ≥ 0."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for rank in sorted({key.rank for key in capsule.scalar_keys() if key.name == name and key.side is None}):
        points = curve(capsule, name, rank).finite()
        for step, value in zip(points.step.tolist(), points.value.tolist(), strict=True):
            if 0 <= value < LONGEST:
                found[step][rank] = value
    return found


def _spent(capsule: Capsule) -> dict[int, ByRank]:
    """Step → rank → time of the whole step, waiting for input included.

    Some loops measure step_time without data_time, and then collectives between two steps fall into the latter. The
    sum is taken where collectives took longer than the step, and where it differs less from rank to rank: ranks that
    wait for each other take equally long over the whole.
    """
    spent, data = _series(capsule, "step_time"), _series(capsule, "data_time")
    waited = _series(capsule, "communication_time")
    both: dict[int, ByRank] = {}
    for step, each in spent.items():
        if data.get(step, {}).keys() >= each.keys():
            both[step] = {rank: value + data[step][rank] for rank, value in each.items()}
    apart = [
        (max(whole.values()) - min(whole.values()), max(alone.values()) - min(alone.values()))
        for step, whole in both.items()
        if len(alone := spent[step]) > 1
    ]
    if not apart:
        return spent
    if any(waited.get(step, {}).get(rank, 0.0) > value for step, each in spent.items() for rank, value in each.items()):
        return both
    with_data, without = np.median(np.array(apart), axis=0)
    return both if with_data < without else spent


def _several(found: Mapping[int, ByRank]) -> dict[int, ByRank]:
    return {step: each for step, each in sorted(found.items()) if len(each) > 1}


def _scalars(capsule: Capsule) -> Timing | None:
    """Time in collectives of every step beside the time of the step."""
    waited, spent = _series(capsule, "communication_time"), _spent(capsule)
    own: dict[int, ByRank] = {}
    whole: dict[int, float] = {}
    for step, each in waited.items():
        both = {rank: spent[step][rank] - wait for rank, wait in each.items() if rank in spent.get(step, {})}
        if len(both) > 1:
            own[step] = {rank: max(0.0, value) for rank, value in both.items()}
            whole[step] = max(spent[step].values())
    if not own:
        return None
    return Timing("step_time − communication_time of each step", own, whole, waited, _series(capsule, "data_time"))


def _profiles(capsule: Capsule) -> Timing | None:
    """Traces of several ranks, step by step."""
    own: dict[int, ByRank] = defaultdict(dict)
    waited: dict[int, ByRank] = defaultdict(dict)
    data: dict[int, ByRank] = defaultdict(dict)
    whole: dict[int, float] = {}
    for record in capsule.records("profile"):
        step, rank = record.get("step"), record["rank"]
        window, communication = _ms(record, "window_ms"), _ms(record, "communication_ms")
        if isinstance(step, int) and window is not None and communication is not None:
            own[step][rank] = max(0.0, window - communication)
            waited[step][rank] = communication
            whole[step] = max(window, whole.get(step, 0.0))
            if (input_time := _ms(record, "data_ms")) is not None:
                data[step][rank] = input_time
    own = _several(own)
    return Timing("traces: window − communication of each step", own, whole, waited, data) if own else None


def _summaries(capsule: Capsule) -> Timing | None:
    """One mean a rank."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for record in (*capsule.records("profile"), *capsule.records("ranks")):
        for name in ("compute_ms", "communication_ms", "data_ms", "window_ms"):
            if (value := _ms(record, name)) is not None:
                rows[record["rank"]][name] = value
    communicating = {rank: each for rank, each in rows.items() if "communication_ms" in each}
    if len(communicating) > 1:
        parts = ("compute_ms", "communication_ms", "data_ms")
        whole = max(max(each.get("window_ms", 0.0), sum(each.get(p, 0.0) for p in parts)) for each in rows.values())
        waited = {rank: each["communication_ms"] for rank, each in communicating.items()}
        own = {rank: max(0.0, whole - wait) for rank, wait in waited.items()}
        source = "means a step: the step − communication"
    else:
        own = {rank: each["compute_ms"] for rank, each in rows.items() if "compute_ms" in each}
        waited, whole, source = {}, max(own.values(), default=0.0), "means a step: computation"
    if len(own) < 2 or whole <= 0:
        return None
    data = {rank: each["data_ms"] for rank, each in rows.items() if "data_ms" in each}
    return Timing(source, {0: own}, {0: whole}, {0: waited} if waited else {}, {0: data} if data else {}, steps=False)


def _calls(capsule: Capsule) -> Timing | None:
    """Between two calls of the whole group: the time that a rank was inside no call, on its own clock."""
    shared = shared_calls(capsule)
    ended = shared.ended[np.isfinite(shared.ended).all(axis=1)]
    if len(ended) < T.FEWEST_CALLS:
        return None
    ends = ended[:: max(1, len(ended) // T.PIECES)].T
    spent = np.maximum(0.0, np.diff(ends))
    inside = np.stack([within(shared.spans[rank], own) for rank, own in zip(shared.ranks, ends, strict=True)])
    waited = np.maximum(0.0, np.diff(inside))
    return Timing(
        "time inside collectives, on each rank's own clock",
        _by_piece(shared.ranks, np.maximum(0.0, spent - waited).T),
        dict(enumerate(spent.max(axis=0).tolist())),
        _by_piece(shared.ranks, waited.T),
        steps=False,
    )


def _by_piece(ranks: Sequence[int], seconds: Any) -> dict[int, ByRank]:
    """Piece → rank → seconds, of float64[pieces, ranks]."""
    return {piece: dict(zip(ranks, each, strict=True)) for piece, each in enumerate(seconds.tolist())}


def _arrivals(capsule: Capsule) -> Timing | None:
    """Where ends of calls are unknown: how long after the last arrival at one call a rank comes to the next."""
    shared = shared_calls(capsule)
    if len(shared) < T.FEWEST_CALLS or 2 * np.isfinite(shared.ended).sum() > shared.ended.size:
        return None
    times = on_one_clock(capsule, shared.ranks, shared.created)
    if not _blocking(capsule):  # calls are only queued: a steady lag of the host's thread delays nobody
        times = _without_lag(times)
    own: dict[int, ByRank] = {}
    whole: dict[int, float] = {}
    for piece in range(1, len(times)):
        begun = float(times[piece - 1].max())
        taken = np.maximum(0.0, times[piece] - begun)
        own[piece] = dict(zip(shared.ranks, taken.tolist(), strict=True))
        whole[piece] = float(taken.max())
    return Timing(ARRIVALS, own, whole, steps=False)


def on_one_clock(capsule: Capsule, ranks: Sequence[int], times: Any) -> Any:
    """Times of ranks (float64[N, R]) with their clocks' offsets taken out.

    Stated offsets count where they make the arrivals agree better, with the sign that does. Where hosts differ and
    nothing is stated, a rank's steady distance from the others is taken for its clock.
    """
    stated, one_host = _clocks(capsule, ranks)
    offsets = np.array([stated.get(rank, 0.0) for rank in ranks])
    if offsets.any():
        return min((times, times - offsets, times + offsets), key=lambda each: float(np.median(np.ptp(each, axis=1))))
    return times if one_host else _without_lag(times)


def _clocks(capsule: Capsule, ranks: Sequence[int]) -> tuple[dict[int, float], bool]:
    """Stated offsets by rank in seconds, and whether all ranks are known to run on one host."""
    stated: dict[int, float] = {}
    names: dict[int, str] = {}
    for record in capsule.records("ranks"):
        offset = record.get("clock_offset_s")
        if _is_time(offset):
            stated[record["rank"]] = float(offset)
        if record.get("host"):
            names[record["rank"]] = record["host"]
    return stated, len({names.get(rank) for rank in ranks}) == 1 and names.get(ranks[0]) is not None


def _without_lag(times: Any) -> Any:
    return times - np.quantile(times - np.median(times, axis=1, keepdims=True), T.CLOCK_QUANTILE, axis=0)


def _blocking(capsule: Capsule) -> bool:
    """Whether a call returns when it is done: back ends of the CPU, or calls recorded as such."""
    run = capsule.manifest.run
    if run is not None and run.backend and ("gloo" in run.backend.lower() or "mpi" in run.backend.lower()):
        return "nccl" not in run.backend.lower()
    flags, _ = capsule.columns("collectives").combinations("async_op")
    return bool(flags) and all(flag is False for (flag,) in flags)


def last_arrivals(capsule: Capsule) -> tuple[dict[int, int], int]:
    """How often each rank was the last to come to a call of its whole group, and the number of such calls.

    Nothing where the clocks cannot be compared.
    """
    shared = shared_calls(capsule)
    if len(shared) < T.FEWEST_CALLS or not any(_clocks(capsule, shared.ranks)):
        return {}, 0
    last = on_one_clock(capsule, shared.ranks, shared.created).argmax(axis=1)
    return dict(zip(shared.ranks, np.bincount(last, minlength=len(shared.ranks)).tolist(), strict=True)), len(shared)


def steady_lag(capsule: Capsule) -> tuple[int, float, float, int] | None:
    """The rank that comes last to nearly all calls of its group, though calls are only queued.

    Returns:
        The rank, its median distance from the others and the median distance of two calls in seconds, and the number
        of calls; None where there is no such rank, or the clocks cannot be compared.
    """
    shared = shared_calls(capsule)
    ranks = shared.ranks
    if len(shared) < T.FEWEST_LAGGING or not any(_clocks(capsule, ranks)):
        return None
    times = on_one_clock(capsule, ranks, shared.created)
    last = times.argmax(axis=1)
    at = int(np.bincount(last, minlength=len(ranks)).argmax())
    if float((last == at).mean()) < T.LAGGING:
        return None
    others = np.median(np.delete(times, at, axis=1), axis=1)
    return ranks[at], float(np.median(times[:, at] - others)), float(np.median(np.diff(times.max(axis=1)))), len(shared)


def _reported(capsule: Capsule) -> Timing | None:
    """Megatron's straggler lines: the ranks with the least and the most, as speed or as time."""
    speed = _several(_series(capsule, "estimated_throughput"))
    if speed:
        own = {step: {rank: 1 / value for rank, value in each.items() if value > 1e-9} for step, each in speed.items()}
        own = _several(own)
        if own:
            scale = {step: min(each.values()) for step, each in own.items()}
            # Only ratios mean something: as seconds, a step of one second on the fastest rank.
            own = {step: {rank: value / scale[step] for rank, value in each.items()} for step, each in own.items()}
            return Timing(THROUGHPUT, own, {step: max(each.values()) for step, each in own.items()})
    spent = _several(_series(capsule, "round_trip_time"))
    if not spent:
        return None
    return Timing("reported time of a step", spent, {step: max(each.values()) for step, each in spent.items()})


def _inputs(capsule: Capsule) -> Timing | None:
    """Waiting for input alone, which the scatter of the computation does not touch.

    A loop may count collectives between two steps as such; what a rank spent in collectives is then none of it.
    """
    data, spent = _series(capsule, "data_time"), _spent(capsule)
    waited = _series(capsule, "communication_time")
    own: dict[int, ByRank] = {}
    whole: dict[int, float] = {}
    for step, each in _several(data).items():
        longest = max(spent.get(step, {}).values(), default=0.0)
        if longest > 0:
            inside = waited.get(step, {})
            own[step] = {
                rank: min(value, max(0.0, spent[step].get(rank, longest) - inside.get(rank, 0.0)))
                for rank, value in each.items()
            }
            whole[step] = longest
    return Timing(INPUTS, own, whole, {}, own, share=T.LOST_TO_INPUT) if own else None


def _unsynchronised(capsule: Capsule) -> Timing | None:
    """Steps that end at different times: nothing made the ranks wait for each other inside them."""
    spent = _several(_series(capsule, "step_time"))
    if not spent:
        return None
    return Timing("step_time", spent, {step: max(each.values()) for step, each in spent.items()})


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LONGEST


def _ms(record: Mapping[str, Any], name: str) -> float | None:
    """Milliseconds of a record in seconds, None where they are absent or none."""
    value = record.get(name)
    return float(value) / 1000 if _is_time(value) and value >= 0 else None
