"""How exactly a number is known: unit roundoff, perturbed inputs, and what error of a candidate they allow."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Half a unit in the last place of 1.0: the largest relative error of one rounding.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}

#: Shifts and factors of a 64-bit mixing function (Stafford's variant of the MurmurHash3 finaliser).
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)

#: Values closer than this (relative) are one value: the faults behind them cannot be told apart on this input.
SAME = 1e-11

#: A scalar fits within the printed rounding plus this many standard deviations.
SIGMAS = 6.0


@dataclass(frozen=True)
class Noise:
    """One draw of ± one unit roundoff on every input; the same draw perturbs the same input alike for every spec.

    The sign is a hash of the number itself: equal numbers were rounded alike, so that the errors of rows that repeat do
    not cancel.
    """

    seed: int
    draw: int
    roundoff: float

    def __call__(self, array: Array, name: str) -> Array:
        """``array`` with each element scaled by 1 ± roundoff; ``name`` keeps the draws of two inputs apart."""
        bits = np.ascontiguousarray(array, np.float64).view(np.uint64) ^ _salt(self.seed, self.draw, name)
        for shift, factor in _MIX:
            bits = (bits ^ (bits >> shift)) * factor
        signs = np.where(bits >> np.uint64(63), 1.0, -1.0)
        return array * (1.0 + self.roundoff * signs)


@lru_cache(maxsize=1024)
def _salt(seed: int, draw: int, name: str) -> np.uint64:
    return np.random.default_rng((seed, draw, zlib.crc32(name.encode()))).integers(0, 2**63, dtype=np.uint64)


def scalar_tolerance(value: float, sigma: float, roundoff: float, decimals: int | None) -> float:
    """½·10⁻ᵈ + 6·√(σ² + (u·|v|)²): half a printed unit and six standard deviations of the rounding.

    Args:
        value: the candidate.
        sigma: how far rounding of the inputs moves it.
        roundoff: u of the dtype in which the number itself was computed.
        decimals: d as printed, None for full precision.
    """
    printed = 0.5 * 10.0**-decimals if decimals is not None else 0.0
    # 1 % guards the printed half unit itself against the binary rounding of a decimal number.
    return 1.01 * printed + SIGMAS * float(np.hypot(sigma, roundoff * abs(value)))


def tensor_z(observed: Array, reference: Array, sigma: Array, roundoff: float) -> tuple[float, float]:
    """(largest row RMS, overall RMS) of the error in standard deviations; rows that are not finite are left out.

    z² = (o − r)² / (σ² + (u·r)² + 0.05 · row mean of those): the last term keeps elements that happen to be near
    zero from standing out.
    """
    width = observed.shape[-1] if observed.ndim > 1 else 1
    flat_o, flat_r, flat_s = (each.reshape(-1, width) for each in (observed, reference, sigma))
    usable = np.isfinite(flat_o).all(axis=1) & np.isfinite(flat_r).all(axis=1)
    if not usable.any():
        return np.inf, np.inf
    variance = flat_s[usable] ** 2 + (roundoff * flat_r[usable]) ** 2
    mean = variance.mean(axis=1, keepdims=True) if width > 1 else variance.mean()
    z2 = (flat_o[usable] - flat_r[usable]) ** 2 / np.maximum(variance + 0.05 * mean, 1e-300)
    return float(np.sqrt(z2.mean(axis=1).max())), float(np.sqrt(z2.mean()))


def as_scalar(value: float | Array) -> float:
    """A tensor stands in tables as its root mean square."""
    return float(np.sqrt(np.nanmean(np.square(value)))) if isinstance(value, np.ndarray) else float(value)


def meeting_keys(values: Sequence[float | Array]) -> set[str]:
    """Under one of these, equal candidates meet: the first number, rounded a little below and above itself."""
    first = as_scalar(values[0])
    return {f"{first * (1 + side * SAME):.9e}" for side in (-1, 1)}


def same_values(left: Sequence[float | Array], right: Sequence[float | Array]) -> bool:
    """Whether two candidates have one value at every observation."""
    return all(
        bool(np.allclose(a, b, rtol=SAME, atol=0.0, equal_nan=True))
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        else abs(a - b) <= SAME * abs(b) or (a != a and b != b)
        for a, b in zip(left, right, strict=True)
    )
