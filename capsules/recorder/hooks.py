"""Hooks that see every activation, every gradient of one and every gradient of a parameter, in the order they happen.

A forward hook measures what a module returns and puts a hook on those tensors, so that their gradients are measured in
autograd order. Full backward hooks would be simpler, but raise on in-place modules and skip dictionaries.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import statistics
from .adapters import Adapters
from .internals import inside_backward, stands_in, wrapper_at_work
from .recompute import Recompute
from .tape import Row, Tape

# What the model was called with and what it returned: inputs, keywords, output.
Call = dict[str, Any]
Guard = Callable[[str, Exception], None]
_REDUCING = ("DistributedDataParallel", "FullyShardedDataParallel")
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers (compile, sharding, checkpoint) put in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrap(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The user's own module inside torch.compile and the data-parallel wrappers, and those, outermost first."""
    wrappers: list[nn.Module] = []
    while True:
        names = (*_WRAPPED, "module") if type(model).__module__.startswith("torch.") else _WRAPPED
        held = dict(model.named_children())
        inner = next((held[name] for name in names if name in held), None)
        if inner is None:
            return model, wrappers
        wrappers.append(model)
        model = inner


def has_children(module: nn.Module) -> bool:
    """Whether a module holds others."""
    return next(module.children(), None) is not None


def tensors_of(output: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in what a module returned, with a suffix for the name; "" for a bare tensor.

    Tuples, lists, dictionaries and model outputs are opened three levels deep; other objects (caches) are not.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield "", output
    elif depth < 3 and isinstance(output, Mapping):
        for key, value in output.items():
            for suffix, tensor in tensors_of(value, depth + 1):
                yield f":{key}{suffix}", tensor
    elif depth < 3 and isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            for suffix, tensor in tensors_of(value, depth + 1):
                yield (f":{index}{suffix}" if len(output) > 1 else suffix), tensor


def _do_nothing(*arguments: Any, **keywords: Any) -> None:
    """What a copy of a hook does: a model copied for an average, or pickled whole, records nothing."""


def _inert() -> Callable[..., None]:
    return _do_nothing


class _Hook:
    """A callable put on a module. Copying or pickling the module leaves an inert function in its place."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


class Outside(Protocol):
    """What wants to see forwards that belong to no micro-batch."""

    def before(self, module: nn.Module) -> bool:
        """Whether it wants this one."""
        ...

    def after(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any) -> None:
        """It returned."""
        ...


class ModuleHooks:
    """The hooks on one model. ``close`` takes every one of them off again."""

    def __init__(self, model: nn.Module, tape: Tape, guard: Guard) -> None:
        self._tape = tape
        self._guard = guard
        self._handles: list[Any] = []
        self._hooked: set[str] = set()
        self._paused = False
        self._about: dict[tuple[str, str], dict[str, Any]] = {}
        self.root, wrappers = unwrap(model)
        #: What reduces the gradients.
        self.wrapper = next((each for each in wrappers if type(each).__name__ in _REDUCING), None)
        self.several = False  # whether there are other ranks
        self.last_gradient = 0.0  # when it was there, by the clock of performance; only where it is reduced later
        self.fired: set[str] = set()
        self.recomputes = False
        self.look_again = False
        self.recompute = Recompute(tape)
        self.outside: Outside | None = None
        self._seen_outside = False
        self.compiled = Compiled()
        self.modules: list[str] = []
        self.parameters: dict[int, str] = {}
        self._watched: set[int] = set()  # those whose gradients are seen
        self.pending: list[tuple[Row, Tensor]] = []
        self.local_norms: list[Tensor] = []
        self.call: Call = {}
        # Children before parents is the order in which outputs appear, which the compiled path has to rely on.
        for name, module in _children_first(self.root):
            self.modules.append(clean_name(name))
            if module is not self.root and not isinstance(module, torch.jit.ScriptModule):  # those take no hooks
                hook = self._forward_hook(clean_name(name), len(self.modules) - 1)
                self._handles.append(module.register_forward_hook(_Hook(hook)))
        if not isinstance(self.root, torch.jit.ScriptModule):
            self._handles.append(self.root.register_forward_pre_hook(_Hook(self._root_begins), with_kwargs=True))
            self._handles.append(self.root.register_forward_hook(_Hook(self._root_returns), with_kwargs=True))
        self.adapters = Adapters(self.root, tape, _Hook, clean_name)
        self._handles += self.adapters.handles

    def watch_parameters(self) -> None:
        """Hook the parameters as they are now: sharding, tying or a cast replaces them after construction."""
        for name, parameter in self.root.named_parameters():
            if is_lazy(parameter):
                continue
            self.parameters.setdefault(id(parameter), clean_name(name))
            if parameter.requires_grad and id(parameter) not in self._watched:  # maybe frozen when last seen
                self._watched.add(id(parameter))
                hook = self._parameter_hook(self.parameters[id(parameter)])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def watch_recomputation(self, everything: bool) -> None:
        """Once it is known to happen: see the random state before every module, in windows that look at everything."""
        fresh = not self.recompute.installed
        self.look_again = self.recomputes and (fresh or everything)
        if self.recomputes and not self.recompute.installed:
            self.recompute.installed = True
            for name, module in _children_first(self.root):
                if module is not self.root and not isinstance(module, torch.jit.ScriptModule):
                    hook = self.recompute.before(clean_name(name))
                    self._handles.append(module.register_forward_pre_hook(_Hook(hook)))

    def begin(self) -> None:
        """Start a micro-batch."""
        self._hooked.clear()
        self.call.clear()
        self._paused = False
        self.pending = []
        self.local_norms = []

    def close(self) -> None:
        """Leave model and parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _root_begins(self, module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if self.several and self.wrapper is None:
            self.wrapper = wrapper_at_work(self.root)
        if not self._tape.on:
            self._begins_outside(module)
        # An evaluation inside a recorded step is not part of it; a reentrant checkpoint around the whole model is.
        elif not module.training and not torch.is_grad_enabled():
            self._tape.on, self._paused = False, True
            self._begins_outside(module)
        elif not self.call and not inside_backward():
            # What raises inside the model is most often due to what it was called with.
            self.call.update(inputs=inputs, keywords=keywords, training=module.training)

    def _begins_outside(self, module: nn.Module) -> None:
        self._seen_outside = self.outside is not None and not inside_backward() and self.outside.before(module)

    def _root_returns(self, module: nn.Module, inputs: Any, keywords: dict[str, Any], output: Any) -> None:
        """Keep references to what the model was called with and returned, until the loss is known."""
        if torch.compiler.is_compiling():
            if self._tape.on:
                self.call["inputs"], self.call["keywords"], self.call["output"] = inputs, keywords, output
            return
        # Shapes were tried, or traced: such a forward has computed nothing.
        tried = any(stands_in(tensor) for _, tensor in tensors_of(output))
        if self._seen_outside and self.outside is not None:
            self._seen_outside = False
            if not tried:
                self.outside.after(inputs, keywords, output)
        if self._paused:
            self._tape.on, self._paused = True, False
        elif tried:
            if "output" not in self.call:
                self.call.clear()
        elif self._tape.on and not inside_backward():
            try:
                # A loss comes from the first call that has a graph; a look without one, before or after, is none of it.
                graph = torch.is_grad_enabled()
                if "output" not in self.call or (graph and not self.call.get("graph", True)):
                    about = {"output": output, "graph": graph, "training": module.training}
                    self.call.update(inputs=inputs, keywords=keywords, **about)
                if not has_children(module):  # a model of one module: its output is its only activation
                    self._measure("output", output)
            except Exception as error:
                self._guard("activations and gradients", error)

    def _forward_hook(self, name: str, slot: int) -> Callable[[nn.Module, Any, Any], None]:
        tape, compiled = self._tape, self.compiled

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                if tape.on and isinstance(output, Tensor):
                    compiled.trace(slot, output)
            elif tape.on:
                try:
                    self._measure(name, output)
                except Exception as error:
                    self._guard("activations and gradients", error)

        return hook

    def _measure(self, name: str, output: Any) -> None:
        self.fired.add(name)
        tape = self._tape
        if self.recompute.on:
            self.recompute.after(name, output)
        if inside_backward():
            # Activation checkpointing runs the module again inside backward. Its values were measured in forward;
            # only the reentrant kind, whose first run had no graph, gets its gradients from this second one.
            self.recomputes = True
            if name not in self._hooked:
                call = tape.count(f"{name} again")
                for suffix, tensor in tensors_of(output):
                    self._hook_gradient(name + suffix, tensor, call)
            return
        tensors = (("", output),) if type(output) is Tensor else tensors_of(output)
        readable = [each for each in tensors if statistics.is_readable(each[1])]
        call = tape.count(name) if readable else 0
        for suffix, tensor in readable:
            if tape.seen(tensor) is not None:
                continue
            full_name = name + suffix
            tape.measure(full_name, "activation", tensor, call, self.describe(full_name, "activation", tensor))
            if self._hook_gradient(full_name, tensor, call):
                self._hooked.add(name)

    def _hook_gradient(self, name: str, tensor: Tensor, call: int) -> bool:
        if tensor.grad_fn is None:  # a leaf (a parameter returned as it is) would keep the hook for ever
            return False

        def hook(gradient: Tensor) -> None:
            if self._tape.on and statistics.is_readable(gradient):
                try:
                    self._tape.measure(name, "gradient", gradient, call, self.describe(name, "gradient", gradient))
                except Exception as error:
                    self._guard("activations and gradients", error)

        tensor.register_hook(hook)
        return True

    def _parameter_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._tape.on:
                return
            try:
                # Only the place in the order is taken now: one fused call measures all gradients after the pass.
                self.pending.append((self._tape.reserve(name, "gradient"), parameter))
                if self.wrapper is not None and parameter.grad is not None:
                    self.local_norms.append(statistics.norm(statistics.local(parameter.grad)))
                    self.last_gradient = time.perf_counter()
            except Exception as error:
                self._guard("activations and gradients", error)

        return hook

    def describe(self, name: str, role: str, tensor: Tensor) -> dict[str, Any]:
        """The columns that rarely change from step to step, made anew only when shape or type did."""
        about = self._about.get((name, role))
        if about is None or about["like"] != (tensor.shape, tensor.dtype):
            about = statistics.describe(statistics.local(tensor)) | {"like": (tensor.shape, tensor.dtype)}
            self._about[name, role] = about
        return about


class Compiled:
    """Norm and largest value of outputs inside a compiled region, one fixed place a module.

    A list or a counter would make the compiler specialise on its length and recompile; a store into a fixed tensor
    becomes part of the graph.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.seen: set[int] = set()  # slots that compiled code has filled

    def prepare(self, size: int, device: torch.device) -> None:
        """Make the table; it must exist before the first compiled call. Filled with -1, which no norm is."""
        if self.values is None:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self.values = torch.full((size, 4), -1.0, dtype=dtype, device=device)

    def trace(self, slot: int, output: Tensor) -> None:
        """Runs while the compiler traces; what it does to ``values`` is compiled into the model's graph."""
        if self.values is None:
            return
        # Writes through ``data`` are not counted: a checkpointed region that the compiler leaves to autograd keeps
        # its inputs, this table among them, and would take a write for a change of what it needs in backward.
        values = self.values.data
        if output.is_floating_point() and output.device == values.device and output.numel():
            detached = output.detach().float()
            values[slot, 0] = torch.linalg.vector_norm(detached)
            values[slot, 1] = detached.amax()
            values[slot, 2] = output.numel()
            values[slot, 3] = output.dtype.itemsize

    def take(self) -> Tensor | None:
        """A copy of the table [modules, 4], which is empty (-1) again afterwards; None where nothing is compiled."""
        if self.values is None or "torch._dynamo.convert_frame" not in sys.modules:
            return None
        taken = self.values.clone()
        self.values.data.fill_(-1.0)
        return taken


def _children_first(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, by its first name, children before their parent."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module))

    visit("", root)
    return found
