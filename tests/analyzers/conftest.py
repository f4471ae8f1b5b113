"""What the tests of the analyzers share: where a capsule is built, and how one rule is run on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The sweep harness is shared with benchmarks/, so both are reached from the repository root.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from llmconsole.analyzers.finding import Finding  # noqa: E402
from llmconsole.analyzers.registry import Rule, all_rules  # noqa: E402
from llmconsole.analyzers.report import CapsuleReport  # noqa: E402
from llmconsole.analyzers.runner import analyze  # noqa: E402
from llmconsole.capsules import Capsule, CapsuleWriter  # noqa: E402
from llmconsole.capsules.importers import import_files  # noqa: E402


def rule_named(rule_id: str) -> Rule:
    return next(each for each in all_rules() if each.id == rule_id)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Capsule]:
    """``build(fill, manifest)``: a sealed capsule, filled by ``fill(writer)``, opened for reading."""
    count = 0

    def build(fill: Callable[[CapsuleWriter], Any], manifest: dict[str, Any] | None = None) -> Capsule:
        nonlocal count
        count += 1
        path = tmp_path / f"made-{count}.capsule"
        with CapsuleWriter(path, title="made by a test", phase="training", manifest=manifest or {}) as writer:
            fill(writer)
        return Capsule.open(path)

    return build


@pytest.fixture
def findings_of() -> Callable[[str, Capsule], list[Finding]]:
    """``findings_of(rule_id, capsule)``: what one rule says; a skip or an error fails the test."""

    def run(rule_id: str, capsule: Capsule) -> list[Finding]:
        report = analyze(capsule, [rule_named(rule_id)])
        assert not report.errors, report.errors
        assert not report.skipped, report.skipped
        return list(report.findings)

    return run


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], CapsuleReport]:
    """The report of one log."""

    def run(text: str) -> CapsuleReport:
        (tmp_path / "job.out").write_text(text)
        report = analyze(Capsule.open(import_files([tmp_path / "job.out"], tmp_path / "made", attach=False)))
        assert not report.errors
        return report

    return run
