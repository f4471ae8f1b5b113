"""The recorder: put around an ordinary PyTorch loop, it keeps the evidence of why the loop broke.

    with Recorder("runs", model=model, optimizer=optimizer) as recorder:
        for batch in loader:
            with recorder.step(batch=batch):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

It measures and never changes: no random number is drawn, no gradient touched, no collective called, nothing raised.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..writer import CapsuleWriter
from . import describe, environment, facts, optimizer, rendezvous
from .between import Between
from .checkpoints import Checkpoints
from .device import DeviceScalars
from .ending import Ending, handled, seal, tell, uncaught, under_way
from .evaluation import Pass
from .failure import said_by
from .finish import Finisher
from .hooks import ModuleHooks
from .loop import Loop
from .ranks import Ranks
from .ring import Micro, RandomState
from .signals import Signals
from .step import Step
from .tape import Tape
from .triggers import Trigger
from .window import Window

log = logging.getLogger("llmconsole.recorder")

# Micro-batches in one window at most: before any optimizer was seen to step, and after. A loop whose steps cannot be
# seen (an optimizer that is none of torch's) would otherwise be one window that grows until the memory is full.
UNSEEN_MICROS, MOST_MICROS = 256, 4096


class Recorder:
    """Records a training loop into one capsule under ``directory``, one directory a rank.

    Args:
        directory: where capsules are kept; created.
        model: the module whose forward is called, before or after wrapping. Attach before ``torch.compile``: hooks
            cannot see inside what was compiled without them, and the capsule then says so.
        optimizer: a torch optimizer or several; left out, every optimizer that steps the model's parameters counts.
        scaler: accepted for symmetry; every ``torch.amp.GradScaler`` that scales within a step is followed.
        config: the resolved configuration, of any usual kind; secrets in it are masked.
        tokenizer: for its special ids and its digest.
        manifest: fields of the capsule's manifest that cannot be seen from here (reduction, initialisation).
        every: full statistics, parameters, updates, parameter groups and the ring of batches each so many windows.
        keep_batches: windows kept in the ring.
        statistics_every: full statistics each so many windows, where that differs from ``every``; 1 is every step.
        whole_updates: measure the update of all parameters rather than of a sample of at most 64 MB; copies them all.
        contract: write ``llmconsole-contract.json`` (digests of tokenizer and template, dtype, special ids, sampling)
            beside each checkpoint that the loop saves. One that lies beside a loaded checkpoint is always read.
        checkpoints: a watcher of checkpoints that was begun before the recorder; left out, one begins now.
        max_bytes: size of this rank's directory at which recording ends with a warning.
        hang_after: seconds a collective may take before all ranks write where they are; else 300 or half its time-out.
        phase: of the capsule.
        title: of the capsule; without one the run's name, else the name of the script.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        config: Any = None,
        tokenizer: Any = None,
        manifest: Mapping[str, Any] | None = None,
        every: int = 50,
        keep_batches: int = 4,
        statistics_every: int | None = None,
        whole_updates: bool = False,
        contract: bool = False,
        checkpoints: Checkpoints | None = None,
        max_bytes: int = 4 << 30,
        hang_after: float | None = None,
        phase: str = "training",
        title: str = "",
    ) -> None:
        self.path: Path | None = None
        self._pid = os.getpid()
        self.recording = self._ended = False
        self._disabled: set[str] = set()
        self._next_step = 0
        self._patience = UNSEEN_MICROS
        self._left = time.perf_counter()
        self._handled = handled()  # what the job was dealing with when it last trained
        self._reason: str | None = None  # of an end that nobody asked for
        self._put_on = ExitStack()  # what takes off again all that was put on, the newest first
        try:
            self._every = max(int(every), 1)
            self._statistics_every = max(int(statistics_every or every), 1)
            self._keep = int(keep_batches)
            self._contract, self._checkpoints, self._hang_after = bool(contract), checkpoints, hang_after
            self._open(directory, model, optimizer, config, tokenizer, manifest, phase, title, whole_updates, max_bytes)
        except Exception as error:
            reason = f"{type(error).__name__}: {said_by(error)}".split("\n")[0]
            log.warning("not recording: %s", reason)
            self._take_off(reason)

    def _open(
        self,
        directory: Any,
        model: nn.Module | None,
        optimizers: Any,
        config: Any,
        tokenizer: Any,
        manifest: Mapping[str, Any] | None,
        phase: str,
        title: str,
        whole_updates: bool,
        max_bytes: int,
    ) -> None:
        model = nn.Module() if model is None else model
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"model is {type(model).__name__}, expected torch.nn.Module")
        directory = Path(directory).absolute()  # the job may change its working directory
        given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        named = [each for each in given if hasattr(each, "param_groups")]
        rank, world_size = rendezvous.rank_and_world()
        fields = facts.manifest(model, named, config, tokenizer, manifest or {}, (rank, world_size), self._attempt)
        training: Any = fields.get("training", {})
        ignore_index = int(training.get("ignore_index", -100))
        path = rendezvous.capsule_path(directory, rank, world_size)
        directory.mkdir(parents=True, exist_ok=True)
        title = title or environment.title(fields.get("run"))
        self._signals = Signals(self._signalled)
        self._put_on.callback(self._signals.close)
        writer = CapsuleWriter(path, title=title, phase=phase, manifest=fields, rank=rank)  # type: ignore[arg-type]
        self._put_on.callback(lambda: seal(writer, self._reason))
        self.path = path
        self._tape = Tape()
        self._hooks = ModuleHooks(model, self._tape, self._disable)
        self._put_on.callback(self._hooks.close)
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        self._hooks.compiled.prepare(len(self._hooks.modules), device)
        ways = (whole_updates, self._attempt, self._step_outside)
        self._loop = Loop(self._tape, self._hooks, named, ignore_index, dict(manifest or {}), *ways)
        self._finisher = Finisher(
            writer, self._loop, DeviceScalars(device), rank, self._attempt, training, self._keep, max_bytes
        )
        self._put_on.callback(lambda: self._finisher.abandon(self._reason))
        if world_size > 1:
            parts = (lambda: self._loop.window, self._finisher.take_over)
            self._finisher.ranks = Ranks(writer, self._attempt, *parts, self._hooks.root, self._hang_after)
            self._finisher.ranks.unheard = self._signals.deadly
            self._hooks.several, self._loop.reduction.called = True, self._finisher.ranks.reductions
        told = (tokenizer, self._contract, self._checkpoints)
        self._between = Between(writer, self._loop, self._finisher, fields, *told, self._attempt)
        self._put_on.callback(self._between.end)
        self._put_on.callback(optimizer.detach, self._loop)
        optimizer.attach(self._loop)
        this = weakref.ref(self)

        def at_exit() -> None:
            if (it := this()) is not None:
                it._close(uncaught())

        self._put_on.callback(atexit.unregister, at_exit)
        atexit.register(at_exit)
        self.recording = True

    # -- the loop

    def step(self, batch: Any = None, sample_ids: Any = None, cursor: Any = None, step: int | None = None) -> Step:
        """One micro-batch, as a context manager.

        Args:
            batch: what the loader gave: mapping, (inputs, targets) or tensor; else what the model is called with.
            sample_ids: B names of samples.
            cursor: where the data stands, any mapping.
            step: number of the optimizer window, to go on counting after a resume; else one more than the last.
        """
        return Step(self, batch, sample_ids, cursor, step)

    @contextmanager
    def evaluation(self, name: str | None = None) -> Generator[Pass]:
        """An evaluation pass, as a context manager; without it one is found where the model runs outside a step.

        Args:
            name: of the data; the mean of the batches' losses becomes ``eval_loss``, for other names than
                "validation" ``eval_loss/NAME``.

        Yields:
            The pass, whose ``batch(batch, sample_ids)`` takes what the model is not called with.
        """
        begun = Pass(0, 0, name)
        if self._alive():
            with self._signals:
                made: list[Pass] = []
                self._attempt("evaluation", lambda: made.append(self._between.evaluations.begin(name)))
                begun = made[0] if made else begun
        try:
            yield begun
        finally:
            if self._alive():
                with self._signals:
                    self._attempt("evaluation", self._between.evaluations.end)

    def evaluated(self, split: str = "validation") -> None:
        """The pass that was found has ended, and ran on that split."""
        if self._alive():
            with self._signals:
                self._attempt("evaluation", lambda: self._between.evaluations.end(split))

    def log(self, step: int | None = None, **values: Tensor | float) -> None:
        """Scalars by name at any time: of ``step``, else of the window that is open, else of the last one."""
        if self._alive():
            with self._signals:
                self._attempt("log", lambda: self._between.log(values, step))

    def saved(self, path: str) -> None:
        """A checkpoint was saved there by means that are not seen from here; joins what was seen of its directory."""
        if self._alive():
            self._attempt("checkpoints", lambda: self._between.checkpoints.file("saved", path, ["step"]))

    def event(self, kind: str, **fields: Any) -> None:
        """An event that cannot be seen from here (``mixture_changed``, ``weights_updated`` …) with its fields."""
        if self._alive():
            with self._signals:
                self._attempt("events", lambda: self._between.event(kind, fields))

    def trigger(self, kind: str = "manual", message: str = "") -> None:
        """Keep the current window (or the last one, between two) whole, and say why."""
        if self._alive():
            with self._signals:
                self._attempt("triggers", lambda: self._finisher.request(kind, message, self._loop.window))

    @property
    def triggered(self) -> Trigger | None:
        """The trigger that the capsule carries so far."""
        return self._finisher.trigger if hasattr(self, "_finisher") else None

    def close(self) -> None:
        """Write what is pending, seal the capsule, leave model and process as they were. A second call does nothing."""
        self._close(under_way(self._handled))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(None if error is None else Ending(error, True))

    def _close(self, ending: Ending | None) -> None:
        if not self._alive():
            return
        with self._signals:
            if ending is not None:
                self._attempt("exception", lambda: tell(ending, self._finisher, self._loop.window))
            if self._loop.window is not None:
                self._finish()
            self._attempt("close", self._between.close)
            self._attempt("close", self._finisher.close)
            self._take_off()

    def _begin(self, handle: Step) -> None:
        loop, began, self._handled = self._loop, time.perf_counter(), handled()
        told: list[int] = []
        if handle.number is not None:
            self._attempt("step numbers", lambda: told.append(describe.step_number(handle.number)))
        if loop.window is not None and told and told[0] != loop.window.step:
            self._finish()
        if loop.window is not None and loop.window.cleared and self._patience == UNSEEN_MICROS:  # no step was ever seen
            self._finish() if loop.window.cleared == "after" else self._cut(loop.window)
        if loop.window is None:
            step = told[0] if told else self._next_step
            first = not self._finisher.windows
            everything = first or step % self._statistics_every == 0
            loop.window = Window(step, everything, due=first or step % self._every == 0)
            self._tape.clear()
            self._tape.everything = everything
            self._between.begin(loop.window)
            self._attempt("recomputation", lambda: self._hooks.watch_recomputation(everything))
            if self._finisher.windows < 2 or not self._finisher.saw_gradients or loop.window.due:
                self._attempt("activations and gradients", self._hooks.watch_parameters)
        window = loop.window
        window.data_time += began - self._left
        micro = Micro(len(window.micros), given=handle.batch)
        window.micros.append(micro)
        if handle.sample_ids is not None:
            self._attempt("sample ids", lambda: setattr(micro, "sample_ids", describe.names(handle.sample_ids)))
        if handle.cursor is not None:
            self._attempt("cursors", lambda: setattr(micro, "cursor", describe.cursor(handle.cursor)))
        self._attempt("random state", lambda: setattr(micro, "random", RandomState.capture()))
        self._hooks.begin()
        self._hooks.recompute.begin(self._hooks.look_again)
        self._tape.begin(micro.index)
        loop.inside = True
        self._tape.on = "activations and gradients" not in self._disabled

    def _end(self, error: BaseException | None) -> None:
        loop, window = self._loop, self._loop.window
        if window is None:
            return
        loop.read_logits()
        loop.measure_gradients()
        self._tape.on = False
        loop.inside = False
        window.micro.given = None
        self._attempt("activations and gradients", lambda: self._finisher.take_compiled(window))
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, StopIteration):  # that ends the data
            self._attempt("exception", lambda: tell(Ending(error, True), self._finisher, window))
        if window.stepped or window.skipped:
            self._patience = MOST_MICROS
        if window.over or error is not None:
            self._finish()
        elif len(window.micros) >= self._patience:
            self._cut(window)
        self._left = time.perf_counter()

    def _cut(self, window: Window) -> None:
        """End a window that no optimizer ends, and from now on as many micro-batches later as the job declared."""
        declared = self._finisher.accumulation or 1
        if self._patience > declared:
            micros = len(window.micros)
            words = f"no optimizer step was seen in {micros} micro-batches; a step is now {declared} of them"
            window.events.append(window.log("warning", words))
            self._patience = declared
        self._finish()

    def _step_outside(self) -> None:
        """The optimizer stepped after the block of the last micro-batch."""
        self._patience = MOST_MICROS
        with self._signals:
            self._finish()

    def _finish(self) -> None:
        window, self._loop.window = self._loop.window, None
        if window is not None:
            self._next_step = window.step + 1
            self._finisher.finish(window)

    # -- life

    def _alive(self) -> bool:
        # A forked child (a data loader's worker) inherits this object, but not the right to write.
        return self.recording and os.getpid() == self._pid

    def _attempt(self, part: str, run: Callable[[], None]) -> None:
        """Run a part of the recording; where it fails, warn once and go on without it."""
        if part in self._disabled or self._ended:
            return
        try:
            run()
        except Exception as error:
            if part == "steps" or (isinstance(error, OSError) and self.recording):
                words = getattr(error, "strerror", None) or said_by(error) or type(error).__name__
                self._stop(f"{part}: {words}")
            else:
                self._disable(part, error)

    def _disable(self, part: str, error: Exception) -> None:
        if part not in self._disabled and not self._ended:
            self._disabled.add(part)
            log.warning("no longer recording %s: %s: %s", part, type(error).__name__, said_by(error).split("\n")[0])
            if part == "activations and gradients":
                self._tape.on = False

    def _stop(self, reason: str) -> None:
        """Give up recording; the job goes on as if it had never been recorded."""
        if self.recording:
            log.warning("recording ended: %s; training goes on without it", reason)
            self._take_off(reason)

    def _take_off(self, reason: str | None = None) -> None:
        self.recording, self._ended, self._reason = False, True, reason
        if hasattr(self, "_loop"):
            self._loop.window, self._tape.on = None, False
        try:
            self._put_on.close()
        except Exception as error:  # the others were taken off all the same
            log.warning("not taken off: %s: %s", type(error).__name__, said_by(error).split("\n")[0])

    def _signalled(self, name: str, final: bool) -> None:
        if self._alive():
            self._attempt("signal", lambda: self._finisher.signalled(name, final, self._loop.window))
