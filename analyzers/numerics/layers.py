"""One layer that leaves the others: activations that grow alone, and layers that fell silent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import Ints
from . import thresholds as T
from .overflow import find_overflow
from .symptoms import first_nonfinite

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Track:
    """Size of one activation over its records: the largest magnitude, or the root mean square where that is all."""

    name: str
    rank: int
    order: int
    step: Ints
    size: Any  # float64[N]
    measure: str

    def latest(self) -> float:
        """The size now: median of the last three records."""
        return float(np.median(self.size[-3:]))

    def growth(self) -> float:
        """Latest size over the smallest running median before it, both over three records."""
        if len(self.size) < T.TRACK_RECORDS:
            return 1.0
        smooth = np.median(np.lib.stride_tricks.sliding_window_view(self.size, 3), axis=1)
        low = float(smooth[:-1].min())
        return float(smooth[-1]) / low if low > 0 else 1.0

    def onset(self, factor: float) -> int:
        """First step from which the size stays above ``factor`` × its smallest running median."""
        smooth = np.median(np.lib.stride_tricks.sliding_window_view(self.size, 3), axis=1)
        low = int(np.argmin(smooth[:-1]))
        above = np.flatnonzero(self.size > factor * smooth[low])
        above = above[above > low]
        return int(self.step[above[0]]) if above.size else int(self.step[-1])


def tracks(stats: Any) -> list[Track]:
    """One track for each activation and rank, of the last ``TRACK_WINDOW`` steps, in execution order.

    The output layer is left out: its logits grow as the model learns. So are the embeddings' inputs and whatever ran
    less than five times.
    """
    stats = stats.select(stats.step >= int(stats.step.max()) - T.TRACK_WINDOW) if len(stats) else stats
    role = stats.role.astype(str)
    logits = {(step, rank, rms) for step, rank, rms in _keys(stats, role == "logits")}
    rows = np.flatnonzero((role == "activation") & ~stats.nonfinite)
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows.tolist():
        found.setdefault((str(stats.name[row]), int(stats.rank[row])), []).append(row)
    made: list[Track] = []
    for (name, rank), members in found.items():
        at = np.array(members)
        if any((int(stats.step[row]), rank, float(stats.rms[row])) in logits for row in members):
            continue
        full = at[np.isfinite(stats.absmax[at])]
        measured = len(np.unique(stats.step[full])) >= T.TRACK_RECORDS
        at, size = (full, stats.absmax[full]) if measured else (at, stats.rms[at])
        step, last = np.unique(stats.step[at][::-1], return_index=True)
        measure = "largest element" if measured else "root mean square"
        made.append(Track(name, rank, int(stats.order[at[-1]]), step, size[::-1][last], measure))
    return sorted(made, key=lambda track: (track.rank, track.order))


def _keys(stats: Any, mask: Any) -> Iterator[tuple[int, int, float]]:
    for row in np.flatnonzero(mask).tolist():
        yield int(stats.step[row]), int(stats.rank[row]), float(stats.rms[row])


@dataclass(frozen=True)
class Outlier:
    """A layer that left the others: its growth, that of half of the others, and the step at which it left."""

    track: Track
    growth: float
    others: float
    step: int


def finite_tracks(capsule: Capsule) -> list[Track]:
    """The tracks of a capsule up to its first non-finite tensor."""
    stats = capsule.stats()
    first_bad = first_nonfinite(capsule, stats)
    return tracks(stats if first_bad is None else stats.select(stats.step < stats.step[first_bad]))


def find_outlier(made: list[Track]) -> Outlier | None:
    """The layer whose growth stands alone among the tracks, or None.

    What follows on the residual path carries the same growth: the first of the fast ones is where it comes from.
    """
    growths = np.array([track.growth() for track in made])
    if len(growths) < T.TRACKS:
        return None
    worst = int(np.flatnonzero(growths >= growths.max() / 2)[0])
    growth, others = float(growths[worst]), float(np.median(np.delete(growths, worst)))
    if growth <= T.OUTLIER_GROWTH or growth < T.OUTLIER_ALONE * max(1.0, others):
        return None
    # A branch that starts near 0 (a small initialisation, an adapter) only catches up with the others.
    level = float(np.median([track.latest() for track in made if track is not made[worst]]))
    if made[worst].latest() < T.OUTLIER_ALONE * level:
        return None
    return Outlier(made[worst], growth, others, made[worst].onset(T.OUTLIER_GROWTH))


@rule(
    "numerics/outlier-growth",
    cases=("nan-in-mid-run",),
    stage="numerics",
    severity="warning",
    needs=("stats.activation",),
    explained_by=("numerics/learning-rate", "data/poison-sample", "numerics/first-nonfinite", "numerics/loss-spike"),
)
def outlier_growth(capsule: Capsule) -> Iterator[Finding]:
    """One layer's activations grow away from those of all others, or a layer has fallen silent.

    What it checks:
        The size of every activation over the last 500 recorded steps, beside that of the other layers.

    Why it matters:
        A few channels that grow without bound overflow float16 first, spoil every quantisation later and pull the
        normalisation of their layer with them. A layer whose output is 0 throughout learns nothing and says nothing.

    How it decides:
        Growth: the largest magnitude (median of three records) is more than 10 × its smallest earlier one, and both
        the growth and what it has come to are at least 4 × the median of the other layers; the first of the fast ones
        in execution order is named, since those after it carry what it adds. Dead: every element of an activation is 0
        in the last three recorded steps or more, and it was not 0 before; or from the start, in five recorded steps.

    Looks like it but is not:
        All layers growing together at the start of a run; the logits and the output layer; branches that are
        initialised to 0 or near it and learn; experts without tokens, which have no record; a single outlier that is
        gone at the next record; a tensor at the end of the float16 range, which is numerics/fp16-overflow.

    What to try next:
        Plot the named layer in the layers view and find the step at which it left the others; look at its largest
        channel and the weights that make it.

    Fix:
        Normalise queries and keys; weight decay on the growing matrix; a lower learning rate; z-loss on logits. For a
        dead layer: another activation function or initialisation, a lower rate, a bias that is not far below zero.
    """
    made = finite_tracks(capsule)
    dead = next((found for track in made if (found := _dead(track)) is not None), None)
    if dead is not None:
        yield dead
    outlier = find_outlier(made)
    if outlier is None or find_overflow(capsule, capsule.stats()) is not None:
        return  # the end of the range has its own rule, which shows the same growth
    track, others = outlier.track, outlier.others
    picked = np.linspace(0, len(track.size) - 1, min(T.TRAJECTORY, len(track.size))).astype(int)
    path = [float(track.size[index]) for index in picked]
    yield Finding(
        title="One layer's activations grow away from the others",
        summary=(
            f"{track.name}: {track.measure} " + " → ".join(f"{value:,.4g}" for value in path) + f", × "
            f"{outlier.growth:.3g} by step {int(track.step[-1])}, where half of the other layers grew by less than "
            f"× {others:.3g}."
        ),
        where=Where(step=outlier.step, rank=track.rank, tensor=track.name, order=track.order),
        evidence=(
            Evidence(name="growth", value=outlier.growth, expected=f"≤ {T.OUTLIER_GROWTH:g}", note=track.name),
            Evidence(name="growth of the others", value=others, note=f"median of {len(made) - 1} layers"),
            Evidence(
                name=f"{track.measure} over the steps",
                value=path,
                note=f"steps {', '.join(str(int(track.step[index])) for index in picked)}",
            ),
        ),
        cause=f"the output of {track.name} grows without bound",
        next=(f"find the step at which {track.name} left the others in the layers view",),
        fix=("normalise what enters it, or decay the matrix that makes it", "lower the learning rate"),
    )


def _dead(track: Track) -> Finding | None:
    """A layer whose output is nothing but zeros up to the end of the record."""
    zero = track.size == 0
    # What a module returns beside its output (T5's position bias of cross-attention, say) may well be zeros.
    if not len(zero) or not zero[-1] or track.name.rpartition(":")[2] not in (track.name, "0"):
        return None
    run = len(zero) if zero.all() else int(np.argmin(zero[::-1]))
    least = T.DEAD_FROM_START if run == len(zero) else T.DEAD_RECORDS
    if run < least:
        return None
    step = int(track.step[-run])
    before = float(track.size[-run - 1]) if run < len(zero) else math.nan
    return Finding(
        title="A layer has fallen silent" if run < len(zero) else "A layer gives nothing but zeros",
        summary=f"Every element of {track.name} is 0 in {run} recorded steps from step {step} to {int(track.step[-1])}"
        + (f"; before, its {track.measure} was {before:.4g}." if run < len(zero) else "."),
        where=Where(step=step, rank=track.rank, tensor=track.name, order=track.order),
        evidence=(
            Evidence(name=track.measure, value=0.0, expected="> 0", note=f"{run} recorded steps"),
            *([Evidence(name="before", value=before)] if run < len(zero) else []),
        ),
        cause=f"no unit of {track.name} is active for any input"
        if run < len(zero)
        else f"the weights of {track.name} are zero, or its input is",
        next=("look at the bias and the largest weight of the layer", "compare with the step before it fell silent"),
        fix=("a lower learning rate, another initialisation, or an activation without a dead half",),
    )
