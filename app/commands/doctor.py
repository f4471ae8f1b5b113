"""What this machine offers: terminal, paths, git, python and torch, device, driver, NCCL, container.

Each row is ok, warn (something will not work as it should; the row says what to do) or absent (not there, and
nothing is wrong with that). Exit status: 1 where a row warns, else 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import paths
from ..output import FOUND, OK, console, print_json
from ..text import one_line
from ..worker import Worker, WorkerError

State = Literal["ok", "warn", "absent"]


class Check(msgspec.Struct, kw_only=True):
    """One row: what was looked at, how it stands, what was found, and what to do."""

    name: str
    state: State
    found: str
    advice: str = ""


class Doctor(msgspec.Struct, kw_only=True):
    """``llmconsole.doctor/1``."""

    format: Literal["llmconsole.doctor/1"] = "llmconsole.doctor/1"
    checks: tuple[Check, ...]


_SIGNS: dict[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warn": ("✗", "bold yellow"),
    "absent": ("–", "bright_black"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.doctor/1)")


def run(args: argparse.Namespace) -> int:
    """Look at everything and print a row each."""
    checks = (*_terminal(), *_paths(), *_git(), *_python(), *_devices())
    if args.json:
        print_json(Doctor(checks=checks))
    else:
        _print(checks)
    return FOUND if any(check.state == "warn" for check in checks) else OK


def _print(checks: tuple[Check, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for check in checks:
        sign, style = _SIGNS[check.state]
        found = Text(one_line(check.found))
        if check.advice:
            found.append(f"\n{one_line(check.advice)}", "yellow" if check.state == "warn" else "bright_black")
        table.add_row(Text(f" {sign}", style), Text(check.name), found)
    console().print(table)


def _terminal() -> Iterator[Check]:
    term = os.environ.get("TERM", "")
    columns, rows = shutil.get_terminal_size()
    if not sys.stdout.isatty():
        yield Check(name="terminal", state="absent", found="standard output is no terminal")
    elif term in ("", "dumb"):
        yield Check(
            name="terminal",
            state="warn",
            found=f"TERM={term or '(unset)'} cannot move its cursor",
            advice="set TERM to what the terminal is, such as xterm-256color; the console needs it",
        )
    elif columns < 80 or rows < 24:
        yield Check(name="terminal", state="warn", found=f"{term}, {columns}x{rows}", advice="make it 80x24 or larger")
    else:
        yield Check(name="terminal", state="ok", found=f"{term}, {columns}x{rows}")
    if os.environ.get("NO_COLOR"):
        yield Check(name="colours", state="absent", found="switched off by NO_COLOR")
    elif os.environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        yield Check(name="colours", state="ok", found="24 bit")
    elif "256" in term:
        yield Check(name="colours", state="ok", found="256")
    else:
        yield Check(name="colours", state="absent", found="16 or fewer; every mark has a sign of its own as well")
    encoding = (sys.stdout.encoding or "").lower()
    if encoding.startswith("utf"):
        yield Check(name="encoding", state="ok", found=encoding)
    else:
        yield Check(
            name="encoding",
            state="warn",
            found=encoding or "unknown",
            advice="set LC_ALL=C.UTF-8, or signs and Chinese text show as escapes",
        )


def _paths() -> Iterator[Check]:
    directory = paths.capsule_directory()
    if not directory.is_dir():
        yield Check(
            name="capsules",
            state="warn",
            found=f"{directory} is no directory",
            advice="set LLMCONSOLE_DIR, or create it",
        )
    elif not os.access(directory, os.W_OK):
        yield Check(
            name="capsules",
            state="warn",
            found=f"{directory.resolve()} cannot be written",
            advice="incidents are noted beside the evidence: copy the capsules to a place of your own",
        )
    else:
        yield Check(name="capsules", state="ok", found=str(directory.resolve()))
    keys = paths.config_directory() / "keys.toml"
    if not keys.exists():
        yield Check(name="key map", state="absent", found=f"{keys} (the default keys are in use; README shows how)")
    else:
        from ..ui.actions import load_keymap

        keymap, problems = load_keymap(keys)
        found = f"{keys}: {len(keymap)} changed" + (f"; {'; '.join(problems)}" if problems else "")
        advice = "what is wrong in it is left out" if problems else ""
        yield Check(name="key map", state="warn" if problems else "ok", found=found, advice=advice)
    log = paths.case_file()
    state: State = "ok" if log.is_file() else "absent"
    yield Check(name="case log", state=state, found=f"{log}{'' if state == 'ok' else ' (the first case creates it)'}")


def _git() -> Iterator[Check]:
    from ..casebook.store import StoreError, identity, version

    try:
        yield Check(name="git", state="ok", found=version())
    except StoreError as error:
        yield Check(name="git", state="warn", found=str(error))
        return
    root = paths.repository_root()
    if root is None:
        yield Check(
            name="repository",
            state="absent",
            found="none here",
            advice="incident resolve needs one: --repo DIR, or git init",
        )
    else:
        yield Check(name="repository", state="ok", found=str(root))
    try:
        yield Check(name="git identity", state="ok", found=identity(root or Path.cwd()))
    except StoreError as error:
        yield Check(name="git identity", state="warn", found="none", advice=str(error))


def _python() -> Iterator[Check]:
    yield Check(name="python", state="ok", found=f"{platform.python_version()} at {sys.executable}")


def _devices() -> Iterator[Check]:
    # A CUDA context reserves address space far beyond any sensible limit.
    with Worker(memory_gib=0) as worker:
        try:
            worker.call("ping", timeout=60)
            yield Check(name="worker", state="ok", found="analysis process starts")
            facts: dict[str, Any] = worker.call("device_facts", timeout=120)
            kind: str | None = worker.call("container")
        except WorkerError as error:
            yield Check(
                name="worker",
                state="warn",
                found=str(error),
                advice=f"nothing can be analysed; try {sys.executable} -c 'import torch'",
            )
            return
    built = facts["built_for"]
    yield Check(
        name="torch", state="ok", found=f"{facts['torch']}{f', for CUDA or ROCm {built}' if built else ', CPU only'}"
    )
    if facts["problem"]:
        yield Check(
            name="device",
            state="warn",
            found=facts["problem"],
            advice="compare driver and CUDA versions; look for Xid lines in dmesg; is the device in exclusive use?",
        )
    elif facts["devices"]:
        yield Check(name="device", state="ok", found=", ".join(facts["devices"]))
    elif facts["driver"]:
        yield Check(
            name="device",
            state="warn",
            found="a driver is loaded, but torch sees no device",
            advice="a CPU build of torch, an empty CUDA_VISIBLE_DEVICES, or a container started without devices",
        )
    else:
        yield Check(name="device", state="absent", found="none; analysis needs none")
    for name, key in (("driver", "driver"), ("cuDNN", "cudnn"), ("NCCL", "nccl")):
        value = facts[key]
        yield Check(name=name, state="ok" if value else "absent", found=str(value) if value else "none")
    yield Check(name="container", state="ok" if kind else "absent", found=kind or "none")
