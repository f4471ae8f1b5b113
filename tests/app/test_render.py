"""The report for people: what an eye finds in which order, at the narrowest terminal too."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from llmconsole.analyzers.finding import Candidate, Counterfactual, Evidence, Finding, Where
from llmconsole.analyzers.report import CapsuleName, CapsuleReport, FirstDivergence, Report, RuleError, Rung, Skipped
from llmconsole.analyzers.stages import STAGES
from llmconsole.app.cli import main
from llmconsole.app.render import figure, observed, place_of, print_report
from rich.console import Console

from ..traces import KinetoTrace

CAUSE = Finding(
    rule="objective/reduction",
    stage="objective",
    severity="critical",
    confidence="confirmed",
    kind="divergence",
    title="The loss is a mean of means",
    summary="Reported loss 5.0 is the mean of micro-batch means.",
    where=Where(step=5, rank=0),
    evidence=(Evidence(name="micro-batch tokens", value=[1000, 10, 990, 12], unit="tokens"),),
    cause="each micro-batch is averaged by itself",
    next=("print the tokens of each micro-batch",),
    fix=("divide by the tokens of the window",),
    counterfactual=Counterfactual(
        observed=5.0,
        tolerance=1e-3,
        healthy=2.0656,
        candidates=(
            Candidate(faults=(), value=2.0656, off_by=2.9344, fits=False),
            Candidate(faults=("mean-of-means",), value=5.0, off_by=1e-16, fits=True),
        ),
        classes=(("mean-of-means", "per-micro-mean"),),
        runner_up=Candidate(faults=("sequence-mean",), value=4.8712, off_by=0.1288, fits=False),
        chance=2e-4,
        inert=("pad-in-loss",),
    ),
    cases=("gradient-accumulation-loss-scale",),
)
SYMPTOM = Finding(
    rule="numerics/loss-nonfinite",
    stage="numerics",
    severity="critical",
    confidence="likely",
    kind="consequence",
    caused_by="objective/reduction",
    title="The loss is NaN",
    summary="NaN from step 9 on",
    where=Where(step=9),
)
INFO = Finding(
    rule="data/lengths", stage="data", severity="info", kind="hygiene", title="Lengths", summary="3 to 9 tokens"
)


def report_of(*findings: Finding, first: Finding | None = None, errors: tuple[RuleError, ...] = ()) -> CapsuleReport:
    marks = {"objective": "divergence", "numerics": "consequence", "data": "note"} if first else {"data": "quiet"}
    return CapsuleReport(
        capsule=CapsuleName(id="01", title="sft-7b", path="/runs/a.capsule"),
        first_divergence=first
        and FirstDivergence(rule=first.rule, stage=first.stage, where=first.where, summary=first.summary),
        findings=findings,
        ladder=tuple(Rung(stage=stage, mark=marks.get(stage, "not captured")) for stage in STAGES),
        quiet=("capsule/damaged",),
        skipped=(
            Skipped(rule="a/b", missing=("batches.logits|batches.target_logits",)),
            Skipped(rule="a/c", missing=("batches.logits|batches.target_logits", "stats")),
        ),
        errors=errors,
    )


def printed(report: CapsuleReport | Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_ladder_is_one_line_with_eight_stages_and_their_marks(width: int):
    line = printed(report_of(CAUSE, SYMPTOM, INFO, first=CAUSE), width).splitlines()[1]
    assert line.replace(" ", "") == "capture–data✓objective✗numerics↳distributed–kernel–runtime–application–"
    assert len(line) <= width


def test_no_line_is_wider_than_the_terminal():
    assert all(len(line) <= 80 for line in printed(report_of(CAUSE, SYMPTOM, INFO, first=CAUSE)).splitlines())


def test_the_first_divergence_comes_first_with_its_place_and_its_advice():
    text = printed(report_of(CAUSE, SYMPTOM, INFO, first=CAUSE))
    order = [
        "✗ First divergence  objective/reduction", "step 5 · rank 0", "mean-of-means", "micro-batch tokens", "Why",
        "Next", "Fix", "cases show gradient-accumulation", "Follows", "Noted", "Quiet", "Skipped",
    ]  # fmt: skip
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_the_table_of_candidates_shows_observed_healthy_what_fits_and_the_runner_up():
    text = " ".join(printed(report_of(CAUSE, first=CAUSE), 120).split())
    assert "reported 5 – –" in text
    assert "healthy 2.0656 2.9 no, 2,934 tolerances off" in text
    assert "▸ mean-of-means 5 1e-16 yes" in text
    assert "next nearest: sequence-mean 4.8712 0.13 no, 129 tolerances off" in text
    assert "cannot be told apart: mean-of-means = per-micro-mean" in text
    assert "not testable here (no effect on this input): pad-in-loss" in text


def test_a_consequence_is_a_line_under_its_cause_and_not_a_finding_of_its_own():
    text = printed(report_of(CAUSE, SYMPTOM, first=CAUSE))
    assert "└ ↳ numerics/loss-nonfinite  step 9" in text
    assert "Also" not in text


def test_a_consequence_of_a_consequence_is_indented_below_it():
    deeper = Finding(
        rule="numerics/first-nonfinite", stage="numerics", severity="critical", kind="consequence",
        caused_by="numerics/loss-nonfinite", title="t", summary="s",
    )  # fmt: skip
    assert "  └ ↳ numerics/first-nonfinite" in printed(report_of(CAUSE, SYMPTOM, deeper, first=CAUSE))


def test_a_second_divergence_is_shown_in_full_below():
    other = Finding(rule="data/x", stage="data", severity="warning", kind="divergence", title="Other", summary="words")
    assert "✗ Also  data/x   warning, likely" in printed(report_of(CAUSE, other, first=CAUSE))


def test_many_findings_of_one_rule_take_one_block():
    one = Finding(rule="data/x", stage="data", severity="warning", kind="divergence", title="T", summary="place 0")
    again = [msgspec.structs.replace(one, summary=f"place {number}") for number in range(20)]
    text = printed(report_of(*again, first=again[0]))
    assert text.count("First divergence") == 1
    assert "place 3" in text
    assert "and 11 more" in text


def test_skipped_rules_are_summed_up_by_what_they_lack():
    text = " ".join(printed(report_of()).split())
    assert "2 rules for lack of evidence; most wanted: batches.logits or batches.target_logits (2), stats (1)" in text


def test_a_rule_that_failed_is_a_row():
    text = printed(report_of(errors=(RuleError(rule="data/x", error="KeyError: 'y'"),)))
    assert "Failed   data/x: KeyError: 'y'" in text


def test_where_nothing_diverged_it_says_how_many_rules_ran():
    assert "✓ Nothing found: 1 rule ran" in printed(report_of())


WARM_UP = "a trace of later steps: the first one of a job is warm-up"


def unjudged_report(*skipped: Skipped, mark: str = "not captured", errors: tuple[RuleError, ...] = ()) -> CapsuleReport:
    """A report of a capsule that is whole, and of which the rules of runtime say no more than ``mark``."""
    marks = {"capture": "quiet", "runtime": mark}
    ladder = tuple(Rung(stage=stage, mark=marks.get(stage, "not captured")) for stage in STAGES)  # pyright: ignore[reportArgumentType]
    return msgspec.structs.replace(report_of(errors=errors), ladder=ladder, skipped=skipped)


OTHERS = tuple(Skipped(rule=f"data/{each}", missing=("batches.input_ids",)) for each in "abc")
NO_REPLAY = Skipped(rule="capsule/not-replayable", missing=("a recording: raw files hold no step",))


def test_evidence_that_no_rule_could_judge_is_no_health_and_its_reason_comes_first():
    skipped = (NO_REPLAY, *OTHERS, Skipped(rule="performance/gpu-idle", missing=(WARM_UP,)))
    text = " ".join(printed(unjudged_report(*skipped)).split())
    assert f"– Nothing could be judged; wanted: {WARM_UP}" in text
    assert f"most wanted: {WARM_UP} (1), batches.input_ids (3), a recording" in text
    assert "✓ Nothing found" not in text


def test_one_stage_that_was_judged_is_said_as_before():
    skipped = (*OTHERS, Skipped(rule="performance/gpu-idle", missing=(WARM_UP,)))
    text = " ".join(printed(unjudged_report(*skipped, mark="quiet")).split())
    assert "✓ Nothing found: 1 rule ran" in text
    assert f"most wanted: batches.input_ids (3), {WARM_UP} (1)" in text


def test_without_a_reason_in_words_no_rule_had_its_evidence():
    assert "Nothing could be judged: no rule had the evidence it needs" in printed(unjudged_report(NO_REPLAY, *OTHERS))


@pytest.mark.parametrize("skipped", [(), (NO_REPLAY,)])
def test_who_asks_about_the_capsule_alone_is_answered(skipped: tuple[Skipped, ...]):
    assert "✓ Nothing found: 1 rule ran" in printed(unjudged_report(*skipped))


def test_a_rule_that_failed_had_its_evidence():
    errors = (RuleError(rule="performance/gpu-idle", error="KeyError"),)
    assert "no rule had the evidence" not in printed(unjudged_report(*OTHERS, mark="error", errors=errors))


@pytest.mark.parametrize(("steps", "said"), [(1, f"– Nothing could be judged; wanted: {WARM_UP}"), (4, "✗ First")])
def test_a_trace_of_the_first_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, said: str):
    trace = KinetoTrace()
    for step in range(steps):
        trace.step(step + 1, 10.0 * step, 10).data(10.0 * step, 5).kernel(10.0 * step + 5.5, 4)
    status = main(["analyze", str(trace.write(tmp_path / "a.pt.trace.json"))])
    assert said in " ".join(capsys.readouterr().out.split())
    assert status == (steps > 1)


ENDED = Finding(
    rule="runtime/job-failed", stage="runtime", severity="info", confidence="undetermined", kind="hygiene",
    title="The scheduler ended the job", summary="The scheduler ended the job after step 4: time limit.",
)  # fmt: skip


def test_how_a_job_ended_stands_beside_the_news_that_nothing_was_found():
    text = " ".join(printed(report_of(ENDED)).split())
    assert "· Nothing found but a remark: The scheduler ended the job after step 4: time limit. Noted" in text
    assert "✓ Nothing found" not in text
    assert "✓ Nothing found: 2 rules ran" in printed(report_of(INFO))


def test_long_words_in_a_cell_read_from_the_left_and_figures_stand_to_the_right():
    words = "ValueError: the sequences of this batch are longer than the longest one that the position embeddings know"
    evidence = (Evidence(name="error", value=words, expected="none"), Evidence(name="kind", value="eager"))
    evidence += (Evidence(name="errors", value=1, expected=0, note="in the log"),)
    finding = msgspec.structs.replace(CAUSE, counterfactual=None, evidence=evidence)
    lines = printed(report_of(finding, first=finding)).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("   error  "))
    left = lines[start].index("ValueError")
    folded = lines[start + 1 : next(at for at, line in enumerate(lines) if line.startswith("   kind"))]
    assert folded
    assert all(len(line) - len(line.lstrip()) == left for line in folded)
    right = [line.index(value) + len(value) for line in lines for value in ("eager",) if line.startswith("   kind")]
    assert right == [line.index(" 1 ") + 2 for line in lines if line.startswith("   errors")]
    assert all(len(line) <= 80 for line in lines)


def test_of_several_reports_the_healthy_ones_take_three_lines():
    text = printed(Report(reports=(report_of(INFO), report_of(CAUSE, first=CAUSE), report_of())))
    assert text.count("capture–") == 3
    assert text.splitlines()[2] == " ✓ Nothing found: 2 rules ran"
    assert text.count("Quiet") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (18342, "18,342"), (0.0314159, "0.031416"), (float("nan"), "NaN"), (float("-inf"), "-Inf"),
        (65504.0, "65,504"), (1e-9, "1e-09"), (123456.78, "123,456.8"), (True, "True"), ("\x1b[2J", "\\x1b[2J"),
        ([1, 2], "1 · 2"), ([4, 3, 2, 1], "4 · 3 … 1"), (10**400, "10^400"),
        ([0, 1, 2, 3], "0 to 3"), ([0, 1, 4, 5, 6, 7], "0 · 1 · 4 to 7"), ([0.5, 1, 2, 3], "0.5 · 1 … 3"),
        (list(range(0, 40, 2)), "0 · 2 … 38"),
    ],
)  # fmt: skip
def test_figures_are_short_and_exact_enough(value: object, shown: str):
    assert figure(value) == shown


def test_a_place_names_what_is_known():
    assert place_of(Where(step=18342, tensor="layers.23", rank=5, sample="17a9")) == (
        "step 18,342 · layers.23 · rank 5 · sample 17a9"
    )


def test_bytes_are_shown_as_people_read_them_and_their_bounds_too():
    rows = (
        Evidence(name="requested", value=3_113_851_290, expected="≤ 2,909,840,343", unit="B"),
        Evidence(name="other process", value=645_922_816, expected=0, unit="B", note="pid 3692507"),
        Evidence(name="unknown", value="NaN", unit="B"),
        Evidence(name="steps", value=3_113_851_290, unit="steps"),
    )
    assert [observed(each) for each in rows] == [
        ("2.9 GiB", "≤ 2.71 GiB", ""),
        ("616 MiB", "0 B", ""),
        ("NaN", "–", ""),
        ("3,113,851,290", "–", "steps"),
    ]
