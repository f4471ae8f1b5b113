"""Two curves at the steps they share: where they part first, and in what manner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..series import Curve, Floats, Ints, align, curve, noise, placeholder, segments
from . import thresholds as limits
from .types import Manner, Row, SeriesDifference

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Outcomes, the most telling first; other series follow by name.
_FIRST = ("loss", "eval_loss", "grad_norm", "learning_rate", "loss_scale")
#: What a job is given rather than what it computes: these names, and those with one of the words.
_GIVEN = frozenset({"learning_rate", "weight_decay", "tokens", "epoch"})
_GIVEN_WORDS = ("consumed", "batch size", "batch-size", "batch_size", "tokens_seen", "/epoch")
#: Words in the names of series that tell time and machine, and differ between any two runs.
_MACHINE = (
    *("time", "second", "memory", "gpu_", "throughput", "tflops", "mfu", "tps", "system/", "elapsed", "per gpu"),
    *(" vs samples", "alloc_retries", "mem-", "flos", "world-size", "world_size"),
)
#: Series that always mean something, also where they are 0 throughout.
_ALWAYS_REPORTED = frozenset({"loss", "eval_loss", "learning_rate"})
#: What importers note of a log whose lines name no step.
_NO_STEPS = "no step"
_MOST_SERIES = 2000
_SAMPLE = 2000
_MOST_DIGITS = 15
_BEFORE, _AFTER = 3, 4


@dataclass(frozen=True)
class Pair:
    """Two curves at shared steps: int64[N], float64[N] each, and the size of the last digit, float64[N]."""

    name: str
    unit: str
    step: Ints
    left: Floats
    right: Floats
    resolution: Floats
    differs: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def first(self) -> int:
        """Index of the first difference, N where there is none."""
        return int(np.argmax(self.differs)) if self.differs.any() else len(self.step)

    @property
    def distance(self) -> Floats:
        """|right − left| float64[N]; infinite where one side alone is not finite."""
        found = np.abs(self.right - self.left)
        return np.where(np.isfinite(found), found, np.where(self.differs, np.inf, 0.0))

    @property
    def scale(self) -> Floats:
        """The larger magnitude of the two, float64[N]."""
        return np.maximum(np.maximum(np.abs(self.left), np.abs(self.right)), 1e-300)


def shared_series(left: Capsule, right: Capsule) -> tuple[list[Pair], list[str]]:
    """The series that both runs have and that a computation decides, most telling first; and what was left out."""
    units = {key.name: key.unit for key in right.scalar_keys() if key.side is None}
    units |= {key.name: key.unit for key in left.scalar_keys() if key.side is None}
    names = {key.name for key in left.scalar_keys() if key.side is None}
    names &= {key.name for key in right.scalar_keys() if key.side is None}
    ordered = [name for name in _FIRST if name in names]
    ordered += sorted(name for name in names if name not in _FIRST and not _of_the_machine(name))
    pairs: list[Pair] = []
    notes: list[str] = []
    counted = _counted(left, right, notes)
    for name in ordered[:_MOST_SERIES]:
        first, second = counted("left", curve(left, name)), counted("right", curve(right, name))
        side = _unreported(name, first, second)
        if side:
            notes.append(f"{name} was not reported by the {side} run (a constant 0 or -1): not compared")
            continue
        pair = pair_of(name, units[name], first, second)
        if len(pair.step):
            pairs.append(pair)
        else:
            notes.append(f"{name} has no step that both runs logged")
    notes += [note for side, capsule in (("left", left), ("right", right)) if (note := _repeats(side, capsule))]
    losses = counted("left", curve(left, "loss")), counted("right", curve(right, "loss"))
    every = losses[0].interval, losses[1].interval
    if every[0] != every[1] and pairs and pairs[0].name == "loss":
        if (means := _of_means(pairs[0], *losses)) is not None:
            which, other = ("right", "left") if every[0] < every[1] else ("left", "right")
            notes.append(f"the {which} run's losses are means over {max(every)} steps: the {other}'s were averaged so")
            return [means, *pairs[1:]], notes
        notes.append(f"left logs every {every[0]} steps, right every {every[1]}: means over those do not agree exactly")
    return _renumbered(pairs, left, right, notes), notes


def _counted(left: Capsule, right: Capsule, notes: list[str]) -> Callable[[str, Curve], Curve]:
    """What moves the points of a log that names no steps, so that its lines were counted, to those of the other."""
    names_none = [
        any(_NO_STEPS in str(note) for each in _files(capsule) for note in each.get("notes") or ())
        for capsule in (left, right)
    ]
    lines, known = (left, right) if names_none[0] else (right, left)
    from_, to = curve(lines, "loss").step, curve(known, "loss").step
    if names_none[0] == names_none[1] or not len(from_) or curve(known, "loss").interval == 1:
        return lambda _, found: found
    side = "left" if lines is left else "right"
    notes.append(f"the {side} log names no steps: its lines were laid beside the other's points, one by one")

    def moved(which: str, found: Curve) -> Curve:
        if which != side:
            return found
        place = np.searchsorted(from_, found.step)
        keep = place < len(to)
        return Curve(to[place[keep]], found.value[keep])

    return moved


def _files(capsule: Capsule) -> list[dict[str, Any]]:
    imported: Any = capsule.manifest.raw.get("imported")
    files = imported.get("files") if isinstance(imported, dict) else None
    return [each for each in files if isinstance(each, dict)] if isinstance(files, list) else []


def _of_means(pair: Pair, left: Curve, right: Curve) -> Pair | None:
    """The losses again, the finer log averaged between the points of the other; None where that is no nearer."""
    fine, coarse = (left, right) if left.interval < right.interval else (right, left)
    width, step = coarse.interval // fine.interval, coarse.step
    ends = np.searchsorted(fine.step, step, side="right")
    whole = (ends >= width) & (fine.step[np.minimum(ends, len(fine)) - 1] == step)
    whole &= fine.step[np.maximum(ends - width, 0)] > step - coarse.interval
    if not whole.any():
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(fine.value), fine.value, np.nan))])
    means = Curve(step[whole], (sums[ends[whole]] - sums[ends[whole] - width]) / width)
    found = pair_of(pair.name, pair.unit, *((means, right) if fine is left else (left, means)))
    nearer = len(found.step) and np.median(found.distance) <= limits.NEARER_AS_MEANS * np.median(pair.distance)
    return found if nearer and pair.differs.any() else None


@np.errstate(all="ignore")
def pair_of(name: str, unit: str, left: Curve, right: Curve) -> Pair:
    """Two curves at the steps they share, compared at the precision with which they were printed."""
    step, first, second = align(left, right)
    mine, theirs = resolution(first), resolution(second)
    # Values printed alike are equal or not; of different precision, the coarser one decides what can be seen.
    same_format = bool((mine == theirs).all())
    if not same_format and len(step) < limits.NOISE_POINTS:
        # So few values may all end in a zero that is not seen: a decimal more or less is no other format.
        same_format = bool((np.maximum(mine, theirs) < 10.5 * np.minimum(mine, theirs)).all())
    slack = np.zeros(len(step)) if same_format else 0.5 * (mine + theirs) * (1 + 1e-9)
    near = (np.abs(second - first) <= slack) | (first == second)
    agree = near | (np.isnan(first) & np.isnan(second))
    return Pair(name, unit, step, first, second, np.maximum(mine, theirs), ~agree)


@np.errstate(all="ignore")
def resolution(values: Floats) -> Floats:
    """Size of the last digit of each value, float64[N], from the decimals or significant digits they all need."""
    finite = np.isfinite(values) & (values != 0)
    found = values[finite]
    sample = found[:: max(1, len(found) // _SAMPLE)]
    if not len(sample):
        return np.zeros(len(values))
    magnitude = np.clip(np.floor(np.log10(np.abs(sample))), -290, 290)
    digits = next((each for each in range(1, _MOST_DIGITS + 1) if _has_digits(sample, magnitude, each)), 17)
    size = np.zeros(len(values))
    if digits > 9 and bool((sample.astype(np.float32) == sample).all()):
        size[finite] = np.spacing(np.abs(found).astype(np.float32))
        return size
    decimals = next((each for each in range(13) if _has_decimals(sample, each)), None)
    size[finite] = 10.0 ** (np.floor(np.log10(np.abs(found))) - digits + 1)
    return size if decimals is None else np.maximum(size, 10.0**-decimals)


@np.errstate(all="ignore")
def judge(pair: Pair, rounding: float = limits.ROUNDING) -> SeriesDifference:
    """In what manner two curves part.

    Args:
        pair: the curves at shared steps.
        rounding: relative rounding of the jobs' dtype.
    """
    at = pair.first
    base = SeriesDifference(
        name=pair.name, unit=pair.unit, shared=len(pair.step), equal_before=min(at, len(pair.step)), manner="none"
    )
    if at == len(pair.step):
        return base
    ratio = _constant_ratio(pair) if at == 0 else None
    if ratio is not None:
        base = msgspec.structs.replace(base, ratio=ratio)
        return _described(base, pair, "constant-ratio", f"right is {ratio:.4g} × left at {len(pair.step)} steps")
    if at > 0 and _jumps(pair, at, rounding) and not _small_after_few(pair, at):
        return _described(base, pair, "jump", "")
    manner, note = _from_the_start(pair, rounding) if at == 0 else _small_at_first(pair, at)
    jump = _jump_over_noise(pair, at, rounding) if manner in ("rounding", "undetermined") else None
    if jump is None:
        return _described(base, pair, manner, note)
    base = msgspec.structs.replace(base, equal_before=jump)
    return _described(base, pair, "jump", "differs by no more than rounding before", jump)


def _small_at_first(pair: Pair, at: int) -> tuple[Manner, str]:
    if _grows(pair, at):
        return "rounding", "starts small and grows"
    if len(pair.step) - at < 2 * limits.FIRST_POINTS:
        return "undetermined", "starts small, with too few points after it to see noise grow"
    return "undetermined", f"starts small, and does not grow {limits.GROWS:.0f}-fold in what was logged"


def rows_around(pair: Pair, step: int) -> tuple[Row, ...]:
    """The shared steps before and after the one at which the curves part."""
    at = int(np.searchsorted(pair.step, step))
    shown = range(max(0, at - _BEFORE), min(len(pair.step), at + _AFTER))
    return tuple(
        Row(
            step=int(pair.step[each]),
            left=float(pair.left[each]),
            right=float(pair.right[each]),
            differs=bool(pair.differs[each]),
        )
        for each in shown
    )


def _described(
    base: SeriesDifference, pair: Pair, manner: Manner, note: str, at: int | None = None
) -> SeriesDifference:
    at = pair.first if at is None else at
    return msgspec.structs.replace(
        base,
        manner=manner,
        note=note,
        step=int(pair.step[at]),
        left=float(pair.left[at]),
        right=float(pair.right[at]),
        relative=float(pair.distance[at] / pair.scale[at]) if math.isfinite(pair.distance[at]) else math.inf,
        resolution=float(pair.resolution[at]),
    )


def _jumps(pair: Pair, at: int, rounding: float) -> bool:
    """Whether a difference is far beyond what rounding could have become since the last equal step."""
    distance = pair.distance
    if not math.isfinite(distance[at]):
        return True
    hidden = min(int(pair.step[at] - pair.step[at - 1]), limits.MOST_HIDDEN_STEPS)
    floor = max(float(pair.resolution[at]), rounding * float(pair.scale[at]))
    return bool(distance[at] >= limits.JUMP * limits.GROWTH_A_STEP ** (hidden - 1) * floor)


def _small_after_few(pair: Pair, at: int) -> bool:
    """Whether the curves part after a few points only, by next to nothing: 16 bits round like that.

    A first loss that is equal shows one forward pass, and the first updates are yet to come.
    """
    if at >= limits.FIRST_POINTS or len(pair.step) < limits.NOISE_POINTS:
        return False
    first = pair.distance[at : at + limits.FIRST_POINTS]
    own = max(noise(pair.left[np.isfinite(pair.left)]), noise(pair.right[np.isfinite(pair.right)]))
    small = bool((first <= limits.SMALL_START * pair.scale[at : at + limits.FIRST_POINTS]).all())
    return small and float(np.median(first)) <= limits.SMALL_AGAINST_NOISE * own


def _jump_over_noise(pair: Pair, at: int, rounding: float) -> int | None:
    """Index of a lasting jump over the rounding that runs show which are not reproducible to the bit."""
    distance = pair.distance
    floor = np.maximum(pair.resolution, rounding * pair.scale)
    before = np.maximum.accumulate(distance)[:-1]
    hidden = np.minimum(np.diff(pair.step), limits.MOST_HIDDEN_STEPS)
    least = limits.JUMP * limits.GROWTH_A_STEP ** (hidden - 1) * np.maximum(before, floor[1:])
    for each in np.flatnonzero(distance[1:] >= least) + 1:
        after = distance[each : each + limits.FIRST_POINTS]
        lasts = len(after) >= limits.JUMP_LASTS and np.median(after) >= least[each - 1] / 2
        if each >= at + limits.FIRST_POINTS and lasts:
            return int(each)
    return None


def _grows(pair: Pair, at: int) -> bool:
    later = pair.distance[at:]
    if len(later) < 2 * limits.FIRST_POINTS:
        return False
    early, late = np.median(later[: limits.FIRST_POINTS]), np.median(later[-limits.FIRST_POINTS :])
    return bool(late >= limits.GROWS * max(early, 1e-300))


def _constant_ratio(pair: Pair) -> float | None:
    """Right over left where it is the same at all shared steps and not 1; None otherwise."""
    usable = np.isfinite(pair.left) & np.isfinite(pair.right) & (pair.left != 0) & (pair.right != 0)
    if usable.sum() < limits.RATIO_POINTS or not usable.all():
        return None
    ratios = pair.right / pair.left
    middle = float(np.median(ratios))
    low, high = np.quantile(ratios, [0.1, 0.9])
    spread = float(max(high - middle, middle - low)) / abs(middle)
    for most, away in (limits.RATIO_SPREAD, limits.TIGHT_RATIO_SPREAD):
        if spread <= most and max(abs(middle), 1 / abs(middle)) - 1 >= away and middle > 0:
            return middle
    return None


def _from_the_start(pair: Pair, rounding: float) -> tuple[Manner, str]:
    """The manner of curves that differ at the first shared step already."""
    signed = pair.right - pair.left
    if not np.isfinite(signed[0]):
        return "start", "one side is not finite at the first shared step"
    relative = float(pair.distance[0] / pair.scale[0])
    begin = float(np.median(pair.distance[: limits.FIRST_POINTS]))
    own = math.nan
    if len(signed) >= limits.NOISE_POINTS:
        own = max(noise(pair.left[np.isfinite(pair.left)]), noise(pair.right[np.isfinite(pair.right)]))
    small = relative <= max(limits.SURE_ROUNDING, rounding / 4)
    small |= relative <= limits.LARGEST_ROUNDING and begin <= limits.SMALL_AGAINST_NOISE * own
    if small:
        return "rounding", "starts small and grows" if _grows(pair, 0) else "stays small"
    low, high = limits.DATA_AGAINST_NOISE
    signs = signed[np.isfinite(signed)] > 0
    mixed = min(signs.mean(), 1 - signs.mean()) >= limits.MIXED_SIGNS if len(signs) else False
    if mixed and low * own <= begin <= high * own:
        return "data-noise", "the differences scatter to both sides by as much as the curves do from step to step"
    return "start", ""


def _unreported(name: str, left: Curve, right: Curve) -> str:
    """Which side never reported the series: a constant 0 or -1 that the other side never takes."""
    if name in _ALWAYS_REPORTED:
        return ""
    for side, one, other in (("left", left, right), ("right", right, left)):
        value = placeholder(one)
        if value is None and 0 < len(one) < 3 and (one.value == -1.0).all():
            value = -1.0
        if value is not None and len(other) and not (other.value == value).any():
            return side
    return ""


def _repeats(side: str, capsule: Capsule) -> str:
    parts = segments(capsule, "loss")
    if len(parts) < 2:
        return ""
    return (
        f"the {side} run went back {len(parts) - 1} times (resumed): where a step was repeated, the last value counts"
    )


def _renumbered(pairs: list[Pair], left: Capsule, right: Capsule, notes: list[str]) -> list[Pair]:
    """The pairs again with the right run's steps moved by one, where only that makes the loss agree."""
    loss = next((pair for pair in pairs if pair.name == "loss"), None)
    if loss is None or loss.first > 0 or len(loss.step) < limits.FIRST_POINTS:
        return pairs
    for shift in (1, -1):
        moved = {pair.name: _moved(curve(right, pair.name), shift) for pair in pairs}
        again = [pair_of(pair.name, pair.unit, curve(left, pair.name), moved[pair.name]) for pair in pairs]
        found = next(pair for pair in again if pair.name == "loss")
        if found.first >= limits.FIRST_POINTS and len(np.unique(found.left[: found.first])) > 2:
            notes.append(f"the right run counts its steps from {-shift:+d}: they were moved by {shift:+d}")
            return [pair for pair in again if len(pair.step)]
    return pairs


def _moved(found: Curve, shift: int) -> Curve:
    return replace(found, step=found.step + shift)


def is_given(name: str) -> bool:
    """Whether a series tells what the job was given: schedule, batch size, how much data it has seen."""
    return name in _GIVEN or any(word in name.lower() for word in _GIVEN_WORDS)


def _of_the_machine(name: str) -> bool:
    lower = name.lower()
    return name.startswith("_") or any(word in lower for word in _MACHINE)


def _has_digits(values: Floats, magnitude: Floats, digits: int) -> bool:
    power = 10.0 ** (digits - 1 - magnitude)
    return bool((np.abs(np.round(values * power) / power - values) <= 1e-14 * np.abs(values)).all())


def _has_decimals(values: Floats, decimals: int) -> bool:
    return bool((np.abs(np.round(values, decimals) - values) <= 1e-14 * np.maximum(1.0, np.abs(values))).all())
