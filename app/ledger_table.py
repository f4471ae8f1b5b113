"""The ledger of memory as stacked bars, for the screen and for ``show --memory``."""

from __future__ import annotations

from rich.text import Text

from .looks.types import MemoryLedger, MemoryPhase
from .numbers import size
from .text import one_line

#: Part → the letter that fills its piece of the bar, and its colour, which repeats the letter.
_PARTS = {
    "weights": ("W", "blue"),
    "gradients": ("G", "green"),
    "optimizer": ("O", "cyan"),
    "activations": ("A", "yellow"),
    "communication": ("C", "magenta"),
    "transient": ("T", "bright_blue"),
    "kv_cache": ("K", "bright_green"),
}
_UNACCOUNTED = ("?", "bold red")
_FRAGMENTED = ("F", "bright_black")


def ledger_text(ledger: MemoryLedger, width: int) -> Text:
    """The phases as stacked bars on one scale with what the configuration needs beside, ``width`` cells wide."""
    text = Text(no_wrap=True)
    text.append(f" {_head(ledger)}\n\n", "bold")
    phases = [*ledger.phases, *([ledger.computed] if ledger.computed is not None else [])]
    scale = max((_extent(each) for each in phases), default=0) or 1
    for each in phases:
        text.append(f" {one_line(each.phase)[:12]:<13}")
        for letter, style, cells in _pieces(each, scale, width - 15):
            text.append(letter * cells, style)
        words = _words(each)
        if each is ledger.computed:
            words = f"{size(sum(each.parts.values()))} at the peak, from the configuration"
            words += f"; {one_line(ledger.reading)}" if ledger.reading else ""
        text.append(f"\n  {words}\n", "bright_black")
    shown = {name for each in phases for name in each.parts}
    signs = [(*sign, name) for name, sign in _PARTS.items() if name in shown]
    signs += [(*_UNACCOUNTED, "unknown"), (*_FRAGMENTED, "free"), ("|", "bold", "capacity")]
    line = 0
    for letter, style, words in signs:
        if line + len(words) + 4 > width:
            line = 0
        text.append("\n " if line == 0 else "  ")
        text.append(letter, style)
        text.append(f" {words}")
        line += len(words) + 4
    return text


def _head(ledger: MemoryLedger) -> str:
    ranks = f"rank {ledger.rank}" + (f" of {len(ledger.ranks)}" if len(ledger.ranks) > 1 else "")
    if not ledger.count:
        return "no ledger was measured; what the configuration needs"
    step = "no step" if ledger.step is None else f"step {ledger.step:,}"
    peak = " (the peak)" if ledger.step == ledger.peak_step else ""
    return f"{step}{peak} · ledger {ledger.place + 1:,} of {ledger.count:,} · {ranks}"


def _extent(phase: MemoryPhase) -> int:
    parts = sum(phase.parts.values())
    return max(parts, *(each or 0 for each in (phase.allocated, phase.reserved, phase.peak, phase.capacity)))


def _pieces(phase: MemoryPhase, scale: int, width: int) -> list[tuple[str, str, int]]:
    """(letter, style, cells) from left to right. Edges are rounded, not lengths, so that sums stay true."""
    pieces: list[tuple[str, str, int]] = []
    total, edge = 0, 0

    def add(letter: str, style: str, count: int) -> None:
        nonlocal total, edge
        total += count
        here = min(width, round(total / scale * width))
        pieces.append((letter, style, here - edge))
        edge = here

    for name, count in phase.parts.items():
        add(*_PARTS.get(name, ("·", "")), count)
    if phase.unaccounted is not None and phase.unaccounted > 0:
        add(*_UNACCOUNTED, phase.unaccounted)
    held = phase.reserved if phase.reserved is not None else total + (phase.fragmentation or 0)
    if held > total:
        add(*_FRAGMENTED, held - total)
    if phase.capacity is not None and (at := round(phase.capacity / scale * width) - 1) >= edge:
        pieces += [(" ", "", at - edge), ("|", "bold", 1)]
    return [each for each in pieces if each[2] > 0]


def _words(phase: MemoryPhase) -> str:
    """The measured numbers, and where ledger and measurement part."""
    held = phase.allocated if phase.allocated is not None else sum(phase.parts.values())
    words = [f"{size(held)}{'' if phase.allocated is not None else ' by the ledger'}"]
    if phase.capacity is not None:
        capacity = size(phase.capacity)
        words[0] = f"{words[0].removesuffix(capacity[-4:])} of {capacity}"
    if phase.unaccounted:
        sign = "?" if phase.unaccounted > 0 else "ledger over by"
        words.append(f"{sign} {size(abs(phase.unaccounted))}")
    words += [
        f"{name} {size(value)}"
        for name, value in (
            ("reserved", phase.reserved),
            ("peak", phase.peak),
            ("free in one", phase.largest_free_block),
        )
        if value is not None
    ]
    return " · ".join(words)
