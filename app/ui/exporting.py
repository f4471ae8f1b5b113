"""Writes the report on screen to a file: which format, then one line that says where it lies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...analyzers.report import CapsuleReport, Report
from ..export import ExportError, Format, write_beside
from .screens.asking import AskScreen

if TYPE_CHECKING:
    from .app import Console

_FORMATS: dict[str, Format] = {"t": "txt", "s": "svg", "h": "html"}
_WORDS = (("t", "text"), ("s", "SVG picture"), ("h", "HTML, one page that loads nothing"))


def ask_and_write(console: Console, path: str) -> None:
    """Ask for a format and write; a report that is not there yet is said to be missing."""
    kept = console.reports.of(path)
    if kept is None or kept.report is None:
        words = kept.problem if kept is not None else "the report is still being made; try again in a moment"
        console.notify(words, severity="warning", markup=False)
        return
    report = kept.report

    def answered(key: str | None) -> None:
        if key:
            # Rendering a long report takes longer than a key may.
            console.run_worker(partial(_write, console, report, _FORMATS[key]), thread=True, exit_on_error=False)

    console.push_screen(AskScreen("Write the report to a file of this directory as", _WORDS), answered)


def _write(console: Console, report: CapsuleReport, format: Format) -> None:
    severity: Literal["information", "error"] = "information"
    try:
        words = f"wrote {write_beside(Report(reports=(report,)), Path.cwd(), format)}"
    except ExportError as error:
        words, severity = str(error), "error"
    console.call_from_thread(partial(console.notify, words, severity=severity, markup=False))
