"""The list of home without a screen: the state of each capsule, the order of need, the filter, and a row's words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.text import Text

from ...entry import RAW, Entry
from ...listing import Listing
from ...text import keep_tail, one_line

if TYPE_CHECKING:
    from ..reports import Reports

State = Literal["undetermined", "divergence", "damaged", "live", "unread", "quiet", "resolved"]

#: Sign of a state and its style, in order of need. Colour repeats the sign and never replaces it.
STATES: dict[State, tuple[str, str]] = {
    "undetermined": ("?", "yellow"),
    "divergence": ("✗", "bold red"),
    "damaged": ("!", "magenta"),
    "live": ("◐", "cyan"),
    "unread": ("·", "dim"),
    "quiet": ("✓", "green"),
    "resolved": ("●", "green"),
}
_NEED = tuple(STATES)

#: What the list says of a capsule that no trigger ended.
_ENDS = {"stale": "silent", "crashed": "died"}

_NAME = " llmconsole  "
_EMPTY = """
 No capsule or log here yet.

 In your training loop:
   from llmconsole.capsules
       import Recorder
   rec = Recorder("runs",
       model=model,
       optimizer=optimizer)

 Or copy a log here: text,
 JSON, CSV, wandb and
 TensorBoard files are known.

 Or see a run break:
   llmconsole demo
"""


def state_of(entry: Entry, reports: Reports) -> State:
    """What the sign of a row says, as far as the verdict is known."""
    if entry.problem:
        return "damaged"
    if entry.status == "recording":
        return "live"
    if entry.incident in ("fixed", "gated"):
        return "resolved"
    kept = reports.of(entry.path)
    if kept is None:
        return "unread"
    if kept.report is None:
        return "damaged"
    report = kept.report
    first = report.first_divergence
    if first is None:  # a job that died or went silent is not well because no rule knows why
        return "undetermined" if entry.status in _ENDS else "quiet"
    sure = any(each.rule == first.rule and each.confidence != "undetermined" for each in report.findings)
    return "divergence" if sure else "undetermined"


def by_need(entries: Iterable[Entry], words: str, reports: Reports) -> list[Entry]:
    """The entries that hold all of ``words``: undecided and failing first, then live, then the rest, newest first."""
    wanted = words.casefold().split()
    shown = [
        each
        for each in entries
        if all(word in f"{each.name} {each.title} {each.trigger} {each.message}".casefold() for word in wanted)
    ]
    return sorted(shown, key=lambda each: (_NEED.index(state_of(each, reports)), -each.changed))


def line(entry: Entry, state: State, width: int) -> Text:
    """Sign, time, name, and what happened, in ``width`` cells."""
    sign, style = STATES[state]
    clock = "live " if entry.status == "recording" else _clock(entry.changed)
    text = Text(no_wrap=True)
    text.append(sign, style)
    text.append(f" {clock} ", "dim")
    room = width - text.cell_len - 1
    name = one_line(entry.title or entry.name).removesuffix(".capsule")
    what = "unreadable" if entry.problem else entry.trigger or _ENDS.get(entry.status, "")
    step = f"{entry.step:,}" if entry.step is not None else ""
    # Where not all has room, the name needs it most: the sign says already that something broke.
    tail = next(
        (
            each
            for each in (f"{one_line(what)} {step}".strip(), step)
            if room - cell_len(each) >= min(14, cell_len(name))
        ),
        "",
    )
    name = keep_tail(name, max(4, room - cell_len(tail) - bool(tail)))
    text.append(name)
    text.append(f"{tail:>{max(0, width - 1 - text.cell_len)}}", "dim")
    return text


def heading(entry: Entry, width: int) -> str:
    """Name and trigger in ``width`` cells: the end of a long name, the beginning of the message."""
    name, message = one_line(entry.title or entry.name), one_line(entry.message)
    if not message:
        return keep_tail(name, width)
    return f"{keep_tail(name, max(12, min(cell_len(name), width - cell_len(message) - 2, width // 2)))}  {message}"


def _clock(changed: float) -> str:
    """Time of day, or the date where it was not today."""
    if not changed:
        return "     "
    then = time.localtime(changed)
    today = time.strftime("%Y%j") == time.strftime("%Y%j", then)
    return time.strftime("%H:%M" if today else "%m-%d", then)


def empty(listing: Listing, width: int) -> str:
    """What a list without rows says: what hides them, why there are none, or how to get some."""
    hidden = len(listing.entries)
    if hidden:
        words = f"The filter hides {'it' if hidden == 1 else f'all {hidden:,}'}: / changes it, esc takes it away."
    elif listing.problem:
        words = one_line(listing.problem)
    elif listing.unread:
        words = f"Looking at {count(listing.unread, 'file')} …"
    elif listing.below:
        words = "No capsule or log lies directly here. There are some in:"
        names = [f"   {keep_tail(one_line(each), max(8, width - 4))}" for each in listing.below]
        return "\n".join([_lines(words, width), *names, _lines("Open one: llmconsole DIR", width)])
    else:
        return _EMPTY
    return _lines(words, width)


def _lines(words: str, width: int) -> str:
    return "\n".join(f" {each}" for each in ["", *wrap(words, width - 2)])


def head(directory: Path, listing: Listing | None, problem: str, paused: bool, width: int) -> Text:
    """The first line: where one is, how much there is, what is wrong, what time it is."""
    words = Text()
    if listing is not None:
        live = sum(each.status == "recording" for each in listing.entries)
        raw = sum(each.status == RAW for each in listing.entries)
        words.append(f"  {count(len(listing.entries) - raw, 'capsule')}" + (f", {live} live" if live else ""))
        if raw:
            words.append(f", {raw:,} from raw files")
        if listing.unread:
            words.append(f", {listing.unread:,} still to read")
        problem = problem or (listing.problem if listing.entries else "")
    if paused:
        words.append("  PAUSED (space goes on)", "bold yellow")
    if problem:
        words.append(f"  {one_line(problem)}", "bold yellow")
    right = f"{time.strftime('%H:%M')}  ? help "
    room = width - len(right) - 1 - len(_NAME)
    where = keep_tail(one_line(directory), max(16, room - words.cell_len))  # what there is matters more
    words = Text(f"{_NAME}{where}") + words
    words.truncate(len(_NAME) + room, overflow="ellipsis")
    words.append(" " * max(1, width - words.cell_len - len(right)) + right, "dim")
    return words


def count(number: int, what: str) -> str:
    """``1 capsule``, ``1,200 capsules``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
