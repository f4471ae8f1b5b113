"""What happens between two windows: evaluation passes, checkpoints saved and loaded, numbers that the loop logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..writer import CapsuleWriter
from .checkpoints import Checkpoints
from .contract import contract, read_beside, write_beside
from .evaluation import Evaluations
from .finish import Finisher
from .loop import Loop
from .window import Window, number

Attempt = Callable[[str, Callable[[], None]], None]


class Between:
    """Keeps what belongs to no window and writes it with the step at which it happened.

    Args:
        writer: of the capsule.
        loop: whose window may be open.
        finisher: knows the last window.
        facts: the manifest as it was written at the start.
        tokenizer: for the contract.
        contract: whether a contract is written beside saved checkpoints.
        checkpoints: a watcher that was begun before there was a recorder, else None.
        attempt: runs a part of the recording and disables it where it raises.
    """

    def __init__(
        self,
        writer: CapsuleWriter,
        loop: Loop,
        finisher: Finisher,
        facts: dict[str, Any],
        tokenizer: Any,
        contract: bool,
        checkpoints: Checkpoints | None,
        attempt: Attempt,
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._finisher = finisher
        self._facts = facts
        self._tokenizer = tokenizer
        self._contract = contract
        self._attempt = attempt
        model: nn.Module = loop.hooks.root
        self.checkpoints = checkpoints or Checkpoints(model if next(model.parameters(), None) is not None else None)
        self.evaluations = Evaluations(loop.hooks, writer, loop.ignore_index, self._where, attempt)
        if checkpoints is None:
            self.checkpoints.watch()

    def _where(self) -> tuple[int, bool]:
        window = self._loop.window
        return (self._finisher.step, False) if window is None else (window.step, True)

    def begin(self, window: Window) -> None:
        """A window begins: what came before it is complete."""
        self._attempt("memory", lambda: self._loop.memory.begin(window))
        self._attempt("evaluation", self.evaluations.end)
        self._attempt("checkpoints", lambda: window.events.extend(self._checkpoint_events(window.step)))

    def close(self) -> None:
        """The recording ends."""
        self._attempt("evaluation", self.evaluations.end)
        self._attempt("checkpoints", lambda: self._writer.records("events", self._checkpoint_events(self._where()[0])))
        self.end()

    def end(self) -> None:
        """Look at nothing any more."""
        self.checkpoints.end()
        self._loop.hooks.outside = None

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Numbers with a step of their own, or that of the window that is open, or of the last one."""
        self.evaluations.logged |= set(values)
        if step is None and self._loop.window is not None:
            self._loop.log(dict(values))
            return
        numbers: dict[str, float] = {}
        for name, value in values.items():
            self._attempt(f"log({name})", lambda n=name, v=value: numbers.update({n: float(number(v))}))
        at = self._where()[0] if step is None else step
        self._attempt("scalars", lambda: self._writer.scalar_row(at, numbers, time.time()))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """An event that only the loop knows of."""
        window = self._loop.window
        if window is not None:
            window.event(kind, **fields)
        else:
            event = {"kind": kind, "step": self._where()[0], "t": time.time(), **fields}
            self._attempt("records", lambda: self._writer.record("events", event))

    def _checkpoint_events(self, step: int) -> list[dict[str, Any]]:
        """Saved ones belong to the window before, loaded ones to the one that begins."""
        events = self.checkpoints.take()
        for event in events:
            path, saved = event.get("path"), event["kind"] == "checkpoint_saved"
            event["step"] = self._finisher.step if saved and self._finisher.windows else step
            if (
                path is not None
                and saved
                and self._contract
                and "model" in event["contents"]
                and self._writer.rank == 0
            ):
                self._attempt("contract", lambda p=path: write_beside(p, self._own_contract()))
            elif path is not None and event["kind"] == "checkpoint_loaded":
                self._attempt("contract", lambda p=path: self._take_over(p))
        return events

    def _own_contract(self) -> dict[str, Any]:
        return contract(self._loop.hooks.root, self._tokenizer, self._facts)

    def _take_over(self, path: str) -> None:
        """What a loaded checkpoint says of itself goes into the manifest: identity is compared with it."""
        found = read_beside(path)
        if found is not None:
            base = {"name": path, "sha256": found.get("model", {}).get("sha256")}
            self._writer.update({"contract": found | {"path": path}, "identity": {"base_checkpoint": base}})
