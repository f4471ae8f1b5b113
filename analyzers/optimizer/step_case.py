"""Captured optimizer steps as cases that can be computed again: one case for each group of equal settings."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...capsules.errors import EvidenceError
from ..reference.adamw import Settings
from ..registry import NotJudged
from ..rounding import UNIT_ROUNDOFF
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Floats = NDArray[np.float64]

#: Elements taken of each parameter, evenly spread, and groups of settings judged in one window.
MOST_ELEMENTS, MOST_GROUPS = 256, 4
#: Added to a norm by torch.nn.utils.clip_grad_norm_ before it divides.
CLIP_EPS = 1e-6
#: Classes that are Adam or AdamW under another name, and parts of names that say that a class is something else.
_ADAM = re.compile(r"adam_?w?\d*$|^(fused|cpu|deepspeedcpu|paged)adam", re.IGNORECASE)
_OTHER = re.compile(
    r"n_?adam|radam|ada(max|mp|n$|belief|factor|mini|bound)|8bit|4bit|fp8|schedule|cautious|sparse|stable|galore|"
    r"grok|apollo|lomo|muon|atan2",
    re.I,
)
_MEMBERS = ("before", "gradient", "gradient_raw", "exp_avg", "exp_avg_sq", "after", "exp_avg_after", "exp_avg_sq_after")


@dataclass(frozen=True, eq=False)
class Declared:
    """What the job says of a step, the same for every parameter of a case; None where it is not said.

    Attributes:
        settings: of Adam; where the count is not ``counted``, its step is the window's number from 1.
        counted: whether the number of the optimizer's step is on record.
        decoupled: whether decay is decoupled.
        genuine: the class is torch's own, so there is one lawful form.
        lr_previous: learning rate of the step before.
        state: of the gradient of the case: scaled, unscaled, clipped or exact (as the optimizer saw it).
        scale: loss scale that backward used.
        new_scale: loss scale after the scaler's update in this window.
        clip: coefficient that clipping should apply to an unscaled gradient.
        clip_scaled: coefficient that clipping before the unscaling applies.
    """

    settings: Settings
    counted: bool
    decoupled: bool | None
    genuine: bool
    lr_previous: float | None
    state: str
    scale: float | None
    new_scale: float | None
    clip: float | None
    clip_scaled: float | None


@dataclass(frozen=True, eq=False)
class StepCase:
    """Elements of several parameters that were stepped with equal settings; all arrays are 1-D, FP64, of one length.

    ``observed`` holds what the job got, by name: after, exp_avg_after, exp_avg_sq_after.
    """

    step: int
    rank: int
    names: tuple[str, ...]
    declared: Declared
    parameter: Floats
    gradient: Floats
    exp_avg: Floats
    exp_avg_sq: Floats
    observed: dict[str, Floats]
    roundoff: float
    moment_roundoff: float
    dtype: str
    optimizer: str


@dataclass(frozen=True)
class Taken:
    """The arrays of one parameter in one window, FP64 [n], with their attributes and dtypes."""

    step: int
    rank: int
    name: str
    arrays: dict[str, Floats]
    dtypes: dict[str, str]
    attributes: dict[str, Any]


_taken: WeakKeyDictionary[Capsule, list[Taken]] = WeakKeyDictionary()


def taken_steps(capsule: Capsule) -> list[Taken]:
    """The parameters of the captured optimizer steps, by window; read once a capsule.

    Of a long run the first and the last windows, and those after an overflow. Members of different lengths are cut to
    the least; elements that are not finite are kept.
    """
    if capsule not in _taken:
        _taken[capsule] = _read(capsule)
    return _taken[capsule]


def _read(capsule: Capsule) -> list[Taken]:
    members: dict[tuple[int, int, str], dict[str, Any]] = defaultdict(dict)
    for tensor in capsule.tensors("optimizer/*"):
        path, _, member = tensor.name.partition("/")[2].rpartition("/")
        if path and member in _MEMBERS:
            members[tensor.step, tensor.rank, path].setdefault(member, tensor)
    chosen = _windows(capsule, sorted({(step, rank) for step, rank, _ in members}))
    found: list[Taken] = []
    for (step, rank, name), tensors in sorted(members.items()):
        if (step, rank) not in chosen:
            continue
        arrays: dict[str, Floats] = {}
        attributes: dict[str, Any] = {}
        for member, tensor in tensors.items():
            try:
                values = np.asarray(tensor.array())
            except EvidenceError:
                continue
            if values.dtype.kind in "fiu" and values.size:
                arrays[member] = values.astype(np.float64).reshape(-1)
                attributes |= tensor.attributes
        if arrays:
            length = min(len(each) for each in arrays.values())
            arrays = {member: each[:length] for member, each in arrays.items()}
            dtypes = {member: str(tensors[member].dtype) for member in arrays}
            found.append(Taken(step, rank, name, arrays, dtypes, attributes))
    return found


def _windows(capsule: Capsule, captured: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Windows worth reading, of those captured, in order."""
    flags = capsule.scalars("overflow")
    after = {int(step) + 1 for step in flags.step[flags.value > 0]}
    odd = [each for each in captured if each[0] in after or each[0] + 1 in after]
    return {*captured[: T.FIRST_WINDOWS], *captured[-T.LAST_WINDOWS :], *odd[: T.ODD_WINDOWS]}


def number(attributes: dict[str, Any], name: str) -> float | None:
    """A finite number among attributes, else None."""
    value = attributes.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


class Unknown(Exception):
    """This parameter's step cannot be computed again; the message says why."""


def cases_by_window(capsule: Capsule, taken: list[Taken]) -> dict[tuple[int, int], list[StepCase]]:
    """Cases of Adam and AdamW by (step, rank), the largest groups of each window.

    Raises:
        NotJudged: there are captured steps and none of them can be computed again.
    """
    grouped: dict[tuple[int, int], dict[Any, list[tuple[Taken, Declared]]]] = defaultdict(lambda: defaultdict(list))
    reasons: list[str] = []
    reader = _Reader(capsule)
    for each in taken:
        try:
            declared = reader.declared(each)
        except Unknown as reason:
            reasons.append(f"{each.name}: {reason}")
            continue
        key = (
            *(getattr(declared.settings, field) for field in ("lr", "beta1", "beta2", "eps", "weight_decay", "step")),
            *(
                declared.counted,
                declared.decoupled,
                declared.state,
                declared.scale,
                declared.clip,
                declared.clip_scaled,
            ),
            *(each.dtypes["before"], each.dtypes.get("exp_avg_after"), tuple(sorted(each.arrays))),
        )
        grouped[each.step, each.rank][key].append((each, declared))
    windows: dict[tuple[int, int], list[StepCase]] = {}
    for window, groups in grouped.items():
        built = [case for members in groups.values() if (case := _case(members)) is not None]
        built.sort(key=lambda case: -len(case.parameter))
        if built:
            windows[window] = built[:MOST_GROUPS]
    if not windows:
        raise NotJudged(reasons[0] if reasons else "a captured optimizer step: before, gradient and after")
    return windows


def _case(members: list[tuple[Taken, Declared]]) -> StepCase | None:
    """One case of parameters with equal settings; None where no element is finite throughout."""
    columns: dict[str, list[Floats]] = defaultdict(list)
    names: list[str] = []
    for taken, _ in members:
        arrays = dict(taken.arrays)
        usable = np.logical_and.reduce([np.isfinite(each) for each in arrays.values()])
        chosen = np.flatnonzero(usable)
        chosen = chosen[:: max(1, math.ceil(len(chosen) / MOST_ELEMENTS))]
        if not len(chosen):
            continue
        zeros = np.zeros(len(chosen))
        names.append(taken.name)
        for member in _MEMBERS:
            if member in arrays:
                columns[member].append(arrays[member][chosen])
            elif member in ("exp_avg", "exp_avg_sq"):
                columns[member].append(zeros)
    if not names:
        return None
    first, declared = members[0]
    joined = {member: np.concatenate(pieces) for member, pieces in columns.items()}
    dtype = first.dtypes["before"]
    moment = first.dtypes.get("exp_avg_after", first.dtypes.get("exp_avg", dtype))
    roundoff = UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["float32"])
    moment_roundoff = max(UNIT_ROUNDOFF.get(moment, UNIT_ROUNDOFF["float32"]), _exact(roundoff))
    return StepCase(
        step=first.step,
        rank=first.rank,
        names=tuple(names),
        declared=declared,
        parameter=joined["before"],
        gradient=joined["gradient"],
        exp_avg=joined["exp_avg"],
        exp_avg_sq=joined["exp_avg_sq"],
        observed={name: joined[name] for name in ("after", "exp_avg_after", "exp_avg_sq_after") if name in joined},
        roundoff=max(roundoff, _exact(roundoff)),
        moment_roundoff=moment_roundoff,
        dtype=dtype,
        optimizer=str(first.attributes.get("optimizer") or ""),
    )


def _exact(roundoff: float) -> float:
    """float64 parameters are judged as float32: rates and counters are often kept in that."""
    return UNIT_ROUNDOFF["float32"] if roundoff < UNIT_ROUNDOFF["float32"] else roundoff


class _Reader:
    """Reads what is declared of a step from attributes, then from the manifest, the records and the events."""

    def __init__(self, capsule: Capsule) -> None:
        training = capsule.manifest.training
        self._manifest = training.optimizer if training is not None else None
        self._counts: dict[tuple[int, int, str], int] = {}
        self._classes: set[str] = set()
        for record in capsule.records("param_groups"):
            count, step = record.get("state_step"), record.get("step")
            if isinstance(count, int) and isinstance(step, int):
                self._counts[step, record["rank"], str(record.get("name"))] = count
        for tensor in capsule.tensors("optimizer/*/after"):
            self._classes.add(str(tensor.attributes.get("optimizer") or ""))
        self._new_scales: dict[tuple[int, int], float] = {}
        self._rates = {int(s): float(v) for s, v in zip(*_series(capsule, "learning_rate"), strict=True)}
        self._scales = {int(s): float(v) for s, v in zip(*_series(capsule, "loss_scale"), strict=True)}
        for event in capsule.records("events"):
            scale, step = event.get("scale_after"), event.get("step")
            if event.get("kind") == "scaler_update" and isinstance(scale, float) and isinstance(step, int):
                self._new_scales[step, event["rank"]] = scale

    def declared(self, taken: Taken) -> Declared:
        """What is known of one parameter's step.

        Raises:
            Unknown: it is no step of Adam, or something that the step depends on is not known.
        """
        attributes, manifest = taken.attributes, self._manifest
        missing = [member for member in ("before", "gradient", "after") if member not in taken.arrays]
        if missing:
            raise Unknown(f"{' and '.join(missing)} not captured")
        if attributes.get("requires_grad") is False:
            raise Unknown("a frozen parameter")
        if attributes.get("closure") is True:
            raise Unknown("the gradient was made inside the step (a closure): capture it where the step begins")
        for flag in ("amsgrad", "maximize"):
            if attributes.get(flag) is True:
                raise Unknown(f"{flag} is not computed again")
        name = str(attributes.get("optimizer") or (manifest.name if manifest else None) or "")
        if name and (not _ADAM.search(name) or _OTHER.search(name)):
            raise Unknown(f"the optimizer is {name}: only Adam and AdamW are computed again")
        if not name and not {"exp_avg_after", "exp_avg_sq_after", "exp_avg", "exp_avg_sq"} & set(taken.arrays):
            raise Unknown("neither the optimizer's name nor its moments were captured")
        betas = attributes.get("betas") or (manifest.betas if manifest else None)
        values = {key: self._setting(attributes, key) for key in ("lr", "eps", "weight_decay")}
        if values["lr"] is None:
            values["lr"] = self._rates.get(taken.step)
        unknown = [key for key, value in values.items() if value is None and key != "weight_decay"]
        if not (isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) for b in betas)):
            unknown.append("betas")
        if unknown:
            raise Unknown(f"{', '.join(unknown)} not recorded")
        count = self._count(taken)
        lawful = all(0 <= float(beta) < 1 for beta in betas or ()) and all(
            (value or 0.0) >= 0 for value in values.values()
        )
        if not lawful or (count is not None and count < 1):
            raise Unknown("settings that no Adam can have")
        if not {"exp_avg", "exp_avg_sq"} <= set(taken.arrays) and count != 1.0:
            raise Unknown("the moments before the step were not captured")
        decoupled = self._decoupled(attributes, name)
        scale = number(attributes, "grad_scale")
        scale = (
            self._scales.get(taken.step) if scale is None and attributes.get("gradient_state") == "scaled" else scale
        )
        scale = scale if scale is not None and scale > 0 else None
        new_scale = number(attributes, "new_scale") or self._new_scales.get((taken.step, taken.rank))
        raw = "gradient_raw" in taken.arrays
        state = str(attributes.get("gradient_state") or ("scaled" if scale not in (None, 1.0) else "exact"))
        clip, clip_scaled = clip_coefficients(attributes, scale)
        return Declared(
            settings=Settings(
                lr=values["lr"] or 0.0,
                beta1=float(betas[0]),  # pyright: ignore[reportOptionalSubscript]
                beta2=float(betas[1]),  # pyright: ignore[reportOptionalSubscript]
                eps=values["eps"] or 0.0,
                weight_decay=values["weight_decay"] or 0.0,
                step=taken.step + 1.0 if count is None else count,
            ),
            counted=count is not None,
            decoupled=decoupled,
            genuine=str(attributes.get("module") or "").startswith("torch.optim."),
            lr_previous=number(attributes, "lr_previous") or self._rates.get(taken.step - 1),
            state="exact" if raw and state != "scaled" else state,
            scale=scale,
            new_scale=new_scale if new_scale != scale else None,
            clip=clip,
            clip_scaled=clip_scaled,
        )

    def _setting(self, attributes: dict[str, Any], key: str) -> float | None:
        value = number(attributes, key)
        return value if value is not None else getattr(self._manifest, key, None)

    def _count(self, taken: Taken) -> float | None:
        """The number of this step, None where it is not recorded."""
        before = number(taken.attributes, "state_step_before")
        if before is not None:
            return before + 1.0
        after = number(taken.attributes, "state_step")
        return after if after is not None else self._counts.get((taken.step, taken.rank, taken.name))

    def _decoupled(self, attributes: dict[str, Any], name: str) -> bool | None:
        """What was meant: the manifest where it speaks of this optimizer, else what the class is."""
        manifest = self._manifest
        own = attributes.get("decoupled")
        if not isinstance(own, bool) and name:
            # Only torch's own Adam is certain to add decay to the gradient.
            torchs = str(attributes.get("module") or "torch.optim.").startswith("torch.optim.")
            own = True if "adamw" in name.lower() else False if torchs else None
        own = own if isinstance(own, bool) else None
        only_one = len(self._classes) <= 1
        if manifest is not None and (only_one or manifest.name == name):
            meant = manifest.decoupled
            if meant is None and manifest.name:
                meant = {"adamw": True, "adam": None if own is None else False}.get(manifest.name.lower())
            return own if meant is None else meant
        return own


def clip_coefficients(attributes: dict[str, Any], scale: float | None) -> tuple[float | None, float | None]:
    """(coefficient that an unscaled gradient should get, the one that clipping it before unscaling gives)."""
    limit, norm, given = (number(attributes, key) for key in ("max_norm", "total_norm", "clip_coefficient"))
    if limit is None or norm is None or limit <= 0 or norm < 0:
        return given, None
    factor = scale or 1.0
    true = norm / factor if attributes.get("clip_state") == "scaled" else norm
    coefficient = given if given is not None and attributes.get("clip_state") != "scaled" else None
    intended = coefficient if coefficient is not None else min(1.0, limit / (true + CLIP_EPS))
    return intended, min(1.0, limit / (true * factor + CLIP_EPS)) if factor != 1.0 else None


def _series(capsule: Capsule, name: str) -> Iterator[Any]:
    series = capsule.scalars(name)
    return iter((series.step.tolist(), series.value.tolist()))
