"""What the loss counterfactuals work on: the micro-batches of one optimizer step, ready to be scored again.

Everything is kept by *token*: ``tokens[b, j]`` is token j of row b, and a mask says for each token whether the job's
labels ask for it. So labels that name the token at their own position (unshifted, shifted by the model) and labels
that name the next one (shifted by the collator) become one thing, and a fault in shifting is an offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.token_ce import Floats, Ints, Scores
from ..rounding import Noise

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Micro:
    """One micro-batch.

    Attributes:
        scores: of the model, [B, T].
        tokens: [B, T + 1]; column T is the token after the row where the labels know it, else −1.
        supervised: [B, T + 1], tokens that the job's labels and masks ask for.
        padding, prompt, tool: [B, T + 1], tokens outside ``supervised`` (padding never is supervised).
        boundary: [B, T + 1], first tokens of a document that follows another in a packed row; None where not packed.
        shifted: the labels came in shifted layout.
        ignore_index: the label value that means "do not score".
        assumed: the labels were not captured; every token that is no padding stands for them.
    """

    scores: Scores
    tokens: Ints
    supervised: Mask
    padding: Mask
    prompt: Mask
    tool: Mask
    boundary: Mask | None
    shifted: bool
    ignore_index: int
    assumed: bool = False
    _parts: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    def rows(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[Floats, Floats]:
        """(loss sum, denominator) of each row [B]; a sum is NaN where the scores cannot say."""
        key = ("rows", shift, positions, denominator, noise)
        return self._remember(key, lambda: self._rows(shift, positions, denominator, noise))

    def totals(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[float, float]:
        """The sums over ``rows`` of both."""
        key = ("totals", shift, positions, denominator, noise)
        return self._remember(key, lambda: _summed(self.rows(shift, positions, denominator, noise)))

    def _rows(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[Floats, Floats]:
        counted, targets = self._remember(("counted", shift, positions), lambda: self._counted(shift, positions))
        # The target of a position depends on the shift alone, but for scored ignore labels.
        table = ("losses", shift, positions == "ignored-label", noise)
        losses = self._remember(
            table, lambda: self.scores.losses(targets, np.ones_like(counted), noise, self.tokens[:, 1:])
        )
        sums = self._remember(("sums", shift, positions, noise), lambda: np.where(counted, losses, 0.0).sum(axis=1))
        divisor = self._remember(
            ("divisor", shift, positions, denominator),
            lambda: self._denominator(shift, positions, denominator, counted),
        )
        return sums, divisor

    def scored(self, shift: str = "1", positions: str = "supervised") -> tuple[Mask, Ints, Floats]:
        """Which positions are scored, on which token (−1: none), and the loss of that token anywhere; each [B, T]."""
        counted, targets = self._counted(shift, positions)
        return counted, targets, self.scores.losses(targets, np.ones_like(counted), None, self.tokens[:, 1:])

    def divided_by(self, shift: str, positions: str, denominator: str) -> Mask:
        """Positions that the denominator counts [B, T]: what is scored, or what a slip would divide by."""
        return self._divided_by(shift, positions, denominator, self._counted(shift, positions)[0])

    @property
    def outside(self) -> Mask:
        """[B, T + 1], tokens that the labels leave out and that are no padding."""
        return ~self.supervised & ~self.padding & (self.tokens >= 0)

    @property
    def masked_starts(self) -> Mask:
        """[B, T + 1], first tokens of later documents that the labels leave out."""
        return self.outside & self.boundary if self.boundary is not None else np.zeros_like(self.supervised)

    def _remember(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Candidates share most of their parts."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def _aligned(self, shift: str) -> tuple[Ints, Ints, Ints]:
        """(target token, flat index of the token whose mask decides, flat index of the target), each [B, T]; −1 none.

        Shifts: ``1`` the next token; ``0`` the token itself; ``0-cut-end`` and ``0-cut-start`` that without each row's
        last or first position; ``2`` the one after the next, within the row;
        ``2-flat`` the same over the flattened batch, so that a row's end is scored on the next row's start;
        ``2-inner`` that without each row's last position; ``2-ragged`` a flattened shift of rows already cut to T − 1.
        """
        batch, columns = self.tokens.shape
        length = columns - 1
        row = np.repeat(np.arange(batch)[:, None], length, axis=1)
        at = np.repeat(np.arange(length)[None, :], batch, axis=0)
        first = 1 if self.shifted else 0  # token named by the label at position 0
        last = length if self.shifted else length - 1
        if shift in ("2-flat", "2-inner"):
            label = row * length + at + (2 - first)
            target_row, target = label // length, label % length + first
            alive = target_row < batch
            if shift == "2-inner":
                alive &= at <= length - 2
        elif shift == "2-ragged":
            over = at == length - 2
            target_row, target = row + over, np.where(over, 1, at + 2)
            alive = (target_row < batch) & (at <= length - 2)
        else:
            target_row, target = row, at + int(shift[0])
            alive = target <= last
            if shift == "0-cut-end":
                alive &= at <= length - 2
            elif shift == "0-cut-start":
                alive &= at >= 1
        index = np.where(alive, target_row * columns + target, -1)
        # Shifted labels scored against the input itself: the mask still sits at the label.
        decides = np.where(alive, row * columns + at + 1, -1) if shift[0] == "0" and self.shifted else index
        flat = self.tokens.reshape(-1)
        return np.where(index >= 0, flat[index], -1), decides, index

    def _counted(self, shift: str, positions: str) -> tuple[Mask, Ints]:
        """Which positions are scored, and on which token, each [B, T]."""
        targets, decides, index = self._remember(("aligned", shift), lambda: self._aligned(shift))

        def at(mask: Mask) -> Mask:
            return np.where(decides >= 0, mask.reshape(-1)[decides], False)

        supervised = at(self.supervised)
        if positions in ("pads", "prompt", "tool", "boundary", "all"):
            return supervised | at(self._extra(positions)), targets
        if positions == "inside-documents" and self.boundary is not None:
            return supervised & ~at(self.boundary), targets
        if positions == "ignored-label":
            return index >= 0, np.where(supervised, targets, self.ignore_index)
        return supervised, targets

    def _extra(self, positions: str) -> Mask:
        """[B, T + 1], tokens that are scored beside the supervised ones."""
        match positions:
            case "pads":
                return self.padding
            case "prompt":
                return self.prompt
            case "tool":
                return self.tool
            case "boundary":
                return self.masked_starts
            case "all":
                return self.padding | self.outside
            case _:
                return np.zeros_like(self.supervised)

    def _denominator(self, shift: str, positions: str, denominator: str, counted: Mask) -> Floats:
        """Denominator of each row [B]."""
        return self._divided_by(shift, positions, denominator, counted).sum(axis=1).astype(np.float64)

    def _divided_by(self, shift: str, positions: str, denominator: str, counted: Mask) -> Mask:
        _, decides, index = self._remember(("aligned", shift), lambda: self._aligned(shift))
        if denominator == "grid":
            return index >= 0
        if denominator == "padded-grid":
            return np.ones_like(counted)
        if denominator == "labels":
            # The label of a row's first token is nobody's target; the row's end, which scores nothing, stands for it.
            every = counted.copy()
            every[:, -1] |= (self.supervised | self._extra(positions))[:, 0]
            return every
        if denominator == "attended":
            return (index >= 0) & ~np.where(decides >= 0, self.padding.reshape(-1)[decides], False)
        return counted


@dataclass(frozen=True, eq=False)
class RecordedSums:
    """A micro-batch of which only the loss sum and the token count were kept: it says how, not what, was reduced."""

    loss_sum: float
    tokens: float
    boundary: None = None

    def rows(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[Floats, Floats]:
        """(loss sum, token count), each [1]; NaN where positions would have to be known."""
        if (shift, positions, denominator) != ("1", "supervised", "counted"):
            return np.array([np.nan]), np.array([np.nan])
        total = np.array([self.loss_sum])
        return (noise(total, "loss_sum") if noise is not None else total), np.array([self.tokens])

    def totals(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[float, float]:
        """The same as numbers."""
        return _summed(self.rows(shift, positions, denominator, noise))


def _summed(rows: tuple[Floats, Floats]) -> tuple[float, float]:
    return float(rows[0].sum()), float(rows[1].sum())


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches whose gradients made one optimizer step.

    Attributes:
        step: optimizer step.
        rank: whose number was observed.
        ranks: the micro-batches of every rank captured at this step, ``rank``'s own first.
        configured: accumulation steps as configured, where known.
        world: number of ranks.
    """

    step: int
    rank: int
    ranks: tuple[tuple[Micro | RecordedSums, ...], ...]
    configured: int | None
    world: int

    @property
    def own(self) -> tuple[Micro | RecordedSums, ...]:
        """The micro-batches of the observed rank."""
        return self.ranks[0]

    @property
    def micros(self) -> tuple[Micro, ...]:
        """Those of every rank whose tokens are known."""
        return tuple(each for rank in self.ranks for each in rank if isinstance(each, Micro))
