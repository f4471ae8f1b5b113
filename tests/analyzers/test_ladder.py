"""The ladder: what comes first, what only follows, and one mark a stage."""

from llmconsole.analyzers.finding import Confidence, Finding, Kind, Severity, Where
from llmconsole.analyzers.ladder import attribute, first_divergence, marks, tier, transitive
from llmconsole.analyzers.report import CapsuleName, CapsuleReport, Report, exit_status
from llmconsole.analyzers.stages import STAGES, Stage


def said(
    rule: str,
    step: int | None = None,
    stage: Stage = "numerics",
    severity: Severity = "critical",
    confidence: Confidence = "likely",
    kind: Kind = "divergence",
    order: int | None = None,
    rank: int | None = None,
) -> Finding:
    return Finding(
        rule=rule,
        stage=stage,
        severity=severity,
        confidence=confidence,
        kind=kind,
        title=rule,
        summary=rule,
        where=Where(step=step, order=order, rank=rank),
    )


def first_of(*findings: Finding, **explained_by: tuple[str, ...]) -> str | None:
    first = first_divergence(attribute(findings, explained_by))
    return first.rule if first else None


def test_the_tiers_are_confirmed_critical_then_likely_critical_then_warning_then_undetermined() -> None:
    order = [
        said("a", 900, confidence="confirmed"),
        said("b", 50),
        said("c", 10, severity="warning", confidence="confirmed"),
        said("d", 0, confidence="undetermined"),
    ]
    assert [tier(each) for each in order] == [0, 1, 2, 3]
    for index in range(4):
        assert first_of(*reversed(order[index:])) == order[index].rule


def test_within_a_tier_the_smallest_step_then_stage_then_order_then_rank_wins() -> None:
    assert first_of(said("late", 5), said("early", 3)) == "early"
    assert first_of(said("late", 3, "runtime"), said("early", 3, "data")) == "early"
    assert first_of(said("late", 3, order=9), said("early", 3, order=2)) == "early"
    assert first_of(said("late", 3, order=2, rank=4), said("early", 3, order=2, rank=1)) == "early"


def test_a_static_fault_counts_as_step_zero() -> None:
    assert first_of(said("later", 1), said("static", None)) == "static"


def test_info_hygiene_and_consequences_by_nature_do_not_compete() -> None:
    assert first_of(said("a", severity="info"), said("b", kind="hygiene"), said("c", kind="consequence")) is None


def test_a_finding_becomes_a_consequence_of_what_explains_it_at_that_step_or_earlier() -> None:
    found = attribute([said("spike", 10), said("rate", 10, severity="warning")], {"spike": ("rate",)})
    spike = next(each for each in found if each.rule == "spike")
    assert (spike.kind, spike.caused_by) == ("consequence", "rate")
    assert first_of(said("spike", 10), said("rate", 11, severity="warning"), spike=("rate",)) == "spike"


def test_an_explanation_that_is_undetermined_info_or_hygiene_explains_nothing() -> None:
    for weak in (
        said("why", 1, confidence="undetermined"),
        said("why", 1, severity="info"),
        said("why", 1, kind="hygiene"),
    ):
        assert first_of(said("what", 5), weak, what=("why",)) == "what"


def test_explanations_are_transitive_even_through_a_rule_that_stayed_quiet() -> None:
    assert transitive({"loss": ("layer",), "layer": ("rate",), "rate": ()})["loss"] == {"layer", "rate"}
    assert first_of(said("loss", 9), said("rate", 2, severity="warning"), loss=("layer",), layer=("rate",)) == "rate"


def test_a_chain_names_its_root() -> None:
    found = attribute(
        [said("loss", 9), said("layer", 8), said("rate", 2)], {"loss": ("layer",), "layer": ("rate",), "rate": ()}
    )
    assert {each.rule: each.caused_by for each in found} == {"loss": "rate", "layer": "rate", "rate": None}


def test_two_rules_that_explain_each_other_leave_the_earlier_one_standing() -> None:
    assert first_of(said("a", 3), said("b", 2), a=("b",), b=("a",)) == "b"
    assert first_of(said("a", 3), said("b", 3), a=("b",), b=("a",)) in ("a", "b")
    assert first_of(said("a", 3), said("b", 3), said("c", 3), a=("b",), b=("c",), c=("a",)) is not None


def test_a_rule_does_not_explain_itself() -> None:
    assert first_of(said("a", 1), said("a", 2), a=("a",)) == "a"


def test_the_ladder_marks_all_eight_stages_and_tells_quiet_from_not_captured() -> None:
    found = attribute(
        [
            said("data/x", 1, "data", "warning"),
            said("numerics/y", 2, "numerics"),
            said("capsule/z", None, "capture", "info", kind="hygiene"),
            said("kernel/k", 3, "kernel", confidence="undetermined"),
        ],
        {"numerics/y": ("data/x",)},
    )
    rungs = marks(found, {"objective"}, {"runtime"}, first_divergence(found))
    assert [rung.stage for rung in rungs] == list(STAGES)
    assert {rung.stage: (rung.mark, rung.rule) for rung in rungs} == {
        "capture": ("note", "capsule/z"),
        "data": ("divergence", "data/x"),
        "objective": ("quiet", None),
        "numerics": ("consequence", "numerics/y"),
        "distributed": ("not captured", None),
        "kernel": ("undetermined", "kernel/k"),
        "runtime": ("error", None),
        "application": ("not captured", None),
    }


def test_a_rung_shows_the_first_divergence_where_it_lies_in_its_stage() -> None:
    found = attribute([said("a", 3, "data"), said("b", 1, "data", "warning")], {})
    first = first_divergence(found)
    assert first is not None
    assert marks(found, set(), set(), first)[1].rule == first.rule == "a"


def test_the_exit_status_is_one_for_a_warning_and_zero_for_a_remark() -> None:
    def report(*findings: Finding) -> Report:
        one = CapsuleReport(
            capsule=CapsuleName(id="", title="", path=""),
            first_divergence=None,
            findings=findings,
            ladder=(),
            quiet=(),
            skipped=(),
            errors=(),
        )
        return Report(reports=(one,))

    assert exit_status(report()) == 0
    assert exit_status(report(said("a", severity="info"))) == 0
    assert exit_status(report(said("a", severity="warning", kind="hygiene"))) == 1
