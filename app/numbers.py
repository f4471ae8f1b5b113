"""Numbers as people read them: three significant digits, thousands separated, units of bytes and time."""

from __future__ import annotations

import math


def compact(value: float) -> str:
    """A number in few characters: ``2.31``, ``18,342``, ``4.12e-07``, ``NaN``."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e7:
        if float(value).is_integer() or size >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}"
    return f"{value:.2e}"
