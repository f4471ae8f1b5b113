"""Where the memory goes: the terms of the peak, measured beside computed. A ledger, not a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..finding import Evidence, Finding, Where
from ..reference.memory_model import Estimate, estimate
from ..registry import rule
from ..series import curve
from .allocator import of_one_process, place
from .configuration import Plan, plan
from .oom import failures
from .records import capacities, gib, mappings, positive, whole
from .rising import ALLOCATOR

if TYPE_CHECKING:
    from ...capsules import Capsule

#: What a peak is made of; those that the memory model computes come first.
COMPUTED: Final = ("weights", "gradients", "optimizer", "activations", "communication", "transient")
TERMS: Final = (*COMPUTED, "kv_cache", "fragmentation")
#: Curves of which the highest point is the peak, and what they count.
_SCALARS: Final = {"memory_peak": "allocated", "memory_reserved": "reserved", "memory_allocated": "allocated"}
#: Stacks that are named as those that hold most.
_MOST_NAMED: Final = 3
#: Share of the peak that is not worth a sentence.
_SMALL: Final = 0.001


@dataclass
class _Measured:
    """What was measured: bytes by term, the peak, what it counts, and where it was; what the allocator counted."""

    terms: dict[str, int] = field(default_factory=dict[str, int])
    peak: int | None = None
    counts: str = "allocated"
    retries: int = 0
    failed: int = 0
    holders: tuple[tuple[int, int, str], ...] = ()  # bytes, blocks, place of the stacks that hold most
    reserved: int | None = None
    capacity: int | None = None
    phase: str | None = None
    step: int | None = None
    rank: int | None = None


@rule(
    "memory/ledger",
    stage="runtime",
    kind="hygiene",
    severity="info",
    needs=(
        "records.memory|scalars.memory_peak|scalars.memory_allocated|scalars.memory_reserved|scalars.memory_device_used",
    ),
    cases=("out-of-memory-after-hours",),
    report=True,
)
def ledger(capsule: Capsule) -> Iterator[Finding]:
    """Where the memory of the device goes at the peak.

    What it checks:
        The memory records of the peak (from the recorder, a snapshot, a summary), the curves of memory, and what the
        configuration in the manifest needs by arithmetic.
    Why it matters:
        Weights, states, activations and fragmentation are cured by different things. What none of the terms explains
        is where a leak, a forgotten graph or another library hides.
    How it decides:
        It only reports: each term in bytes as measured and, beside it, as computed from the configuration
        (Korthikanti et al. 2022 and Rajbhandari et al. 2020, within 10 % of what torch allocates for a GPT); the phase
        of the peak; the largest term that nothing explains; the stacks that hold most. A peak alone, and the use of
        the device alone, say nothing of their parts and are undetermined.
    Looks like it but is not:
        A peak in the first steps, while kernels are tried out; memory that the allocator keeps and nobody uses.
    What to try next:
        Where a term is unexplained, write an allocator snapshot at the peak and look at the stacks that hold it.
    Fix:
        None: this is a ledger.
    """
    planned = plan(capsule)
    estimates = [estimate(shape, job) for shape, job in planned.readings]
    measured = _measured(capsule)
    if measured.peak is None and not measured.terms:
        yield _of_the_device(_highest(capsule, "memory_device_used"), estimates)
        return
    known = {**_middle(estimates), **measured.terms} if estimates else dict(measured.terms)
    total = max(measured.peak or 0, measured.reserved or 0) or None
    unexplained = (
        None
        if measured.peak is None
        else measured.peak - sum(size for name, size in known.items() if name != "fragmentation")
    )
    devices = of_one_process(capsule)  # their numbers are no ranks
    yield Finding(
        confidence="confirmed" if _parted(measured) else "likely" if estimates else "undetermined",
        title=_title(measured, estimates),
        summary=_summary(measured, known, unexplained, estimates, planned)
        + (f" That is device {measured.rank}." if devices else ""),
        where=Where(step=measured.step, rank=None if devices else measured.rank),
        evidence=(
            *_rows(measured, estimates),
            *_total_rows(measured, total, unexplained, estimates),
        ),
        cause="the terms of the peak" if _parted(measured) or estimates else None,
        next=_next(measured, estimates, unexplained),
    )


def _parted(measured: _Measured) -> bool:
    """Whether anything was measured of what the peak is made of; what is unused is no part of it."""
    return any(name != "fragmentation" for name in measured.terms)


def _highest(capsule: Capsule, name: str) -> tuple[float, int, int] | None:
    """(value, step, rank) of the highest point of a curve over all ranks."""
    found: list[tuple[float, int, int]] = []
    for key in capsule.scalar_keys():
        if key.name != name or key.side == ALLOCATOR:
            continue
        if len(points := curve(capsule, name, key.rank, key.side).finite()):
            at = int(points.value.argmax())
            found.append((float(points.value[at]), int(points.step[at]), key.rank))
    return max(found, key=lambda each: each[0], default=None)


def _holders(capsule: Capsule, rank: int | None) -> Iterator[tuple[int, int, str]]:
    for record in capsule.records("allocations", rank=rank):
        size = whole(record.get("size"))
        if size and record.get("action") == "live":
            frames = [
                (str(each.get("name") or ""), str(each.get("file") or ""), whole(each.get("line")) or 0)
                for each in mappings(record.get("frames"))
            ]
            if frames:
                yield size, whole(record.get("count")) or 1, place(frames)


def _measured(capsule: Capsule) -> _Measured:
    """The ledger of the highest record, completed by other records of its step, else by the curves."""
    records = list(capsule.records("memory"))
    stated = (each.capacity for each in failures(capsule) if each.capacity is not None)
    found = _Measured(capacity=min(capacities(capsule).values(), default=min(stated, default=None)))
    best = max(records, key=_height, default=None)
    if best is not None:
        found.phase = str(best["phase"]) if best.get("phase") else None
        found.step, found.rank = whole(best.get("step")), whole(best.get("rank"))
        same = [
            each for each in records if (each.get("step"), each.get("rank")) == (best.get("step"), best.get("rank"))
        ]
        for name in TERMS:
            size = whole(best.get(name))
            others = (each for other in same if (each := whole(other.get(name))) is not None)
            size = max(others, default=None) if size is None and name != "fragmentation" else size
            if size is not None:
                found.terms[name] = size
        found.peak = positive(best.get("peak")) or positive(best.get("allocated"))
        found.reserved = max((each for one in same if (each := positive(one.get("reserved")))), default=None)
        found.capacity = positive(best.get("capacity")) or found.capacity
        found.retries = whole(best.get("retries")) or 0
        found.failed = whole(best.get("ooms")) or 0
        allocated = whole(best.get("allocated"))
        if found.peak is not None and allocated is not None and allocated < found.peak:
            # What is unused now says nothing of the peak, which was earlier.
            found.terms.pop("fragmentation", None)
        found.holders = tuple(sorted(_holders(capsule, found.rank), reverse=True)[:_MOST_NAMED])
    if found.peak is None:
        peaks = ((name, highest) for name in _SCALARS if (highest := _highest(capsule, name)) is not None)
        for name, (value, step, rank) in list(peaks)[:1]:
            found.peak, found.counts = int(max(0.0, value)), _SCALARS[name]
            found.step, found.rank = (step, rank) if found.step is None else (found.step, found.rank)
    if found.reserved is not None and found.peak is not None and "fragmentation" not in found.terms:
        found.terms["fragmentation"] = max(0, found.reserved - found.peak)
    return found


def _height(record: Mapping[str, Any]) -> int:
    parts = sum(whole(record.get(name)) or 0 for name in TERMS)
    return positive(record.get("peak")) or positive(record.get("allocated")) or parts


def _middle(estimates: Sequence[Estimate]) -> dict[str, int]:
    return {name: round((low + high) / 2) for name, (low, high) in _ranges(estimates).items()}


def _ranges(estimates: Sequence[Estimate]) -> dict[str, tuple[float, float]]:
    values = {name: [float(getattr(each, name)) for each in estimates] for name in COMPUTED}
    return {name: (min(each), max(each)) for name, each in values.items() if each}


def _rows(measured: _Measured, estimates: Sequence[Estimate]) -> Iterator[Evidence]:
    computed = _ranges(estimates)
    for name in TERMS:
        value, expected = measured.terms.get(name), computed.get(name)
        if value is None and expected is None:
            continue
        words = None if expected is None else _between(*expected)
        note = "measured" if value is not None else "computed"
        shown = value if value is not None else None if expected is None else round(expected[1])
        yield Evidence(name=name, value=shown, expected=words if value is not None else None, unit="B", note=note)


def _total_rows(
    measured: _Measured, total: int | None, unexplained: int | None, estimates: Sequence[Estimate]
) -> Iterator[Evidence]:
    peaks = [each.peak for each in estimates]
    expected = _between(min(peaks), max(peaks)) if peaks else None
    if measured.peak is not None:
        note = f"in {measured.phase}" if measured.phase else ""
        yield Evidence(name="peak", value=measured.peak, expected=expected, unit="B", note=note)
    elif peaks:
        yield Evidence(name="peak", value=round(max(peaks)), unit="B", note=f"computed, in {estimates[0].phase}")
    if unexplained is not None:
        yield Evidence(name="unexplained", value=unexplained, expected=0, unit="B")
    if measured.reserved is not None:
        yield Evidence(name="reserved", value=measured.reserved, unit="B")
    if measured.capacity is not None:
        yield Evidence(name="capacity", value=measured.capacity, unit="B")
    if measured.failed:
        yield Evidence(name="failed allocations", value=measured.failed, expected=0)


def _title(measured: _Measured, estimates: Sequence[Estimate]) -> str:
    peak = measured.peak if measured.peak is not None else max((each.peak for each in estimates), default=None)
    if peak is None:
        return "Memory, as far as it was measured"
    return f"Memory at the peak: {gib(peak)}{_share(peak, measured.capacity)}"


def _share(size: float, capacity: int | None) -> str:
    return f", {size / capacity:.1%} of the device" if capacity else ""


def _summary(
    measured: _Measured, known: Mapping[str, int], unexplained: int | None, estimates: Sequence[Estimate], planned: Plan
) -> str:
    order = sorted(((name, size) for name, size in known.items() if size), key=lambda each: -each[1])
    parts = [f"{name.replace('_', ' ')} {gib(size)}" for name, size in order if name != "fragmentation"]
    where = f" in {measured.phase}" if measured.phase else f" in {estimates[0].phase}, computed" if estimates else ""
    if parts:
        words = f"The peak{where}: {', '.join(parts)}."
        if unexplained is not None and abs(unexplained) > _SMALL * (measured.peak or 0):
            words += f" {gib(abs(unexplained))} {'are not explained' if unexplained > 0 else 'too much is computed'}."
    else:
        words = f"At most {gib(measured.peak)} were {measured.counts}{where}; nothing tells what they are made of."
    if unused := measured.terms.get("fragmentation"):
        words += f" {gib(unused)} more are held unused."
    if measured.retries:
        words += f" The allocator had to give its cache back {measured.retries:,} times."
    if measured.failed:
        times = "once" if measured.failed == 1 else f"{measured.failed:,} times"
        words += f" It ran out of memory {times}."
    if measured.holders:
        held = (
            f"{gib(size)} from {line} ({count:,} block{'s' if count > 1 else ''})"
            for size, count, line in measured.holders
        )
        words += f" Largest: {'; '.join(held)}."
    if estimates and planned.open:
        words += f" Open in the configuration: {', '.join(planned.open)}."
    elif planned.beyond:
        words += f" Nothing is computed: {planned.beyond}."
    return words


def _next(measured: _Measured, estimates: Sequence[Estimate], unexplained: int | None) -> tuple[str, ...]:
    """The one step that tells most."""
    large = measured.peak is None or (unexplained is not None and unexplained > 0.1 * measured.peak)
    if measured.holders:
        return ("look at the stacks that hold most: what do they keep until the peak?",) if large else ()
    if not estimates and not _parted(measured):
        return (_RECORD,)
    return ("write an allocator snapshot at the peak and look at the stacks that hold most",) if large else ()


#: What tells the parts of a peak, where nothing does.
_RECORD: Final = (
    "record some steps with llmconsole's Recorder, or write an allocator snapshot at the peak: "
    "both tell weights, states and activations apart"
)


def _of_the_device(highest: tuple[float, int, int] | None, estimates: Sequence[Estimate]) -> Finding:
    peaks = [each.peak for each in estimates]
    used, _, rank = highest if highest is not None else (None, 0, None)
    return Finding(
        confidence="undetermined",
        title="Memory: no use of it is on record" if used is None else f"Memory of the device: {gib(used)} at most",
        summary="What the job allocated is not on record: an allocator snapshot tells its parts."
        if used is None
        else "Only the use of the whole device is on record: an allocator snapshot tells its parts apart.",
        where=Where(rank=rank),
        evidence=(
            Evidence(
                name="memory_device_used",
                value=None if used is None else round(used),
                expected=_between(min(peaks), max(peaks)) if peaks else None,
                unit="B",
                note="highest",
            ),
            *_rows(_Measured(), estimates),
        ),
        next=(_RECORD,),
    )


def _between(low: float, high: float) -> str | int:
    """A computed number, or the range of the readings that the configuration admits."""
    return round(low) if round(low) == round(high) else f"{low:,.0f} … {high:,.0f}"
