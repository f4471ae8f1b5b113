"""The case log while one types, the form that makes a case, and the way back from both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.asking import AskScreen
from llmconsole.app.ui.screens.cases import CasesScreen
from llmconsole.app.ui.screens.home import HomeScreen
from llmconsole.app.ui.screens.resolve import ResolveScreen
from llmconsole.app.ui.screens.review import ReviewScreen
from llmconsole.app.ui.widgets.form import Form
from llmconsole.app.ui.widgets.line import Line
from llmconsole.app.ui.widgets.rows import Rows
from textual.widgets import Static

from ..capsules import diverged
from ..conftest import git

Until = Callable[..., Any]

CASE = """\
# Debug cases

## labels-twice · Labels are shifted twice 标签错位

- **Class:** not-converging
- **Rules:** numerics/loss-nonfinite
- **Misled by:** the learning rate [red]x[/red]
- **Root cause:** shifted in the collator and again in the loss
- **Occurrences:**
  - 2026-11-01 run a
  - 2026-11-02 run b
"""


def text(console: Console, selector: str) -> str:
    widget = console.screen.query_one(selector)
    return "\n".join("".join(each.text for each in widget.render_line(y)) for y in range(max(1, widget.size.height)))


def head(console: Console) -> str:
    return str(console.screen.query_one("#where", Static).render())


@pytest.fixture
def log(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one case of its own, which is also the working directory."""
    (repository / "debug-cases.md").write_text(CASE)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "Resolve\n\nCase-Id: labels-twice")
    monkeypatch.chdir(repository)
    return repository


def test_search_narrows_as_one_types_and_finds_both_languages(tmp_path: Path, log: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await pilot.press("c")
            assert isinstance(console.screen, CasesScreen)
            await until(pilot, lambda: len(console.screen.query_one(Rows)) > 20, "all cases, ours and the user's")
            console.screen.query_one(Line).insert_text_at_cursor("标签错位 ")  # a pilot has only ASCII keys
            await pilot.press(*"2026-11-02")
            await until(pilot, lambda: " 1 of " in head(console), "one case holds both words")
            await until(pilot, lambda: "!Misled by" in text(console, "#fields"), "what misled stands out")
            assert "[red]x[/red]" in text(console, "#fields")
            assert "○ Labels are shifted twice" in text(console, "#found")
            await pilot.press("enter")
            await until(pilot, lambda: "2026-11-02 run b" in text(console, "#fields"), "occurrences")
            await until(pilot, lambda: "Resolve" in text(console, "#fields"), "the commit that names the case")
            await pilot.press("escape", "escape")
            await until(pilot, lambda: isinstance(console.screen, HomeScreen), "back where one came from")

    asyncio.run(scenario())


def test_from_a_finding_the_log_is_filtered_by_its_rule(tmp_path: Path, log: Path, until: Until) -> None:
    (tmp_path / "runs").mkdir()
    diverged(tmp_path / "runs" / "nan.capsule")

    async def scenario() -> None:
        console = Console(tmp_path / "runs", remember=False)
        async with console.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "loss-nonfinite" in text(console, "#first"), "the verdict")
            await pilot.press("c")
            await until(pilot, lambda: "labels-twice" in text(console, "#fields"), "the user's own case first")
            assert console.screen.query_one("#query").value == "rule:numerics/loss-nonfinite"  # pyright: ignore
            await pilot.press(*"zzzz")
            await until(pilot, lambda: " 0 of " in head(console), "typing replaces the filter")
            assert "Fewer words find more" in text(console, "#found")

    asyncio.run(scenario())


def test_a_known_case_asks_for_less_and_what_was_typed_is_not_lost_by_a_key(
    tmp_path: Path, log: Path, until: Until
) -> None:
    (tmp_path / "runs").mkdir()
    capsule = diverged(tmp_path / "runs" / "nan.capsule")

    async def scenario() -> None:
        console = Console(tmp_path / "runs", remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "loss-nonfinite" in text(console, "#first"), "the verdict")
            await pilot.press("r")
            form = console.screen.query_one(Form)
            # An earlier incident of the user's names the same rule, so it is suggested; its card keeps its root cause.
            await until(pilot, lambda: form["case"].value == "labels-twice", "the known case is suggested")
            assert form["root_cause"].value == ""
            # HEAD only files a case, so the fix is looked for before it.
            assert form["fix_commit"].value == git(log, "rev-parse", "HEAD~1")[:12]
            await until(pilot, lambda: "The log has this case" in text(console, "#note"), "the case is known")
            await pilot.press("down", *"!!")
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(console.screen, AskScreen), "it asks before anything is lost")
            await pilot.press("ctrl+q", "n", "escape")
            await until(pilot, lambda: isinstance(console.screen, ResolveScreen), "still in the form")
            assert form["title"].value == "Labels are shifted twice 标签错位!!"
            await pilot.press("f2")
            await until(pilot, lambda: "3 fields marked" in text(console, "#note"), "what the card lacks is asked for")
            assert [each.field for each in form._fields if each.has_class("bad")] == [
                "trigger",
                "regression_test",
                "prevention",
            ]
            form.fill({"trigger": "t", "regression_test": "tests/test_labels.py::test_alone", "prevention": "p"})
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(console.screen, ReviewScreen), "the review")
            assert "+  - 2026" in text(console, "#diff") or "+  - 2026" in str(console.screen._plan.diff)  # pyright: ignore
            # Someone commits another case meanwhile: what was shown is no longer what would be committed.
            (log / "debug-cases.md").write_text(CASE + "\n## other-case · Other\n\n- **Class:** kernel\n")
            await pilot.press("y")
            await until(pilot, lambda: "changed since" in text(console, "#ask"), "it refuses to commit something else")
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(console.screen, ResolveScreen), "back in the form")
            (log / "debug-cases.md").write_text(CASE)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(console.screen, ReviewScreen), "the review again")
            await pilot.press("y")
            await until(pilot, lambda: "Committed" in text(console, "#ask"), "committed")
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(console.screen, HomeScreen), "home")
            await until(pilot, lambda: "●" in text(console, "#capsules"), "the list marks it resolved")

    asyncio.run(scenario())
    assert git(log, "log", "-1", "--format=%(trailers:key=Case-Id,valueonly)").strip() == "labels-twice"
    assert capsule.joinpath("incident.json").exists()


def test_the_report_goes_to_a_file_and_one_line_says_where(tmp_path: Path, log: Path, until: Until) -> None:
    (tmp_path / "runs").mkdir()
    diverged(tmp_path / "runs" / "nan.capsule")

    async def scenario() -> None:
        console = Console(tmp_path / "runs", remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "loss-nonfinite" in text(console, "#first"), "the verdict")
            for key in "eheh":
                await pilot.press(key)
                await pilot.pause(0.3)
            await until(pilot, lambda: (log / "nan-report-2.html").exists(), "two files, none replaced")
            assert any("nan-report" in each.message for each in console._notifications)

    asyncio.run(scenario())


def test_five_thousand_cases_answer_a_keystroke_without_holding_the_screen(
    tmp_path: Path, log: Path, until: Until
) -> None:
    many = [f"## case-{n} · Number {n}\n\n- **Class:** kernel\n- **Symptom:** word{n % 7}\n" for n in range(5000)]
    (log / "debug-cases.md").write_text("# Debug cases\n\n" + "\n".join(many))

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await pilot.press("c")
            await until(pilot, lambda: "5,02" in head(console), "all are there")
            await pilot.press(*"word3")
            await until(pilot, lambda: " 714 of " in head(console), "those that hold the word")  # 4,998 / 7
            assert len(console.screen.query_one(Rows)) == 300

    asyncio.run(scenario())
