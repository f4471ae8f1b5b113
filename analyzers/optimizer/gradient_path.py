"""From the gradient that backward left to the one that the optimizer saw: which factor lies between them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..rounding import UNIT_ROUNDOFF
from . import thresholds as T
from .step_case import CLIP_EPS, Taken, clip_coefficients, number
from .step_faults import BY_NAME

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Path:
    """The factor of one parameter's gradient, the one it should be, and the faults whose factor it is."""

    taken: Taken
    factor: float
    healthy: float
    faults: tuple[str, ...]


def broken_path(capsule: Capsule, taken: list[Taken]) -> Iterator[Finding]:
    """The first window in which the gradient was multiplied by the factor of a named fault instead of the right one.

    What is no multiple of the captured gradient, or one without a name, is somebody's own processing and no finding.
    """
    windows: dict[tuple[int, int], list[Path]] = defaultdict(list)
    scales = _new_scales(capsule)
    for each in taken:
        path = path_of(each, scales.get((each.step, each.rank)))
        if path is not None:
            windows[each.step, each.rank].append(path)
    for (step, rank), paths in sorted(windows.items()):
        named = Counter(path.faults for path in paths if path.faults)
        if not named:
            continue
        faults, votes = named.most_common(1)[0]
        if 2 * votes <= len(paths):
            continue
        yield _finding(step, rank, faults, [path for path in paths if path.faults == faults])
        return


def path_of(taken: Taken, new_scale: float | None) -> Path | None:
    """The factor between the two gradients of one parameter; None where they are no multiples of each other."""
    raw, used = taken.arrays.get("gradient_raw"), taken.arrays.get("gradient")
    attributes = taken.attributes
    if raw is None or used is None or attributes.get("closure") is True or attributes.get("fused") is True:
        return None
    usable = np.isfinite(raw) & np.isfinite(used) & (raw != 0)
    large = usable & (np.abs(raw) > 1e-3 * np.abs(raw[usable]).max(initial=0.0))
    if large.sum() < 4:
        return None
    factor = float(np.median(used[large] / raw[large]))
    slack = T.PROPORTIONAL + 4 * max(
        UNIT_ROUNDOFF.get(taken.dtypes[each], 0.0) for each in ("gradient", "gradient_raw")
    )
    if factor <= 0 or np.any(np.abs(used[large] - factor * raw[large]) > slack * np.abs(factor * raw[large])):
        return None
    scale = number(attributes, "grad_scale") if attributes.get("raw_state") == "scaled" else 1.0
    if scale is None or scale <= 0 or (number(attributes, "clips") or 0) > 1:
        return None
    clip, _ = clip_coefficients(attributes, scale)
    clip = 1.0 if clip is None else clip
    healthy = clip / scale
    close = T.SAME_FACTOR + slack
    if abs(factor / healthy - 1.0) <= close:
        return Path(taken, factor, healthy, ())
    names = [
        name
        for name, value in _faulty(attributes, scale, new_scale, clip).items()
        if value > 0 and abs(factor / value - 1.0) <= close and abs(math.log(value / healthy)) > 10 * close
    ]
    return Path(taken, factor, healthy, tuple(names))


def _faulty(attributes: dict, scale: float, new_scale: float | None, clip: float) -> dict[str, float]:  # type: ignore[type-arg]
    """Factor of each fault that can be at work here."""
    found: dict[str, float] = {"clipped-twice": clip * clip / scale}
    if scale == 1.0:
        return found
    limit, norm = number(attributes, "max_norm"), number(attributes, "total_norm")
    found["gradient-not-unscaled"] = clip
    if limit is not None and norm is not None and attributes.get("clip_state") == "scaled":
        early = min(1.0, limit / (norm + CLIP_EPS))
        found |= {"clipped-before-unscale": early / scale, "gradient-not-unscaled": early}
    if new_scale is not None and new_scale != scale:
        found["unscaled-with-new-scale"] = clip / new_scale
    return found


def _new_scales(capsule: Capsule) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for event in capsule.records("events"):
        scale, step = event.get("scale_after"), event.get("step")
        if event.get("kind") == "scaler_update" and isinstance(scale, float) and isinstance(step, int) and scale > 0:
            found[step, event["rank"]] = scale
    return found


def _finding(step: int, rank: int, faults: tuple[str, ...], paths: list[Path]) -> Finding:
    fault, path = BY_NAME[faults[0]], paths[0]
    scale = number(path.taken.attributes, "grad_scale")
    rows = [
        Evidence(
            name="factor of the gradient",
            value=path.factor,
            expected=path.healthy,
            note="gradient of the optimizer / gradient that backward left, equal over all captured elements",
        ),
        Evidence(name="parameters", value=[each.taken.name for each in paths], note="with this factor"),
    ]
    if scale is not None:
        rows.append(Evidence(name="loss_scale", value=scale))
    for name in ("max_norm", "total_norm"):
        if (value := number(path.taken.attributes, name)) is not None:
            rows.append(
                Evidence(name=name, value=value, note="of the call that clipped" if name == "total_norm" else "")
            )
    certain = len(faults) == 1
    return Finding(
        severity=None if certain else "warning",
        confidence="confirmed" if certain else "likely",
        title=fault.cause[0].upper() + fault.cause[1:],
        summary=(
            f"At step {step} the optimizer's gradient is {path.factor:.4g} × the one that backward left; "
            f"{path.healthy:.4g} × is right, and {' or '.join(faults)} gives {path.factor:.4g}."
        ),
        where=Where(step=step, rank=rank, tensor=path.taken.name),
        evidence=tuple(rows),
        cause=" or ".join(BY_NAME[name].cause for name in faults),
        fix=tuple(dict.fromkeys(BY_NAME[name].fix for name in faults)),
        next=("log the norm of the gradient right before the optimizer steps",),
    )
