"""Follows the training loop: what backward, scaler, clipping and optimizer do to the window that is open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from . import statistics
from .captured import StepSample, StepSamples
from .hooks import ModuleHooks
from .internals import stands_in
from .memory import MemoryLedger
from .owners import Owners
from .parameters import CPU_BYTES, DEVICE_BYTES, WHOLE_BYTES, UpdateSample, gradient_norms
from .reading import BatchReader
from .reduction import Reduction
from .tape import Row, Tape, gather
from .window import Window, number

Attempt = Callable[[str, Callable[[], None]], None]


class Loop:
    """The ``optimizer.Observer`` of one recorder.

    Args:
        tape: rows of the window.
        hooks: of the model.
        optimizers: those the user named; empty: any optimizer that holds a parameter of the model.
        ignore_index: label of unsupervised positions.
        given: the manifest as far as the user gave it.
        whole_updates: measure updates of all parameters, however large the copy.
        attempt: runs a part of the recording and disables that part where it raises.
        finish: called when the optimizer stepped after the ``with`` block of the last micro-batch.
    """

    def __init__(
        self,
        tape: Tape,
        hooks: ModuleHooks,
        optimizers: list[Any],
        ignore_index: int,
        given: dict[str, Any],
        whole_updates: bool,
        attempt: Attempt,
        finish: Callable[[], None],
    ) -> None:
        self.tape = tape
        self.hooks = hooks
        self.owners = Owners(hooks, optimizers)
        self.window: Window | None = None
        self.inside = False  # a micro-batch is being run
        self.sample: UpdateSample | None = None
        self.large_sample: UpdateSample | None = None
        self.measured_update = False
        self.reduction = Reduction(hooks)
        self.steps = StepSamples(hooks.root, self.parameters)
        self.memory = MemoryLedger(hooks.root, lambda: self.owners.optimizers)
        self.ignore_index = ignore_index
        self.given = given
        self._whole_updates = whole_updates
        self._reader = BatchReader(tape, hooks, ignore_index)
        self._attempt = attempt
        self._finish = finish
        self._by_hand = False  # the loop divides scaled gradients itself

    # -- what the patched functions tell (see ``optimizer.Observer``)

    def watching(self) -> bool:
        """Whether a window is open."""
        return self.window is not None

    def before_backward(self, roots: Any) -> None:
        """Take the loss, and what is kept of the logits before backward frees them."""
        window = self.window
        if window is None or not self.inside:
            return

        def record() -> None:
            losses: list[Any] = [roots] if isinstance(roots, Tensor) else list(roots or ())
            window.backwards += 1
            window.backward_began = time.time()
            event = window.event("backward")
            if window.backwards == 1:
                window.later(self.steps.carried(), lambda value: event.update(carried=value))
            for loss in losses:
                if isinstance(loss, Tensor) and loss.numel() == 1 and not (loss.is_meta or stands_in(loss)):
                    self._take_loss(window, loss)

        self.read_logits()
        self._attempt("loss", record)
        self._attempt("memory", lambda: self.memory.reached(window, "forward"))

    def after_backward(self) -> None:
        """Keep a sample of scaled gradients: some loops divide them by hand before anything else is called."""
        if self.inside and self.scaled:
            self._sample(lambda sample: sample.left_scaled())
        if (window := self.window) is not None and self.inside:
            self._attempt("memory", lambda: self.memory.reached(window, "backward"))
            self._attempt("activations and gradients", lambda: self.reduction.after_backward(window))

    def _unscaled_by_hand(self) -> None:
        """See whether the loop itself has divided the gradients by the loss scale; between samples, as before."""
        window = self.window
        if window is None or not self.scaled:
            return

        def look(sample: StepSample) -> None:
            scale = window.scale
            found = sample.divided_by(scale) if scale is not None else None
            self._by_hand = self._by_hand if found is None else found

        self._sample(look)
        if self._by_hand:
            window.unscaled = True
            window.event("unscale")

    def loss_scaled(self, scaler: Any, losses: Any, scaled: Any) -> None:
        """Remember which loss the scaled one stands for."""
        window = self.window
        if window is None or not self.inside or not scaler.is_enabled():
            return

        def record() -> None:
            window.scale = scaler._scale.clone()
            if isinstance(losses, Tensor) and isinstance(scaled, Tensor):
                window.scaled.append((scaled, losses.detach()))

        self._attempt("loss", record)

    def before_unscale(self, scaler: Any, optimizer: Any, nested: bool) -> None:
        """Measure the gradients while they are as backward left them."""
        if self.window is not None and self.owners.hold(optimizer, self.window):
            self.measure_gradients()
            self._sample(lambda sample: sample.gradients(scaled=self.scaled))
            self.window.event("unscale", nested=nested or None)

    def after_unscale(self, scaler: Any, optimizer: Any, found_inf: list[Tensor], nested: bool) -> None:
        """The scaler has looked for gradients that are not finite while it divided them."""
        window = self.window
        if window is None or not self.owners.hold(optimizer, self.window):
            return
        window.unscaled = True
        event = window.event("finite_check", nested=nested or None)
        for found in found_inf:
            copied = found.clone()
            window.later(copied, lambda value: event.update(found_inf=max(value, event.get("found_inf", 0.0))))
            if not nested:
                window.found_inf.append(copied)

    def before_clip_value(self, parameters: list[Tensor], clip_value: float) -> None:
        """Note it: gradients clipped by value have no norm that could be foretold."""
        window = self.window
        if window is not None and any(id(parameter) in self.hooks.parameters for parameter in parameters[:1]):
            self._unscaled_by_hand()
            self.measure_gradients()
            self._sample(lambda sample: sample.gradients(scaled=self.scaled))
            self._attempt("steps", lambda: (window.event("clip", clip_value=float(clip_value)), None)[1])

    def zeroed(self, owner: Any) -> None:
        """Note that gradients were zeroed, where any of them belongs to the model."""
        window = self.window
        if window is None:
            return
        parameters = owner.parameters() if isinstance(owner, torch.nn.Module) else _first_parameters(owner)
        if id(next(iter(parameters), None)) in self.hooks.parameters:
            window.event("zero_grad")
            if window.backwards and not window.over:
                window.cleared = "after" if window.micro.backward_losses else "before"
                self.measure_gradients()
                self._sample(lambda sample: sample.gradients(scaled=self.scaled))

    def before_clip(self, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
        """Measure the gradients, and take the norm the job itself computed."""
        window = self.window
        if window is None or not any(id(parameter) in self.hooks.parameters for parameter in parameters[:1]):
            return
        self._unscaled_by_hand()
        self.measure_gradients()
        if not hasattr(total_norm, "to_local"):  # a sharded norm is whole only after a collective
            window.total_norm = total_norm.detach()
        window.max_norm = max_norm
        self._sample(lambda sample: sample.gradients(scaled=self.scaled))
        self._sample(lambda sample: sample.clipped(parameters, max_norm, window.total_norm, self.scaled))
        event, clip = window.event("grad_norm"), window.event("clip", max_norm=max_norm)
        window.later(window.total_norm, lambda value: (event.update(norm=value), clip.update(norm=value))[0])

    def before_step(self, optimizer: Any) -> None:
        """Measure the gradients, and copy the sample of the parameters."""
        window = self.window
        if window is None or not self.owners.hold(optimizer, self.window):
            return
        self._unscaled_by_hand()
        self.measure_gradients()
        groups = optimizer.param_groups
        if window.learning_rate is None and groups:
            rate = groups[0].get("lr")
            window.learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
        self._sample(lambda sample: sample.gradients(scaled=self.scaled))
        state, scale, rates = "scaled" if self.scaled else "unscaled", window.scale, self.steps.rates(optimizer)
        self._sample(lambda sample: sample.before(optimizer, state, scale, rates))
        if not window.stepped:
            self.reduction.before_step(window)
            self._attempt("parameter updates", self._copy_parameters)

    def after_step(self, optimizer: Any, by_scaler: bool, closure: bool) -> None:
        """The window has done what it was for."""
        window = self.window
        if window is not None and self.owners.hold(optimizer, self.window):
            window.stepped = True
            window.event("optimizer_step", nested=by_scaler or None)
            self._sample(lambda sample: sample.after(optimizer, closure))
            self._attempt("memory", lambda: self.memory.reached(window, "optimizer"))
            if not self.inside:
                self._finish()

    def scaler_stepped(self, scaler: Any, optimizer: Any, stepped: bool, found_inf: list[Tensor]) -> None:
        """Note a step that was left out."""
        window = self.window
        if window is None or not self.owners.hold(optimizer, self.window):
            return
        window.found_inf += [tensor.clone() for tensor in found_inf]
        if not stepped:
            window.skipped = True
            window.event("optimizer_step_skipped")
            if not self.inside:
                self._finish()

    def scaler_updated(self, scaler: Any, before: Tensor | None, after: Tensor | None) -> None:
        """Note the scale before and after."""
        window = self.window
        if window is None or before is None or after is None:
            return
        event = window.event("scaler_update")
        window.later(before, lambda value: event.update(scale_before=value))
        window.later(after.clone(), lambda value: event.update(scale_after=value))

    # -- what the user says

    def told(self, loss: Any) -> None:
        """The loss of the micro-batch at work."""
        window = self.window
        if window is not None and window.micros and loss is not None:
            self._attempt("step.loss", lambda: setattr(window.micro, "given_loss", number(loss)))

    def log(self, values: dict[str, Any]) -> None:
        """Scalars for this window; one that is no number costs only its own name."""
        window = self.window
        if window is None:
            return
        for name, value in values.items():
            if value is not None:
                self._attempt(f"step.log({name})", lambda n=name, v=value: window.logged.update({n: number(v)}))

    def _sample(self, take: Callable[[StepSample], None]) -> None:
        """Do something with the sample of the optimizer step, in the windows that have one."""
        window = self.window
        if window is None:
            return

        def run() -> None:
            if (sample := self.steps.of(window)) is not None:
                take(sample)

        self._attempt("optimizer steps", run)

    @property
    def scaled(self) -> bool:
        """Whether the gradients of the open window are still multiplied by a loss scale."""
        return self.window is not None and self.window.scale is not None and not self.window.unscaled

    # -- measurements

    def _take_loss(self, window: Window, loss: Tensor) -> None:
        detached = loss.detach()
        for scaled, unscaled in window.scaled:
            if scaled is loss:
                detached = unscaled
                break
        else:
            if window.scale is not None:  # divided by the accumulation, say, after it was scaled
                detached = detached / window.scale.to(detached.device)
        detached = detached.clone()  # loops add up losses in place
        micro = window.micro
        micro.backward_losses.append(detached)
        micro.loss_dtype = str(detached.dtype).removeprefix("torch.")
        row = self.tape.reserve("loss", "loss")
        row.about = self.hooks.describe("loss", "loss", detached)
        row.norm = detached.item() if statistics.at_hand(detached) else detached
        window.losses.append(row)

    def measure_gradients(self) -> None:
        """Norms of the gradients that backward has left, before anything divides, clips or frees them."""
        window = self.window
        if window is not None and self.inside:
            self._attempt("activations and gradients", lambda: self._measure_gradients(window))

    @torch.no_grad()
    def _measure_gradients(self, window: Window) -> None:
        pending, self.hooks.pending = self.hooks.pending, []
        micro = window.micro
        if not pending and micro.backward_losses and not micro.gradients_measured:
            pending = self._unannounced()
        micro.gradients_measured = True
        window.local_norms = self.hooks.local_norms or window.local_norms
        self.hooks.local_norms = []
        # A parameter used twice is announced twice; the last place is where its gradient was complete.
        found = [(row, p.grad) for row, p in {id(p): (row, p) for row, p in pending}.values() if p.grad is not None]
        measured: list[tuple[Row, Tensor]] = []
        for row, gradient in found:
            if statistics.is_readable(gradient) and gradient.numel():
                row.about = self.hooks.describe(row.name, "gradient", gradient)
                measured.append((row, statistics.local(gradient)))
        if not measured:
            return
        window.gradients.update((row.name, row) for row, _ in measured)
        on_cpu = all(statistics.at_hand(gradient) for _, gradient in measured)
        if self.tape.everything:
            for row, gradient in measured:
                self._measure_whole(row, gradient, on_cpu)
            return
        norms = gradient_norms([gradient for _, gradient in measured])
        numbers = [values[0] for values in gather(norms)] if on_cpu else norms
        for (row, gradient), norm in zip(measured, numbers, strict=True):
            row.norm = norm
            if on_cpu and not math.isfinite(cast(float, norm)):
                self._measure_whole(row, gradient, on_cpu)
                self.tape.everything = self.tape.everything or row.bad

    def _measure_whole(self, row: Row, gradient: Tensor, on_cpu: bool) -> None:
        row.full = statistics.full(gradient)
        if on_cpu:
            row.norm = statistics.norm_of(cast("statistics.Numbers", row.full), gradient.numel())
        else:
            row.norm = statistics.norm(gradient)

    def _unannounced(self) -> list[tuple[Row, Tensor]]:
        """Gradients whose parameters' hooks do not fire (FSDP2 sets them itself), last defined first."""
        names = self.hooks.parameters
        parameters = [p for p in self.hooks.root.parameters() if p.grad is not None and id(p) in names]
        rows: list[tuple[Row, Tensor]] = []
        for parameter in reversed(parameters):
            rows.append((self.tape.reserve(names[id(parameter)], "gradient"), parameter))
        return rows

    def read_logits(self) -> None:
        """Find the batch, and take what is kept of the logits, as soon as the loss is known or the block ends."""
        window = self.window
        if window is None or not window.micros or not self.inside:
            return
        micro = window.micro
        call = dict(self.hooks.call)
        self.hooks.call.clear()
        if not call and (micro.arrays or micro.given is None):
            return
        self._attempt("batch", lambda: self._reader.read(window, micro, call))

    def _copy_parameters(self) -> None:
        window = self.window
        if self.sample is None:
            on_cpu = all(p.device.type == "cpu" for p in self.parameters().values())
            limit = None if self._whole_updates else CPU_BYTES if on_cpu else DEVICE_BYTES
            self.sample = UpdateSample(self.parameters(), limit)
        self.sample.before()
        if window is not None and window.everything and not self._whole_updates:
            self.large_sample = self.large_sample or UpdateSample(self.parameters(), WHOLE_BYTES)
            self.large_sample.before()
        else:
            self.large_sample = None  # its memory is the job's again

    @property
    def optimizers(self) -> list[Any]:
        """Those that step the model, as far as they are known."""
        return self.owners.optimizers

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters by name."""
        names = self.hooks.parameters
        return {names[id(p)]: p for p in self.hooks.root.parameters() if id(p) in names}

    def changes(self) -> dict[str, Tensor]:
        """Parameters after minus before the step of this window, the largest sample there is; empty without a step."""
        sample = self.large_sample or self.sample
        return sample.changes() if sample is not None and self.measured_update else {}


def _first_parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in getattr(optimizer, "param_groups", ())[:1] for parameter in group["params"][:1]]
