"""What `cases lint` says of a case log that people edit by hand and merge."""

from __future__ import annotations

from pathlib import Path

from llmconsole.app import paths
from llmconsole.app.casebook.cards import parse
from llmconsole.app.casebook.lint import lint
from llmconsole.app.casebook.store import Repository

from ..conftest import Run, git

WHOLE = """# Debug cases

## labels-shifted · Labels are shifted twice

- **Class:** not-converging
- **Rules:** objective/labels-shifted-twice
- **Symptom:** loss at 11.9
- **Root cause:** two places shift
- **Trigger:** a new collator
- **Fix:** shift once (commit abc1234)
- **Prevention:** one place shifts
- **Regression test:** tests/test_labels.py::TestLabels::test_shift
"""
RULES = {"objective/labels-shifted-twice"}


def words(text: str, repository: Path | None = None) -> list[str]:
    found = lint(text, Path("debug-cases.md"), RULES, Repository(repository) if repository else None)
    return [f"{each.line}: {each.words}" for each in found]


def test_a_whole_case_has_nothing_wrong(repository: Path) -> None:
    assert words(WHOLE, repository) == []


def test_markers_of_a_merge_are_named_with_their_lines_and_both_cases_are_kept() -> None:
    mine, theirs = WHOLE.split("\n", 2)[2], WHOLE.split("\n", 2)[2].replace("labels-shifted ", "other-case ")
    text = f"# Debug cases\n\n<<<<<<< HEAD\n{mine}\n=======\n{theirs}\n>>>>>>> feature\n"
    lines = text.split("\n")
    found = words(text)
    assert [each for each in found if "conflict marker" in each] == [
        f"{lines.index(mark) + 1}: conflict marker {mark[:7]}: resolve the merge, keep the cases of both sides"
        for mark in ("<<<<<<< HEAD", "=======", ">>>>>>> feature")
    ]
    assert {card.id for card in parse(text)} == {"labels-shifted", "other-case"}


def test_a_heading_underlined_with_equals_is_no_conflict() -> None:
    assert words("Debug cases\n=======\n" + WHOLE.partition("\n")[2]) == []


def test_what_is_missing_unknown_or_taken_is_said_where_it_stands(repository: Path) -> None:
    text = (
        WHOLE
        + WHOLE.split("\n", 2)[2].replace("not-converging", "nothing").replace("labels-shifted-twice", "no-such-rule")
        + "\n## BAD_ID · A case\n\n- **Class:** kernel\n"
        + "\n## empty-case · Nothing yet\n\n- **Class:** kernel\n- **Regression test:** tests/gone.py::test_x\n"
    )
    found = words(text, repository)
    line = text.split("\n").index
    second = text.rindex("## labels-shifted")
    at = text[:second].count("\n") + 1
    assert f"{at}: the id labels-shifted is taken by the case in line {line(WHOLE.split(chr(10))[2]) + 1}" in found
    assert any("class nothing is none of" in each for each in found)
    assert any("no rule is called objective/no-such-rule" in each for each in found)
    assert f"{line('## BAD_ID · A case') + 1}: BAD_ID is no case id: lower-case words joined by single dashes" in found
    empty = line("## empty-case · Nothing yet") + 1
    assert f"{empty}: missing: Rules, Symptom, Root cause, Trigger, Fix, Prevention" in found
    assert f"{empty + 3}: tests/gone.py is no file at HEAD" in found


def test_a_gate_that_does_not_verify(repository: Path) -> None:
    text = WHOLE + "- **Gate:** gates/labels-shifted.json · passed 2026-11-29\n"
    (said,) = words(text, repository)
    assert said.startswith(f"{text.count(chr(10))}: the gate does not verify: gates/labels-shifted.json is not there")


def test_the_cases_that_ship_with_the_product_are_asked_for_nothing() -> None:
    assert words(paths.seed_cases()) == []


def test_the_command_prints_a_line_a_problem_and_says_by_its_status_that_there_are_some(
    repository: Path, cli: Run
) -> None:
    (repository / "debug-cases.md").write_text(WHOLE)
    done = cli("cases", "lint", cwd=repository)
    assert (done.returncode, done.stdout) == (0, "1 case, nothing wrong\n")
    (repository / "debug-cases.md").write_text(WHOLE.replace("- **Trigger:** a new collator\n", ""))
    git(repository, "add", ".")
    done = cli("cases", "lint", cwd=repository)
    assert (done.returncode, done.stdout) == (1, "debug-cases.md:3: labels-shifted: missing: Trigger\n")
