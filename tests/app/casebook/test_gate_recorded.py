"""Whether a capsule comes from after the fix: by the job's revision, else by the time, else not told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.answers import describe
from llmconsole.app.casebook.gate.at_hand import capsule_of
from llmconsole.app.casebook.gate.items import Bench, Result, run_item
from llmconsole.app.casebook.gate.plan import parse
from llmconsole.app.casebook.gate.recorded import Order, Recorded, order
from llmconsole.app.casebook.gate.workshop import Workshop
from llmconsole.app.casebook.store import Repository
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.importers import import_files

from ..conftest import git

OWN = ("gates", "debug-cases.md")


class History:
    """older → broken → fixed (at noon) → later on main; changes branch off from it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._patch = root, monkeypatch
        root.mkdir()
        git(root, "init", "-q", "-b", "main")
        self.older = self.commit("10:00", other="0")
        self.broken = self.commit("11:00", code="broken")
        self.fixed = self.commit("12:00", code="fixed")
        self.later = self.commit("13:00", other="1")

    def commit(self, clock: str, **files: str) -> str:
        for name, text in files.items():
            (self.root / name).write_text(text)
        for name in ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"):
            self._patch.setenv(name, f"2026-11-29T{clock}:00Z")
        git(self.root, "add", "--all")
        git(self.root, "commit", "-q", "--allow-empty", "-m", f"At {clock}")
        return git(self.root, "rev-parse", "HEAD")

    def order(self, commit: str = "", dirty: bool | None = False, created: str = "", here: bool = True) -> Order:
        moment = f"2026-11-29T{created}:00.000Z" if created else ""
        found = Recorded(created=moment, here=here, commit=commit, dirty=dirty)
        return order(found, Repository(self.root), self.broken, self.fixed, OWN)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    return History(tmp_path / "work", monkeypatch)


class TestByRevision:
    def test_the_fix_or_a_descendant_is_after_it_whatever_the_clock_says(self, history: History) -> None:
        for commit in (history.fixed, history.later):
            assert history.order(commit, created="09:00") == Order()

    def test_the_broken_revision_or_one_before_is_not_after_it_whatever_the_clock_says(self, history: History) -> None:
        for commit in (history.broken, history.older):
            found = history.order(commit, created="14:00")
            assert found.problem == (
                f"the capsule was recorded at {commit[:12]}, before the fix {history.fixed[:12]}; "
                "record one with the fix committed"
            )

    @pytest.mark.parametrize("dirty", [True, None])
    def test_changes_in_no_commit_may_have_been_the_fix(self, history: History, dirty: bool | None) -> None:
        found = history.order(history.broken, dirty, created="11:59")
        assert not found.problem
        assert "whether these were the fix" in found.note
        assert "may differ" in history.order(history.later, dirty=True).note

    def test_a_rebased_or_picked_fix_has_its_files(self, history: History) -> None:
        git(history.root, "checkout", "-q", "-b", "side", history.broken)
        history.commit("11:30", other="2")
        git(history.root, "cherry-pick", history.fixed)
        assert history.order(git(history.root, "rev-parse", "HEAD")) == Order()

    def test_a_branch_without_the_fix_does_not(self, history: History) -> None:
        git(history.root, "checkout", "-q", "-b", "side", history.broken)
        assert "does not have the fix" in history.order(history.commit("14:00", other="2")).problem

    def test_a_branch_with_another_state_of_its_files_is_not_judged(self, history: History) -> None:
        git(history.root, "checkout", "-q", "-b", "side", history.broken)
        found = history.order(history.commit("14:00", code="fixed otherwise"))
        assert not found.problem
        assert "cannot be told" in found.note

    def test_the_commit_before_that_of_the_case_is_the_fix_where_head_is_given_for_it(self, history: History) -> None:
        history.fixed = history.commit("14:00", **{"debug-cases.md": "the card"})
        assert history.order(history.later) == Order()


class TestByTime:
    def test_created_before_the_fix_shows_nothing_of_it(self, history: History) -> None:
        found = history.order(created="11:59")
        assert found.problem == (
            f"the capsule was created 2026-11-29T11:59:00Z and the fix {history.fixed[:12]} committed "
            "2026-11-29T12:00:00Z, so it was recorded before the fix (it holds no revision of the job); "
            "record one with the fix committed"
        )
        assert history.order("0" * 40, created="11:00").problem, "a revision of another repository leaves the time"

    def test_created_after_it_passes_and_says_what_is_not_known(self, history: History) -> None:
        assert "holds no revision of the job" in history.order(created="12:01").note
        found = history.order("0123456789" * 4, created="12:01")
        assert not found.problem
        assert "its revision 0123456789" in found.note

    @pytest.mark.parametrize("name", ["HEAD", "main", "--all", "HEAD~0"])
    def test_a_name_is_no_revision(self, history: History, name: str) -> None:
        assert history.order(name, created="11:00").problem

    def test_clocks_of_two_hosts_tell_no_minutes(self, history: History) -> None:
        for clock in ("11:57", "12:03"):
            found = history.order(created=clock, here=False)
            assert not found.problem
            assert "clocks of two hosts" in found.note
        assert history.order(created="11:50", here=False).problem

    def test_a_rebase_does_not_make_the_fix_younger(self, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-11-30T00:00:00Z")
        monkeypatch.delenv("GIT_AUTHOR_DATE")
        git(history.root, "checkout", "-q", "-b", "side", history.broken)
        git(history.root, "cherry-pick", history.fixed)
        history.fixed = git(history.root, "rev-parse", "HEAD")
        assert not history.order(created="13:00").problem

    @pytest.mark.parametrize("created", ["", "yesterday", "9999-99-99", "0001-01-01T00:00:00+23:59"])
    def test_no_time_is_said(self, history: History, created: str) -> None:
        found = order(Recorded(created=created), Repository(history.root), history.broken, history.fixed)
        assert not found.problem
        assert found.note.endswith("cannot be told: it holds no revision of the job, and no time")


class TestItem:
    def equivalence(self, history: History, **manifest: Any) -> Result:
        path = history.root / "after.capsule"
        with CapsuleWriter(path, phase="training", manifest=manifest) as writer:
            writer.scalars("loss", step=range(60), value=[2.0 - i / 100 for i in range(60)])
        return self.of(history, path)

    def of(self, history: History, path: Path) -> Result:
        text = f"[regression]\nbroken = 'x'\ncommand = 'x'\n[equivalence]\ncapsule = '{path}'\nrules = ['numerics/a']\n"
        skipped = "".join(f"[{name}]\nskip = 'x'\n" for name in ("neighbours", "performance", "faults", "documents"))
        repository = Repository(history.root)

        def analyze(path: Path, rules: list[str]) -> tuple[dict[str, Any], str, Recorded]:
            report = {"findings": [], "skipped": [], "errors": [], "quiet": rules}
            return report, Capsule.open(path).digest(), Recorded(**describe(str(path))["recorded"])

        with Workshop(repository) as workshop:
            bench = Bench(repository, workshop, history.broken, history.fixed, OWN, analyze)
            return run_item("equivalence", parse(text + skipped, "gates/x.toml"), bench)

    def test_recorded_on_the_broken_revision_it_is_no_pass(self, history: History) -> None:
        found = self.equivalence(history, run={"code": {"commit": history.broken, "dirty": False}})
        assert found.verdict == "error"
        assert "before the fix" in found.words

    def test_recorded_on_the_fix_it_passes_without_a_note(self, history: History) -> None:
        found = self.equivalence(history, run={"code": {"commit": history.fixed, "dirty": False}})
        assert (found.verdict, found.words) == ("passed", "1 rules ran and are quiet")
        assert "note" not in found.baseline["recorded"]

    def test_recorded_outside_git_before_the_fix_it_is_no_pass(self, history: History) -> None:
        found = self.equivalence(history, created="2026-11-28T12:00:00Z")
        assert found.verdict == "error"
        assert "so it was recorded before the fix" in found.words

    def test_an_import_passes_with_a_note_in_the_record(self, history: History, tmp_path: Path) -> None:
        log = tmp_path / "log.csv"
        log.write_text("step,loss\n" + "".join(f"{step},{2 - step / 100}\n" for step in range(60)))
        found = self.of(history, import_files([log], tmp_path / "imported.capsule", attach=False))
        assert found.verdict == "passed"
        assert "; note: whether the capsule was recorded after the fix cannot be told" in found.words
        assert found.baseline["recorded"]["note"] in found.words
        assert found.baseline["recorded"]["created"] == ""


class TestCapsuleOfTheCard:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        for name in ("first", "second"):
            with CapsuleWriter(tmp_path / "runs" / f"{name}.capsule") as writer:
                writer.scalars("loss", step=[0], value=[1.0])
        return tmp_path

    def test_the_newest_occurrence_whose_capsule_is_here(self, made: Path) -> None:
        first, second = (Capsule.open(made / "runs" / f"{name}.capsule").id for name in ("first", "second"))
        told = f"- 2026-11-28 run a, capsule {first}, fixed by abc\n- 2026-11-29 run b, capsule {second}, fixed by abc"
        assert capsule_of(told, made) == made / "runs" / "second.capsule"
        shutil.rmtree(made / "runs" / "second.capsule")
        assert capsule_of(told, made) == made / "runs" / "first.capsule"
        shutil.rmtree(made / "runs" / "first.capsule")
        assert capsule_of(told, made) is None

    def test_a_path_by_hand(self, made: Path) -> None:
        assert capsule_of("2026-11-29 capsule runs/first.capsule, again", made) == made / "runs" / "first.capsule"
        assert capsule_of("2026-11-29 capsule runs/third.capsule", made) is None
        assert capsule_of("seen twice", made) is None
