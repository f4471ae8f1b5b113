"""The gate in repositories as people have them: hooks, submodules, ignored files, floods of output, a killed commit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.casebook.gate import outcomes
from llmconsole.app.casebook.gate.gate import Gate, GateError
from llmconsole.app.casebook.gate.outcomes import OutcomeError
from llmconsole.app.casebook.gate.plan import ITEMS, PlanError, parse
from llmconsole.app.casebook.gate.record import RecordError, sha256, verify
from llmconsole.app.casebook.gate.workshop import Workshop
from llmconsole.app.casebook.store import Repository, StoreError
from llmconsole.app.worker import Worker
from llmconsole.capsules import Capsule, CapsuleWriter

from ..conftest import IDENTITY, git
from .test_gate import CASE, Made, wait_until

RECORD = f"gates/{CASE}.json"


@pytest.fixture(scope="module")
def worker() -> Any:
    with Worker() as worker:
        yield worker


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A gate that only looks into documents, so that nothing but git is run."""
    made = Made(tmp_path / "work")
    made.plan = {name: {"skip": "not asked here"} for name in ITEMS} | {"documents": made.plan["documents"]}
    made.plan["regression"] = {"skip": "not asked here", "broken": made.broken, "fixed": made.fixed}
    return made


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, worker: Worker) -> Path:
    """A repository whose gate passed, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in IDENTITY.items():
            patch.setenv(name, value)
        made = Made(tmp_path_factory.mktemp("gate") / "gated")
        made.plan = {name: {"skip": "not asked here"} for name in ITEMS} | {"documents": made.plan["documents"]}
        made.plan["regression"] = {"skip": "not asked here", "broken": made.broken, "fixed": made.fixed}
        made.run(worker)
        return made.root


@pytest.fixture
def passed(made: Made, gated: Path) -> Made:
    shutil.rmtree(made.root)
    shutil.copytree(gated, made.root)
    return made


def hook(root: Path, name: str, body: str) -> None:
    file = root / ".git" / "hooks" / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


class TestHooks:
    def test_one_that_rewrites_the_files_and_refuses_changes_nothing(self, made: Made, worker: Worker) -> None:
        hook(made.root, "pre-commit", "for f in gates/* debug-cases.md; do echo >> $f; done; echo fixed it >&2; exit 1")
        made.gate()
        before = made.state(), git(made.root, "ls-files", "--stage")
        with pytest.raises(StoreError, match="fixed it"):
            Gate(CASE, made.root).run(worker)
        assert (made.state(), git(made.root, "ls-files", "--stage")) == before

    def test_one_that_rewrites_the_record_is_told(self, made: Made, worker: Worker) -> None:
        hook(made.root, "pre-commit", f"echo >> {RECORD}; git add {RECORD}")
        gate = made.gate()
        assert gate.run(worker).outcome == "passed-with-exceptions"
        assert "committed and does not hold" in gate.warning

    def test_killed_while_one_runs_nothing_is_committed_and_the_files_are_as_they_were(self, made: Made) -> None:
        begun = made.root.parent / "begun"
        hook(made.root, "pre-commit", f"touch '{begun}'; sleep 600")
        made.gate()
        before = made.state(), git(made.root, "ls-files", "--stage")
        command = [sys.executable, "-m", "llmconsole.app.cli", "gate", "run", CASE]
        process = subprocess.Popen(command, cwd=made.root, stderr=subprocess.DEVNULL)
        wait_until(lambda: begun.exists() or process.poll() is not None)
        assert "debug-cases.md" in git(made.root, "status", "--porcelain"), "it was killed too early to show anything"
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: (made.state(), git(made.root, "ls-files", "--stage")) == before)
        assert not (made.root / ".git" / "index.lock").exists()


class TestWhatCouldNotBeCommittedIsSaidBeforeAnythingRuns:
    def test_a_log_that_lies_elsewhere(
        self, made: Made, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copy(made.root / "debug-cases.md", tmp_path / "log.md")
        monkeypatch.setenv("LLMCONSOLE_CASES", str(tmp_path / "log.md"))
        with pytest.raises(GateError, match="lies outside"):
            made.run(worker)

    def test_gates_that_are_ignored(self, made: Made, worker: Worker) -> None:
        made.write(".gitignore", "gates/\n")
        made.commit("Ignore")
        with pytest.raises(GateError, match="excluded by an ignore rule"):
            made.run(worker)

    def test_a_merge_in_progress(self, made: Made, worker: Worker) -> None:
        (made.root / ".git" / "MERGE_HEAD").write_text(f"{made.broken}\n")
        with pytest.raises(GateError, match="a merge is unfinished"):
            made.run(worker)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("".join(f'[{name}]\nskip = "x"\n' for name in ITEMS), "every item is skipped"),
            ("[faults]\ntimeout = inf", "timeout"),
            ("[performance]\ntolerance = nan", "tolerance"),
            ('[regression]\njunit = "../x.xml"', "does not lie in the tree"),
        ],
    )
    def test_a_file_that_asks_for_nothing(self, text: str, words: str) -> None:
        with pytest.raises(PlanError, match=words):
            parse(text, "gates/x.toml")


class TestVerify:
    def forged(self, passed: Made, *, also: dict[str, str] | None = None, **changes: str) -> str:
        """A record changed with all its digests and trailers, by someone who knows how."""
        file = passed.root / RECORD
        file.write_bytes(file.read_bytes().replace(changes["old"].encode(), changes["new"].encode()))
        for name, text in (also or {}).items():
            passed.write(name, text)
        message = git(passed.root, "log", "-1", "--format=%B")
        passed.commit(message.rpartition("Gate-Sha256")[0] + f"Gate-Sha256: {sha256(file.read_bytes())}\n")
        with pytest.raises(RecordError) as refused:
            verify(Repository(passed.root), CASE)
        return str(refused.value)

    def test_a_commit_that_changes_other_files_too_is_not_the_gates(self, passed: Made) -> None:
        words = self.forged(passed, old='"version":"', new='"version":"9', also={"loss.py": "pass\n"})
        assert "also changes loss.py" in words

    def test_a_name_that_is_not_that_of_its_commit(self, passed: Made) -> None:
        assert "was made by Eve <ada@example.org>, and commit" in self.forged(passed, old="Ada", new="Eve")

    def test_a_shallow_clone_is_told_what_it_lacks(self, passed: Made, tmp_path: Path) -> None:
        git(tmp_path, "clone", "-q", "--depth=1", f"file://{passed.root}", "clone")
        with pytest.raises(RecordError, match="git fetch --unshallow"):
            verify(Repository(tmp_path / "clone"), CASE)

    def test_parts_that_contradict_each_other(self, passed: Made) -> None:
        assert "contradict" in self.forged(passed, old='"result":"WARNED"', new='"result":"PASSED"')

    def test_a_card_that_says_otherwise(self, passed: Made) -> None:
        log = (passed.root / "debug-cases.md").read_text().replace("· passed", "· not passed")
        words = self.forged(
            passed, old='"version":"', new='"version":"9', also={"debug-cases.md": log.replace(RECORD, "gates/x.json")}
        )
        assert "the card in its commit gates/x.json" in words

    def test_a_capsule_at_hand_that_is_another_one_now(self, made: Made, worker: Worker) -> None:
        with CapsuleWriter(made.root / "after.capsule", phase="training") as writer:
            writer.scalars("loss", step=range(60), value=[2.0 - i / 100 for i in range(60)])
        made.plan["equivalence"] = {"capsule": "after.capsule", "rules": ["numerics/loss-nonfinite"]}
        made.run(worker)
        right = Capsule.open(made.root / "after.capsule").digest()
        assert verify(Repository(made.root), CASE, lambda _: right).case == CASE
        with pytest.raises(RecordError, match=r"of another capsule than after\.capsule is now"):
            verify(Repository(made.root), CASE, lambda _: "0" * 64)

    def test_a_clone_with_other_line_ends_holds(self, passed: Made, tmp_path: Path) -> None:
        git(tmp_path, "-c", "core.autocrlf=true", "clone", "-q", str(passed.root), "clone")
        git(tmp_path / "clone", "config", "core.autocrlf", "true")
        assert b"\r\n" in (tmp_path / "clone" / RECORD).read_bytes()
        assert verify(Repository(tmp_path / "clone"), CASE).case == CASE

    def test_settings_that_change_what_git_prints(self, passed: Made) -> None:
        for name in ("log.showSignature", "log.follow", "diff.noprefix"):
            git(passed.root, "config", name, "true")
        assert verify(Repository(passed.root), CASE).case == CASE


class TestTheWorkshop:
    def test_has_the_submodules_that_are_here_and_leaves_nothing_of_them(self, made: Made, tmp_path: Path) -> None:
        library = tmp_path / "library"
        library.mkdir()
        git(library, "init", "-q")
        (library / "lib.py").write_text("x = 1\n")
        git(library, "add", ".")
        git(library, "commit", "-q", "-m", "Library")
        git(made.root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "dep/lib")
        commit = made.commit("Use it")
        with Workshop(Repository(made.root)) as workshop:
            assert (workshop.tree(commit) / "dep" / "lib" / "lib.py").read_text() == "x = 1\n"
        for place in (made.root, made.root / "dep" / "lib"):
            assert git(place, "worktree", "list").count("\n") == 0
        assert not workshop.directory.exists()

    def test_lets_a_work_tree_of_the_users_be_whose_disk_is_away(self, made: Made, tmp_path: Path) -> None:
        git(made.root, "worktree", "add", "-q", str(tmp_path / "stick"), "-b", "stick")
        (tmp_path / "stick").rename(tmp_path / "unplugged")
        hook(made.root, "post-checkout", f"touch '{tmp_path / 'ran'}'; exit 1")
        with Workshop(Repository(made.root)) as workshop:
            workshop.tree(made.fixed)
        assert "stick" in git(made.root, "worktree", "list")
        assert not (tmp_path / "ran").exists(), "hooks are for the trees in which people work"

    def test_is_not_held_by_children_that_write_for_ever_and_removes_what_they_locked(
        self, made: Made, tmp_path: Path
    ) -> None:
        with Workshop(Repository(made.root)) as workshop:
            begun = time.monotonic()
            flood = "mkdir -p ro/x; touch ro/x/y; chmod 500 ro/x ro; setsid yes & read line; exit 3"
            ran = workshop.run(f"bash -c '{flood}'", workshop.tree(made.fixed), 60)
            assert ran.status == 3
            assert len(ran.output) <= 16_384
            assert time.monotonic() - begun < 30
            own = tmp_path / "own.sh"
            own.write_text("#!/bin/sh\necho mine\n")
            own.chmod(0o755)
            os.rename(own, made.root / "own.sh")
            assert workshop.run("./own.sh", workshop.tree(made.fixed), 60).output == "mine\n", (
                "an environment in no commit"
            )
        assert not workshop.directory.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE a [<!ENTITY b 'c'>]><testsuite/>", "declares entities"),
        ("<?xml version='1.0' encoding='utf-16'?><!DOCTYPE a><testsuite/>".encode("utf-16"), "UTF-16"),
        (b"", "cannot be read"),
    ],
)
def test_test_results_that_are_no_test_results(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "junit.xml").write_bytes(content)
    with pytest.raises(OutcomeError, match=words):
        outcomes.read(tmp_path / "junit.xml")


def test_names_of_tests_are_one_line_and_a_test_that_is_expected_to_fail_is_not_red(tmp_path: Path) -> None:
    row = "<testcase name='x&#10;&#10;Case-Id: evil'><skipped type='pytest.xfail' message='known'/></testcase>"
    (tmp_path / "junit.xml").write_text(f"<testsuite>{row}</testsuite>")
    tests = outcomes.read(tmp_path / "junit.xml")
    assert tests[0].name == "x Case-Id: evil"
    judged = outcomes.judge_regression(tests, (outcomes.Test("x", "passed"),), 0)
    assert (judged.verdict, judged.words) == (
        "error",
        "not red: every test (1) is skipped or expected to fail on the broken revision",
    )
