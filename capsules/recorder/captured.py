"""A small sample of the optimizer step, whole: parameters, gradients and moments before and after, element by element.

What the rules compute an optimizer step again from. Everything is copied on the tensors' own device, in the windows
that were chosen for it and no others, and brought to the host when the window is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import statistics
from .describe import decoupled_decay

if TYPE_CHECKING:
    from .window import Window

#: Leading elements taken of a parameter, and parameters sampled: of those that are trained, and of frozen ones.
MOST_ELEMENTS, MOST_PARAMETERS, MOST_FROZEN = 4096, 16, 4
#: Windows between two samples where full statistics are taken more often than the batches are written.
EVERY_AT_MOST = 10
#: Names of the settings of a parameter group that a step depends on.
_SETTINGS = ("lr", "eps", "weight_decay", "momentum", "maximize", "amsgrad", "capturable", "fused")
#: An optimizer's tensors beside its parameter that are sampled.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")

Later = Callable[[Any, Callable[[float], None]], None]


def leading(tensor: Tensor) -> Tensor:
    """A copy of the leading elements [≤ 4096] of the part of a tensor that lies on this rank, on its device."""
    local = statistics.local(tensor)
    flat = local.view(-1) if local.is_contiguous() else local[: MOST_ELEMENTS // max(1, local[:1].numel()) + 1]
    return flat.reshape(-1)[:MOST_ELEMENTS].clone()


def choose(root: nn.Module, parameters: dict[str, nn.Parameter]) -> tuple[list[str], list[str]]:
    """Names of the parameters to sample: trained ones of every kind, and a few frozen ones.

    The largest and the last matrix, an embedding, a norm, a bias, a pair of adapters, the first and the last parameter;
    what room is left goes to parameters spread evenly over the depth.
    """
    readable = {name: p for name, p in parameters.items() if statistics.is_readable(p) and p.numel()}
    trained = [name for name, p in readable.items() if p.requires_grad]
    frozen = [name for name, p in readable.items() if not p.requires_grad]
    embedded = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}

    def first(of: Iterable[str]) -> list[str]:
        return list(of)[:1]

    matrices = sorted((n for n in trained if readable[n].ndim > 1), key=lambda n: -readable[n].numel())
    chosen = [
        *first(matrices),
        *first(n for n in trained if id(readable[n]) in embedded),
        *first(n for n in trained if readable[n].ndim == 1 and n.endswith("weight")),
        *first(n for n in trained if readable[n].ndim == 1 and n.endswith("bias")),
        *first(n for n in trained if "lora_A" in n),
        *first(n for n in trained if "lora_B" in n),
        *trained[:1],
        *[n for n in trained if readable[n].ndim > 1][-1:],
        *trained[-1:],
    ]
    spread = max(1, math.ceil(len(trained) / (MOST_PARAMETERS // 2)))
    names = list(dict.fromkeys([*chosen, *trained[::spread]]))[:MOST_PARAMETERS]
    return names, frozen[:: max(1, math.ceil(len(frozen) / MOST_FROZEN))]


@dataclass
class _Parameter:
    """What was taken of one parameter."""

    arrays: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


class StepSample:
    """The sample of one window.

    Args:
        parameters: those to sample, by name.
        later: hands over a number that may still lie on a device, see ``Window.later``.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], later: Later) -> None:
        self._parameters = parameters
        self._taken = {name: _Parameter() for name in parameters}
        self._later = later
        self._depth: dict[int, int] = {}
        self._scaled = False
        self._raw = False
        self._names = {id(p): name for name, p in parameters.items()}

    @torch.no_grad()
    def gradients(self, scaled: bool) -> None:
        """Take the gradients as backward left them, before anything divides or clips them; the first call counts."""
        if self._raw:
            return
        self._raw, self._scaled = True, scaled
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and statistics.is_readable(parameter.grad):
                self._taken[name].arrays["gradient_raw"] = leading(parameter.grad)
                self._taken[name].attributes["raw_state"] = "scaled" if scaled else "unscaled"

    @torch.no_grad()
    def left_scaled(self) -> None:
        """Take the gradients right after a backward of a scaled loss; the last backward of a window counts."""
        self._raw = False
        self.gradients(scaled=True)

    @torch.no_grad()
    def divided_by(self, scale: Tensor) -> bool | None:
        """Whether the gradients are now 1 / ``scale`` of what backward left; None where that cannot be told."""
        for name, parameter in self._parameters.items():
            raw = self._taken[name].arrays.get("gradient_raw")
            if raw is None or parameter.grad is None or not statistics.is_readable(parameter.grad):
                continue
            at = raw.abs().argmax()
            before, now = float(raw[at]), float(leading(parameter.grad)[at])
            if math.isfinite(before) and before and float(scale) != 1.0:
                return abs(now * float(scale) / before - 1.0) < 0.01
        return None

    def clipped(self, parameters: list[Tensor], max_norm: float, total_norm: Any, scaled: bool) -> None:
        """Note a clip by norm for those of its parameters that are sampled; ``scaled``: before the unscaling."""
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is not None:
                attributes = self._taken[name].attributes
                attributes["clips"] = attributes.get("clips", 0) + 1
                attributes |= {"max_norm": max_norm, "clip_state": "scaled" if scaled else "unscaled"}
                self._later(total_norm, lambda value, a=attributes: a.__setitem__("total_norm", value))

    @torch.no_grad()
    def before(self, optimizer: Any, state: str, scale: Any, rates: list[Any]) -> None:
        """Take parameters, gradients and moments that ``optimizer`` is about to use.

        Args:
            optimizer: about to step; a call inside another call of its own (a subclass calling its parent) is left out.
            state: of the gradients: scaled, unscaled or clipped.
            scale: the loss scale, None without a scaler.
            rates: learning rate of each group at the step before; empty where there was none.
        """
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        if depth > 1:
            return
        for name, parameter, index in self._owned(optimizer):
            taken, group = self._taken[name], optimizer.param_groups[index]
            if "before" in taken.arrays:
                continue  # its second step in one window
            taken.arrays["before"] = leading(parameter)
            if parameter.grad is not None and statistics.is_readable(parameter.grad):
                taken.arrays["gradient"] = leading(parameter.grad)
            attributes = taken.attributes
            attributes |= {"optimizer": type(optimizer).__name__, "module": type(optimizer).__module__}
            attributes |= {"requires_grad": parameter.requires_grad, "closure": False}
            attributes["gradient_state"] = "clipped" if state == "unscaled" and "clips" in attributes else state
            if (decoupled := decoupled_decay(optimizer, group)) is not None:
                attributes["decoupled"] = decoupled
            if "betas" in group:
                attributes["betas"] = [float(beta) for beta in group["betas"]]
            for key in _SETTINGS:
                if isinstance(value := group.get(key), bool):
                    attributes[key] = value
                else:
                    self._number(attributes, key, value)
            self._number(attributes, "grad_scale", scale)
            self._number(attributes, "lr_previous", rates[index] if index < len(rates) else None)
            self._moments(optimizer, name, parameter, "", "state_step_before")

    @torch.no_grad()
    def after(self, optimizer: Any, closure: bool) -> None:
        """Take parameters and moments as the step left them; ``closure``: gradients were made inside the step."""
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 1) - 1
        if depth > 0:
            return
        for name, parameter, _ in self._owned(optimizer):
            taken = self._taken[name]
            if "before" not in taken.arrays or "after" in taken.arrays:
                continue
            taken.arrays["after"] = leading(parameter)
            taken.attributes["closure"] = closure
            self._moments(optimizer, name, parameter, "_after", "state_step")

    def frozen_gradients(self) -> set[str]:
        """Names of frozen parameters that had a gradient when the optimizer stepped."""
        return {n for n, p in self._parameters.items() if not p.requires_grad and "gradient" in self._taken[n].arrays}

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """After minus before of the sampled elements, by name."""
        pairs = {name: taken.arrays for name, taken in self._taken.items() if "after" in taken.arrays}
        return {name: arrays["after"] - arrays["before"] for name, arrays in pairs.items()}

    def groups(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """For ``CapsuleWriter.tensors``: what was taken, on the host, one transfer for each dtype and device."""
        taken = {name: each for name, each in self._taken.items() if "before" in each.arrays}
        places = [(name, key) for name, each in taken.items() for key in each.arrays]
        hosts = dict(zip(places, to_host([taken[name].arrays[key] for name, key in places]), strict=True))
        return [
            (f"optimizer/{name}", {key: hosts[name, key] for key in each.arrays}, each.attributes)
            for name, each in taken.items()
        ]

    def _owned(self, optimizer: Any) -> list[tuple[str, nn.Parameter, int]]:
        """(name, parameter, number of its group) of those in the sample."""
        return [
            (self._names[id(parameter)], parameter, index)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._names
        ]

    def _moments(self, optimizer: Any, name: str, parameter: Tensor, suffix: str, count: str) -> None:
        state, taken = optimizer.state.get(parameter, {}), self._taken[name]
        for key in _MOMENTS:
            value = state.get(key)
            if isinstance(value, Tensor) and statistics.is_readable(value) and value.shape == parameter.shape:
                taken.arrays[key + suffix] = leading(value)
        if "step" in state:
            self._number(taken.attributes, count, state["step"])
        elif not suffix and not state:
            taken.attributes[count] = 0

    def _number(self, attributes: dict[str, Any], key: str, value: Any) -> None:
        if not isinstance(value, (int, float, Tensor)) or (isinstance(value, Tensor) and value.numel() != 1):
            return
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        self._later(copied, lambda number: attributes.__setitem__(key, number))


class StepSamples:
    """Chooses the windows whose optimizer step is sampled, and the parameters, the same ones in every window.

    Args:
        root: the model.
        parameters: its parameters by name, as they are when asked.
    """

    def __init__(self, root: nn.Module, parameters: Callable[[], dict[str, nn.Parameter]]) -> None:
        self._root = root
        self._parameters = parameters
        self._names: list[str] | None = None
        self._chosen: dict[str, nn.Parameter] = {}
        self._window: Window | None = None
        self._sample: StepSample | None = None
        self._last = -EVERY_AT_MOST
        self._wanted = False
        self._rates: dict[int, list[Any]] = {}

    def of(self, window: Window) -> StepSample | None:
        """The sample of a window; None where it was not chosen.

        Chosen are the first window, those in which the batches are written, those of full statistics that are not too
        near to the one before, and the one after an overflow.
        """
        if self._window is not window:
            self._window, self._sample = window, None
            regular = window.everything and abs(window.step - self._last) >= EVERY_AT_MOST
            if window.due or regular or self._wanted:
                self._chosen = self._choose()
                self._sample, self._last = StepSample(self._chosen, window.later), window.step
        return self._sample

    def _choose(self) -> dict[str, nn.Parameter]:
        parameters = self._parameters()
        if self._names is None:
            trained, frozen = choose(self._root, parameters)
            self._names = [*trained, *frozen]
        return {name: parameters[name] for name in self._names if name in parameters}

    @torch.no_grad()
    def carried(self) -> Tensor | None:
        """‖g‖ over the sample of gradients that lie there before a window's first backward; None without any.

        Of every window: where a loop drops its gradients there is nothing to do.
        """
        found = [p.grad for p in self._chosen.values() if p.grad is not None and statistics.is_readable(p.grad)]
        norms = [statistics.norm(leading(each)) for each in found]
        return torch.stack([each.float().to(norms[0].device) for each in norms]).norm() if norms else None

    def rates(self, optimizer: Any) -> list[Any]:
        """Learning rates of the groups at the optimizer's step before; remembers those of now."""
        now = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
        before = self._rates.get(id(optimizer), [])
        self._rates[id(optimizer)] = [each.detach().clone() if isinstance(each, Tensor) else each for each in now]
        return before

    def close(self, window: Window) -> StepSample | None:
        """The sample of a window that has been read; the one after an overflow will be sampled."""
        sample = self._sample if self._window is window else None
        self._window = self._sample = None
        self._wanted = window.overflowed
        return sample


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors (1-D) in host memory; those of one dtype on one device come over together."""
    found: list[Tensor] = list(tensors)
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not statistics.at_hand(tensor):
            places.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in places.values():
        host = torch.cat([tensors[index] for index in indices]).cpu()
        pieces = host.split([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            found[index] = piece
    return found
