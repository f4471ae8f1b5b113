"""The runner: each rule by itself, whatever another one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding, Where
from llmconsole.analyzers.registry import NotJudged, Rule, all_rules
from llmconsole.analyzers.report import Report, exit_status
from llmconsole.analyzers.runner import MAX_FINDINGS_PER_RULE, analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.jsonio import decode, encode

Build = Callable[..., Capsule]


@pytest.fixture
def capsule(build: Build) -> Capsule:
    return build(lambda writer: writer.scalars("loss", step=[0, 1], value=[2.0, 1.0], rank=0))


def made(function: Callable[[Any], Iterable[Finding]], **declared: Any) -> Rule:
    base = Rule("test/one", "data", "divergence", "critical", (), (), ("a-case",), False, function)
    return replace(base, **declared)


def one(capsule: Any) -> Iterator[Finding]:
    yield Finding(title="One", summary="one thing", where=Where(step=1), cause="because")


def test_a_rule_that_cannot_compare_its_evidence_is_skipped_and_its_stage_is_not_called_quiet(capsule: Capsule) -> None:
    def cannot(_: Any) -> Iterator[Finding]:
        raise NotJudged("labels that fit\ntheir tokens")
        yield

    def silent(_: Any) -> Iterator[Finding]:
        yield from ()

    report = analyze(capsule, [made(cannot, id="test/cannot"), made(silent, id="test/silent")])
    assert [(each.rule, each.missing) for each in report.skipped] == [
        ("test/cannot", ("labels that fit their tokens",))
    ]
    assert (report.quiet, report.errors) == (("test/silent",), ())
    assert next(each.mark for each in report.ladder if each.stage == "data") == "not captured"


def test_what_the_declaration_says_is_filled_in(capsule: Capsule) -> None:
    (finding,) = analyze(capsule, [made(one)]).findings
    assert (finding.rule, finding.stage, finding.severity, finding.kind) == (
        "test/one",
        "data",
        "critical",
        "divergence",
    )
    assert finding.cases == ("a-case",)


def test_a_finding_may_be_milder_than_its_rule_and_never_louder(capsule: Capsule) -> None:
    def mild(capsule: Any) -> Iterator[Finding]:
        yield Finding(title="x", summary="x", severity="info", kind="hygiene")

    def loud(capsule: Any) -> Iterator[Finding]:
        yield Finding(title="x", summary="x", severity="critical", kind="divergence")

    (finding,) = analyze(capsule, [made(mild)]).findings
    assert (finding.severity, finding.kind) == ("info", "hygiene")
    (finding,) = analyze(capsule, [made(loud, severity="info", kind="hygiene")]).findings
    assert (finding.severity, finding.kind) == ("info", "hygiene")


def test_an_undetermined_finding_has_no_cause(capsule: Capsule) -> None:
    def unsure(capsule: Any) -> Iterator[Finding]:
        yield Finding(title="x", summary="x", confidence="undetermined", cause="a guess")

    assert analyze(capsule, [made(unsure)]).findings[0].cause is None


def test_a_rule_without_its_evidence_is_skipped_with_what_is_missing(capsule: Capsule) -> None:
    report = analyze(capsule, [made(one, needs=("scalars.loss", "batches.logits|batches.target_logits", "stats"))])
    assert report.skipped[0].missing == ("batches.logits|batches.target_logits", "stats")
    assert not report.findings
    assert report.ladder[1].mark == "not captured"


@pytest.mark.parametrize("error", [ValueError("two\nlines"), RecursionError(), MemoryError(), KeyError("x")])
def test_a_rule_that_raises_is_a_row_and_the_others_still_speak(capsule: Capsule, error: Exception) -> None:
    def broken(capsule: Any) -> Iterator[Finding]:
        yield Finding(title="said before", summary="kept")
        raise error

    report = analyze(capsule, [made(broken, id="test/broken"), made(one)])
    assert {each.rule for each in report.findings} == {"test/broken", "test/one"}
    (row,) = report.errors
    assert row.rule == "test/broken"
    assert "\n" not in row.error
    assert type(error).__name__ in row.error


def test_a_rule_that_returns_nonsense_is_a_row(capsule: Capsule) -> None:
    assert analyze(capsule, [made(lambda capsule: None)]).errors  # type: ignore[arg-type, return-value]
    assert analyze(capsule, [made(lambda capsule: [42])]).errors  # type: ignore[arg-type, list-item]


def test_a_rule_that_never_stops_is_cut_and_the_report_says_so(capsule: Capsule) -> None:
    def endless(capsule: Any) -> Iterator[Finding]:
        while True:
            yield Finding(title="x", summary="x")

    report = analyze(capsule, [made(endless)])
    assert len(report.findings) == MAX_FINDINGS_PER_RULE
    assert str(MAX_FINDINGS_PER_RULE) in report.errors[0].error


def test_a_rule_that_ran_and_found_nothing_is_quiet(capsule: Capsule) -> None:
    report = analyze(capsule, [made(lambda capsule: [])])
    assert report.quiet == ("test/one",)
    assert report.ladder[1].mark == "quiet"
    assert exit_status(report) == 0


def test_all_rules_run_on_an_almost_empty_capsule_without_an_error(capsule: Capsule) -> None:
    report = analyze(capsule)
    assert not report.errors
    said = {each.rule for each in report.findings} | set(report.quiet) | {each.rule for each in report.skipped}
    assert said == {each.id for each in all_rules()}
    assert len(report.ladder) == 8


def test_a_report_survives_json_with_numbers_that_are_not_finite(capsule: Capsule) -> None:
    from llmconsole.analyzers.finding import Evidence

    def nan(capsule: Any) -> Iterator[Finding]:
        yield Finding(title="x", summary="x", evidence=(Evidence(name="loss", value=float("nan"), expected=1.0),))

    report = Report(reports=(analyze(capsule, [made(nan)]),))
    back = decode(encode(report))
    assert back["format"] == "llmconsole.report/1"
    assert back["reports"][0]["findings"][0]["evidence"][0]["value"] == "NaN"
    assert back["reports"][0]["ladder"][1] == {"stage": "data", "mark": "divergence", "rule": "test/one"}


def test_the_same_capsule_gives_the_same_report(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=list(range(60)), value=[5.5] * 60, rank=0)

    capsule = build(fill, {"model": {"vocab_size": 256, "initialised": "random"}})
    assert analyze(capsule) == analyze(Capsule.open(capsule.path))
