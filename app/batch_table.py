"""A batch sheet as lines of text, for the console's view and for ``show --batch`` alike.

What belongs to one token stands in one column: its text, its label, its mask, its role, what it cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from .looks.sheets import BatchSheet, TokenRow
from .numbers import compact
from .text import keep_tail, one_line, visible

ROLES = ("p padding", "s system", "u user", "a assistant", "t tool", "i image", "o audio", "v video")
_HEAD = 8  # cells of the words on the left
_DIM = "bright_black"
_LONGEST = 16  # cells of a token's text


@dataclass(frozen=True)
class Line:
    """One line of a sample: its word, and a cell with its style for each token."""

    word: str
    cells: list[tuple[str, str]]


def sample(sheet: BatchSheet, row: TokenRow, width: int, fault: bool = False) -> tuple[list[Text], int]:
    """The lines of one sample in ``width`` cells, and how many tokens of it they show."""
    lines = _lines(sheet, row, fault)
    gap = 0 if sheet.bytes else 1
    least = 2 if fault and row.fault else 1  # the fault's signs widen most cells of bytes: widen all alike
    widths = [max(least, *(cell_len(line.cells[at][0]) for line in lines)) + gap for at in range(len(row.token))]
    room, fit = width - _HEAD - 1, 0
    while fit < len(widths) and room >= widths[fit]:
        room -= widths[fit]
        fit += 1
    drawn = [_title(sheet, row, width)]
    for line in lines:
        text = Text(f" {line.word:<{_HEAD}}", _DIM, no_wrap=True)
        for (cell, style), cells in zip(line.cells[:fit], widths[:fit], strict=True):
            text.append(cell + " " * (cells - cell_len(cell)), style or "not dim default")
        drawn.append(text)
    return drawn, fit


def _title(sheet: BatchSheet, row: TokenRow, width: int) -> Text:
    text = Text(f" {keep_tail(one_line(row.id), 40)}", "bold", no_wrap=True)
    words = f"  {row.length:,} tokens, {row.supervised:,} supervised"
    if not math.isnan(row.mean) or (row.supervised and row.loss):
        words += f", mean {compact(row.mean)} nats"
    words += f"   from token {sheet.left:,}" if sheet.left else ""
    text.append(words, f"not bold {_DIM}")
    text.truncate(width, overflow="ellipsis")
    return text


def _lines(sheet: BatchSheet, row: TokenRow, fault: bool) -> list[Line]:
    """The lines that there is evidence for."""
    here = sheet.worst.token - sheet.left if sheet.worst is not None and sheet.worst.row == row.row else -1
    lines = [Line("token", [])]
    lines[0].cells.extend(
        (_cell(token), "reverse" if at == here else "" if row.asked[at] else _DIM) for at, token in enumerate(row.token)
    )
    if row.label:
        marks = [(_cell(label), "") if row.asked[at] and label else ("·", _DIM) for at, label in enumerate(row.label)]
        lines.append(Line("label", marks))
    if row.mask:
        lines.append(Line("mask", [(str(each), "" if each else "yellow") for each in row.mask]))
    if row.role:
        lines.append(Line("role", [(ROLES[each][0] if 0 <= each < len(ROLES) else "?", _DIM) for each in row.role]))
    if row.loss:
        lines.append(Line("loss", [_loss(sheet, each, row.asked[at]) for at, each in enumerate(row.loss)]))
    if fault and row.fault:
        signs = {0: "→", 1: "+", 2: "÷"}
        scored = [
            (f"{signs[how]}{_cell(text)}", "bold magenta") if text or how == 2 else ("", "")
            for text, how in zip(row.fault, row.added, strict=True)
        ]
        lines.append(Line("scored", scored))
        lines.append(Line("at", [_loss(sheet, each, True) for each in row.fault_loss]))
    return lines


def _cell(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _loss(sheet: BatchSheet, loss: float, asked: bool) -> tuple[str, str]:
    """A loss in one cell: whole nats as a digit for bytes, one decimal for ids."""
    if loss == -math.inf:
        return "", ""
    if math.isnan(loss):
        return ("NaN", "bold red") if asked else ("", "")
    if not asked:
        return "", ""
    style = "bold red" if loss >= sheet.loud else ""
    if sheet.bytes:
        return ("I" if math.isinf(loss) else "+" if loss >= 10 else str(int(max(loss, 0)))), style
    words = "Inf" if math.isinf(loss) else f"{loss:.1f}" if loss < 100 else f"{loss:.0f}"
    return words + ("!" if loss >= sheet.loud else ""), style


def where(sheet: BatchSheet) -> str:
    """Which batch this is, in words."""
    words = f"step {sheet.step:,}  batch {sheet.position + 1:,} of {sheet.batches:,} captured"
    if sheet.rank or sheet.micro:
        words += f"  rank {sheet.rank} micro-batch {sheet.micro}"
    if sheet.split:
        words += f"  {sheet.split}"
    words += f"  sample {sheet.top + 1:,} of {sheet.rows:,}"
    return words


def notes(sheet: BatchSheet) -> list[str]:
    """How the columns are aligned, and the worst token where it was asked for."""
    layouts = {
        "unshifted": "each label stands under its own token",
        "shifted": "each label stands under the token before it",
    }
    known = any(each.label for each in sheet.samples)
    layout = layouts.get(sheet.layout, "labels fit neither layout: each stands at its own position" if known else "")
    reported = f"reported {sheet.reported:.5g}" if sheet.reported is not None else ""
    mean = "" if math.isnan(sheet.mean) else f"mean {sheet.mean:.5g} nats"
    lines = ["   ".join(each for each in (layout, reported, mean) if each)]
    if sheet.worst is not None:
        found = sheet.worst
        name = next((each.id for each in sheet.samples if each.row == found.row), f"row {found.row}")
        place = "worst" if found.place == 0 else f"{found.place + 1}. worst"
        lines.append(
            f"{place}: {_cell(found.text)} at token {found.token:,} of {one_line(name, 40)}: {found.loss:.5g} nats"
        )
    if sheet.fault:
        lines.append(one_line(sheet.fault))
    return [line for line in lines if line]


def legend(sheet: BatchSheet) -> str:
    """What the signs mean."""
    losses = "loss in whole nats, + is 10 or more" if sheet.bytes else f"! loss ≥ {sheet.loud:.2g} (3σ above the mean)"
    parts = ["· not supervised", f"{losses} ({sheet.loss_from})" if sheet.loss_from else ""]
    parts += [sheet.mask_note, ", ".join(ROLES[each] for each in sheet.roles if 0 <= each < len(ROLES))]
    return "   ".join(each for each in parts if each)
