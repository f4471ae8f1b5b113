"""Parameters before and after a step: the norm of the update, and what each parameter group holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import statistics
from .internals import fused_norms
from .tape import gather

# Copied before every step: at most this much on a device, and less on a CPU, where a copy costs what a step costs.
DEVICE_BYTES = 64 << 20
CPU_BYTES = 1 << 20
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
) -> list[dict[str, Any]]:
    """Rows of the ``param_groups`` stream: every parameter, the group it is in, and its optimizer state.

    Args:
        step: the window.
        optimizers: those that step the model; without one there is nothing to say.
        parameters: all of the model's, by name.
        norms: gradient norms of this window by name.
        changes: after minus before of the sampled elements by name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    records: list[dict[str, Any]] = []
    waiting: list[Tensor] = []
    owners: list[tuple[dict[str, Any], list[tuple[str, str, int]]]] = []
    group_number = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    continue
                record, state = _parameter_record(parameter, optimizer.state.get(parameter, {}))
                record |= {"step": step, "group": group_number, "name": name, "in_optimizer": True}
                record |= {key: float(group[key]) for key in ("lr", "weight_decay") if key in group}
                record |= _gradient(name, norms)
                places: list[tuple[str, str, int]] = []
                for key, tensor in state.items():
                    places.append((key, str(tensor.dtype).removeprefix("torch."), tensor.numel()))
                    waiting.append(statistics.norm(tensor))
                moved = changes.get(name)
                if moved is not None:
                    places.append(("moved", "", moved.numel()))
                    waiting.append((moved != 0).sum())
                    if moved.shape == parameter.shape:
                        places.append(("update", "", 1))
                        waiting.append(statistics.norm(moved))
                records.append(record)
                owners.append((record, places))
            group_number += 1
    values = iter(gather(waiting))
    for record, places in owners:
        for key, dtype, size in places:
            value = next(values)[0]
            if key == "moved":
                record["moved_fraction"] = value / size
            elif key == "update":
                record["update_norm"] = value
            else:
                record.setdefault("state", {})[key] = {"dtype": dtype, "rms": value / max(size, 1) ** 0.5}
    owned = {record["name"] for record in records}
    if optimizers:
        records += [
            _parameter_record(p, {})[0] | {"step": step, "name": name, "in_optimizer": False} | _gradient(name, norms)
            for name, p in parameters.items()
            if name not in owned
        ]
    return records


def _parameter_record(parameter: Tensor, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    record: dict[str, Any] = {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "requires_grad": parameter.requires_grad,
    }
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "step":
            record["state_step"] = int(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            tensors[key] = statistics.local(value)
    return record, tensors


def _gradient(name: str, norms: dict[str, float]) -> dict[str, Any]:
    return {"has_grad": True, "grad_norm": norms[name]} if name in norms else {"has_grad": False}
