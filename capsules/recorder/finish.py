"""The end of a window: read it, judge it, and write what is worth keeping."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..writer import CapsuleWriter
from . import statistics
from .captured import StepSample
from .coverage import coverage
from .device import DeviceScalars
from .ending import seal
from .failure import by_collective, raised_at, said_by
from .loop import Loop
from .observed import observed_facts
from .output import Output, read_samples, standard_scalars
from .parameters import group_records
from .ranks import Ranks
from .ring import Ring
from .tape import UNKNOWN, Row
from .triggers import Limits, OddSample, Spike, Trigger, first_bad
from .window import Window

# Seconds between two looks at the size of what was written.
SIZE_EVERY = 10.0

# Series that add up over the micro-batches of a window.
_SUMS = ("loss", "grad_norm", "grad_norm_clipped", "tokens")

Attempt = Callable[[str, Callable[[], None]], None]


class Finisher:
    """Turns windows into evidence, with what has to be remembered from one to the next."""

    def __init__(
        self,
        writer: CapsuleWriter,
        loop: Loop,
        device: DeviceScalars,
        rank: int,
        attempt: Attempt,
        training: dict[str, Any],
        keep: int,
        max_bytes: int,
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._device = device
        self._rank = rank
        self._attempt = attempt
        self._ring = Ring(keep)
        self._limits = Limits()
        self._spike = Spike()
        self._odd_sample = OddSample()
        self.accumulation: int | None = training.get("accumulation_steps")
        self._output = Output(writer, rank, loop.ignore_index, self.accumulation)
        self._max_bytes = max_bytes
        self._sized = time.monotonic()
        self._lawful: set[str] = set()
        self._facts: dict[str, Any] = {}
        self._crashed = False
        self._raised = (0, "")  # the last exception
        self._over = 0.0  # Unix seconds: the end of the last window
        self.signal: str | None = None  # the last one that came
        self.step = 0
        self._cursor: Any = None
        self.trigger: Trigger | None = None
        self.ranks: Ranks | None = None  # in a job of several
        self.windows = 0
        self.saw_gradients = False
        self._usual = 0  # micro-batches of the last window that stepped
        attempt("memory", lambda: loop.memory.keep_history(lambda path: writer.attach(path, "snapshot", rank=rank)))

    # -- reasons from outside

    def request(self, kind: str, message: str, window: Window | None) -> None:
        """Someone asks for the window to be kept."""
        self._ask(Trigger(kind, self._at(window), self._rank, signal=kind, message=message or None), window)

    def failed(self, error: BaseException, window: Window | None) -> None:
        """An exception is passing through."""
        memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        kind, name = "oom" if memory else "exception", type(error).__name__
        words = said_by(error)[:2000]
        if window is None and self._raised == (id(error), words):
            return  # on its way out of a step, which has told it
        message = f"{name}: {words}"[:2000]
        self._crashed = True
        frames = raised_at(error)
        if self.ranks is not None:
            began = self._over if window is None else window.backward_began or window.micro.began
            self.ranks.ends(kind, message, since=began if by_collective(error, frames) else None)
        device = isinstance(error, torch.OutOfMemoryError)
        extra: dict[str, Any] = self._loop.memory.failure(words) if device else {"where": "host"} if memory else {}
        said = {"type": name, "message": words, "frames": frames or None, **extra}
        if window is not None:
            window.event(kind, **said)
        else:
            self._writer.record("events", {"kind": kind, "step": self.step, "t": time.time(), **said})
        self._raised = id(error), words
        self._ask(Trigger(kind, self._at(window), self._rank, signal=name, message=message), window)
        self._writer.heartbeat(status="crashed")

    def remark(self, words: str) -> None:
        """Something was not as it should be at the end, and the job dealt with it."""
        if self.ranks is not None:
            self.ranks.remark = words
        fields = {"level": "warning", "logger": "llmconsole.recorder", "message": words}
        self._writer.record("events", {"kind": "log", "step": self.step, "t": time.time(), **fields})

    def signalled(self, name: str, final: bool, window: Window | None) -> None:
        """A signal has come; ``final``: the process ends when this returns, so everything is written now."""
        self.signal = name
        self._ask(Trigger("signal", self._at(window), self._rank, signal=name, message=f"received {name}"), window)
        if final:
            if self.ranks is not None:
                self.ranks.ends("signal", name)
            if window is not None:
                self._loop.window = None
                self.finish(window)
            self._crashed = True
            self.close()

    def _ask(self, trigger: Trigger, window: Window | None) -> None:
        if window is not None:
            window.requests.append(trigger)
        elif self._fire(trigger):
            self._output.ring(self._ring)

    def _at(self, window: Window | None) -> int:
        return self.step if window is None else window.step

    # -- the end of a window

    def take_compiled(self, window: Window) -> None:
        """Rows of the modules inside compiled regions, whose norms lie in a table on the device."""
        table = self._loop.hooks.compiled.take()
        if table is None:
            return
        micro, rows = window.micro.index, self._loop.tape.rows
        compiled, names = self._loop.hooks.compiled, self._loop.hooks.modules

        def sink(values: list[float]) -> None:
            filled = [slot for slot in range(len(names)) if values[4 * slot + 2] >= 0]
            compiled.seen.update(filled)
            place = next(
                (i for i, row in enumerate(rows) if row.micro == micro and row.role != "activation"), len(rows)
            )
            rows[place:place] = [
                Row.compiled(names[slot] or "output", micro, values[4 * slot : 4 * slot + 4]) for slot in filled
            ]

        window.waiting.append((table.view(-1), sink))

    def finish(self, window: Window) -> None:
        """Read, judge and write; each part for itself, so that one that fails costs only itself."""
        self.step = window.step
        tokens: list[Any] = [self._output.supervised(micro) for micro in window.micros]
        self._attempt("parameter updates", lambda: self._collect_updates(window))
        if window.everything:
            self._attempt("parameters", self._measure_parameters)
        self._attempt("values", lambda: self._collect(window, tokens))
        self._attempt("samples", lambda: read_samples(window))
        self._attempt("values", lambda: window.read(self._loop.tape))
        rows = [row for row in self._loop.tape.rows if row.about is not UNKNOWN and not isinstance(row.norm, Tensor)]
        for row in window.losses:
            row.norm = abs(float(row.norm))
        values = standard_scalars(window, tokens)
        if not window.over and len(window.micros) < self._usual:
            # The job ended within it: sums over fewer micro-batches would bend the curves. What is not finite stays.
            values = {name: value for name, value in values.items() if name not in _SUMS or not math.isfinite(value)}
        self._usual = len(window.micros) if window.stepped else self._usual
        triggers = self._judge(window, rows, values)
        self._ring.add(window.step, window.micros)
        self._write(window, rows, values, tokens, triggers)
        self.windows += 1
        self.saw_gradients = self.saw_gradients or bool(window.gradients)
        if window.cursor is not None:
            self._cursor = window.cursor
        if self._crashed and not any(trigger.kind in ("exception", "oom") for trigger in window.requests):
            self._crashed, self._raised = False, (0, "")  # the loop caught it and goes on
            if self.ranks is not None:
                self.ranks.goes_on()
            self._attempt("heartbeat", lambda: self._writer.heartbeat(status="recording"))
        self._attempt("size", self._check_size)
        self._over = time.time()

    def _collect(self, window: Window, tokens: list[Any]) -> None:
        numbers = window.numbers
        for micro in window.micros:
            micro.reported = None
            for loss in micro.backward_losses:
                window.later(
                    loss, lambda v, m=micro: setattr(m, "reported", v if m.reported is None else m.reported + v)
                )
            window.later(micro.given_loss, lambda v, m=micro: setattr(m, "told", v))
        for name, value in list(window.logged.items()):
            window.later(value, lambda v, n=name: window.logged.__setitem__(n, v))
        window.later(window.total_norm, lambda v: numbers.__setitem__("grad_norm", v))
        window.later(window.scale, lambda v: numbers.__setitem__("loss_scale", v))
        window.later(window.learning_rate, lambda v: setattr(window, "learning_rate", v))
        window.overflowed = window.skipped
        for found in window.found_inf:
            window.later(found, lambda v: setattr(window, "overflowed", window.overflowed or v > 0))
        for norm in window.local_norms:
            window.later(norm, window.local_values.append)
        for index, count in enumerate(tokens):
            window.later(count, lambda v, i=index: tokens.__setitem__(i, int(v)))
        window.sharded = self._loop.reduction.sharded
        for record, difference in self._loop.hooks.recompute.take():
            record["step"] = window.step
            window.recomputed.append(record)
            window.later(difference, lambda v, r=record: r.__setitem__("max_abs_difference", v))

    def _collect_updates(self, window: Window) -> None:
        loop = self._loop
        loop.measured_update = False
        if loop.sample is None or not window.stepped:
            return
        measured = loop.sample.after()
        if measured is None:
            return
        loop.measured_update = True
        parameters, updates = measured
        for parameter, update in zip(parameters, updates, strict=True):
            window.later(parameter, window.parameter_values.append)
            window.later(update, window.update_values.append)
        if loop.large_sample is not None:
            loop.large_sample.subtract()

    @torch.no_grad()
    def _measure_parameters(self) -> None:
        """Full rows of every parameter and of the sampled updates, behind everything else in the order."""
        loop = self._loop
        for parameter in loop.hooks.root.parameters():
            name = loop.hooks.parameters.get(id(parameter))
            local = statistics.local(parameter)
            if name is not None and statistics.is_readable(local) and local.numel():
                about = loop.hooks.describe(name, "parameter", parameter)
                loop.tape.rows.append(Row(name, "parameter", about, 0, 0, full=statistics.full(local)))
        for name, change in loop.changes().items():
            about = statistics.describe(change)
            loop.tape.rows.append(Row(name, "update", about, 0, 0, full=statistics.full(change)))

    def _judge(self, window: Window, rows: list[Row], values: dict[str, float]) -> list[Trigger]:
        """The triggers of this window that may fire, requests included."""
        found: list[Trigger] = []
        loss = values.get("loss")
        interval = first_bad(rows, self._lawful, skip_gradients=window.overflowed)
        if interval is not None or (loss is not None and not math.isfinite(loss)):
            bad = interval.first_bad if interval else None
            signal = "loss" if bad is None else bad.role
            value = loss if bad is None or bad.role == "loss" else float(bad.norm)
            message = interval.message() if interval else "the loss is not finite, no tensor before it was seen to be"
            found.append(Trigger("nonfinite", window.step, self._rank, signal, value, message))
        else:
            self._limits.healthy("nonfinite")
            self._lawful |= {row.name for row in rows if row.role != "gradient" and not row.finite}
        threshold = self._spike.add(loss) if loss is not None else None
        if threshold is not None:
            message = f"loss {loss:.6g} above {threshold:.6g}, judged by the windows before"
            found.append(Trigger("spike", window.step, self._rank, "loss", loss, message))
        else:
            self._limits.healthy("spike")
        return [trigger for trigger in [*found, *window.requests] if self._limits.allow(trigger.kind)]

    def _write(
        self,
        window: Window,
        rows: list[Row],
        values: dict[str, float],
        tokens: list[Any],
        triggers: list[Trigger],
    ) -> None:
        attempt, output = self._attempt, self._output
        for trigger in triggers:
            window.events.append(window.log("warning", f"{trigger.kind}: {trigger.message or 'asked for'}"))
        if self.windows == 0:
            window.events += coverage(self._loop.hooks, window)
        values["step_time"] = time.perf_counter() - window.began
        values["data_time"] = window.data_time
        if (ranks := self.ranks) is not None:
            attempt("ranks", lambda: ranks.window(window, values))
        attempt("memory", lambda: self._writer.records("memory", self._loop.memory.take(window)))
        attempt("device memory", lambda: values.update(self._device.read()))
        attempt("scalars", lambda: output.scalars(window, values))
        attempt("statistics", lambda: output.statistics(window.step, rows))
        attempt("records", lambda: output.records(window, tokens))
        output.tokens_seen += sum(count for count in tokens if isinstance(count, int))
        if triggers and not window.everything:
            attempt("parameters", lambda: self._write_parameters(window.step, len(rows)))
        sample = self._loop.steps.close(window)
        if triggers or window.due:
            attempt("parameter groups", lambda: self._write_groups(window, sample))
        adapted = self._loop.hooks.adapters.groups()
        if sample is not None:
            attempt("optimizer steps", lambda: self._writer.tensors(window.step, [*sample.groups(), *adapted]))
        odd = self._odd_sample.add([loss for micro in window.micros for loss in micro.sample_loss or ()])
        if triggers or window.due or odd:
            attempt("batches", lambda: output.ring(self._ring))
        if triggers or window.due:
            attempt("manifest", lambda: self._update_manifest(window))
        for trigger in triggers:
            attempt("triggers", lambda t=trigger: self._carry(t))

    def _write_parameters(self, step: int, order: int) -> None:
        tape = self._loop.tape
        known, tape.rows = tape.rows, []
        self._measure_parameters()
        tape.read([])
        self._output.statistics(step, tape.rows, order)
        tape.rows = known

    def _write_groups(self, window: Window, sample: StepSample | None) -> None:
        loop = self._loop
        norms = {name: float(row.norm) for name, row in window.gradients.items()}
        changes = (sample.changes() if sample is not None else {}) | loop.changes()
        frozen: set[str] = sample.frozen_gradients() if sample is not None else set()
        records = group_records(
            window.step, loop.optimizers, loop.parameters(), norms, changes, loop.hooks.root, frozen
        )
        if records:
            self._writer.records("param_groups", records)

    def _update_manifest(self, window: Window) -> None:
        facts = observed_facts(window, self._loop, self._facts)
        position = {"global_step": window.step, "tokens_seen": self._output.tokens_seen}
        if window.cursor is not None or self._cursor is not None:
            position["data_cursor"] = window.cursor or self._cursor
        self._facts = facts
        self._writer.update({**facts, "position": position})

    # -- triggers

    def _fire(self, trigger: Trigger) -> bool:
        if not self._limits.allow(trigger.kind):
            return False
        self._carry(trigger)
        return True

    def _carry(self, trigger: Trigger) -> None:
        """The heartbeat carries the first trigger of the greatest weight."""
        if self.trigger is None or trigger.weight > self.trigger.weight:
            self.trigger = trigger
        self._writer.heartbeat(trigger=self.trigger.fields(), step=trigger.step)

    def take_over(self, trigger: Trigger | None) -> None:
        """Carry a trigger that the watchdog has found; None: it was none after all."""
        if trigger is not None:
            self._carry(trigger)
        elif self.trigger is not None and self.trigger.kind == "hang":
            self.trigger = None
            self._writer.withdraw()

    # -- life

    def _check_size(self) -> None:
        now = time.monotonic()
        if now - self._sized < SIZE_EVERY:
            return
        self._sized = now
        size = 0
        for folder, _, files in os.walk(self._writer.path / "ranks" / f"rank{self._rank:05d}"):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # a file that was written anew meanwhile
                    size += os.path.getsize(os.path.join(folder, name))
        if size > self._max_bytes:
            self.close()
            raise OSError(errno.EFBIG, f"{size:,} bytes written, more than max_bytes={self._max_bytes:,}")

    def close(self) -> None:
        """Write the rest of the ring and seal the capsule."""
        if self._writer.closed:
            return
        if self.ranks is not None:
            self.ranks.close()
        if self.windows:
            self._attempt("batches", lambda: self._output.ring(self._ring))
        trigger = self.trigger.fields() if self.trigger else None
        self._attempt("memory", self._loop.memory.close)
        self._writer.close(status="crashed" if self._crashed else "sealed", trigger=trigger)

    def abandon(self, reason: str | None = None) -> None:
        """Close the files after a failure, sealing what is there and saying why where that still can be written."""
        if self.ranks is not None:
            self.ranks.stop()
        seal(self._writer, reason, self.step, self._crashed)
