"""What activation checkpointing runs again in backward: the random state and the values of both runs, compared.

Looking costs a digest a module, so it is done in chosen windows: the first after a recomputation was noticed, and those
with full statistics. Of outputs only the leading elements are kept; checkpointing is used where memory is short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import statistics
from .internals import inside_backward
from .tape import Tape

# Elements of each output that are compared, and modules recorded in one window.
SAMPLE, MOST = 4096, 512


class Recompute:
    """Pairs forward and recomputation of the modules of one model.

    Attributes:
        on: this window is a chosen one.
        found: records of the stream ``recompute`` of this window, and the differences of each, still on their device.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.on = False
        self.installed = False
        self.found: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._states: dict[str, list[str]] = {}
        self._outputs: dict[str, list[Tensor]] = {}
        self._running = ""  # the outermost module that is being recomputed

    def begin(self, on: bool) -> None:
        """Start a micro-batch; what an earlier one left is forgotten."""
        self.on = on
        self._states, self._outputs, self._running = {}, {}, ""

    def before(self, name: str) -> Callable[[nn.Module, Any], None]:
        """A forward hook that runs before the module ``name``."""

        def hook(module: nn.Module, inputs: Any) -> None:
            if not self.on or not self._tape.on or torch.compiler.is_compiling():
                return
            if not inside_backward():
                self._states.setdefault(name, []).append(random_digest())
            elif not self._running or not name.startswith(f"{self._running}."):
                self._running = name
                earlier = self._states.get(name)
                if earlier and len(self.found) < MOST:  # segments come back in reverse order
                    record = {"module": name, "micro": self._tape.micro, "forward_rng_sha256": earlier.pop()}
                    self.found.append((record | {"recompute_rng_sha256": random_digest()}, []))

        return hook

    @torch.no_grad()
    def after(self, name: str, output: Any) -> None:
        """The module ``name`` returned, in forward or again in backward."""
        tensor = output[0] if isinstance(output, (tuple, list)) and output else output
        if not self.on or not isinstance(tensor, Tensor) or not statistics.is_readable(tensor):
            return
        local = statistics.local(tensor)
        leading = local.reshape(-1)[:SAMPLE] if local.is_contiguous() else local.flatten()[:SAMPLE]
        if not inside_backward():
            self._outputs.setdefault(name, []).append(leading.clone())
        elif (earlier := self._outputs.get(name)) and self.found and leading.numel():
            before = earlier.pop()
            if before.shape == leading.shape and before.device == leading.device:
                self.found[-1][1].append((before.double() - leading.double()).abs().amax())

    def take(self) -> list[tuple[dict[str, Any], Tensor | None]]:
        """The records of the window, each with its largest difference where outputs could be compared."""
        found, self.found = self.found, []
        return [(record, torch.stack(values).amax() if values else None) for record, values in found]


def random_digest() -> str:
    """SHA-256 of the states of torch's CPU generator and, where it is in use, the current device's."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()
