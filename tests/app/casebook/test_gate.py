"""The gate over real small repositories with real commits: each way to pass or not has words of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.casebook import cards
from llmconsole.app.casebook.gate import performance
from llmconsole.app.casebook.gate.gate import Gate, GateError
from llmconsole.app.casebook.gate.items import Result
from llmconsole.app.casebook.gate.plan import ITEMS, PlanError, parse
from llmconsole.app.casebook.gate.record import Facts, RecordError, canonical, junit, statement, verify
from llmconsole.app.casebook.store import Repository
from llmconsole.app.worker import Worker
from llmconsole.capsules import Capsule, CapsuleWriter

from ..conftest import IDENTITY, git

CASE = "loss-counts-padding"
NODE = "tests/test_loss.py::test_padding_is_not_counted"
PYTEST = f"{sys.executable} -m pytest -q"

BROKEN = "def mean(losses, mask):\n    return sum(losses) / len(losses)\n"
FIXED = "def mean(losses, mask):\n    kept = [x for x, m in zip(losses, mask) if m]\n    return sum(kept) / len(kept)\n"
TEST = "from loss import mean\n\ndef test_padding_is_not_counted():\n    assert mean([2.0, 0.0], [1, 0]) == 2.0\n"
NEIGHBOURS = "from loss import mean\n\ndef test_no_padding():\n    assert mean([1.0, 3.0], [1, 1]) == 2.0\n"
DOCUMENT = "# Loss\n\nPadding is not\ncounted. Rows of at most 8,192 tokens. Since 2.3.1.\n"
CARD = f"""# Debug cases

## {CASE} · The loss counts padding

- **Class:** not-converging
- **Rules:** objective/uniform-guess
- **Fix:** leave padding out (commit FIX)
- **Regression test:** {NODE}
"""


class Made:
    """A repository with the fault, the fix and its test, the card, and a gate that passes; changes are made from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        git(root, "init", "-q", "-b", "main")
        self.write("loss.py", BROKEN)
        self.write("README.md", "words\n")
        self.broken = self.commit("Mean of the losses")
        self.write("loss.py", FIXED)
        self.write("tests/test_loss.py", TEST)
        self.write("tests/test_neighbours.py", NEIGHBOURS)
        self.write("docs/loss.md", DOCUMENT)
        self.fixed = self.commit("Leave padding out")
        self.write("debug-cases.md", CARD.replace("FIX", self.fixed[:12]))
        self.commit("Resolve the case")
        self.plan: dict[str, Any] = {
            "regression": {"command": f"{PYTEST} {NODE}", "broken": self.broken, "fixed": self.fixed,
                           "files": ["tests/test_loss.py"]},
            "neighbours": {"command": f"{PYTEST} tests/test_neighbours.py"},
            "equivalence": {"command": f"{sys.executable} -c 'import loss; assert loss.mean([2, 0], [1, 0]) == 2'"},
            "performance": {"skip": "too small to time"},
            "faults": {"command": f"{PYTEST} tests/test_neighbours.py"},
            "documents": {"paths": ["docs/loss.md"], "invariant": "Padding is not counted", "limit": "8,192 tokens",
                          "version": "2.3.1"},
        }  # fmt: skip

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, message: str) -> str:
        git(self.root, "add", "--all")
        git(self.root, "commit", "-q", "-m", message)
        return git(self.root, "rev-parse", "HEAD")

    def toml(self) -> str:
        lines = [f"capsule = {json.dumps(self.plan['capsule'])}"] if "capsule" in self.plan else []
        for name in ITEMS:
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in self.plan.get(name, {}).items()]
        return "\n".join(lines) + "\n"

    def gate(self) -> Gate:
        self.write(f"gates/{CASE}.toml", self.toml())
        return Gate(CASE, self.root)

    def run(self, worker: Worker) -> Facts:
        return self.gate().run(worker)

    def state(self) -> tuple[str, ...]:
        """What a gate that did not pass, or was killed, must not change."""
        return (
            git(self.root, "status", "--porcelain=v1", "--untracked-files=all"),
            git(self.root, "rev-list", "--all"),
            git(self.root, "worktree", "list"),
            (self.root / "debug-cases.md").read_text(),
        )


@pytest.fixture(scope="module")
def worker() -> Any:
    with Worker() as worker:
        yield worker


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the runs inside a gate start sooner


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "work tree mit Ümlaut")


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, worker: Worker) -> Path:
    """A repository whose gate passed, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in IDENTITY.items():
            patch.setenv(name, value)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        made = Made(tmp_path_factory.mktemp("gate") / "gated")
        for name in ITEMS[1:]:
            made.plan[name] = {"skip": "not asked here"}
        made.run(worker)
        return made.root


def verdict_of(facts: Facts, item: str) -> Result:
    return next(each for each in facts.results if each.item == item)


class TestATrueFix:
    def test_passes_and_card_plan_and_record_are_one_commit(self, made: Made, worker: Worker) -> None:
        facts = made.run(worker)
        assert facts.outcome == "passed-with-exceptions", [(each.item, each.words) for each in facts.results]
        assert verdict_of(facts, "regression").words.startswith("red on broken (")
        named = git(made.root, "show", "--name-only", "--format=", "HEAD").split("\n")
        assert named == ["debug-cases.md", f"gates/{CASE}.json", f"gates/{CASE}.toml"]
        message = git(made.root, "log", "-1", "--format=%B")
        trailers = subprocess.run(
            ["git", "interpret-trailers", "--parse"], input=message, capture_output=True, text=True, check=True
        ).stdout
        assert f"Case-Id: {CASE}" in trailers
        assert "Gate-Result: passed-with-exceptions" in trailers
        card = cards.find(cards.parse((made.root / "debug-cases.md").read_text()), CASE)
        assert card is not None
        assert card.get("Gate").startswith(f"gates/{CASE}.json · passed-with-exceptions 2")
        assert git(made.root, "worktree", "list").count("\n") == 0
        assert verify(Repository(made.root), CASE).fixed == made.fixed
        assert verdict_of(facts, "performance").words == "not run because: too small to time"
        assert json.loads((made.root / f"gates/{CASE}.json").read_text())["predicate"]["result"] == "WARNED"
        suite = ElementTree.fromstring(junit(facts))[0]
        assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "0", "1")
        assert [case.get("name") for case in suite] == list(ITEMS)
        content = (made.root / f"gates/{CASE}.json").read_bytes()
        assert content == canonical(json.loads(content)) == canonical(statement(facts))

    def test_with_all_six_items_it_passed_and_other_files_stay(self, made: Made, worker: Worker) -> None:
        made.plan["performance"] = {"command": "echo 1.0", "pairs": 5}
        made.write("notes.txt", "mine")  # in no commit: nothing that the gate runs could see
        assert made.run(worker).outcome == "passed"
        assert git(made.root, "status", "--porcelain") == "?? notes.txt"
        record = json.loads((made.root / f"gates/{CASE}.json").read_text())
        assert record["_type"] == "https://in-toto.io/Statement/v1"
        assert record["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
        assert record["predicate"]["result"] == "PASSED"
        assert record["subject"][0]["digest"] == {"gitCommit": made.fixed}
        assert record["predicate"]["passedTests"] == list(ITEMS)


def fails_on_both(made: Made) -> None:
    made.write("tests/test_loss.py", TEST.replace("2.0\n", "3.0\n"))
    made.plan["regression"]["fixed"] = made.commit("Ask for something else")


def passes_on_both(made: Made) -> None:
    made.write("tests/test_loss.py", TEST.replace("[2.0, 0.0], [1, 0]", "[2.0], [1]"))
    made.plan["regression"]["fixed"] = made.commit("Ask for nothing")


def cannot_import_on_broken(made: Made) -> None:
    made.write("tests/test_loss.py", TEST.replace("import mean", "import mean, extra"))
    made.write("loss.py", FIXED + "extra = 1\n")
    made.plan["regression"]["fixed"] = made.commit("A name that was not there before")


def imports_inside_the_test(made: Made) -> None:
    made.write(
        "tests/test_loss.py", "def test_padding_is_not_counted():\n    from loss import extra\n    assert extra\n"
    )
    made.write("loss.py", FIXED + "extra = 1\n")
    made.plan["regression"]["fixed"] = made.commit("Imported within the test")


def collects_nothing(made: Made) -> None:
    made.plan["regression"]["command"] = f"{PYTEST} tests/test_loss.py -k no_such_test"


def takes_too_long(made: Made) -> None:
    made.write("tests/test_loss.py", "import time\n\ndef test_padding_is_not_counted():\n    time.sleep(600)\n")
    made.plan["regression"]["fixed"] = made.commit("A test that never ends")
    made.plan["regression"]["timeout"] = 1.5


def no_test_runner(made: Made) -> None:
    made.plan["regression"]["command"] = f"{sys.executable} -c 'import loss'"


def no_such_module(made: Made) -> None:
    made.plan["regression"]["command"] = f"{sys.executable} -m no_such_runner -q {NODE}"


def no_such_file(made: Made) -> None:
    made.plan["regression"]["files"] = ["tests/../../outside.py"]


REGRESSION: list[tuple[Callable[[Made], None], str, str]] = [
    (fails_on_both, "failed", "not fixed: fails on both revisions"),
    (passes_on_both, "failed", "does not reproduce the fault: passes on both revisions"),
    (cannot_import_on_broken, "error", "not red: on the broken revision it could not run"),
    (imports_inside_the_test, "error", "not red: on the broken revision it could not run (ImportError"),
    (collects_nothing, "error", "collects nothing"),
    (takes_too_long, "error", "timed out after 1.5 s"),
    (no_test_runner, "error", "no JUnit XML"),
    (no_such_module, "error", "No module named no_such_runner; it wrote no JUnit XML"),
    (no_such_file, "error", "does not lie in the repository"),
]


@pytest.mark.parametrize(("change", "verdict", "words"), REGRESSION, ids=[each[0].__name__ for each in REGRESSION])
def test_a_regression_test_that_shows_nothing_has_words_of_its_own(
    made: Made, worker: Worker, change: Callable[[Made], None], verdict: str, words: str
) -> None:
    for name in ITEMS[1:]:
        made.plan[name] = {"skip": "not asked here"}
    change(made)
    made.gate()
    before = made.state()
    facts = made.run(worker)
    found = verdict_of(facts, "regression")
    assert (found.verdict, facts.outcome) == (verdict, "failed")
    assert words in found.words
    assert made.state() == before, "where it did not pass, nothing is written and nothing committed"
    last = made.gate().last()
    assert last is not None
    assert verdict_of(last, "regression").words == found.words, "the last run can be read again"


class TestWhatCannotRun:
    def test_a_dirty_tree(self, made: Made, worker: Worker) -> None:
        made.write("README.md", "other words\n")
        with pytest.raises(GateError, match=r"changes that are in no commit \(README.md\)"):
            made.run(worker)

    @pytest.mark.parametrize("revision", ["no-such-branch", "--all", "HEAD:loss.py"])
    def test_an_unknown_revision(self, made: Made, worker: Worker, revision: str) -> None:
        made.plan["regression"]["broken"] = revision
        with pytest.raises(GateError, match=r"broken = .* is no commit"):
            made.run(worker)

    def test_twice_the_same_revision(self, made: Made, worker: Worker) -> None:
        made.plan["regression"]["broken"] = made.fixed
        with pytest.raises(GateError, match="the same commit"):
            made.run(worker)

    def test_an_item_without_command_or_reason(self, made: Made, worker: Worker) -> None:
        made.plan["faults"] = {}
        made.plan["documents"] = {"paths": ["docs/loss.md"], "invariant": "x"}
        with pytest.raises(PlanError, match=r"\[faults\] needs a command.*\[documents\] needs limit, version"):
            made.run(worker)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[regression", "gates/x.toml"),
            ("[regression]\nbrokn = 'x'", "brokn"),
            ("[performance]\ntolerance = -1", "tolerance"),
            ("[faults]\ncommand = 'a && b'", "bash -c"),
            ('[faults]\ncommand = "a \'b"', "No closing quotation"),
            ("faults = 3", "Expected"),
        ],
    )
    def test_a_file_that_is_no_gate(self, text: str, words: str) -> None:
        with pytest.raises(PlanError, match=r"gates/x\.toml") as refused:
            parse(text, "gates/x.toml")
        assert words in str(refused.value)
        assert "\n" not in str(refused.value).strip() or "toml" in words

    def test_a_case_that_the_log_does_not_have(self, made: Made) -> None:
        with pytest.raises(GateError, match="has no case other"):
            Gate("other", made.root)


class TestItems:
    def only(self, made: Made, worker: Worker, item: str, **fields: Any) -> Result:
        made.plan["regression"]["skip"] = "not asked here"
        for name in ITEMS[1:]:
            made.plan[name] = {"skip": "not asked here"}
        made.plan[item] = fields
        return verdict_of(made.run(worker), item)

    def test_slower_by_20_percent(self, made: Made, worker: Worker) -> None:
        made.write("cost.txt", "1.20\n")
        made.plan["regression"]["fixed"] = made.commit("Slower")
        git(made.root, "checkout", "-q", "-b", "side", made.broken)
        made.write("cost.txt", "1.00\n")
        made.plan["regression"]["broken"] = made.commit("With a cost")
        git(made.root, "checkout", "-q", "main")
        found = self.only(made, worker, "performance", command="cat cost.txt", pairs=5)
        assert found.verdict == "failed"
        assert "slower than the tolerance allows: +20.0 %" in found.words

    def test_a_document_that_lacks_the_invariant(self, made: Made, worker: Worker) -> None:
        fields = made.plan["documents"] | {"invariant": "Labels are shifted once"}
        found = self.only(made, worker, "documents", **fields)
        assert (found.verdict, found.words) == ("failed", "the invariant is not in the documents of the fix")

    def test_a_document_that_said_so_before(self, made: Made, worker: Worker) -> None:
        fields = {
            "paths": ["README.md", "docs/loss.md"],
            "invariant": "words",
            "limit": "8,192 tokens",
            "version": "2.3.1",
        }
        assert "the invariant was there before the fix" in self.only(made, worker, "documents", **fields).words

    def test_rules_that_ran_and_are_quiet(self, made: Made, worker: Worker) -> None:
        with CapsuleWriter(made.root / "after.capsule", phase="training") as writer:
            writer.scalars("loss", step=range(60), value=[2.0 - i / 100 for i in range(60)])
        rules = ["numerics/loss-nonfinite"]
        found = self.only(made, worker, "equivalence", capsule="after.capsule", rules=rules)
        assert found.verdict == "passed"
        assert found.baseline["sha256"] == Capsule.open(made.root / "after.capsule").digest()

    def test_a_capsule_from_before_the_fix_shows_nothing(self, made: Made, worker: Worker) -> None:
        with CapsuleWriter(
            made.root / "after.capsule",
            phase="training",
            manifest={"run": {"code": {"commit": made.broken, "dirty": False}}},
        ) as writer:
            writer.scalars("loss", step=range(60), value=[2.0 - i / 100 for i in range(60)])
        rules = ["numerics/loss-nonfinite"]
        found = self.only(made, worker, "equivalence", capsule="after.capsule", rules=rules)
        assert found.verdict == "error"
        assert f"was recorded at {made.broken[:12]}, before the fix" in found.words
        assert not (made.root / f"gates/{CASE}.json").exists()

    def test_a_runner_that_is_not_installed_does_not_blame_the_fix(self, made: Made, worker: Worker) -> None:
        found = self.only(made, worker, "neighbours", command=f"{sys.executable} -m no_such_runner")
        assert found.verdict == "error"
        assert found.words.endswith("No module named no_such_runner")
        failing = f"{sys.executable} -c 'import no_such_module'"
        assert self.only(made, worker, "neighbours", command=failing).verdict == "failed"

    def test_a_rule_that_fires_is_not_quiet_and_one_that_was_skipped_shows_nothing(
        self, made: Made, worker: Worker
    ) -> None:
        with CapsuleWriter(made.root / "after.capsule", phase="training") as writer:
            writer.scalars("loss", step=range(60), value=[float("nan")] * 60)
        fires = self.only(made, worker, "equivalence", capsule="after.capsule", rules=["numerics/loss-nonfinite"])
        assert fires.verdict == "failed"
        assert "numerics/loss-nonfinite finds: " in fires.words
        skipped = self.only(made, worker, "equivalence", capsule="after.capsule", rules=["objective/pad-in-loss"])
        assert skipped.verdict == "error"
        assert "objective/pad-in-loss was skipped" in skipped.words
        unknown = self.only(made, worker, "equivalence", capsule="after.capsule", rules=["objective/nothing"])
        assert "no rule is called objective/nothing" in unknown.words


class TestVerify:
    @pytest.fixture
    def passed(self, made: Made, gated: Path) -> Made:
        shutil.rmtree(made.root)
        shutil.copytree(gated, made.root)
        made.fixed = git(made.root, "rev-parse", "HEAD~2")
        made.plan = {}
        return made

    def refusal(self, made: Made, case: str = CASE) -> str:
        with pytest.raises(RecordError) as refused:
            verify(Repository(made.root), case)
        return str(refused.value)

    def test_a_record_edited_by_one_byte(self, passed: Made) -> None:
        file = passed.root / f"gates/{CASE}.json"
        content = file.read_bytes()
        for at in range(0, len(content), 97):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert "differs from what is committed" in self.refusal(passed)
        passed.commit("Better words")
        assert "was changed after the gate wrote it" in self.refusal(passed)

    def test_a_record_whose_commit_vanished(self, passed: Made) -> None:
        record = (passed.root / f"gates/{CASE}.json").read_bytes()
        message = git(passed.root, "log", "-1", "--format=%B")
        git(passed.root, "checkout", "-q", "--orphan", "new", "HEAD")
        git(passed.root, "commit", "-q", "-m", message)
        git(passed.root, "branch", "-D", "main")
        git(passed.root, "reflog", "expire", "--expire=now", "--all")
        assert (passed.root / f"gates/{CASE}.json").read_bytes() == record
        assert f"the fixed commit {passed.fixed[:12]} is not in this repository any more" in self.refusal(passed)

    def test_a_record_copied_to_another_case(self, passed: Made) -> None:
        for end in ("json", "toml"):
            content = (passed.root / f"gates/{CASE}.{end}").read_text()
            passed.write(f"gates/other-case.{end}", content)
        message = git(passed.root, "log", "-1", "--format=%B")
        passed.commit(message.replace(CASE, "other-case"))
        assert "is the record of another case" in self.refusal(passed, "other-case")

    def test_a_plan_changed_since(self, passed: Made) -> None:
        file = passed.root / f"gates/{CASE}.toml"
        file.write_text(file.read_text() + "# looser\n")
        assert "differs from what is committed" in self.refusal(passed)
        passed.commit("Looser")
        assert "was changed since the record was made" in self.refusal(passed)

    def test_a_record_that_was_never_made(self, made: Made) -> None:
        assert "llmconsole gate run" in self.refusal(made)


def test_killed_in_the_middle_it_leaves_no_process_no_tree_and_the_repository_as_it_was(made: Made) -> None:
    made.write("tests/test_loss.py", "import subprocess, sys, time\n\ndef test_padding_is_not_counted():\n"
               "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
               "    open(r'" + str(made.root.parent / "begun") + "', 'w').close()\n    time.sleep(600)\n")  # fmt: skip
    made.plan["regression"]["fixed"] = made.commit("A test that starts a process and waits")
    made.gate()
    before = made.state()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        (made.root.parent / "begun").unlink(missing_ok=True)
        token = f"test-{os.getpid()}-{number}"
        process = subprocess.Popen(
            [sys.executable, "-m", "llmconsole.app.cli", "gate", "run", CASE],
            cwd=made.root, env={**os.environ, "WHOSE": token}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        wait_until(lambda process=process: (made.root.parent / "begun").exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        errors = process.communicate()[1].decode()
        assert "Traceback" not in errors
        wait_until(lambda token=token: not carrying(token))
        wait_until(lambda: git(made.root, "worktree", "list").count("\n") == 0)
        assert made.state() == before


def carrying(token: str) -> list[int]:
    """Processes that inherited a variable of ours."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.05)
    pytest.fail("did not happen")


class TestPerformance:
    def test_noise_around_nothing_passes(self) -> None:
        found = performance.compare(
            [1, 1.1, 0.9, 1, 1.05], [1.02, 1.0, 1.0, 0.97, 1.1], lower_is_better=True, tolerance=0.05
        )
        assert found.verdict == "passed"

    def test_noise_that_hides_the_answer_is_no_pass(self) -> None:
        found = performance.compare([1.0] * 5, [0.7, 1.4, 1.3, 0.8, 1.2], lower_is_better=True, tolerance=0.05)
        assert (found.verdict, found.low) == ("error", 0.7)
        assert "too noisy" in found.words

    def test_throughput_is_the_other_way_round(self) -> None:
        assert performance.compare([100.0] * 5, [80.0] * 5, lower_is_better=False, tolerance=0.05).verdict == "failed"
        assert performance.compare([100.0] * 5, [130.0] * 5, lower_is_better=False, tolerance=0.05).verdict == "passed"

    def test_the_interval_is_that_of_the_sign_test(self) -> None:
        """Of 9 pairs the second least and second greatest hold the median with 1 - 2·10/512 = 96.1 %."""
        ratios = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08]
        found = performance.compare([1.0] * 9, ratios, lower_is_better=True, tolerance=0.05)
        assert (found.low, found.high) == (1.01, 1.07)

    @pytest.mark.parametrize(
        ("output", "number"),
        [("1.5\n", 1.5), ("warm up\n3\n", 3.0), ("time 3 s\n", None), ("nan\n", None), ("", None), ("2\ndone\n", 2.0)],
    )
    def test_the_number_is_the_last_line_that_is_one(self, output: str, number: float | None) -> None:
        assert performance.number_of(output) == number


def test_init_writes_what_card_and_git_know(made: Made) -> None:
    gate = Gate(CASE, made.root)
    file = gate.init(made.root / "runs" / "a.capsule")
    text = file.read_text()
    assert f'broken = "{made.broken[:12]}"' in text
    assert f'fixed = "{made.fixed[:12]}"' in text
    python = next((name for name in ("python", "python3") if shutil.which(name)), sys.executable)
    assert f'command = "{python} -m pytest -q {NODE}"' in text
    assert 'files = ["tests/test_loss.py"]' in text
    assert 'capsule = "runs/a.capsule"' in text
    with pytest.raises(PlanError, match=r"\[neighbours\] needs a command"):
        gate.plan()
    with pytest.raises(GateError, match="is there already"):
        gate.init()


def test_init_names_the_capsule_of_the_card_where_it_is_here(made: Made) -> None:
    with CapsuleWriter(made.root / "runs" / "a.capsule") as writer:
        writer.scalars("loss", step=[0], value=[1.0])
    log = made.root / "debug-cases.md"
    id = Capsule.open(made.root / "runs" / "a.capsule").id
    log.write_text(f"{log.read_text()}- **Occurrences:** 2026-11-29 run a, step 0, capsule {id}, fixed by abc1234\n")
    assert 'capsule = "runs/a.capsule"\n\n[regression]' in Gate(CASE, made.root).init().read_text()
    (made.root / f"gates/{CASE}.toml").unlink()
    shutil.rmtree(made.root / "runs")
    assert 'capsule = ""\n\n[regression]' in Gate(CASE, made.root).init().read_text()
