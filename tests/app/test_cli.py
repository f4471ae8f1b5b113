"""The command line as people and scripts meet it: exit statuses, one-line errors, JSON, and nothing raw."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.cli import COMMANDS, main

from . import capsules
from .conftest import TEST_FILE, Run, git

GOLDEN = Path(__file__).parent / "golden"
UPDATE = bool(os.environ.get("LLMCONSOLE_UPDATE_GOLDEN"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one capsule that diverged and one that did not."""
    directory = tmp_path_factory.mktemp("runs")
    capsules.diverged(directory / "nan.capsule")
    capsules.healthy(directory / "ok.capsule")
    return directory


@pytest.fixture(scope="module")
def hostile_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a capsule whose every string, and whose name, is hostile."""
    directory = tmp_path_factory.mktemp("hostile")
    capsules.hostile(directory / "run\x1b[31m\u202e.capsule")
    return directory


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single line on standard error of a call that failed."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("llmconsole: ")
    return line


class TestDispatch:
    def test_help_lists_every_command(self, cli: Run):
        done = cli("--help")
        assert done.returncode == 0
        assert all(f"\n  {command} " in done.stdout for command in COMMANDS)

    def test_version(self, cli: Run):
        assert re.fullmatch(r"llmconsole \d+\.\d+\.\d+\n", cli("--version").stdout)

    @pytest.mark.parametrize("command", [each for each in COMMANDS if each != "demo"])
    def test_every_command_explains_itself(self, cli: Run, command: str):
        done = cli(command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("usage: llmconsole")

    def test_an_unknown_word_names_the_nearest_command(self, cli: Run):
        assert one_error_line(cli("analyse")).endswith("did you mean llmconsole analyze?")

    def test_a_word_near_nothing_points_to_the_list(self, cli: Run):
        assert "llmconsole --help" in one_error_line(cli("\x1b[31mqqqq"))

    def test_a_file_in_place_of_a_command_is_pointed_to_analyze(self, cli: Run, tmp_path: Path):
        (tmp_path / "train.log").write_text("x")
        assert one_error_line(cli("train.log")).endswith("llmconsole analyze train.log")

    @pytest.mark.parametrize(
        "arguments",
        [("analyze",), ("analyze", "--stage", "nowhere", "x"), ("show", "--nope", "x"), ("incident",), ("-x",)],
    )
    def test_a_wrong_command_line_is_one_line(self, cli: Run, arguments: tuple[str, ...]):
        assert "--help" in one_error_line(cli(*arguments))

    def test_a_wrong_command_line_is_put_right(self, capsys: pytest.CaptureFixture[str]):
        for arguments, words in (
            (["--json", "analyze", "a b"], "options come after the command: llmconsole analyze 'a b' --json"),
            (["show", "x", "--rank"], "(did you mean --ranks?)"),
            (["show", "x", "--mem=3"], "(did you mean --memory?)"),
            (["incident", "note", "x", "y", "--jsn"], "(did you mean --json?); see llmconsole incident note --help"),
            (["show", "x", "y", "-q"], "unrecognized arguments: y -q; see"),
        ):
            assert main(arguments) == 2
            said = capsys.readouterr()
            assert (said.out, said.err.count("\n")) == ("", 1)
            assert words in said.err

    def test_importing_the_command_line_loads_nothing_heavy(self):
        heavy = ("torch", "numpy", "h5py", "git", "rich", "msgspec", "textual", "polars", "markdown_it", "platformdirs")
        script = f"import sys, llmconsole.app.cli; print([name for name in {heavy} if name in sys.modules])"
        assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"

    def test_analysis_loads_its_weight_in_the_worker_alone(self, runs: Path):
        script = (
            "import sys; from llmconsole.app.cli import main; "
            f"status = main(['analyze', {str(runs)!r}, '--json']); "
            "print(status, [name for name in ('torch', 'numpy', 'h5py', 'git', 'textual') if name in sys.modules], "
            "file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stderr.strip() == "1 []"

    def test_analysis_starts_its_worker_before_it_loads_what_it_prints_with(self, runs: Path):
        script = (
            "import subprocess, sys; from llmconsole.app.cli import main; start = subprocess.Popen\n"
            "def started(*given, **named):\n"
            "    print([name for name in ('msgspec', 'rich') if name in sys.modules], file=sys.stderr)\n"
            "    return start(*given, **named)\n"
            f"subprocess.Popen = started; main(['analyze', {str(runs)!r}])"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stderr.strip() == "[]"


class TestExitStatus:
    def test_one_where_something_diverged(self, cli: Run, runs: Path):
        assert cli("analyze", str(runs / "nan.capsule")).returncode == 1

    def test_zero_where_nothing_was_found(self, cli: Run, runs: Path):
        done = cli("analyze", str(runs / "ok.capsule"))
        assert done.returncode == 0
        assert "Nothing found" in done.stdout

    def test_one_for_a_capsule_that_is_damaged(self, cli: Run, tmp_path: Path):
        path = capsules.healthy(tmp_path / "torn.capsule")
        (scalars,) = path.glob("ranks/*/scalars.bin")
        scalars.write_bytes(scalars.read_bytes()[:-5])
        done = cli("analyze", str(path))
        assert done.returncode == 1
        assert "capsule/damaged" in done.stdout

    def test_a_directory_is_all_of_its_capsules(self, cli: Run, runs: Path):
        done = cli("analyze", str(runs), "--json")
        assert done.returncode == 1
        assert [Path(each["capsule"]["path"]).name for each in json.loads(done.stdout)["reports"]] == [
            "nan.capsule",
            "ok.capsule",
        ]

    def test_two_where_one_of_several_paths_is_unusable_and_the_others_are_reported(self, cli: Run, runs: Path):
        done = cli("analyze", str(runs / "gone.capsule"), str(runs / "ok.capsule"), "--json")
        assert "gone.capsule: no such file" in one_error_line(done)
        assert len(json.loads(done.stdout)["reports"]) == 1

    def test_two_for_a_file_that_is_no_capsule(self, cli: Run, tmp_path: Path):
        (tmp_path / "x.log").write_text("nothing that any program prints\n")
        assert "of no known format" in one_error_line(cli("analyze", "x.log"))

    def test_two_for_a_directory_without_capsules(self, cli: Run, tmp_path: Path):
        (tmp_path / "empty").mkdir()
        line = one_error_line(cli("analyze", "empty"))
        assert "no capsule in this directory" in line
        assert "; give the directory of a Recorder, or one in which logs" in line

    def test_two_for_a_part_of_a_capsule_which_is_no_evidence_alone(
        self, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.chdir(runs)
        (part,) = Path("nan.capsule").glob("ranks/rank*")
        for path in (part, part / "scalars.bin", Path("nan.capsule/capsule.json")):
            assert main(["analyze", str(path)]) == 2
            words = f"{path}: is a part of a capsule; give the whole one: nan.capsule"
            assert capsys.readouterr() == ("", f"llmconsole: {words}\n")

    def test_two_for_a_manifest_that_cannot_be_read(self, cli: Run, tmp_path: Path):
        (tmp_path / "bad.capsule").mkdir()
        (tmp_path / "bad.capsule" / "capsule.json").write_text("[" * 100_000)
        assert "bad.capsule" in one_error_line(cli("analyze", "bad.capsule"))
        assert "bad.capsule" in one_error_line(cli("show", "bad.capsule"))
        assert cli(".").returncode == 2

    def test_two_for_a_rule_or_case_that_does_not_exist(self, cli: Run, runs: Path):
        assert "did you mean numerics/loss-nonfinite?" in one_error_line(
            cli("analyze", str(runs), "--rule", "numerics/loss-non-finite")
        )
        assert "did you mean" in one_error_line(cli("rules", "numerics/loss-nonfinit"))
        assert "no case is called" in one_error_line(cli("cases", "show", "qqqqqqq"))

    def test_zero_for_listings(self, cli: Run, runs: Path):
        for arguments in (("rules",), ("cases",), ("cases", "search", "qqqq"), ("show", str(runs / "ok.capsule"))):
            assert cli(*arguments).returncode == 0, arguments

    def test_rules_and_stages_narrow_the_analysis(self, cli: Run, runs: Path):
        path = str(runs / "nan.capsule")
        assert cli("analyze", path, "--rule", "capsule/damaged").returncode == 0
        assert cli("analyze", path, "--stage", "capture").returncode == 0
        assert cli("analyze", path, "--stage", "numerics").returncode == 1

    def test_two_where_the_analysis_runs_out_of_memory_or_time_and_the_report_says_so(self, cli: Run, runs: Path):
        for name, value in (("LLMCONSOLE_WORKER_MEMORY", "0.12"), ("LLMCONSOLE_WORKER_TIMEOUT", "0.01")):
            done = cli("analyze", str(runs / "ok.capsule"), "--json", **{name: value})
            assert "ok.capsule" in one_error_line(done)
            (report,) = json.loads(done.stdout)["reports"]
            assert report["errors"][0]["rule"] == "analysis"
            assert report["first_divergence"] is None

    def test_a_reader_that_leaves_early_hears_no_complaint(self):
        command = f"{sys.executable} -m llmconsole.app.cli rules | (exec <&-); echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("141\n", "")  # not 1, which means findings

    def test_an_output_that_cannot_be_written_is_one_line(self):
        for target in ("/dev/full", "&-"):
            command = f"{sys.executable} -m llmconsole.app.cli --help >{target}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
            if target == "/dev/full":
                assert "standard output: No space left" in one_error_line(done)
            else:
                assert (done.returncode, done.stderr) == (0, "")

    def test_an_interrupt_is_one_line_and_leaves_no_worker(self, runs: Path):
        process = subprocess.Popen(
            [sys.executable, "-m", "llmconsole.app.cli", "analyze", *[str(runs)] * 400],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (workers := children.read_text().split()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert errors == "llmconsole: interrupted\n"
        # Interrupted while it was being started, a worker ends by itself as soon as it finds its input closed.
        deadline = time.monotonic() + 30
        while any(is_alive(worker) for worker in workers):
            assert time.monotonic() < deadline, "a worker lives on"
            time.sleep(0.02)


class TestHome:
    def test_names_the_directories_that_hold_some_where_there_is_none_directly(
        self, cli: Run, runs: Path, tmp_path: Path
    ):
        below = tmp_path / "below"
        shutil.copytree(runs, below)
        done = cli(str(tmp_path), "--list")
        assert f"   {below}\n" in done.stdout
        assert "Recorder" not in done.stdout

    def test_lists_the_capsules_and_says_what_to_type_next(self, cli: Run, runs: Path):
        done = cli(str(runs))
        assert done.returncode == 0
        assert "2 capsules" in done.stdout
        assert "llmconsole analyze" in done.stdout

    def test_takes_the_directory_from_the_environment(self, cli: Run, runs: Path):
        assert "2 capsules" in cli(LLMCONSOLE_DIR=str(runs)).stdout

    def test_an_empty_directory_teaches(self, cli: Run):
        assert "llmconsole demo" in cli().stdout


class TestHostileText:
    @pytest.mark.parametrize("json_too", [False, True])
    @pytest.mark.parametrize(("command", "status"), [("analyze", 1), ("show", 0), ("", 0)])
    def test_nothing_raw_reaches_the_terminal_and_no_status_changes(
        self, cli: Run, hostile_directory: Path, command: str, status: int, json_too: bool
    ):
        (path,) = hostile_directory.iterdir()
        target = str(path) if command else str(hostile_directory)
        done = cli(*filter(None, [command, target, "--json" if json_too else ""]))
        assert done.returncode == status, done.stderr
        printed = done.stdout + done.stderr
        controls = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0))} - {"\n"}
        assert not controls & set(printed)
        assert not set(printed) & set("\u202e\u200b\x1b\x07")
        escape = "\\u001b[31mred" if json_too else "\\x1b[31mred"
        assert escape in re.sub(r"\n\s*", "", printed)

    def test_an_error_line_shows_a_file_name_escaped(self, cli: Run):
        assert "\\x1b[2Jx\\u202e" in one_error_line(cli("analyze", "\x1b[2Jx\u202e"))
        assert "\\udcff" in one_error_line(cli("show", os.fsdecode(b"\xff")))

    def test_a_case_log_that_others_edited_is_shown_escaped(self, cli: Run, tmp_path: Path):
        (tmp_path / "log.md").write_text("## a-b · Ti\x1b[2Jtle\n\n- **Fix:** f\u202ex [red]y[/red]\n")
        done = cli("cases", "show", "a-b", LLMCONSOLE_CASES=str(tmp_path / "log.md"))
        assert "Ti\\x1b[2Jtle" in done.stdout
        assert "f\\u202ex [red]y[/red]" in done.stdout
        assert "\x1b" not in done.stdout

    def test_a_terminal_without_utf8_gets_stand_ins(self, cli: Run, runs: Path):
        done = cli("analyze", str(runs / "nan.capsule"), PYTHONIOENCODING="ascii")
        assert done.returncode == 1
        assert "capture+ data- objective- numerics? distributed-" in done.stdout


OPTIONS = [
    "--case=labels-not-shifted", "--title=Labels are not shifted", "--class=not-converging",
    "--root-cause=nobody shifts", "--trigger=a new collator", "--fix-commit=HEAD",
    "--regression-test=tests/test_labels.py::test_alone", "--prevention=one place shifts",
]  # fmt: skip


class TestIncidentResolve:
    def test_commits_the_case_and_says_which_commit(self, cli: Run, repository: Path, tmp_path: Path):
        capsule = capsules.diverged(tmp_path / "nan.capsule")
        done = cli("incident", "resolve", str(capsule), *OPTIONS, "--yes", "--repo", str(repository))
        assert done.returncode == 0, done.stderr
        sha = git(repository, "rev-parse", "HEAD")
        assert done.stdout.rstrip().endswith(f"committed {sha}")
        for shown in (
            "debug-cases.md",
            "+## labels-not-shifted · Labels are not shifted",
            "Case-Id: labels-not-shifted",
        ):
            assert shown in done.stdout
        assert json.loads((capsule / "incident.json").read_text())["case_commit"] == sha
        text = (repository / "debug-cases.md").read_text()
        assert "**Rules:** numerics/loss-nonfinite" in text
        assert "run sft-7b, step 3, capsule" in text

    def test_the_digest_in_the_commit_is_that_of_the_capsule(self, cli: Run, repository: Path, tmp_path: Path):
        from llmconsole.capsules import Capsule

        capsule = capsules.diverged(tmp_path / "nan.capsule")
        cli("incident", "resolve", str(capsule), *OPTIONS, "--yes", cwd=repository)
        trailer = git(repository, "log", "-1", "--format=%(trailers:key=Capsule-Sha256,valueonly)")
        assert trailer == Capsule.open(capsule).digest()

    def test_refuses_half_a_case_in_one_line(self, cli: Run, repository: Path, tmp_path: Path):
        capsule = capsules.diverged(tmp_path / "nan.capsule")
        line = one_error_line(cli("incident", "resolve", str(capsule), "--case", "x", "--yes", cwd=repository))
        for name in (
            "--title",
            "--class",
            "--root-cause",
            "--trigger",
            "--fix-commit",
            "--regression-test",
            "--prevention",
        ):
            assert name in line
        assert git(repository, "status", "--porcelain") == ""

    def test_without_a_terminal_and_without_yes_nothing_is_written(self, cli: Run, repository: Path, tmp_path: Path):
        capsule = capsules.diverged(tmp_path / "nan.capsule")
        done = cli("incident", "resolve", str(capsule), *OPTIONS, cwd=repository)
        assert "--yes" in one_error_line(done)
        assert git(repository, "status", "--porcelain") == ""
        assert not (capsule / "incident.json").exists()

    @pytest.mark.parametrize(("answer", "commits"), [("y\n", 3), ("n\n", 2), ("\n", 2)])
    def test_on_a_terminal_it_asks(self, repository: Path, tmp_path: Path, answer: str, commits: int):
        capsule = capsules.diverged(tmp_path / "nan.capsule")
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "llmconsole.app.cli", "incident", "resolve", str(capsule), *OPTIONS],
            cwd=repository,
            env={**os.environ, "TERM": "xterm-256color"},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(leader, 4096)
        assert len(git(repository, "rev-list", "HEAD").splitlines()) == 2
        assert b"+## labels-not-shifted" in re.sub(rb"\x1b\[[0-9;]*m", b"", shown)
        os.write(leader, answer.encode())
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # how a pseudo-terminal ends on Linux
            pass
        os.close(leader)
        assert process.wait(30) == 0
        assert len(git(repository, "rev-list", "HEAD").splitlines()) == commits
        assert (capsule / "incident.json").exists() == (commits == 3)
        assert (b"nothing was written" in shown) == (commits == 2)


#: Text that belongs to a rule and may be reworded, and facts of the machine and the moment.
PROSE = {"title", "summary", "cause", "next", "fix", "note", "documentation"}
VARIABLE = {
    "id": "ID", "created": "TIME", "changed": 0.0, "pid": 0, "host": "HOST", "started": "TIME",
    "process_start": "START",
    "digest": "SHA256", "capsule_sha256": "SHA256", "commit": "COMMIT", "found": "…", "state": "…", "advice": "…",
}  # fmt: skip


def normalised(document: Any, key: str = "", inside_rule: bool = False) -> Any:
    """A document without what differs from run to run or is prose."""
    if isinstance(document, dict):
        rule = inside_rule or "rule" in document or "documentation" in document
        return {name: normalised(value, name, rule) for name, value in document.items()}
    if inside_rule and key in PROSE and document:
        return "…"
    if isinstance(document, list):
        return [normalised(each, key, inside_rule) for each in document]
    if key in VARIABLE and document is not None and not inside_rule:
        return VARIABLE[key]
    if isinstance(document, str):
        document = re.sub(r"\b[0-9A-HJKMNP-TV-Z]{26}\b", "ID", document)
        document = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", document)
        document = re.sub(r"\b[0-9a-f]{12}\b|\b[0-9a-f]{40}\b", "COMMIT", document)
        return re.sub(r"\b20\d\d-\d\d-\d\d\b", "DATE", document)
    return document


class TestGoldenJson:
    @pytest.fixture
    def prepared(self, tmp_path: Path, repository: Path) -> list[str]:
        (tmp_path / "runs").mkdir()
        capsules.diverged(tmp_path / "runs" / "nan.capsule")
        (tmp_path / "log.md").write_text("## my-case · Mine\n\n- **Class:** kernel\n- **Own:** qwertz\n")
        assert (repository / "tests" / "test_labels.py").read_text() == TEST_FILE
        return ["--repo", str(repository)]

    @pytest.mark.parametrize(
        ("name", "arguments", "status"),
        [
            ("report", ["analyze", "runs", "--rule", "numerics/loss-nonfinite"], 1),
            ("show", ["show", "runs/nan.capsule"], 0),
            ("rules", ["rules", "capsule/damaged"], 0),
            ("cases", ["cases", "search", "qwertz"], 0),
            ("capsules", ["runs"], 0),
            ("doctor", ["doctor"], 1),
            ("env", ["env"], 0),
            ("incident", ["incident", "resolve", "runs/nan.capsule", *OPTIONS, "--symptom=NaN", "--yes"], 0),
        ],
    )
    def test_the_document_is_as_promised(
        self, cli: Run, tmp_path: Path, prepared: list[str], name: str, arguments: list[str], status: int
    ):
        settings = {
            "cases": {"LLMCONSOLE_CASES": str(tmp_path / "log.md")},
            "doctor": {"LLMCONSOLE_DIR": str(tmp_path / "nowhere")},  # which is worth a warning, and status 1
        }.get(name, {})
        more = prepared if name == "incident" else []
        done = cli(*arguments, *more, "--json", **settings)
        assert done.returncode == status, done.stderr
        document = json.loads(done.stdout.replace(str(tmp_path), "/tmp"))
        assert document["format"] == f"llmconsole.{name}/1"
        if name == "env":  # which rows there are depends on the machine
            document["environment"] = {"python": "…"} if document["environment"]["python"] else {}
        document = normalised(document)
        golden = GOLDEN / f"{name}.json"
        if UPDATE:
            golden.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        assert document == json.loads(golden.read_text(encoding="utf-8"))
