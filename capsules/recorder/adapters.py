"""Low-rank adapters at work: what a few adapted layers got and gave, beside what their base gave when recording began.

peft's layers are known (``base_layer``, ``lora_A``, ``lora_B``), and those that hold base and adapter in one
(``weight``, ``lora_A``, ``lora_B``). The base's output is computed here, from a copy of some rows of its frozen
weights: an adapter that was merged into them since, and is added all the same, shows only against that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import statistics
from .internals import inside_backward
from .tape import Tape

#: Adapted layers looked at, and rows (tokens) and output features taken of each.
MOST_LAYERS, MOST_ROWS, MOST_FEATURES = 2, 64, 64
#: Parts of adapters that compute something else than base + scaling · B · A: DoRA, AdaLoRA, activated ones.
_OTHER_KINDS = ("lora_magnitude_vector", "lora_E", "lora_variant")

Groups = list[tuple[str, dict[str, Tensor], dict[str, Any]]]


@dataclass
class _Base:
    """Some rows of a frozen base layer, [≤ 64, in] and [≤ 64], as they were when they were copied."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype


class _Layer:
    """One adapted layer."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.base: Any = getattr(module, "base_layer", module)
        self.copy: _Base | None = None
        self.fed: Tensor | None = None  # what the first adapter matrix was called with, after its dropout
        self.taken: dict[str, Tensor] = {}
        self.scaling = 1.0

    def matrices(self) -> tuple[Tensor, Tensor, float] | None:
        """A [r, in], B [out, r] and the scaling of the one active adapter; None for several, or another kind."""
        module: Any = self.module
        a: Any = module.lora_A
        b: Any = module.lora_B
        scaling: Any = getattr(module, "scaling", 1.0)
        if isinstance(a, nn.ModuleDict):
            active = list(getattr(module, "active_adapters", a))
            if len(active) != 1 or active[0] not in a:
                return None
            a, b, scaling = a[active[0]], b[active[0]], scaling[active[0]]
        if any(getattr(module, each, None) for each in _OTHER_KINDS) or getattr(b, "bias", None) is not None:
            return None
        a, b = (getattr(each, "weight", each) for each in (a, b))
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(scaling, (int, float))):
            return None
        plain = all(each.ndim == 2 and statistics.is_readable(each) for each in (a, b))
        return (a, b, float(scaling)) if plain else None

    def begin(self) -> bool:
        """Whether this layer can be looked at; an odd one cannot."""
        try:
            self.remember()
            return isinstance(self.base, nn.Module) and self.matrices() is not None
        except Exception:  # whatever an object that only looks like an adapter does
            return False

    def remember(self) -> None:
        """Copy the base's weights, where they are frozen, dense and without the adapter in them."""
        weight: Any = getattr(self.base, "weight", None)
        self.copy = None
        if not isinstance(weight, Tensor) or weight.requires_grad or weight.ndim != 2:
            return
        if not statistics.is_readable(weight) or getattr(self.module, "merged", False):
            return
        bias = getattr(self.base, "bias", None)
        kept = None if bias is None else bias.detach()[:MOST_FEATURES].float().clone()
        self.copy = _Base(weight.detach()[:MOST_FEATURES].float().clone(), kept, weight.dtype)

    def before(self) -> _Base | None:
        """The copy of the base, made anew where the base was cast or moved since."""
        weight: Any = getattr(self.base, "weight", None)
        if self.copy is None or (self.copy.dtype, self.copy.weight.device) != (weight.dtype, weight.device):
            self.remember()
        return self.copy

    @torch.no_grad()
    def take(self, x: Any, output: Any) -> None:
        """Keep input, base output, matrices and output of some rows of this call."""
        fed, self.fed = self.fed, None
        base, matrices = self.before(), self.matrices()
        if base is None or matrices is None or not all(isinstance(each, Tensor) for each in (x, output)):
            return
        a, b, self.scaling = matrices
        fed = x if fed is None else fed
        if fed.shape != x.shape or x.shape[:-1] != output.shape[:-1] or a.shape[1] != x.shape[-1]:
            return
        if b.shape[0] != output.shape[-1] or base.weight.shape[1] != x.shape[-1]:
            return
        flat = [each.detach().reshape(-1, each.shape[-1]) for each in (x, fed, output)]
        chosen = torch.linspace(0, len(flat[0]) - 1, min(len(flat[0]), MOST_ROWS), device=x.device).long().unique()
        inputs, fed, output = (each[chosen] for each in flat)
        with torch.autocast(x.device.type, enabled=False):
            base_output = F.linear(inputs.float(), base.weight, base.bias)
        self.taken = {
            "input": fed.clone(), "base_output": base_output, "output": output[:, :MOST_FEATURES].clone(),
            "a": a.detach().clone(), "b": b.detach()[:MOST_FEATURES].clone(),
        }  # fmt: skip


class Adapters:
    """The adapters of one model. ``handles`` are the hooks, for whoever takes them off.

    Args:
        root: the model.
        tape: tells which windows have full statistics.
        wrap: makes a hook that survives copying and pickling the model.
        name: of a module as the evidence has it.
    """

    def __init__(
        self, root: nn.Module, tape: Tape, wrap: Callable[[Any], Any], name: Callable[[str], str] = str
    ) -> None:
        self._tape = tape
        self.handles: list[Any] = []
        found = [_Layer(name(each), module) for each, module in root.named_modules() if _is_adapted(module)]
        found = [each for each in found if each.begin()]
        self._layers = found[:: max(1, len(found) - 1)][:MOST_LAYERS]
        for layer in self._layers:
            self.handles.append(layer.module.register_forward_hook(wrap(self._returned(layer))))
            self.handles += [
                each.register_forward_pre_hook(wrap(self._fed(layer))) for each in _first_matrices(layer.module)
            ]
            # A checkpoint's base is another one, and nothing was merged into it yet.
            self.handles.append(layer.base.register_load_state_dict_post_hook(wrap(_loaded(layer))))

    def groups(self) -> Groups:
        """For ``CapsuleWriter.tensors``: what the window that ends showed, on the host; forgets it."""
        found: Groups = []
        for layer in self._layers:
            taken, layer.taken = layer.taken, {}
            if taken:
                arrays = {key: tensor.cpu() for key, tensor in taken.items()}
                found.append((f"adapter/{layer.name}", arrays, {"scaling": layer.scaling}))
        return found

    def _wanted(self, layer: _Layer) -> bool:
        if torch.compiler.is_compiling() or inside_backward():
            return False
        return self._tape.on and self._tape.everything and self._tape.micro == 0 and not layer.taken

    def _fed(self, layer: _Layer) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self._wanted(layer):
                layer.fed = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None

        return hook

    def _returned(self, layer: _Layer) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._wanted(layer):
                try:
                    layer.take(inputs[0] if inputs else None, output)
                except Exception:
                    layer.taken = {}  # an odd layer costs only its own evidence

        return hook


def _loaded(layer: _Layer) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        layer.begin()

    return hook


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B")


def _first_matrices(module: Any) -> list[nn.Module]:
    """The modules that apply the first matrix, where modules do."""
    if isinstance(module.lora_A, nn.ModuleDict):
        return list(module.lora_A.values())
    return [module.lora_A] if isinstance(module.lora_A, nn.Module) else []
