"""Parameters before and after a step: the norm of the update, and what each parameter group holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import statistics
from .internals import copy_all, fused_norms, subtract_all
from .tape import gather

# Copied before every step: at most this much on a device, and less on a CPU, where a copy costs what a step costs.
DEVICE_BYTES = 64 << 20
CPU_BYTES = 1 << 20
# Copied before a step whose updates are written as full rows.
WHOLE_BYTES = 64 << 20


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
        self._groups: list[tuple[list[str], list[Tensor], list[Tensor]]] = []
        self._fresh = False

    def _build(self) -> None:
        """Views of the sample and buffers of the same shape, one group a dtype and device for the fused operations."""
        locals_ = {name: statistics.local(p) for name, p in self._parameters.items()}
        locals_ = {name: p for name, p in locals_.items() if p.is_floating_point() and p.numel()}
        size = sum(p.numel() * p.element_size() for p in locals_.values())
        limit = size if self._limit is None else self._limit
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[Tensor], list[Tensor]]] = {}
        left, remaining = limit, len(locals_)
        for name, p in sorted(locals_.items(), key=lambda item: item[1].numel()):  # small ones leave room to others
            view = p
            if size > limit:
                if not p.is_contiguous():
                    remaining -= 1
                    continue
                view = p.view(-1)[: max(1, left // remaining // p.element_size())]
                left -= view.numel() * view.element_size()
                remaining -= 1
            names, views, buffers = groups.setdefault((p.dtype, p.device), ([], [], []))
            names.append(name)
            views.append(view)
            buffers.append(torch.empty_like(view))
        self._groups = list(groups.values())

    @torch.no_grad()
    def before(self) -> None:
        """Copy the sample. Parameters that moved to another storage since (a cast, an offload) are looked up anew."""
        pointers = [statistics.local(p).data_ptr() for p in self._parameters.values()]
        if pointers != self._pointers:
            self._build()
            self._pointers = pointers
        for _, views, buffers in self._groups:
            copy_all(buffers, views)
        self._fresh = True

    @torch.no_grad()
    def after(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Norms of parameters (before the step) and of their updates, one of each a group member, on their devices."""
        if not self._fresh:
            return None
        self._fresh = False
        parameters: list[Tensor] = []
        updates: list[Tensor] = []
        for _, views, buffers in self._groups:
            parameters += fused_norms(buffers)
            subtract_all(buffers, views)
            updates += fused_norms(buffers)
        return parameters, updates

    def changes(self) -> dict[str, Tensor]:
        """Before minus after of each sampled parameter, from the latest step."""
        return {name: buffer for names, _, buffers in self._groups for name, buffer in zip(names, buffers, strict=True)}

    @property
    def names(self) -> list[str]:
        """Names in the order of ``after``."""
        return [name for names, _, _ in self._groups for name in names]


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
    step: int, optimizers: list[Any], names: dict[int, str], norms: dict[str, float], updates: dict[str, float],
    changes: dict[str, Tensor],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the ``param_groups`` stream: every parameter, the group it is in, and its optimizer state.

    Args:
        step: the window.
        optimizers: those that step the model.
        names: id of a parameter → name, of all parameters of the model.
        norms: gradient norms of this window by name.
        updates: update norms of this window by name.
        changes: before minus after of sampled elements by name.
    """
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
                record |= _known(name, norms, updates)
                places: list[tuple[str, str, int]] = []
                for key, tensor in state.items():
                    places.append((key, str(tensor.dtype).removeprefix("torch."), tensor.numel()))
                    waiting.append(statistics.norm(tensor))
                moved = changes.get(name)
                if moved is not None:
                    places.append(("moved", "", moved.numel()))
                    waiting.append((moved != 0).sum())
                records.append(record)
                owners.append((record, places))
            group_number += 1
    values = iter(gather(waiting))
    for record, places in owners:
        for key, dtype, size in places:
            value = next(values)[0]
            if key == "moved":
                record["moved_fraction"] = value / size
            else:
                record.setdefault("state", {})[key] = {"dtype": dtype, "rms": value / max(size, 1) ** 0.5}
    return records


def unowned_records(step: int, parameters: dict[str, nn.Parameter], owned: set[str], norms: dict[str, float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows for the model's parameters that are in no group of any optimizer."""
    return [
        _parameter_record(parameter, {})[0]
        | {"step": step, "name": name, "in_optimizer": False}
        | _known(name, norms, {})
        for name, parameter in parameters.items()
        if name not in owned
    ]


def _parameter_record(parameter: Tensor, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    record: dict[str, Any] = {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "requires_grad": parameter.requires_grad,
        "has_grad": False,
    }
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "step":
            record["state_step"] = int(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            tensors[key] = statistics.local(value)
    return record, tensors


def _known(name: str, norms: dict[str, float], updates: dict[str, float]) -> dict[str, Any]:
    known: dict[str, Any] = {"has_grad": name in norms}
    if name in norms:
        known["grad_norm"] = norms[name]
    if name in updates:
        known["update_norm"] = updates[name]
    return known
