"""Two revisions in turn, several times: the median of the paired ratios and an interval, not one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

#: Probability with which the interval holds the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Comparison:
    """How much worse the fix is: the ratio's median and interval, above 1 where it is worse, and the judgement."""

    ratio: float
    low: float
    high: float
    verdict: Literal["passed", "failed", "error"]
    words: str


def number_of(output: str) -> float | None:
    """The number that a command printed: its last line that is one."""
    for line in reversed(output.split("\n")):
        try:
            found = float(line.strip())
        except ValueError:
            continue
        return found if math.isfinite(found) else None
    return None


def compare(broken: Sequence[float], fixed: Sequence[float], *, lower_is_better: bool, tolerance: float) -> Comparison:
    """Judge pairs of measurements taken in turn.

    The interval is that of order statistics for the median (sign test), which assumes nothing of the distribution.

    Args:
        broken: one number a pair, positive.
        fixed: the partner of each.
        lower_is_better: seconds, not tokens a second.
        tolerance: share by which the fix may be worse.
    """
    ratios = sorted(
        (after / before) if lower_is_better else (before / after) for before, after in zip(broken, fixed, strict=True)
    )
    middle = median(ratios)
    low, high = _interval(ratios)
    said = f"{_share(middle)} [{_share(low)}, {_share(high)}] over {len(ratios)} pairs, tolerance {tolerance:.3g}"
    if middle <= 1 + tolerance:
        return Comparison(middle, low, high, "passed", said)
    if low > 1:
        return Comparison(middle, low, high, "failed", f"slower than the tolerance allows: {said}")
    return Comparison(middle, low, high, "error", f"too noisy to tell: {said}; measure longer, or set more pairs")


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with ``COVERAGE``; the extremes where none does."""
    count = len(ordered)
    outside, cut = 0.0, 0
    while cut < count // 2:
        outside += math.comb(count, cut) / 2**count
        if 1 - 2 * outside < COVERAGE:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[count - 1 - cut]


def _share(ratio: float) -> str:
    change = (ratio - 1) * 100
    return f"{change:+.1f} %"
