"""``show --layers`` and ``show --batch``: the console's views of one step as text or JSON."""

from __future__ import annotations

import argparse
from typing import Literal

import msgspec

from ..looks.sheets import BatchSheet, LayerSheet
from ..output import console, print_json
from .evidence import Look

#: Samples and tokens of a sample printed; the rest is in the console.
SAMPLES, TOKENS = 64, 2_000


class Layers(msgspec.Struct, kw_only=True):
    """``llmconsole.show-layers/1``."""

    format: Literal["llmconsole.show-layers/1"] = "llmconsole.show-layers/1"
    layers: LayerSheet


class BatchPage(msgspec.Struct, kw_only=True):
    """``llmconsole.show-batch/1``."""

    format: Literal["llmconsole.show-batch/1"] = "llmconsole.show-batch/1"
    batch: BatchSheet


def print_layers(args: argparse.Namespace, look: Look) -> int:
    """Print the sheet of one step."""
    sheet = msgspec.convert(look("layers", kind=args.kind, step=_given(args.layers)), LayerSheet)
    if args.json:
        print_json(Layers(layers=sheet))
        return 0
    from .. import layer_table as table

    screen = console()
    screen.print(f" {table.where(sheet)}")
    if words := table.notes(sheet):
        screen.print(f" {words}")
    lines = table.LayerTable(sheet, screen.width)
    screen.print(lines.head())
    for row in range(len(sheet.name)):
        screen.print(lines.line(row))
    for line in table.LEGEND:
        screen.print(f" {line}", style="bright_black")
    return 0


def print_batch(args: argparse.Namespace, look: Look) -> int:
    """Print the samples of one batch."""
    found = look("batch", step=_given(args.batch), samples=SAMPLES, tokens=TOKENS)
    sheet = msgspec.convert(found, BatchSheet)
    if args.json:
        print_json(BatchPage(batch=sheet))
        return 0
    from .. import batch_table as table

    screen = console()
    if sheet.step is None:
        screen.print(" no batch holds token ids")
        return 0
    screen.print(f" {table.where(sheet)}")
    for line in table.notes(sheet):
        screen.print(f" {line}")
    for row in sheet.samples:
        for line in table.sample(sheet, row, screen.width)[0]:
            screen.print(line)
    screen.print(f" {table.legend(sheet)}", style="bright_black")
    return 0


def _given(step: int | str) -> int | None:
    """The step asked for; the option alone is an empty word, and asks for the step that matters."""
    return step if isinstance(step, int) else None
