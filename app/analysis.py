"""Asking the worker for a report, and what is said where it brings none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..analyzers.report import CapsuleName, CapsuleReport, RuleError, Rung
from ..analyzers.stages import STAGES
from .worker import Worker

#: A capsule exists when this file does.
MANIFEST = "capsule.json"


def analyze_capsule(
    worker: Worker,
    path: Path,
    *,
    rules: Sequence[str] = (),
    stages: Sequence[str] = (),
    files: Sequence[str] = (),
    timeout: float | None = None,
) -> CapsuleReport:
    """The report of one capsule or raw file, or of the raw ``files`` of one job, made in the worker.

    Raises:
        WorkerError: the capsule is unusable, or the worker died over it.
    """
    params = {"path": os.fspath(path), "rules": list(rules), "stages": list(stages), "files": list(files)}
    params["cases"] = os.getcwd()
    return msgspec.convert(worker.call("analyze", params, timeout), CapsuleReport)


def unfinished_report(path: Path, problem: str) -> CapsuleReport:
    """The report of a capsule over which the worker died: nothing is known, and the reason is a row."""
    return CapsuleReport(
        capsule=CapsuleName(id="", title=path.name, path=os.fspath(path)),
        first_divergence=None,
        findings=(),
        ladder=tuple(Rung(stage=stage, mark="not captured") for stage in STAGES),
        quiet=(),
        skipped=(),
        errors=(RuleError(rule="analysis", error=problem),),
    )


def is_capsule(path: Path) -> bool:
    """Whether a path looks like a capsule; whether it can be read is the worker's answer."""
    return (path / MANIFEST).is_file()


def capsules_in(directory: Path) -> list[Path]:
    """The capsules that lie directly in a directory, by name."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return [directory / name for name in names if is_capsule(directory / name)]
