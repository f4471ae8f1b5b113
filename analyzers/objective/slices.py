"""Means that hide a part: a domain or a range of lengths that gets worse while the whole gets better."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from ..scores import BEYOND, Change, Track, chance, families, improved, tracks, worst_change
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """One sample with its loss at one step."""

    step: int
    key: str
    domain: str | None
    length: int | None
    loss: float


@dataclass(frozen=True)
class Shift:
    """Change of a mean loss between two points of the run: ``z`` is above 0 where it rose."""

    part: str
    before: float
    after: float
    z: float
    samples: int
    since: int


@rule(
    "objective/slice-regression",
    stage="objective",
    severity="warning",
    needs=("records.samples.loss|records.evaluations.slice|records.samples.domain",),
    explained_by=("numerics/eval-mode", "objective/template-drift", "data/mixture-shift"),
    cases=("general-ability-lost",),
)
def slice_regression(capsule: Capsule) -> Iterator[Finding]:
    """The mean improves while a domain or a range of lengths gets worse.

    What it checks:
        Losses of single samples by domain and by length (held-out ones where there are any, else those of training),
        and scores by slice, from an earlier point of the run to its end. And domains that are evaluated and not trained
        on.

    Why it matters:
        Decisions are made on the mean. The part that pays for it belongs to somebody.

    How it decides:
        The whole improves by 1 % (by 2 standard errors where the samples are others each time) and a part worsens by
        more than 3 % of its level, where noise alone would show so large a rise in any part at any point with a
        probability of at most 1 %. Held-out samples are compared with themselves. Of scores, 2 standard errors and 5 %.
        A domain that is a remark when absent makes up a share of the evaluation that training, by chance alone, misses
        in less than 1 % of cases.

    Looks like it but is not:
        A part that falls more slowly than the others; a part of few samples; a planned change of the mixture, after
        which training losses are those of other texts; a control set, which is left out of training on purpose.

    What to try next:
        Plot the parts instead of the mean; look at the part's share of the mixture over the same steps.

    Fix:
        More weight, or cleaner data, for the part that got worse; report it beside the mean from now on.
    """
    held, trained = _samples(capsule)
    scored = tracks(capsule)
    judged = False
    fallen = [change for change in _fallen_slices(scored) if change is not None]
    judged |= any(track.part is not None and len(track.scores) > 1 for track in scored)
    for seen, paired in ((held, True), (trained, False)):
        points = _held_out_points(seen) if paired else [] if _mixture_moves(capsule) else _blocks(seen)
        if len(points) > 1:
            judged = True
            if finding := _worse_part(points, paired):
                yield finding
                break
    if fallen:
        yield _fallen(fallen)
    absent = list(_absent_domain(capsule))
    if not judged and not absent and not _evaluated_domains(capsule):
        raise NotCaptured("samples of one part at two points of the run, or scores by slice of two checkpoints")
    yield from absent


# -- losses of samples


def _samples(capsule: Capsule) -> tuple[list[Seen], list[Seen]]:
    """Held-out and training samples with a finite loss, by step."""
    held: list[Seen] = []
    trained: list[Seen] = []
    for index, each in enumerate(capsule.records("samples")):
        step, loss = each.get("step"), each.get("loss")
        if step is None or not isinstance(loss, int | float) or not math.isfinite(loss):
            continue
        domain = str(each["domain"]) if each.get("domain") else None
        key = str(each.get("id") or each.get("sha256") or f"record {index}")
        seen = Seen(int(step), key, domain, each.get("length"), float(loss))
        if each.get("split") in (None, "train"):
            trained.append(seen)
        else:
            held.append(seen)
    return sorted(held, key=lambda each: each.step), sorted(trained, key=lambda each: each.step)


def _mixture_moves(capsule: Capsule) -> bool:
    moves = ("mixture_changed", "context_length_changed")
    return any(event.get("kind") in moves for event in capsule.records("events"))


def _held_out_points(seen: Sequence[Seen]) -> list[list[Seen]]:
    """The samples of each evaluation; where there are many, of as many evaluations in a row: one alone swings."""
    points = [list(each) for _, each in groupby(seen, key=lambda each: each.step)]
    if len(points) <= T.SLICE_POINTS:
        return points
    cuts = np.linspace(0, len(points), T.SLICE_BLOCKS + 1).round().astype(int)
    return [[each for point in points[start:end] for each in point] for start, end in pairwise(cuts)]


def _blocks(seen: Sequence[Seen]) -> list[list[Seen]]:
    """Training samples in a few stretches of steps with equally many samples each."""
    if len(seen) < 2 * T.SLICE_SAMPLES or len({each.step for each in seen}) < 2 * T.SLICE_BLOCKS:
        return []
    cuts = np.linspace(0, len(seen), T.SLICE_BLOCKS + 1).round().astype(int)
    return [list(seen[start:end]) for start, end in pairwise(cuts)]


def _parts(points: Sequence[Sequence[Seen]]) -> list[tuple[str, Callable[[Seen], bool]]]:
    """Names of the parts and what belongs to them: domains, and lengths between powers of two."""
    everything = [each for point in points for each in point]
    domains = Counter(each.domain for each in everything if each.domain is not None)
    parts: list[tuple[str, Callable[[Seen], bool]]] = []
    if len(domains) > 1:
        for name, _ in domains.most_common(T.MOST_SLICES):
            parts.append((f"domain {name}", lambda each, name=name: each.domain == name))
    octaves = Counter(each.length.bit_length() for each in everything if each.length)
    if len(octaves) > 1:
        for bits in sorted(octaves):
            words = f"lengths {1 << (bits - 1)} to {(1 << bits) - 1}"
            parts.append((words, lambda each, bits=bits: bool(each.length) and each.length.bit_length() == bits))
    return parts


def _worse_part(points: Sequence[Sequence[Seen]], paired: bool) -> Finding | None:
    """The part that rose most surely between some point and the last one, while the whole fell."""
    parts = _parts(points)
    last = points[-1]
    if not parts:
        return None
    comparisons = len(parts) * (len(points) - 1)
    worse: list[tuple[Shift, Shift]] = []
    for point in points[:-1]:
        sides = (point, last) if paired else (_levelled(point), _levelled(last))
        whole = _shift("all samples", *sides, paired)
        if whole is None or not _falls(whole, paired):
            continue
        for name, belongs in parts:
            shift = _shift(name, [s for s in point if belongs(s)], [s for s in last if belongs(s)], paired)
            if shift is None or shift.z <= BEYOND or chance(shift.z, comparisons) > T.SLICE_CHANCE:
                continue
            if shift.after - shift.before > T.SLICE_RISE * abs(shift.before):
                worse.append((shift, whole))
    if not worse:
        return None
    shift, whole = max(worse, key=lambda each: each[0].z)
    names = {each.part for each, _ in worse}
    kind = "held-out" if paired else "training"
    return Finding(
        title="The mean falls while a part of the data gets worse",
        summary=f"From step {shift.since} to {last[0].step} the {kind} loss falls from {whole.before:.4g} to "
        f"{whole.after:.4g}, while that of {shift.part} rises from {shift.before:.4g} to {shift.after:.4g}"
        + (f"; {len(names)} of {len(parts)} parts rise." if len(names) > 1 else "."),
        where=Where(step=shift.since),
        evidence=(
            Evidence(
                name=f"loss of {shift.part}",
                value=shift.after,
                expected=f"≤ {shift.before * (1 + T.SLICE_RISE):.4g}",
                unit="nats/token",
                note=f"{shift.z:+.1f} standard errors, {shift.samples} samples",
            ),
            Evidence(
                name="loss of all samples",
                value=whole.after,
                expected=f"< {whole.before:.4g}",
                unit="nats/token",
                note=f"{whole.z:+.1f} standard errors, {whole.samples} samples",
            ),
            Evidence(name="probability by noise", value=chance(shift.z, comparisons), expected=f"≤ {T.SLICE_CHANCE}"),
        ),
        cause=f"training on the rest is paid for by {shift.part}",
        next=("plot the parts instead of the mean", "compare the part's share of the mixture over these steps"),
        fix=("give the part more weight in the mixture, or clean it", "report it beside the mean"),
    )


def _levelled(seen: Sequence[Seen]) -> list[Seen]:
    """The same mean without the differences between domains, which are no noise of the whole."""
    sums: dict[str | None, list[float]] = defaultdict(list)
    for each in seen:
        sums[each.domain].append(each.loss)
    mean = sum(each.loss for each in seen) / len(seen)
    own = {domain: sum(losses) / len(losses) for domain, losses in sums.items()}
    return [replace(each, loss=each.loss - own[each.domain] + mean) for each in seen]


def _falls(whole: Shift, paired: bool) -> bool:
    """Whether the whole falls: a fixed set by more than its swing, other samples each time by more than their noise."""
    return whole.before - whole.after > T.WHOLE_FALL * abs(whole.before) if paired else whole.z < -BEYOND


def _shift(name: str, before: Sequence[Seen], after: Sequence[Seen], paired: bool) -> Shift | None:
    """Change of the mean loss: of the samples that both points share where ``paired``, else by Welch's formula."""
    if paired:
        first, second = _own_means(before), _own_means(after)
        pairs = [(first[key], loss) for key, loss in second.items() if key in first]
        if len(pairs) < T.SLICE_PAIRS:
            return None
        old, new = np.array(pairs).T
        error = float(np.std(new - old, ddof=1)) / math.sqrt(len(pairs))
    else:
        old, new = (np.array([each.loss for each in side]) for side in (before, after))
        if min(len(old), len(new)) < T.SLICE_SAMPLES:
            return None
        error = math.sqrt(float(np.var(old, ddof=1)) / len(old) + float(np.var(new, ddof=1)) / len(new))
    change = float(new.mean() - old.mean())
    z = change / error if error else math.copysign(math.inf, change) if change else 0.0
    return Shift(name, float(old.mean()), float(new.mean()), z, len(new), before[0].step)


def _own_means(seen: Sequence[Seen]) -> dict[str, float]:
    """Each sample's mean loss."""
    losses: dict[str, list[float]] = defaultdict(list)
    for each in seen:
        losses[each.key].append(each.loss)
    return {key: sum(own) / len(own) for key, own in losses.items()}


# -- scores by slice


def _fallen_slices(scored: Sequence[Track]) -> Iterator[Change | None]:
    """Slices that fell beyond noise while the whole they belong to rose."""
    for whole, parts in families(scored).values():
        if improved(whole) is None:
            continue
        changes = [change for part in parts if len(part.scores) > 1 and (change := worst_change(part)) is not None]
        for change in changes:
            sure = chance(-change.z, len(changes)) <= T.SLICE_SCORE_CHANCE
            yield change if change.z < -BEYOND and sure and not change.differs else None


def _fallen(fallen: Sequence[Change]) -> Finding:
    worst = min(fallen, key=lambda each: each.z)
    return Finding(
        title="The mean of an evaluation improves while a slice gets worse",
        summary=f"{worst.words} got worse by {-worst.z:.1f} standard errors, while the mean improved"
        + (f"; {len(fallen)} slices did." if len(fallen) > 1 else "."),
        where=Where(step=worst.after.step),
        evidence=tuple(each.evidence() for each in fallen[:12]),
        cause=f"what raised the mean is paid for by {worst.track.part}",
        next=("look at the answers of the slice at both checkpoints", "compare the slice's share of the mixture"),
        fix=("give the slice more weight in the mixture", "report it beside the mean"),
    )


# -- domains


def _evaluated_domains(capsule: Capsule) -> dict[str, int]:
    """Held-out samples of each domain."""
    samples = capsule.records("samples")
    held = [each for each in samples if each.get("split") not in (None, "train") and each.get("domain")]
    return dict(Counter(str(each["domain"]) for each in held))


def _absent_domain(capsule: Capsule) -> Iterator[Finding]:
    """Domains that are evaluated and not among the training samples on record."""
    held = _evaluated_domains(capsule)
    trained: dict[str, int] = defaultdict(int)
    for each in capsule.records("samples"):
        if each.get("split") in (None, "train") and each.get("domain"):
            trained[str(each["domain"])] += 1
    seen, total = sum(trained.values()), sum(held.values())
    if not seen or not total:
        return
    absent = [name for name, count in held.items() if name not in trained and _missed(count / total, seen)]
    if absent:
        yield Finding(
            severity="info",
            kind="hygiene",
            confidence="likely",
            title="A domain is evaluated that training does not hold",
            summary=f"{', '.join(sorted(absent)[:6])}: none of {seen} training samples on record, and "
            f"{sum(held[name] for name in absent)} of {total} evaluated ones. Its score shows transfer, not learning.",
            evidence=tuple(
                Evidence(name=f"training samples of {name}", value=0, expected="> 0", note=f"{held[name]} evaluated")
                for name in sorted(absent)[:12]
            ),
            cause="the evaluation holds a domain that the mixture does not",
            next=("see whether it is a control set, or was lost from the mixture",),
            fix=("add the domain to the mixture, or name the set a control set",),
        )


def _missed(share: float, samples: int) -> bool:
    """Whether so many samples would hold a domain of that share by all odds."""
    return samples * math.log1p(-min(share, 1 - 1e-9)) < math.log(T.ABSENT_CHANCE)
