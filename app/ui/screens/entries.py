"""The list of home without a screen: the state of each capsule, the order of need, the filter, and a row's words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.text import Text

from ...listing import Entry
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
