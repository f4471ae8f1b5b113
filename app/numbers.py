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


def size(count: float) -> str:
    """Bytes in three significant digits: ``61.2 GiB``, ``512 MiB``, ``-3 KiB``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(count) >= 1 << power:
            return f"{_three(count / (1 << power))} {unit}"
    return f"{count:,.0f} B"


def amount(value: float, unit: str) -> str:
    """``compact``, but bytes as ``size`` gives them."""
    return size(value) if unit == "bytes" and math.isfinite(value) else compact(value)


def duration(seconds: float) -> str:
    """A time in three significant digits: ``1.23 s``, ``45.6 ms``, ``789 µs``."""
    if not math.isfinite(seconds):
        return compact(seconds)
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{_three(seconds / scale)} {unit}"
    return f"{_three(seconds / 1e-6)} µs" if seconds else "0 s"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
