"""Parameters before and after a step: the norm of the update, and what each parameter group holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import statistics
from .captured import leading
from .hooks import clean_name
from .internals import fused_norms
from .tape import gather

# Copied before every step: at most this much on a device, and less on a CPU, where a copy costs what a step costs.
DEVICE_BYTES = 64 << 20
CPU_BYTES = 1 << 20
# What optimizers call the copy of a parameter in higher precision that they keep in their state.
_MASTERS = ("master", "master_param", "master_weight", "fp32_param", "param_fp32")
# Copied before a step whose updates are written as full rows.
WHOLE_BYTES = 64 << 20


@dataclass
class _Group:
    """The sample of one dtype and device: views of the parameters, and one flat copy of them all."""

    names: list[str]
    views: list[Tensor]  # 1-D, into the parameters' own storage
    shapes: list[tuple[int, ...]]
    before: Tensor
    after: Tensor


class UpdateSample:
    """A fixed sample of the parameters whose change is measured.

    Each parameter gives all its elements while the model fits into ``limit`` bytes, else its leading elements up to
    an equal share, so that no layer is left out. The same sample gives ``param_norm`` and ``update_norm``.

    Args:
        parameters: by name.
        limit: bytes, or None to take everything.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], limit: int | None) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._limit = limit
        self._pointers: list[int] = []
        self._groups: list[_Group] = []
        self._fresh = False

    def _build(self) -> None:
        local = {name: statistics.local(p) for name, p in self._parameters.items()}
        local = {name: p for name, p in local.items() if p.is_floating_point() and p.numel() and p.is_contiguous()}
        size = sum(p.numel() * p.element_size() for p in local.values())
        limit = size if self._limit is None else self._limit
        members: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor, tuple[int, ...]]]] = {}
        left, remaining = limit, len(local)
        for name, p in sorted(local.items(), key=lambda item: item[1].numel()):  # small ones leave room to others
            view, shape = p.view(-1), tuple(p.shape)
            if size > limit:
                view = view[: max(1, left // remaining // p.element_size())]
                shape = shape if view.numel() == p.numel() else tuple(view.shape)
                left -= view.numel() * view.element_size()
            remaining -= 1
            members.setdefault((p.dtype, p.device), []).append((name, view, shape))
        self._groups = []
        for found in members.values():
            names, views, shapes = (list(column) for column in zip(*found, strict=True))
            before = torch.cat(views)
            self._groups.append(_Group(names, views, shapes, before, torch.empty_like(before)))

    @torch.no_grad()
    def before(self) -> None:
        """Copy the sample. Parameters that moved to another storage since (a cast, an offload) are looked up anew."""
        pointers = [statistics.local(p).data_ptr() for p in self._parameters.values()]
        if pointers != self._pointers:
            self._build()
            self._pointers = pointers
        else:
            for group in self._groups:
                torch.cat(group.views, out=group.before)
        self._fresh = True

    @torch.no_grad()
    def subtract(self) -> None:
        """Take the difference to the copy; ``changes`` hands it out."""
        for group in self._groups:
            torch.cat(group.views, out=group.after)
            torch.sub(group.after, group.before, out=group.after)

    @torch.no_grad()
    def after(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """‖before‖ and ‖after - before‖ for each dtype and device, still on it; None where nothing was copied."""
        if not self._fresh:
            return None
        self._fresh = False
        parameters = [statistics.norm(group.before) for group in self._groups]
        self.subtract()
        return parameters, [statistics.norm(group.after) for group in self._groups]

    def changes(self) -> dict[str, Tensor]:
        """After minus before by name, from the latest step; in the parameter's shape where all of it was sampled."""
        return {
            name: piece.view(shape)
            for group in self._groups
            for name, piece, shape in zip(
                group.names, group.after.split([view.numel() for view in group.views]), group.shapes, strict=True
            )
        }


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """‖g‖₂ of each gradient on its device, in float32 or wider, by one fused call for each dtype and device."""
    results: list[Tensor] = [torch.empty(0)] * len(gradients)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, gradient in enumerate(gradients):
        groups.setdefault((gradient.dtype, gradient.device), []).append(index)
    for indices in groups.values():
        for index, value in zip(indices, fused_norms([gradients[i] for i in indices]), strict=True):
            results[index] = value
    return results


def group_records(
    step: int,
    optimizers: list[Any],
    parameters: dict[str, nn.Parameter],
    norms: dict[str, float],
    changes: dict[str, Tensor],
    root: nn.Module,
    frozen_gradients: set[str],
) -> list[dict[str, Any]]:
    """Rows of the ``param_groups`` stream: every parameter, the group it is in, and its optimizer state.

    Args:
        step: the window.
        optimizers: those that step the model; without one there is nothing to say.
        parameters: all of the model's, by name.
        norms: gradient norms of this window by name.
        changes: after minus before of the sampled elements by name.
        root: the model, which says what names stand for one parameter.
        frozen_gradients: names of parameters that take no gradient and had one.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    tied = shared_names(root, names)
    records: list[dict[str, Any]] = []
    waiting: list[tuple[Tensor, Callable[[float], None]]] = []

    def add(name: str, parameter: Tensor, group: dict[str, Any] | None, state: dict[str, Any]) -> dict[str, Any]:
        record = _parameter_record(parameter, state, waiting)
        record |= {"step": step, "name": name, "in_optimizer": group is not None}
        record |= {key: float(group[key]) for key in ("lr", "weight_decay") if key in group} if group else {}
        record |= {"has_grad": name in norms or name in frozen_gradients}
        record |= {"grad_norm": norms[name]} if name in norms else {}
        record |= {"shared_with": tied[id(parameter)]} if id(parameter) in tied else {}
        record |= {"adapter": True} if is_adapter(name) else {}
        moved = changes.get(name)
        if moved is not None:
            size = max(moved.numel(), 1)
            waiting.append(((moved != 0).sum(), lambda value: record.update(moved_fraction=value / size)))
            if moved.shape == parameter.shape:
                waiting.append((statistics.norm(moved), lambda value: record.update(update_norm=value)))
        records.append(record)
        return record

    group_number = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := names.get(id(parameter))) is not None:
                    record = add(name, parameter, group, optimizer.state.get(parameter, {}))
                    record |= {"group": group_number, "optimizer": type(optimizer).__name__}
            group_number += 1
    owned = {record["name"] for record in records}
    for name, parameter in parameters.items() if optimizers else ():
        if name not in owned:
            add(name, parameter, None, {})
    for (_, sink), values in zip(waiting, gather([tensor for tensor, _ in waiting]), strict=True):
        sink(values[0])
    return records


def shared_names(root: nn.Module, names: dict[int, str]) -> dict[int, list[str]]:
    """For each parameter that the model holds under several names (tied weights), the names that are not its own."""
    found: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if names.get(id(parameter), clean_name(name)) != clean_name(name):
            found.setdefault(id(parameter), []).append(clean_name(name))
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a low-rank adapter, by the names that peft and its kin give."""
    return "lora_" in name or ".adapter" in name


def _parameter_record(
    parameter: Tensor, state: dict[str, Any], waiting: list[tuple[Tensor, Callable[[float], None]]]
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "requires_grad": parameter.requires_grad,
    }
    if statistics.is_readable(parameter) and parameter.numel():
        median = leading(parameter).float().abs().median()
        waiting.append((median, lambda value: record.update(weight_absmedian=value)))
    for key, value in state.items():
        if key == "step":
            record["state_step"] = int(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            held, dtype = statistics.local(value), str(value.dtype).removeprefix("torch.")
            if key in _MASTERS and value.shape == parameter.shape:
                record["master_dtype"] = dtype
            entry = record.setdefault("state", {}).setdefault(key, {"dtype": dtype, "rms": math.nan})
            root_of = max(held.numel(), 1) ** 0.5
            waiting.append((statistics.norm(held), lambda value, e=entry, r=root_of: e.update(rms=value / r)))
    return record
