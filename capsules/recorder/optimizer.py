"""What happens around the optimizer: backward, loss scaling, clipping and steps, as calls to the recorders at work.

The functions are replaced once while any recorder lives, and put back when the last one closes. Loops need not be
changed for it, and names bound earlier still lead here: ``Tensor.backward`` looks ``torch.autograd.backward`` up when
called, ``clip_grad_norm_`` looks up ``_clip_grads_with_norm_``, and a scaler's methods are found through its class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .internals import inside_backward


class Observer(Protocol):
    """What a recorder wants to be told. None of these may raise."""

    def watching(self) -> bool:
        """Whether a window is open; nothing else is called while it is not."""
        ...

    def before_backward(self, roots: Any) -> None:
        """``roots``: the first argument of backward."""
        ...

    def after_backward(self) -> None:
        """The gradients are there."""
        ...

    def loss_scaled(self, scaler: Any, losses: Any, scaled: Any) -> None:
        """``GradScaler.scale`` turned ``losses`` into ``scaled``."""
        ...

    def before_unscale(self, scaler: Any, optimizer: Any, nested: bool) -> None:
        """``nested``: called by ``GradScaler.step`` rather than by the loop."""
        ...

    def after_unscale(self, scaler: Any, optimizer: Any, found_inf: list[Tensor], nested: bool) -> None:
        """``found_inf``: one number a device, above 0 where a gradient was not finite."""
        ...

    def before_clip(self, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
        """Gradients still have ``total_norm``."""
        ...

    def before_clip_value(self, parameters: list[Tensor], clip_value: float) -> None:
        """Gradient elements are about to be limited to ± ``clip_value``."""
        ...

    def before_step(self, optimizer: Any) -> None:
        """The optimizer is about to change its parameters."""
        ...

    def after_step(self, optimizer: Any, by_scaler: bool, closure: bool) -> None:
        """The optimizer has stepped; ``by_scaler``: within ``GradScaler.step``; ``closure``: it made its gradients."""
        ...

    def zeroed(self, owner: Any) -> None:
        """``zero_grad`` of an optimizer or a module is about to run."""
        ...

    def scaler_stepped(self, scaler: Any, optimizer: Any, stepped: bool, found_inf: list[Tensor]) -> None:
        """``stepped`` False: the scaler left the optimizer out because gradients overflowed."""
        ...

    def scaler_updated(self, scaler: Any, before: Tensor | None, after: Tensor | None) -> None:
        """Scales as 0-d tensors; ``before`` is a copy."""
        ...


_observers: list[Observer] = []
_undo: list[Callable[[], None]] = []
_stepping: list[dict[str, bool]] = []  # the GradScaler.step calls on the stack


def attach(observer: Observer) -> None:
    """Tell ``observer`` from now on."""
    _observers.append(observer)
    if len(_observers) == 1:
        _install()


def detach(observer: Observer) -> None:
    """Stop telling ``observer``; with the last one every replaced function is put back."""
    if observer in _observers:
        _observers.remove(observer)
        if not _observers:
            while _undo:
                _undo.pop()()


def _watching() -> list[Observer]:
    return [observer for observer in _observers if observer.watching()]


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    replacement = functools.wraps(original)(wrap(original))
    setattr(owner, name, replacement)

    def undo() -> None:
        # Where someone has wrapped ours since, theirs must stay; without observers ours only passes the call on.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    _undo.append(undo)


def _install() -> None:
    scaler = torch.amp.GradScaler
    _replace(torch.autograd, "backward", _backward)
    _replace(scaler, "scale", _scale)
    _replace(scaler, "unscale_", _unscale)
    _replace(scaler, "step", _scaler_step)
    _replace(scaler, "update", _update)
    _replace(Optimizer, "zero_grad", _zero_grad)
    _replace(torch.nn.Module, "zero_grad", _zero_grad)
    _replace(clip_grad, "clip_grad_value_", _clip_value)
    _replace(torch.nn.utils, "clip_grad_value_", _clip_value)
    if hasattr(clip_grad, "_clip_grads_with_norm_"):
        _replace(clip_grad, "_clip_grads_with_norm_", _clip_with_norm)
    else:  # before torch 2.6 clipping is one function, known under two names
        _replace(clip_grad, "clip_grad_norm_", _clip)
        _replace(torch.nn.utils, "clip_grad_norm_", _clip)
    _undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    _undo.append(register_optimizer_step_post_hook(_after_step).remove)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*arguments: Any, **keywords: Any) -> Any:
        # A reentrant checkpoint calls backward within backward: not a loss.
        if inside_backward() or not (watching := _watching()):
            return original(*arguments, **keywords)
        for observer in watching:
            observer.before_backward(arguments[0] if arguments else keywords.get("tensors"))
        result = original(*arguments, **keywords)
        for observer in watching:
            observer.after_backward()
        return result

    return backward


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        for observer in _watching():
            observer.loss_scaled(self, outputs, scaled)
        return scaled

    return scale


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        for observer in _watching():
            observer.before_unscale(self, optimizer, bool(_stepping))
        result = original(self, optimizer)
        if (watching := _watching()) and self.is_enabled():
            found_inf = _found_inf(self, optimizer)
            for observer in watching:
                observer.after_unscale(self, optimizer, found_inf, bool(_stepping))
        return result

    return unscale_


def _scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _watching():
            return original(self, optimizer, *arguments, **keywords)
        call = {"stepped": False}
        _stepping.append(call)
        try:
            result = original(self, optimizer, *arguments, **keywords)
        finally:
            _stepping.remove(call)
        if self.is_enabled():
            found_inf = _found_inf(self, optimizer)
            for observer in _watching():
                observer.scaler_stepped(self, optimizer, call["stepped"], found_inf)
        return result

    return step


def _found_inf(scaler: Any, optimizer: Any) -> list[Tensor]:
    """What the scaler's check of this optimizer's gradients found, one number a device."""
    return list(scaler._per_optimizer_states.get(id(optimizer), {}).get("found_inf_per_device", {}).values())


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *arguments: Any, **keywords: Any) -> Any:
        watching = _watching()
        before = getattr(self, "_scale", None)
        before = before.clone() if watching and before is not None else None
        result = original(self, *arguments, **keywords)
        for observer in watching:
            observer.scaler_updated(self, before, getattr(self, "_scale", None))
        return result

    return update


def _tell_clip(parameters: Any, max_norm: Any, total_norm: Tensor) -> None:
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    if isinstance(tensors, (list, tuple)):  # a generator would be used up by looking
        for observer in _watching():
            observer.before_clip(list(tensors), float(max_norm), total_norm)


def _clip_value(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_value_(parameters: Any, clip_value: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(parameters, (Tensor, list, tuple)):
            parameters = list(parameters)
        for observer in _watching():
            observer.before_clip_value([parameters] if isinstance(parameters, Tensor) else [*parameters], clip_value)
        return original(parameters, clip_value, *arguments, **keywords)

    return clip_value_


def _zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for observer in _watching():
            observer.zeroed(self)
        return original(self, *arguments, **keywords)

    return zero_grad


def _clip_with_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_with_norm(parameters: Any, max_norm: Any, total_norm: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if _observers:
            _tell_clip(parameters, max_norm, total_norm)
        return original(parameters, max_norm, total_norm, *arguments, **keywords)

    return clip_with_norm


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, max_norm: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(parameters, (Tensor, list, tuple)):
            parameters = list(parameters)
        total_norm = original(parameters, max_norm, *arguments, **keywords)
        if _observers:
            _tell_clip(parameters, max_norm, total_norm)
        return total_norm

    return clip


def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for observer in _watching():
        observer.before_step(optimizer)


def _after_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    if _stepping:
        _stepping[-1]["stepped"] = True
    closure = any(each is not None for each in (*arguments[1:2], keywords.get("closure")))  # the first is the optimizer
    for observer in _watching():
        observer.after_step(optimizer, bool(_stepping), closure)
