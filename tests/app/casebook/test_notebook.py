"""The notebook of an incident: hypotheses from the rules, one change at a time, and a clock that is only read."""

from __future__ import annotations

import json
import multiprocessing
from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from llmconsole.app.casebook import notebook as books
from llmconsole.app.casebook.cards import parse
from llmconsole.app.casebook.incident import IncidentError, notebook, read_incident, read_notebook
from llmconsole.app.casebook.notebook import Notebook
from llmconsole.app.commands import notebook as command
from llmconsole.capsules import Capsule, CapsuleWriter

from ..conftest import Run

START = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)


def at(minutes: float) -> Callable[[], datetime]:
    """A clock that stands."""
    return lambda: START + timedelta(minutes=minutes)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A loss that is not finite from step 40 on."""
    path = tmp_path / "run.capsule"
    with CapsuleWriter(path, phase="training") as writer:
        writer.scalars("loss", step=np.arange(60), value=[*np.linspace(3, 2, 40), *[float("nan")] * 20])
    return path


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    path = tmp_path / "healthy.capsule"
    with CapsuleWriter(path, phase="evaluation") as writer:
        writer.scalars("loss", step=np.arange(60), value=np.linspace(3, 2, 60))
    return path


def do(action: str, capsule: Path, clock: Callable[[], datetime], **fields: object) -> int:
    defaults = {"json": True, "changed": "", "observed": "", "verdict": "undecided", "test": "", "rule": ""}
    return command.run(Namespace(action=action, capsule=str(capsule), **{**defaults, **fields}), clock)


def test_opening_starts_the_clock_and_writes_down_what_the_rules_suggest(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Capsule.open(broken).digest()
    assert do("open", broken, at(0)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "llmconsole.incident/1"
    book = read_notebook(broken)
    assert (book.status, book.opened) == ("open", "2026-11-29T03:00:00Z")
    assert book.hypotheses[0].rule == "numerics/loss-nonfinite"
    assert [each.id for each in book.hypotheses] == list(range(1, len(book.hypotheses) + 1))
    assert all(each.verdict == "undecided" for each in book.hypotheses), "a rule suggests, people decide"
    do("open", broken, at(5))
    assert read_notebook(broken).opened == "2026-11-29T03:00:00Z", "opened twice, the clock goes on"
    assert Capsule.open(broken).digest() == before, "the notebook is no evidence"


def test_where_no_rule_speaks_the_triage_of_its_class_stands_there(healthy: Path) -> None:
    do("open", healthy, at(0))
    book = read_notebook(healthy)
    assert {each.source for each in book.hypotheses} == {"triage"}
    assert "training mode" in book.hypotheses[0].claim, "its phase is evaluation"


def test_a_supported_hypothesis_locates_the_incident_and_a_refutation_opens_it_again(healthy: Path) -> None:
    do("open", healthy, at(0))
    do("hypothesis", healthy, at(2), claim="the tokenizer differs", test="compare digests")
    mine = read_notebook(healthy).hypotheses[-1]
    assert mine.source == "person"
    do("experiment", healthy, at(7), number=mine.id, changed="revision", observed="same", verdict="undecided")
    assert read_notebook(healthy).status == "open"
    do(
        "experiment",
        healthy,
        at(11),
        number=mine.id,
        changed="tokenizer",
        observed="digests differ",
        verdict="supported",
    )
    book = read_notebook(healthy)
    assert (book.status, book.seconds(START + timedelta(hours=9))) == ("located", 11 * 60)
    do("experiment", healthy, at(20), number=mine.id, changed="back", observed="no change", verdict="refuted")
    assert read_notebook(healthy).status == "open"
    assert read_notebook(healthy).located == ""


def test_a_rule_tests_its_own_hypothesis(broken: Path, tmp_path: Path) -> None:
    do("open", broken, at(0))
    with notebook(broken) as book:
        book.hypotheses.append(books.Hypothesis(id=90, claim="rate", rule="numerics/gradient-explosion"))
        book.hypotheses.append(books.Hypothesis(id=91, claim="quiet", rule="data/token-out-of-vocabulary"))
    do("experiment", broken, at(1), number=1)
    do("experiment", broken, at(1), number=90)
    do("experiment", broken, at(1), number=91)
    book = read_notebook(broken)
    observed = {each.id: each.experiments[0].observed for each in book.hypotheses if each.experiments}
    assert observed[1].startswith("numerics/loss-nonfinite: The loss is NaN from step 40 on")
    assert "cannot run: " in observed[90], "no gradient norm was recorded: nothing is refuted by that"
    assert book.hypothesis(90).verdict == "undecided"


def test_a_rule_that_was_likely_does_not_prove_itself_by_being_run_again() -> None:
    from llmconsole.analyzers.finding import Finding
    from llmconsole.analyzers.report import CapsuleName, CapsuleReport

    def report(confidence: str) -> CapsuleReport:
        finding = Finding(rule="data/x", title="x", summary="so it is", severity="warning", confidence=confidence)
        name = CapsuleName(id="", title="", path="")
        return CapsuleReport(
            capsule=name, first_divergence=None, findings=(finding,), ladder=(), quiet=(), skipped=(), errors=()
        )

    assert books.judge_by_rule(report("confirmed"), "data/x") == ("data/x: so it is", "supported")
    assert books.judge_by_rule(report("likely"), "data/x")[1] == "undecided"
    assert "an experiment decides" in books.judge_by_rule(report("likely"), "data/x")[0]


@pytest.mark.parametrize(("minutes", "late"), [(29.9, False), (30, True), (300, True)])
def test_at_thirty_minutes_the_way_back_is_offered(
    healthy: Path, capsys: pytest.CaptureFixture[str], minutes: float, late: bool
) -> None:
    do("open", healthy, at(0))
    capsys.readouterr()
    do("show", healthy, at(minutes), json=False)
    assert ("go back to one batch" in " ".join(capsys.readouterr().out.split())) == late


def test_once_located_no_way_back_is_offered(healthy: Path) -> None:
    do("open", healthy, at(0))
    do("experiment", healthy, at(9), number=1, observed="seen", verdict="supported")
    assert not read_notebook(healthy).late(START + timedelta(hours=3))


def write_hundred(path: Path) -> None:
    for number in range(100):
        with notebook(path) as book:
            book.notes.append(books.Note(text=f"{number}", t=""))


def test_two_people_at_once_lose_no_line_and_unknown_fields_stay(healthy: Path) -> None:
    (healthy / "incident.json").write_text(json.dumps({"status": "open", "of someone else": {"kept": [1]}}))
    both = [multiprocessing.get_context("spawn").Process(target=write_hundred, args=(healthy,)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert len(read_notebook(healthy).notes) == 200
    assert read_incident(healthy)["of someone else"] == {"kept": [1]}


@pytest.mark.parametrize(
    "content", ['{"hypotheses": 3}', '{"status": "done"}', '{"hypotheses": [{"id": "x"}]}', "[]", "{"]
)
def test_a_record_that_is_none_is_one_line(healthy: Path, content: str) -> None:
    (healthy / "incident.json").write_text(content)
    with pytest.raises(IncidentError, match=r"incident\.json cannot be used") as refused:
        read_notebook(healthy)
    assert "\n" not in str(refused.value)


def test_numbers_over_incidents_and_cases() -> None:
    text = """
## a-case · One

- **Class:** kernel, attention
- **Rules:** kernel/tail-block
- **Gate:** gates/a-case.json · passed 2026-11-29
- **Occurrences:** first
  - second

## b-case · Two

- **Class:** kernel
- **Rules:** kernel/tail-block, kernel/noise
"""
    three = [
        Notebook(status="located", opened="2026-11-29T03:00:00Z", located=f"2026-11-29T03:{minutes:02}:00Z")
        for minutes in (4, 10, 50)
    ]
    found = books.count([*three, Notebook(status="open", opened="2026-11-29T03:00:00Z")], parse(text))
    assert (found.located, found.median_seconds) == (3, 600)
    assert found.incidents == {"located": 3, "open": 1}
    assert found.classes == {"kernel": 2}
    assert found.rules == {"kernel/tail-block": 3}, "two occurrences of the one, one of the other"
    assert found.ungated == ("b-case",)


def test_the_command_line_says_what_a_raw_file_needs_and_what_is_not_there(
    tmp_path: Path, broken: Path, cli: Run
) -> None:
    (tmp_path / "a job").mkdir()
    (tmp_path / "a job" / "train.log").write_text("".join(f"step {n} loss {5 - n / 60:.3f}\n" for n in range(60)))
    for action in ("open", "resolve"):
        done = cli("incident", action, "a job")
        assert (done.returncode, done.stdout) == (2, "")
        advice = "a job is not a capsule; make one of it first: llmconsole import 'a job' -o runs"
        assert done.stderr == f"llmconsole: {advice}\n"
    assert cli("incident", "open", ".").stderr.endswith("not a capsule; give one of those in it: run.capsule\n")
    assert cli("incident", "open", "run.capsule").returncode == 0
    done = cli("incident", "experiment", "run.capsule", "77", "--observed", "x")
    assert done.returncode == 2
    assert "no hypothesis 77" in done.stderr
    done = cli("incident", "note", "run.capsule", "evil \x1b[2J text")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    done = cli("incident", "statistics", ".")
    assert done.returncode == 0
    assert "open 1" in done.stdout
