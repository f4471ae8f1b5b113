"""The last windows' micro-batches with the random state they began in, kept in memory until a reason to write them."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch import Readings
from .internals import version

# Whole logits are kept beside their readings only while all of them in the ring, or in the open window, fit into this.
LOGITS_BYTES = 64 << 20


@dataclass
class RandomState:
    """States of the generators, taken without advancing any of them."""

    torch: Tensor
    python: Any
    numpy: Any
    cuda: list[Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        """The states now: torch's CPU generator, Python's, numpy's where it is loaded, each initialised device's."""
        numpy = sys.modules.get("numpy")
        started = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch=torch.get_rng_state(),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            cuda=[torch.cuda.get_rng_state()] if started else [],
        )

    def moved(self) -> bool:
        """Whether torch's generators have drawn numbers since."""
        now = RandomState.capture()
        pairs = zip([self.torch, *self.cuda], [now.torch, *now.cuda], strict=False)
        return any(not torch.equal(before, after) for before, after in pairs)


@dataclass
class Micro:
    """One micro-batch of a window, from its beginning to what became known of it."""

    index: int
    began: float = field(default_factory=time.time)
    given: Any = None
    sample_ids: list[str] | None = None
    cursor: Any = None
    random: RandomState | None = None
    arrays: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    keys: list[str] | None = None
    layout: str | None = None
    odd_rows: list[int] = field(default_factory=list[int])  # rows of another label layout, or of none
    training_mode: bool | None = None  # of the model, in the forward that has a graph
    readings: Readings | None = None
    has_graph: bool = False  # the readings are of a forward whose output a backward can start from
    logits: Tensor | None = None
    logits_version: int = -1
    backward_losses: list[Tensor] = field(default_factory=list[Tensor])
    given_loss: Tensor | float | None = None
    loss_dtype: str | None = None
    gradients_measured: bool = False
    # Read at the end of the window:
    reported: float | None = None
    told: float | None = None
    sample_loss: list[float] | None = None
    sample_tokens: list[float] | None = None
    row_digests: list[str] = field(default_factory=list[str])
    row_lengths: list[int] = field(default_factory=list[int])

    def hold_logits(self, logits: Tensor) -> None:
        """Keep a reference to the logits; a copy would cost as much as they do."""
        self.logits, self.logits_version = logits.detach(), version(logits)

    @property
    def logits_bytes(self) -> int:
        """Bytes that the reference keeps alive."""
        return 0 if self.logits is None else self.logits.nbytes

    def untouched_logits(self) -> Tensor | None:
        """The logits where nothing has written into them since the model returned them."""
        logits = self.logits
        return logits if logits is not None and version(logits) == self.logits_version else None


@dataclass
class Entry:
    """One window in the ring."""

    step: int
    micros: list[Micro]
    written: bool = False


class Ring:
    """The last ``keep`` windows, newest last."""

    def __init__(self, keep: int) -> None:
        self.entries: deque[Entry] = deque(maxlen=max(keep, 1))

    def add(self, step: int, micros: list[Micro]) -> None:
        """Take a finished window; the oldest falls out, and old logits go first where memory is short."""
        self.entries.append(Entry(step, micros))
        room = LOGITS_BYTES
        for entry in reversed(self.entries):
            for micro in reversed(entry.micros):
                room -= micro.logits_bytes
                if room < 0:
                    micro.logits = None

    def unwritten(self) -> list[Entry]:
        """Windows that are not on disk yet, oldest first; they count as written from now on."""
        entries = [entry for entry in self.entries if not entry.written]
        for entry in entries:
            entry.written = True
        return entries


def host(tensor: Tensor) -> Any:
    """A numpy array of a tensor, bfloat16 as float32."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16 or (tensor.dtype.itemsize == 1 and tensor.is_floating_point()):
        tensor = tensor.float()
    return tensor.cpu().numpy()


def evidence(micro: Micro) -> dict[str, Any]:
    """The keywords of ``CapsuleWriter.batch`` for one micro-batch."""
    found: dict[str, Any] = {name: host(tensor) for name, tensor in micro.arrays.items()}
    weights = found.get("loss_weights")
    if weights is not None and bool(((weights == 0) | (weights == 1)).all()):
        del found["loss_weights"]  # the mask says it all
    found |= {
        "sample_ids": micro.sample_ids,
        "reported_loss": micro.reported,
        "label_layout": micro.layout,
        "keys": micro.keys,
        "odd_rows": micro.odd_rows or None,
        "loss_dtype": micro.loss_dtype,
    }
    readings = micro.readings
    if readings is not None:
        found |= {
            "logits_dtype": str(readings.dtype).removeprefix("torch."),
            "logsumexp": host(readings.logsumexp),
            "target_logits": host(readings.target_logits),
        }
        if readings.token_loss is not None:
            found["token_loss"] = host(readings.token_loss)
            found["token_loss_from"] = "logits and labels, cross-entropy of the next token"
    logits = micro.untouched_logits()
    if logits is not None:
        found["logits"] = host(logits)
    return {name: value for name, value in found.items() if value is not None}


def digests(ids: Tensor, mask: Tensor | None) -> tuple[list[str], list[int]]:
    """SHA-256 of each row's real tokens as little-endian int64, and how many there are.

    Args:
        ids: [B, T] on a CPU.
        mask: [B, T], zero where a position is padding, or None.
    """
    rows = ids.to(torch.int64).contiguous().numpy().astype("<i8", copy=False)
    kept = None if mask is None or mask.ndim != 2 else mask.numpy() != 0
    if kept is not None and kept.all():
        kept = None
    names: list[str] = []
    lengths: list[int] = []
    for index in range(rows.shape[0]):
        row = rows[index] if kept is None else rows[index][kept[index]]
        names.append(hashlib.sha256(row.tobytes()).hexdigest())
        lengths.append(int(row.size))
    return names, lengths
