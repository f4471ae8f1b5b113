"""An incident becomes a committed case, whole or not at all, in every kind of repository people have."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from llmconsole.app.casebook import cards, resolve
from llmconsole.app.casebook.incident import IncidentError
from llmconsole.app.casebook.resolve import Incident, ResolveError, Statement
from llmconsole.app.casebook.store import Repository, StoreError

from ..conftest import IDENTITY, git, make_repository

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
STATEMENT = Statement(
    case="labels-not-shifted",
    title="Labels are not shifted",
    case_class="not-converging",
    root_cause="nobody shifts",
    trigger="a new collator",
    fix_commit="HEAD",
    regression_test="tests/test_labels.py::TestLabels::test_shift",
    prevention="one place shifts",
)


@pytest.fixture
def incident(tmp_path: Path) -> Incident:
    """A capsule's own words, and its directory."""
    path = tmp_path / "run.capsule"
    path.mkdir()
    return Incident(
        path=path,
        id="01JDV",
        sha256="ab" * 32,
        status="sealed",
        run="sft-7b",
        step=0,
        rules=("objective/labels-not-shifted",),
        symptom="the reported loss 0.03 is that of unshifted labels",
    )


@pytest.fixture(autouse=True)
def here(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)


def resolve_now(incident: Incident, **changes: str) -> str:
    return resolve.commit(resolve.plan(dataclasses.replace(STATEMENT, **changes), incident, now=NOW))


def state_of(repository: Path) -> tuple[str, str, str]:
    """What a failure must not change: the index, the work tree, the history."""
    status = git(repository, "status", "--porcelain=v1", "--untracked-files=all")
    staged = git(repository, "diff", "--cached")
    return status, staged, git(repository, "rev-list", "--all")


class TestANewCase:
    def test_becomes_a_section_in_a_commit_of_its_own(self, repository: Path, incident: Incident):
        fix = git(repository, "rev-parse", "HEAD")
        sha = resolve_now(incident)
        assert sha == git(repository, "rev-parse", "HEAD")
        assert git(repository, "show", "--format=", "--name-only", "HEAD") == "debug-cases.md"
        (card,) = cards.parse((repository / "debug-cases.md").read_text())
        assert {field.name: field.value for field in card.fields} == {
            "Class": "not-converging",
            "Rules": "objective/labels-not-shifted",
            "Symptom": "the reported loss 0.03 is that of unshifted labels",
            "Root cause": "nobody shifts",
            "Trigger": "a new collator",
            "Fix": f"Shift the labels once (commit {fix[:12]})",
            "Prevention": "one place shifts",
            "Regression test": "tests/test_labels.py::TestLabels::test_shift",
            "Occurrences": f"2026-11-29 run sft-7b, step 0, capsule 01JDV, fixed by {fix[:12]}",
        }

    def test_carries_the_three_trailers(self, repository: Path, incident: Incident):
        resolve_now(incident)
        trailers = git(repository, "log", "-1", "--format=%(trailers:only,unfold)")
        assert trailers == f"Case-Id: labels-not-shifted\nCapsule-Sha256: {'ab' * 32}\nGate-Result: not-run"

    def test_marks_the_incident_as_fixed_and_keeps_what_it_does_not_know(self, repository: Path, incident: Incident):
        (incident.path / "incident.json").write_text('{"status": "open", "remarks": ["mine"]}')
        sha = resolve_now(incident)
        record = json.loads((incident.path / "incident.json").read_text())
        assert record["status"] == "fixed"
        assert record["case"] == "labels-not-shifted"
        assert record["case_commit"] == sha
        assert record["fix_commit"] == git(repository, "rev-parse", "HEAD~1")
        assert record["remarks"] == ["mine"]

    def test_does_not_write_through_a_link_that_a_stranger_put_there(
        self, repository: Path, incident: Incident, tmp_path: Path
    ):
        (tmp_path / "victim").write_text("precious")
        (incident.path / "incident.json").symlink_to(tmp_path / "victim")
        with pytest.raises(IncidentError, match=r"incident\.json cannot be used: is a symbolic link"):
            resolve_now(incident)
        assert (tmp_path / "victim").read_text() == "precious"
        assert not (repository / "debug-cases.md").exists()

    def test_the_plan_shows_what_the_commit_then_holds_and_writes_nothing(self, repository: Path, incident: Incident):
        before = state_of(repository)
        planned = resolve.plan(STATEMENT, incident, now=NOW)
        assert state_of(repository) == before
        resolve.commit(planned)
        shown = [line for line in planned.diff.splitlines() if line.startswith(("+", "-"))]
        committed = git(repository, "show", "--format=", "HEAD").splitlines()
        assert shown == [line for line in committed if line.startswith(("+", "-"))]
        assert git(repository, "log", "-1", "--format=%B").strip() == planned.message.strip()


class TestAKnownCase:
    def test_gains_an_occurrence_and_nothing_else(self, repository: Path, incident: Incident):
        resolve_now(incident)
        before = (repository / "debug-cases.md").read_text()
        again = dataclasses.replace(incident, id="02ABC", run="", step=None)
        resolve.commit(resolve.plan(Statement(case=STATEMENT.case, fix_commit="HEAD~1"), again, now=NOW))
        after = (repository / "debug-cases.md").read_text()
        fix = git(repository, "rev-parse", "HEAD~2")[:12]
        assert after == before + f"  - 2026-11-29, capsule 02ABC, fixed by {fix}\n"

    def test_is_completed_where_a_field_was_missing(self, repository: Path, incident: Incident):
        (repository / "debug-cases.md").write_text("## labels-not-shifted · Mine\n\n- **Class:** not-converging\n")
        resolve_now(incident)
        (card,) = cards.parse((repository / "debug-cases.md").read_text())
        assert card.title == "Mine"
        assert card.get("Root cause") == "nobody shifts"


class TestRefusals:
    def test_everything_missing_is_named_at_once(self, incident: Incident):
        with pytest.raises(ResolveError) as caught:
            resolve.plan(Statement(case="Bad Id"), dataclasses.replace(incident, symptom=""), now=NOW)
        for name in ("--title", "--class", "--root-cause", "--trigger", "--fix-commit", "--regression-test"):
            assert name in str(caught.value)
        assert "--prevention are missing" in str(caught.value)
        assert "'Bad Id' is no case id" in str(caught.value)
        assert "--symptom" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"fix_commit": "--output=x"}, "is no commit"),
            ({"fix_commit": "0123456789"}, "is no commit"),
            ({"fix_commit": "HEAD:train.py"}, "is no commit"),
            ({"case_class": "bad luck"}, "is none of"),
            ({"regression_test": "tests/nothing.py::test_x"}, "no such file"),
            ({"regression_test": "tests/test_labels.py::test_other"}, "holds no such test"),
            ({"regression_test": "tests/test_labels.py::TestLabels::test_alone"}, "holds no such test"),
            ({"regression_test": "../elsewhere.py::test_x"}, "no such file"),
            ({"regression_test": "/etc/passwd"}, "no such file"),
        ],
    )
    def test_what_is_wrong_is_named(self, incident: Incident, change: dict[str, str], complaint: str):
        with pytest.raises(ResolveError, match=complaint):
            resolve.plan(dataclasses.replace(STATEMENT, **change), incident, now=NOW)

    def test_a_commit_that_files_a_case_is_no_fix(self, incident: Incident):
        resolve_now(incident)
        words = "files the case labels-not-shifted and fixes nothing; name the commit of the fix"
        with pytest.raises(ResolveError, match=words) as caught:
            resolve.plan(dataclasses.replace(STATEMENT, case="another"), incident, now=NOW)
        assert list(caught.value.fields) == ["fix_commit"]

    def test_a_test_that_is_not_committed_does_not_count(self, repository: Path, incident: Incident):
        (repository / "tests" / "test_new.py").write_text("def test_new(): pass\n")
        with pytest.raises(ResolveError, match="not committed yet"):
            resolve.plan(
                dataclasses.replace(STATEMENT, regression_test="tests/test_new.py::test_new"), incident, now=NOW
            )

    def test_a_run_that_still_records_is_not_resolved(self, incident: Incident):
        with pytest.raises(ResolveError, match="still recording"):
            resolve.plan(STATEMENT, dataclasses.replace(incident, status="recording"), now=NOW)

    def test_outside_a_repository_the_way_in_is_named(self, incident: Incident, tmp_path: Path):
        with pytest.raises(StoreError, match=r"not inside a git repository.*--repo"):
            resolve.plan(STATEMENT, incident, repo=tmp_path, now=NOW)


class TestTheCommit:
    def test_leaves_staged_and_unstaged_work_alone(self, repository: Path, incident: Incident):
        (repository / "staged.py").write_text("staged\n")
        git(repository, "add", "staged.py")
        (repository / "train.py").write_text("in the middle of something\n")
        before = state_of(repository)[:2]
        resolve_now(incident)
        assert state_of(repository)[:2] == before

    def test_a_hook_that_refuses_leaves_index_and_file_as_they_were(self, repository: Path, incident: Incident):
        hook = repository / ".git" / "hooks" / "pre-commit"
        hook.write_text("#!/bin/sh\necho 'no \x1b[31mcases\x1b[0m on Friday' >&2\nexit 1\n")
        hook.chmod(0o755)
        (repository / "staged.py").write_text("staged\n")
        git(repository, "add", "staged.py")
        before = state_of(repository)
        with pytest.raises(StoreError, match=r"cases.* on Friday") as caught:
            resolve_now(incident)
        assert "\x1b" not in str(caught.value)
        assert state_of(repository) == before
        assert not (repository / "debug-cases.md").exists()
        assert not (incident.path / "incident.json").exists()

    def test_a_hook_that_refuses_restores_the_bytes_of_a_file_that_was_there(
        self, repository: Path, incident: Incident
    ):
        log = repository / "debug-cases.md"
        log.write_bytes(b"# Mine\r\n\xff\r\n")
        git(repository, "add", "debug-cases.md")
        git(repository, "commit", "-q", "-m", "log")
        log.write_bytes(b"# Mine\r\n\xff\r\nnot committed")
        hook = repository / ".git" / "hooks" / "commit-msg"
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
        before = state_of(repository)
        with pytest.raises(StoreError):
            resolve_now(incident)
        assert log.read_bytes() == b"# Mine\r\n\xff\r\nnot committed"
        assert state_of(repository) == before

    def test_a_hook_that_rewrites_the_new_file_and_refuses_leaves_it_out_of_the_index(
        self, repository: Path, incident: Incident
    ):
        hook = repository / ".git" / "hooks" / "pre-commit"
        hook.write_text("#!/bin/sh\necho >> debug-cases.md\nexit 1\n")
        hook.chmod(0o755)
        before = state_of(repository)
        with pytest.raises(StoreError):
            resolve_now(incident)
        assert state_of(repository) == before

    def test_lines_that_begin_with_a_number_sign_are_committed_as_shown(self, repository: Path, incident: Incident):
        git(repository, "config", "commit.cleanup", "strip")
        planned = resolve.plan(dataclasses.replace(STATEMENT, symptom="#1 " * 60), incident, now=NOW)
        resolve.commit(planned)
        assert git(repository, "log", "-1", "--format=%B").strip() == planned.message.strip()

    def test_changes_that_nobody_committed_are_part_of_the_diff_that_is_shown(
        self, repository: Path, incident: Incident
    ):
        resolve_now(incident)
        log = repository / "debug-cases.md"
        log.write_text(log.read_text() + "\nA note of mine.\n")
        another = dataclasses.replace(STATEMENT, case="another", fix_commit="HEAD~1")
        planned = resolve.plan(another, incident, now=NOW)
        assert "+A note of mine." in planned.diff
        assert planned.uncommitted

    def test_signing_that_fails_is_told_and_nothing_stays(self, repository: Path, incident: Incident):
        git(repository, "config", "commit.gpgsign", "true")
        git(repository, "config", "gpg.program", "/nonexistent/gpg")
        before = state_of(repository)
        with pytest.raises(StoreError, match="gpg"):
            resolve_now(incident)
        assert state_of(repository) == before

    def test_without_an_identity_the_line_says_how_to_get_one(
        self, repository: Path, incident: Incident, monkeypatch: pytest.MonkeyPatch
    ):
        for name in IDENTITY:
            monkeypatch.delenv(name)
        git(repository, "config", "user.useConfigOnly", "true")
        before = state_of(repository)
        with pytest.raises(StoreError, match=r"does not know who commits: git config --global user\.name"):
            resolve_now(incident)
        assert state_of(repository) == before

    def test_a_held_index_is_waited_for_and_then_named(self, repository: Path, incident: Incident):
        (repository / ".git" / "index.lock").touch()
        before = state_of(repository)
        with pytest.raises(StoreError, match=r"another git process holds .*index\.lock"):
            resolve_now(incident)
        (repository / ".git" / "index.lock").unlink()
        assert state_of(repository) == before

    def test_works_in_a_linked_work_tree(self, repository: Path, incident: Incident, monkeypatch: pytest.MonkeyPatch):
        tree = repository.parent / "linked tree"
        git(repository, "worktree", "add", "-q", str(tree), "-b", "other")
        monkeypatch.chdir(tree / "tests")
        sha = resolve_now(incident)
        assert git(tree, "rev-parse", "other") == sha
        assert not (repository / "debug-cases.md").exists()

    def test_the_log_may_lie_in_a_repository_without_commits(
        self, incident: Incident, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        notes = tmp_path / "notes"
        notes.mkdir()
        git(notes, "init", "-q")
        monkeypatch.setenv("LLMCONSOLE_CASES", str(notes))
        sha = resolve_now(incident)
        assert git(notes, "rev-parse", "HEAD") == sha
        assert git(notes, "ls-files") == "debug-cases.md"

    def test_a_refusal_in_a_repository_without_commits_leaves_it_empty(
        self, incident: Incident, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        notes = tmp_path / "notes"
        notes.mkdir()
        git(notes, "init", "-q")
        hook = notes / ".git" / "hooks" / "pre-commit"
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
        monkeypatch.setenv("LLMCONSOLE_CASES", str(notes / "debug-cases.md"))
        with pytest.raises(StoreError):
            resolve_now(incident)
        assert git(notes, "status", "--porcelain") == ""

    def test_line_ends_that_git_converts_do_not_fill_the_diff(self, repository: Path, incident: Incident):
        git(repository, "config", "core.autocrlf", "true")
        log = repository / "debug-cases.md"
        log.write_bytes(b"# Mine\r\n\r\nText.\r\n")
        git(repository, "add", "debug-cases.md")
        git(repository, "commit", "-q", "-m", "log")
        planned = resolve.plan(STATEMENT, incident, now=NOW)
        assert not [line for line in planned.diff.splitlines() if line.startswith("-") and not line.startswith("---")]
        resolve.commit(planned)
        assert b"\n" not in log.read_bytes().replace(b"\r\n", b"")

    def test_an_ignored_log_is_not_forced_in(self, repository: Path, incident: Incident):
        (repository / ".gitignore").write_text("debug-cases.md\n")
        with pytest.raises(StoreError, match="ignored"):
            resolve_now(incident)
        assert not (repository / "debug-cases.md").exists()


def _resolve_in_a_process(repository: Path, capsule: Path, case: str, barrier: object) -> None:
    os.chdir(repository)
    incident = Incident(path=capsule, id=case, sha256="00", status="sealed", symptom="s")
    planned = resolve.plan(dataclasses.replace(STATEMENT, case=case), incident, now=NOW)
    barrier.wait()  # both have shown their diff before either writes
    resolve.commit(planned)


class TestTwoAtOnce:
    def test_no_card_is_lost(self, repository: Path, incident: Incident):
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(2)
        arguments = [(repository, incident.path, case, barrier) for case in ("case-a", "case-b")]
        processes = [context.Process(target=_resolve_in_a_process, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        ids = {card.id for card in cards.parse((repository / "debug-cases.md").read_text())}
        assert ids == {"case-a", "case-b"}
        assert len(git(repository, "rev-list", "HEAD").splitlines()) == 4
        assert git(repository, "status", "--porcelain") == ""

    def test_the_same_new_case_by_another_hand_is_not_written_over(self, repository: Path, incident: Incident):
        planned = resolve.plan(STATEMENT, incident, now=NOW)
        resolve_now(incident)
        before = state_of(repository)
        with pytest.raises(ResolveError, match="changed since the diff was shown"):
            resolve.commit(planned)
        assert state_of(repository) == before

    def test_what_was_typed_into_the_log_after_the_diff_was_shown_is_not_committed_unseen(
        self, repository: Path, incident: Incident
    ):
        planned = resolve.plan(STATEMENT, incident, now=NOW)
        (repository / "debug-cases.md").write_text("a secret\n")
        with pytest.raises(ResolveError, match="changed since the diff was shown"):
            resolve.commit(planned)
        assert (repository / "debug-cases.md").read_text() == "a secret\n"


class TestTheRepository:
    def test_names_only_commits(self, repository: Path):
        store = Repository(repository)
        assert store.commit_id("HEAD") == git(repository, "rev-parse", "HEAD")
        assert store.commit_id("HEAD^{tree}") is None
        assert store.commit_id("") is None
        assert store.commit_id("HEAD\x00") is None

    def test_is_the_one_that_was_named_also_within_a_hook_of_another(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        git(tmp_path, "init", "-q", "other")
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
        monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
        store = Repository(repository)
        assert store.root == repository
        assert store.tracked("train.py")

    def test_a_path_outside_or_inside_dot_git_is_refused(self, repository: Path, tmp_path: Path):
        store = Repository(repository)
        with pytest.raises(StoreError, match="outside"):
            store.relative(tmp_path / "elsewhere.md")
        with pytest.raises(StoreError, match=r"inside \.git"):
            store.relative(repository / ".git" / "config")

    def test_a_bare_repository_is_no_place_for_a_log(self, tmp_path: Path):
        git(tmp_path, "init", "-q", "--bare", "bare.git")
        with pytest.raises(StoreError, match="bare"):
            Repository(tmp_path / "bare.git")

    def test_no_git_process_is_left_behind(self, repository: Path, incident: Incident):
        resolve_now(incident)
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        names = [Path(f"/proc/{child}/comm").read_text().strip() for child in children]
        assert "git" not in names


def test_two_repositories_can_be_made(tmp_path: Path):
    assert git(make_repository(tmp_path / "one"), "log", "-1", "--format=%s") == "Shift the labels once"
