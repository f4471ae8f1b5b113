"""What grows and is given back as a whole, what grows by next to nothing, and what grows without any stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from benchmarks.caching_allocator import GIB, MIB, CachingAllocator
from benchmarks.training_memory import EXTRA_LOSS, Job
from tests.analyzers.conftest import rule_named
from tests.analyzers.snapshots import imported

LEAK, LOGGED = "memory/leak", "memory/logged-tensors"


def says(rule: str, capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, [rule_named(rule)])
    assert not report.errors, report.errors
    return list(report.findings)


def collecting(tmp_path: Path, cleared: tuple[int, ...], steps: int, size: int = 2 * MIB) -> Capsule:
    """A job that keeps one block a step in a list, which it clears after some steps."""
    a = CachingAllocator(40 * GIB)
    job, kept = Job(a), list[int]()
    for number in range(steps):
        job.step(also=lambda: kept.append(a.malloc(size, EXTRA_LOSS)))
        if number in cleared:
            for address in kept:
                a.free(address)
            kept.clear()
    return imported(tmp_path, a)


@pytest.mark.quiet(LEAK)
@pytest.mark.quiet(LOGGED)
def test_losses_that_are_collected_until_they_are_logged_are_no_leak(tmp_path: Path):
    """Sixteen losses are averaged and given back, again and again; the snapshot comes after twelve of the next."""
    capsule = collecting(tmp_path, (15, 31, 47), 60)
    assert says(LEAK, capsule) == says(LOGGED, capsule) == []


@pytest.mark.fires(LEAK)
@pytest.mark.fires(LOGGED)
def test_what_grows_beyond_what_was_ever_given_back_is_one(tmp_path: Path):
    capsule = collecting(tmp_path, (15,), 50)
    for rule in (LEAK, LOGGED):
        (finding,) = says(rule, capsule)
        assert (finding.severity, finding.confidence) == ("warning", "likely")


@pytest.mark.fires(LEAK)
@pytest.mark.fires(LOGGED)
def test_half_a_kilobyte_a_step_fills_no_device(tmp_path: Path):
    capsule = collecting(tmp_path, (), 40, 512)
    for rule in (LEAK, LOGGED):
        (finding,) = says(rule, capsule)
        assert finding.severity == "info"
        assert "512 B" in finding.summary
        assert finding.summary.endswith("So little a step fills no device.")


@pytest.mark.parametrize("leaking", [True, False])
def test_without_any_stack_sizes_show_the_rhythm_and_what_grows_is_left_open(tmp_path: Path, leaking: bool):
    a = CachingAllocator(40 * GIB)
    weights = [a.malloc(8 * MIB) for _ in range(6)]
    for _ in range(40):
        passing = [a.malloc(size * MIB) for size in (5, 6, 7)]
        if leaking:
            a.malloc(3 * MIB)
        for address in passing:
            a.free(address)
    assert weights
    found = says(LEAK, imported(tmp_path, a))
    assert [each.confidence for each in found] == ["undetermined"] * leaking
