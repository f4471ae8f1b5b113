"""Makes a capsule of raw evidence: what will be written, one key, and then the capsule in the file's place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..entry import RAW, Entry
from ..numbers import size
from ..text import one_line
from .link import Answer
from .screens.asking import AskScreen

if TYPE_CHECKING:
    from .app import Console


def needs_capsule(what: str, entry: Entry) -> str:
    """What is said of raw evidence where only a capsule will do; empty where the entry is one."""
    if entry.status != RAW:
        return ""
    return f"{what} belongs to a capsule, and this is a raw file: i makes a capsule of it (llmconsole import does too)"


def ask_and_import(console: Console, entry: Entry) -> None:
    """Say what would be written and write it on ``y``."""
    if entry.status != RAW:
        if not entry.problem:
            console.notify("this is a capsule already", timeout=3)
        return
    files = entry.files or (entry.path,)
    what = one_line(entry.name) if len(files) == 1 else f"{len(files)} files"
    question = f"Make a capsule of {what} ({one_line(entry.message)}) in {one_line(console.directory)}"
    words = f"write it, with a copy of the original in it ({size(_bytes(files))})"

    def answered(key: str | None) -> None:
        if key:
            console.notify(f"importing {what} …", timeout=3, markup=False)
            params = {"files": list(files), "target": os.fspath(console.directory)}
            console.link.ask(console, "import_job", params, channel="verdict", key=entry.path)

    console.push_screen(AskScreen(question, (("y", words),)), answered)


def imported(console: Console, answer: Answer) -> None:
    """Say what came of it; home shows the capsule as soon as it is listed."""
    if answer.problem:
        console.notify(one_line(answer.problem), severity="error", timeout=10, markup=False)
        return
    for problem in answer.result["problems"][:3]:
        console.notify(one_line(problem), severity="warning", timeout=10, markup=False)
    capsule = answer.result["capsule"]
    console.notify(f"wrote {one_line(capsule)}", timeout=6, markup=False)
    console.home.expect(capsule, answer.params["files"][0])


def _bytes(files: tuple[str, ...]) -> int:
    total = 0
    for file in files:
        try:
            total += os.stat(file).st_size
        except OSError:
            continue
    return total
