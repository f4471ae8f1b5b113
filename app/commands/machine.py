"""``show --memory``, ``--ranks`` and ``--latency``: the console's views of the machine as text or JSON."""

from __future__ import annotations

import argparse
from typing import Literal

import msgspec

from ..looks.types import Latency, LiveStacks, MemoryLedger, RanksGrid
from ..output import console, print_json
from .evidence import Look

#: Ranks printed, and cells beside those that hold the collectives of a rank; the rest is in the console.
RANKS, _BESIDE = 256, 41
#: Lines of stacks printed.
STACKS = 40

_LEDGER = (
    "A Recorder in the training script writes one. Without it: torch.cuda.memory._dump_snapshot writes a snapshot, and "
    "llmconsole show SNAPSHOT --memory says who holds the memory."
)
_COLLECTIVES = (
    "A Recorder in the training script writes them. Without it: set TORCH_FR_BUFFER_SIZE=2000 "
    "(TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and give the directory of the dumps to llmconsole show DUMPS --ranks."
)


class Machine(msgspec.Struct, kw_only=True):
    """``llmconsole.show-machine/1``: one of the three, the others are null; ``stacks`` belong to the memory."""

    format: Literal["llmconsole.show-machine/1"] = "llmconsole.show-machine/1"
    memory: MemoryLedger | None = None
    stacks: LiveStacks | None = None
    ranks: RanksGrid | None = None
    latency: tuple[Latency, ...] | None = None


def print_memory(args: argparse.Namespace, look: Look) -> int:
    """Print the ledger of the step at which most was allocated, and who held the peak."""
    ledger = msgspec.convert(look("memory"), MemoryLedger | None)
    stacks = msgspec.convert(look("stacks"), LiveStacks | None)
    if args.json:
        print_json(Machine(memory=ledger, stacks=stacks))
        return 0
    if ledger is None and stacks is None:
        return _nothing("no ledger of memory was captured", _LEDGER)
    from ..ledger_table import ledger_text
    from ..stack_table import stacks_text

    screen = console()
    if ledger is not None:
        screen.print(ledger_text(ledger, screen.width - 1))
    if stacks is not None:
        screen.print(stacks_text(stacks, screen.width - 1, STACKS, 0))
    return 0


def print_ranks(args: argparse.Namespace, look: Look) -> int:
    """Print the grid around the first collective in which ranks differ."""
    screen = console()
    columns = max(8, screen.width - _BESIDE)
    found = msgspec.convert(look("ranks", columns=columns, rows=RANKS), RanksGrid)
    if args.json:
        print_json(Machine(ranks=found))
        return 0
    from ..ui.views.ranks import ONE_PROCESS, grid_text

    if not found.count:
        alone = look("contents")["world_size"] == 1
        return _nothing("neither collectives nor times of ranks were captured", ONE_PROCESS if alone else _COLLECTIVES)
    screen.print(grid_text(found, screen.width))
    return 0


def print_latency(args: argparse.Namespace, look: Look) -> int:
    """Print the waterfall of the time to first token, and of the whole request."""
    measures = ("ttft", "e2e")
    answers = [look("latency", measure=measure) for measure in measures]
    found = tuple(msgspec.convert(each, Latency) for each in answers if each is not None)
    if args.json:
        print_json(Machine(latency=found))
        return 0
    if not found:
        return _nothing("no request says its time to first token or its whole time")
    from ..ui.views.latency import waterfall

    screen = console()
    for each in found:
        screen.print(waterfall(each, screen.width, len(each.components) + len(each.slices) + 9))
    return 0


def _nothing(words: str, advice: str = "") -> int:
    console().print(f" {words}")
    if advice:
        console().print(f" {advice}", style="bright_black")
    return 0
