"""A real run breaks, the report names the place, and the case is filed: for every fault of the demo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.demo.faults import FAULTS

from .conftest import CLI, FOR_PEOPLE, Played, environment, run

pytestmark = pytest.mark.timeout(400)  # a test waits for the run that it looks at

BROKEN = [name for name, fault in FAULTS.items() if fault.rule]
every_fault = pytest.mark.parametrize("demo", BROKEN, indirect=True)
every_demo = pytest.mark.parametrize("demo", list(FAULTS), indirect=True)
for_scripts = pytest.mark.parametrize("demo", [name for name in FAULTS if name != FOR_PEOPLE], indirect=True)


def of(fault: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("demo", [fault], indirect=True)


def loud(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["severity"] in ("warning", "critical")]


class TestEveryFault:
    @every_demo
    def test_the_demo_succeeds(self, demo: Played) -> None:
        assert demo.status == 0, demo.stderr
        assert "Traceback" not in demo.stderr

    @every_fault
    def test_the_injected_fault_is_the_first_divergence(self, demo: Played, report: Any) -> None:
        assert report(demo)["first_divergence"]["rule"] == FAULTS[demo.fault].rule

    @every_fault
    def test_whatever_else_is_loud_follows_from_it(self, demo: Played, report: Any) -> None:
        others = [each for each in loud(report(demo)) if each["rule"] != FAULTS[demo.fault].rule]
        assert {each["kind"] for each in others} <= {"consequence"}
        assert {each["caused_by"] for each in others} <= {FAULTS[demo.fault].rule}

    @every_demo
    def test_no_rule_fails(self, demo: Played, report: Any) -> None:
        assert report(demo)["errors"] == []


class TestWhatTheReportSays:
    @of("overflow")
    def test_overflow_happens_in_the_forward_pass_of_a_levelled_gelu(self, demo: Played, report: Any) -> None:
        where = report(demo)["first_divergence"]["where"]
        assert where["tensor"].endswith(".mlp.act")
        followed = {each["rule"] for each in loud(report(demo)) if each["kind"] == "consequence"}
        assert {"numerics/first-nonfinite", "numerics/loss-nonfinite"} <= followed

    @of("label-shift")
    def test_unshifted_labels_are_confirmed_by_the_number_they_produce(self, demo: Played, report: Any) -> None:
        (finding,) = [each for each in loud(report(demo)) if each["rule"] == FAULTS[demo.fault].rule]
        assert finding["confidence"] == "confirmed"
        assert ["labels-not-shifted"] in [row["faults"] for row in finding["counterfactual"]["candidates"]]

    @of("learning-rate")
    def test_the_learning_rate_is_to_blame_from_the_first_step(self, demo: Played, report: Any) -> None:
        assert report(demo)["first_divergence"]["where"]["step"] == 0

    @of("poison-sample")
    def test_the_bad_sample_is_named(self, demo: Played, report: Any) -> None:
        assert report(demo)["first_divergence"]["where"]["sample"].startswith("embeddings.nrrd:")

    @of("none")
    def test_a_healthy_run_is_met_with_silence(self, demo: Played, report: Any) -> None:
        assert loud(report(demo)) == []
        assert report(demo)["first_divergence"] is None
        assert len(report(demo)["quiet"]) > 10


class TestTheRepository:
    @every_fault
    def test_it_tells_the_whole_story_in_four_commits(self, demo: Played) -> None:
        work = FAULTS[demo.fault].repair
        assert work is not None
        assert demo.git("log", "--reverse", "--format=%s").splitlines() == [
            "Train a byte-level GPT",
            FAULTS[demo.fault].message.splitlines()[0],
            work.message.splitlines()[0],
            f"Resolve {work.case.id}: {work.case.title}",
        ]
        assert demo.git("status", "--porcelain") == ""

    @every_fault
    def test_the_regression_test_is_red_on_the_broken_commit_and_green_on_the_fix(
        self, demo: Played, tmp_path: Path
    ) -> None:
        work = FAULTS[demo.fault].repair
        assert work is not None
        module = work.test_file.removesuffix(".py").replace("/", ".")
        for revision, ending in (("HEAD~2", "FAILED (failures="), ("HEAD~1", "OK")):
            tree = tmp_path / revision
            demo.git("worktree", "add", "--detach", str(tree), revision)
            (tree / work.test_file).write_text(demo.git("show", f"HEAD~1:{work.test_file}"))
            done = subprocess.run(
                [sys.executable, "-m", "unittest", module], cwd=tree, capture_output=True, text=True, env=environment()
            )
            demo.git("worktree", "remove", "--force", str(tree))
            assert done.stderr.strip().splitlines()[-1].startswith(ending), done.stderr

    @every_fault
    def test_the_last_commit_is_the_case_and_nothing_else(self, demo: Played) -> None:
        assert demo.git("show", "--format=", "--name-only", "HEAD") == "debug-cases.md"
        trailers = demo.git("show", "-s", "--format=%(trailers:only)", "HEAD")
        work = FAULTS[demo.fault].repair
        assert work is not None
        assert f"Case-Id: {work.case.id}" in trailers
        assert "Gate-Result: not-run" in trailers
        assert f"- **Rules:** {FAULTS[demo.fault].rule}" in demo.git("show", "HEAD:debug-cases.md")
        assert work.test_node in demo.git("show", "HEAD:debug-cases.md")

    @of("none")
    def test_where_nothing_is_wrong_nothing_is_resolved(self, demo: Played) -> None:
        assert len(demo.git("log", "--format=%h").splitlines()) == 2
        assert not (demo.directory / "debug-cases.md").exists()

    @of("none")
    def test_the_job_of_the_first_commit_passes_its_own_tests(self, demo: Played, tmp_path: Path) -> None:
        tree = tmp_path / "first"
        demo.git("worktree", "add", "--detach", str(tree), demo.git("rev-list", "--max-parents=0", "HEAD"))
        done = subprocess.run(
            [sys.executable, "-m", "unittest", "discover", "-s", "tests", "-t", "."],
            cwd=tree,
            capture_output=True,
            text=True,
            env=environment(),
        )
        demo.git("worktree", "remove", "--force", str(tree))
        assert done.returncode == 0, done.stderr


class TestForScripts:
    @for_scripts
    def test_the_json_has_the_agreed_shape(self, demo: Played) -> None:
        golden = json.loads((Path(__file__).parent / "golden" / "demo.json").read_text())
        assert differences(demo.json, golden) == []

    @for_scripts
    def test_the_json_tells_what_happened(self, demo: Played) -> None:
        outcome = demo.json
        assert outcome["format"] == "llmconsole.demo/1"
        assert outcome["correct"] is True
        assert outcome["expected_rule"] == FAULTS[demo.fault].rule
        assert outcome["capsule"] == str(demo.capsule)
        assert outcome["steps"] == 200
        commits = [commit for commit in outcome["commits"].values() if commit]
        assert commits == demo.git("log", "--reverse", "--format=%H").splitlines()
        if FAULTS[demo.fault].repair is not None:
            assert (outcome["regression_test"]["broken"], outcome["regression_test"]["fixed"]) == ("failed", "passed")


class TestForPeople:
    @of(FOR_PEOPLE)
    def test_report_case_and_commit_are_on_standard_output(self, demo: Played) -> None:
        for part in (
            "First divergence  numerics/fp16-overflow",
            "capture✓ data✓ objective↳ numerics✗",
            "+## levelled-gelu-runs-away",
            "debug-cases.md | ",
            "Resolve levelled-gelu-runs-away",
        ):
            assert part in demo.stdout

    @of(FOR_PEOPLE)
    def test_progress_is_narrated_on_standard_error(self, demo: Played) -> None:
        assert "step 20: loss " in demo.stderr
        assert "loss nan" in demo.stderr
        assert "the injected fault is overflow" in demo.stderr

    def test_a_guess_is_asked_for_until_it_is_one_and_timed(self) -> None:
        import io

        from llmconsole.app.commands.demo import ask

        guess = ask(FAULTS["label-shift"], io.StringIO("the weather\n2\n"))
        assert guess is not None
        assert (guess.fault, guess.correct) == ("label-shift", True)
        assert guess.seconds >= 0
        wrong = ask(FAULTS["overflow"], io.StringIO("poison-sample\n"))
        assert wrong is not None
        assert not wrong.correct

    def test_without_an_answer_there_is_no_guess(self) -> None:
        import io

        from llmconsole.app.commands.demo import ask

        assert ask(FAULTS["overflow"], io.StringIO("")) is None


class TestWhatCannotBe:
    def test_an_unknown_fault_is_a_usage_error(self) -> None:
        done = run("demo", "--fault", "gremlin")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1

    def test_a_directory_in_use_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        done = run("demo", "--dir", str(tmp_path))
        assert done.returncode == 2
        assert "not empty" in done.stderr
        assert os.listdir(tmp_path) == ["thesis.txt"]

    def test_without_git_one_line_says_so_and_nothing_is_left(self, tmp_path: Path) -> None:
        done = run("demo", "--dir", str(tmp_path / "demo"), PATH=str(tmp_path))
        assert done.returncode == 2
        assert done.stderr == "llmconsole: git is not on the PATH; install it\n"
        assert not (tmp_path / "demo").exists()

    def test_an_interrupt_in_the_middle_leaves_nothing_running(self, tmp_path: Path) -> None:
        directory = tmp_path / "demo"
        process = subprocess.Popen(
            [*CLI, "demo", "--headless", "--dir", str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "step 0:" in line:
                break
        assert inside(directory)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
        assert "Traceback" not in rest
        deadline = time.monotonic() + 10
        while inside(directory) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert inside(directory) == []
        # What was recorded until then can be read.
        (capsule,) = (directory / "runs").glob("*.capsule")
        assert run("show", str(capsule)).returncode == 0
        shutil.rmtree(directory)


def inside(directory: Path) -> list[str]:
    """Processes that work in a directory."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(directory):
                found.append(entry.name)
        except OSError:
            continue
    return found


def differences(value: Any, golden: Any, place: str = "$") -> list[str]:
    """Where a document leaves its golden shape: other fields, another order, another type."""
    if isinstance(golden, dict):
        fields = [name for name in golden if name != "or null"]
        if value is None and "or null" in golden:
            return []
        if not isinstance(value, dict) or list(value) != fields:
            return [f"{place}: {list(value) if isinstance(value, dict) else value!r} instead of {fields}"]
        return [each for name in fields for each in differences(value[name], golden[name], f"{place}.{name}")]
    if isinstance(golden, list):
        return [each for row in value for each in differences(row, golden[0], f"{place}[]")]
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    kind = kinds[type(value)]
    return [] if kind in golden.split(" or ") else [f"{place}: {kind} instead of {golden}"]
