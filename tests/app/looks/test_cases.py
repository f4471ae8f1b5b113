"""From a finding to the cases that name its rule: the user's own first, then those that resemble them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.app.answers import analyze
from llmconsole.app.looks.cases import case_list
from llmconsole.app.paths import seed_cases

from ..capsules import diverged
from ..conftest import Run

LOG = """# Debug cases

## our-nan · Our loss is not finite

- **Class:** not-converging
- **Keywords:** NaN, tokenizer, 溢出
- **Rules:** numerics/loss-nonfinite

## our-overflow · A neighbour of it

- **Class:** not-converging
- **Keywords:** tokenizer
- **Rules:** numerics/fp16-overflow

## our-hang · Nothing like it

- **Class:** distributed
- **Keywords:** hang
- **Rules:** distributed/missing-rank
"""


def test_the_report_names_the_users_own_cases_before_ours(repository: Path) -> None:
    (repository / "debug-cases.md").write_text(LOG)
    capsule = str(diverged(repository / "run.capsule"))
    (finding,) = [each for each in analyze(capsule, cases=str(repository)).findings if each.rule.endswith("nonfinite")]
    assert finding.cases[0] == "our-nan"
    assert len(finding.cases) > 1, "those that the rule declares are kept"
    without = analyze(capsule).findings
    assert all("our-nan" not in each.cases for each in without)


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"\xff numerics/loss-nonfinite")]
)
def test_a_log_that_cannot_be_read_takes_nothing_from_the_report(
    repository: Path, make: Callable[[Path], object]
) -> None:
    make(repository / "debug-cases.md")
    report = analyze(str(diverged(repository / "run.capsule")), cases=str(repository))
    assert report.first_divergence.rule == "numerics/loss-nonfinite"


@pytest.mark.parametrize("log", ["", seed_cases(), "## no-such · A case\n\n- **Rules:** data/all-masked\n"])
def test_a_log_that_names_no_rule_of_the_report_is_not_taken_apart(repository: Path, log: str) -> None:
    if log:
        (repository / "debug-cases.md").write_text(log)
    capsule = diverged(repository / "run.capsule")
    script = (
        "import sys; from llmconsole.app.answers import analyze; "
        f"found = analyze({str(capsule)!r}, cases={str(repository)!r}).findings; "
        "print(len(found) > 0, 'markdown_it' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["True", "False"]


def test_after_the_cases_of_a_rule_come_those_alike(repository: Path) -> None:
    (repository / "debug-cases.md").write_text(LOG)
    found = case_list("rule:numerics/loss-nonfinite", str(repository))
    own = [(each.id, each.alike) for each in found.rows if not each.seed]
    assert own == [("our-nan", False), ("our-overflow", True)], "a keyword and the class; a hang is not alike"
    assert found.found == sum(not each.alike for each in found.rows)
    assert not any(each.alike for each in case_list("NaN", str(repository)).rows), "a search finds what it says"


def test_the_command_names_them_too(repository: Path, cli: Run) -> None:
    (repository / "debug-cases.md").write_text(LOG)
    diverged(repository / "run.capsule")
    assert "llmconsole cases show our-nan" in cli("analyze", "run.capsule", cwd=repository).stdout
