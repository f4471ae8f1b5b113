"""Scores of checkpoints (stream ``evaluations``) as rules read them: tracks over checkpoints with their noise."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .finding import Evidence
from .series import noise

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Standard errors of a difference beyond which two scores differ.
BEYOND = 2.0
#: Checkpoints from which a track shows its own scatter.
TRACK_POINTS = 5

#: What makes two scores no longer comparable, and what a person calls it.
CONDITIONS = {
    "harness": "harness",
    "harness_version": "version of the harness",
    "template_sha256": "template",
    "preprocessing_sha256": "preprocessing",
}

#: Names of numbers that are better when lower.
_LOWER = re.compile(
    r"(?:^|[^a-z])(?:loss|ppl|perplexity|nll|bpb|bpc|entropy|error|err|wer|cer|mse|mae|fid|toxicity)(?:[^a-z]|$)"
)


@dataclass(frozen=True)
class Score:
    """One number of one checkpoint, the mean of its ``repeats``; ``record`` is the first of them.

    ``stderr`` is NaN where neither it nor the number of questions is known.
    """

    record: dict[str, Any]
    repeats: tuple[float, ...]
    value: float
    stderr: float
    checkpoint: Any
    step: int | None

    def differs(self, other: Score) -> list[str]:
        """What both say of how they were measured, and say differently."""
        return [
            words
            for field, words in CONDITIONS.items()
            if self.record.get(field) and other.record.get(field) and self.record[field] != other.record[field]
        ]


@dataclass(frozen=True)
class Track:
    """The scores of one evaluation over checkpoints, repeats of one averaged; ``sign`` is 1 where higher is better."""

    name: str
    suite: str | None
    part: str | None
    sign: int
    scores: tuple[Score, ...]

    @property
    def label(self) -> str:
        """What a person would call it."""
        words = [each for each in (self.suite, self.name) if each]
        return " ".join(dict.fromkeys(words)) + (f" / {self.part}" if self.part else "")


def lower_is_better(name: str, declared: Any) -> bool:
    """Whether a number is better when it falls: as declared, else by its name."""
    return declared is False if declared is not None else bool(_LOWER.search(name.lower()))


def records(capsule: Capsule) -> list[dict[str, Any]]:
    """Evaluations with a finite value, by step where all have one, else in the order written."""
    found = [
        each
        for each in capsule.records("evaluations")
        if isinstance(each.get("value"), int | float) and math.isfinite(each["value"])
    ]
    return (
        sorted(found, key=lambda each: each["step"]) if all(each.get("step") is not None for each in found) else found
    )


def checkpoint(record: dict[str, Any]) -> Any:
    """What two records of one checkpoint share; None where nothing tells."""
    if record.get("checkpoint_sha256"):
        return record["checkpoint_sha256"]
    return None if record.get("step") is None else f"step {record['step']}"


def tracks(capsule: Capsule) -> list[Track]:
    """The evaluations as tracks, in the order of their first record."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in records(capsule):
        groups[record.get("name"), record.get("suite"), record.get("slice")].append(record)
    found: list[Track] = []
    for (name, suite, part), group in groups.items():
        words = f"{suite or ''} {name or ''}"
        declared = next((r["higher_is_better"] for r in group if r.get("higher_is_better") is not None), None)
        lower = lower_is_better(words, declared)
        most = 0.0 if lower else _most([record["value"] for record in group])
        scores = tuple(_averaged(each, most, at) for at, each in enumerate(_same_checkpoint(group)))
        found.append(Track(str(name or suite or "evaluation"), suite, part, -1 if lower else 1, scores))
    return found


def _most(values: list[float]) -> float:
    """1 or 100 where the values are shares or percentages, 0 where they can be neither."""
    if min(values) < 0 or max(values) > 100:
        return 0.0
    return 1.0 if max(values) <= 1 else 100.0


def _same_checkpoint(group: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records of one track in runs of one checkpoint measured in one way."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    last: Any = None
    for index, record in enumerate(group):
        own = checkpoint(record)
        if own is None:  # without a name, only a repeat belongs to what came before
            own = last if record.get("repeat") and last is not None else f"record {index}"
        last = own
        found.setdefault((own, *(record.get(field) for field in CONDITIONS)), []).append(record)
    return list(found.values())


def _averaged(group: list[dict[str, Any]], most: float, at: int) -> Score:
    value = sum(record["value"] for record in group) / len(group)
    # Repeats ask the same questions again: their mean is hardly better known than each.
    errors = [error for record in group if math.isfinite(error := standard_error(record, most))]
    first = group[0]
    own = checkpoint(first)
    repeats = tuple(float(record["value"]) for record in group)
    error = max(errors, default=math.nan)
    return Score(first, repeats, value, error, own if own is not None else at, first.get("step"))


def standard_error(record: dict[str, Any], most: float) -> float:
    """The declared standard error, else √(p (1 − p) / n) of a share (``most`` 1) or percentage (100); else NaN.

    Never below what one question more or less in n would change.
    """
    declared, n, value = record.get("stderr"), record.get("n"), record["value"]
    if isinstance(declared, int | float) and math.isfinite(declared) and declared > 0:
        return float(declared)
    if not n or not most or not 0 <= value <= most:
        return math.nan
    p = value / most
    return most * max(math.sqrt(p * (1 - p) / n), 0.5 / n)


def z_between(before: Score, after: Score, noise: float = 0.0) -> float:
    """How many standard errors of their difference the second is above the first; NaN where no error is known.

    ``noise`` is a further standard deviation of a single checkpoint.
    """
    errors = [error for error in (before.stderr, after.stderr) if math.isfinite(error)]
    if not errors:
        return math.nan
    whole = math.hypot(*(errors * 2 if len(errors) == 1 else errors), noise * math.sqrt(2))
    difference = after.value - before.value
    return difference / whole if whole else math.copysign(math.inf, difference) if difference else 0.0


def chance(z: float, comparisons: int) -> float:
    """Probability that one of so many independent comparisons reaches ``z`` on one side by noise alone."""
    tail = 0.5 * math.erfc(z / math.sqrt(2))
    return -math.expm1(max(1, comparisons) * math.log1p(-tail)) if tail < 1 else 1.0


@dataclass(frozen=True)
class Change:
    """How a track went from one of its checkpoints to its last: ``z`` is above 0 where it got better."""

    track: Track
    before: Score
    after: Score
    z: float
    differs: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Both values under the track's name."""
        return f"{self.track.label} {self.before.value:.4g} → {self.after.value:.4g}"

    def evidence(self) -> Evidence:
        """The change as a number beside the noise."""
        size = abs(self.after.value - self.before.value) / abs(self.z) if self.z and math.isfinite(self.z) else 0.0
        n = self.after.record.get("n")
        note = f"from {self.before.value:.4g}, z = {self.z:+.2f}" + (f", n = {n}" if n else "")
        limit = self.before.value - self.track.sign * BEYOND * size
        expected = f"{'≥' if self.track.sign > 0 else '≤'} {limit:.4g}"
        return Evidence(name=self.track.label, value=self.after.value, expected=expected, note=note)


def worst_change(track: Track) -> Change | None:
    """The change to the last checkpoint from whichever earlier one makes it look worst.

    Where none was measured as the last one was, the earlier ones count all the same, and ``differs`` says in what they
    differ. None without two checkpoints, or where no noise is known.
    """
    *earlier, last = track.scores
    alike = [each for each in earlier if not each.differs(last)]
    own = _own_noise(track)
    found = [
        Change(track, each, last, track.sign * z_between(each, last, own), tuple(each.differs(last)))
        for each in alike or earlier
    ]
    return min((each for each in found if not math.isnan(each.z)), key=lambda each: each.z, default=None)


def _own_noise(track: Track) -> float:
    """Scatter from checkpoint to checkpoint beyond that of the questions; 0 where there are too few to tell."""
    values = np.array([each.value for each in track.scores])
    if len(values) < TRACK_POINTS or any(each.differs(track.scores[-1]) for each in track.scores):
        return 0.0
    errors = np.array([each.stderr for each in track.scores])
    sampled = float(np.nanmedian(errors)) if np.isfinite(errors).any() else 0.0
    return math.sqrt(max(0.0, noise(values) ** 2 - sampled**2))


def families(found: Sequence[Track]) -> dict[tuple[str, str | None], tuple[Track | None, list[Track]]]:
    """Tracks by (name, suite): that of the whole, where there is one, and those of its slices."""
    groups: dict[tuple[str, str | None], tuple[Track | None, list[Track]]] = {}
    wholes = {(each.name, each.suite): each for each in found if each.part is None}
    parts: dict[tuple[str, str | None], list[Track]] = defaultdict(list)
    for each in found:
        if each.part is not None:
            parts[each.name, each.suite].append(each)
    for key in dict.fromkeys((each.name, each.suite) for each in found):
        groups[key] = (wholes.get(key) or _mean(parts[key]), parts[key])
    return groups


def _mean(parts: Sequence[Track]) -> Track | None:
    """The mean of slices at the checkpoints that all of them have, by numbers of questions where all say them."""
    counts = [part.scores[-1].record.get("n") for part in parts]
    total = sum(each or 0 for each in counts)
    weights = [each / total for each in counts if each] if all(counts) and total else [1 / len(parts)] * len(parts)
    shared = [each.checkpoint for each in parts[0].scores] if len(parts) > 1 else []
    scores: list[Score] = []
    for own in shared:
        row = [next((score for score in part.scores if score.checkpoint == own), None) for part in parts]
        if all(row):
            kept = [each for each in row if each is not None]
            value = sum(weight * each.value for weight, each in zip(weights, kept, strict=True))
            error = math.sqrt(sum((weight * each.stderr) ** 2 for weight, each in zip(weights, kept, strict=True)))
            scores.append(Score(kept[0].record, (value,), value, error, own, kept[0].step))
    if len(scores) < 2:
        return None
    return Track(parts[0].name, parts[0].suite, None, parts[0].sign, tuple(scores))


def improved(whole: Track | None) -> Change | None:
    """The rise of the whole from its first to its last checkpoint, where it is beyond noise."""
    if whole is None or len(whole.scores) < 2:
        return None
    first, last = whole.scores[0], whole.scores[-1]
    change = Change(
        whole, first, last, whole.sign * z_between(first, last, _own_noise(whole)), tuple(first.differs(last))
    )
    return change if change.z > BEYOND else None
