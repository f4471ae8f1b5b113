"""What a stranger may put where a capsule's files should be: a pipe, a folder, terabytes of nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmconsole.app.listing import Lister
from llmconsole.app.worker import Worker

from . import capsules

RANK = Path("ranks/rank00000")
PLACES = ["incident.json", *(str(RANK / name) for name in ("rank.json", "scalars.bin", "names.jsonl"))]
WORDS = ("kind", "status", "table", "name", "role", "file", "checksum", "phase", "type", "message", "trigger")


@pytest.fixture(scope="module")
def worker():
    with Worker() as started:
        yield started


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    return capsules.healthy(tmp_path / "x.capsule")


def put_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def put_endless_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [put_pipe, put_folder, put_endless_device])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_waited_for_nowhere(worker: Worker, capsule: Path, place: str, put) -> None:
    put(capsule / place)
    report = worker.call("analyze", {"path": str(capsule)}, 60)
    assert report["errors"] == []
    damaged = [finding for finding in report["findings"] if finding["rule"] == "capsule/damaged"]
    assert bool(damaged) == place.startswith("ranks")
    (entry,) = Lister(capsule.parent).listing().entries
    assert (entry.problem, entry.incident) == ("", "")


def test_terabytes_of_holes_take_no_time(worker: Worker, capsule: Path) -> None:
    (capsule / "files").mkdir()
    announced = {"path": "files/huge.log", "bytes": 4, "sha256": "0" * 64}
    manifest = json.loads((capsule / "capsule.json").read_text())
    (capsule / "capsule.json").write_text(json.dumps(manifest | {"files": [announced]}))
    for file in (capsule / "files/huge.log", capsule / "files/unlisted"):
        file.touch()
        os.truncate(file, 1 << 42)
    shown = worker.call("show", {"path": str(capsule)}, 60)
    assert shown["inventory"]["digest"] is None
    assert [row["what"] for row in shown["damage"]] == [f"attached file has {1 << 42:,} bytes instead of 4"]
    with pytest.raises(Exception, match=r"files of 8,796,[0-9,]+ bytes are more than a digest is made of"):
        worker.call("describe", {"path": str(capsule)}, 60)


def test_half_a_surrogate_pair_in_any_field_is_an_odd_sign_and_no_error(worker: Worker, capsule: Path) -> None:
    manifest = json.loads((capsule / "capsule.json").read_text())
    half = {"status": "\ud800", "phase": "\udfff", "title": "a\ud800b", "\ud800": {"\udc00": ["\udc00"]}}
    (capsule / "capsule.json").write_text(json.dumps(manifest | half))
    shown = worker.call("show", {"path": str(capsule)}, 60)
    assert shown["title"] == "a\ufffdb"
    assert shown["manifest"]["\ufffd"] == {"\ufffd": ["\ufffd"]}
    rank = capsule / RANK
    (rank / "records").mkdir(exist_ok=True)
    for name in ("names.jsonl", "arrays.jsonl", "rank.json", "records/events.jsonl", "records/memory.jsonl"):
        (rank / name).write_text(json.dumps({"id": 0, "step": 1, "\ud800": 1} | dict.fromkeys(WORDS, "\ud800")) + "\n")
    for method in ("show", "analyze", "contents", "marks", "describe"):
        worker.call(method, {"path": str(capsule)}, 60)
    assert [row["what"][:12] for row in shown["damage"]] == ["field status", "field phase "]


def test_a_name_that_is_no_utf8_is_one_row_of_the_list(worker: Worker, capsule: Path) -> None:
    odd = capsule.parent / "\udcff\udcfe.capsule"
    capsule.rename(odd)
    capsules.healthy(capsule)
    found = worker.call("listing", {"directory": str(capsule.parent)}, 60)
    assert sorted(entry["name"] for entry in found["entries"]) == [capsule.name, odd.name]
    assert worker.call("analyze", {"path": str(odd)}, 60)["errors"] == []


def test_more_ranks_than_are_read_and_files_in_their_place_are_damage(
    worker: Worker, capsule: Path, monkeypatch
) -> None:
    from llmconsole.capsules import Capsule, reader

    (capsule / "ranks/rank00001").write_text("no directory")
    for rank in range(2, 9):
        (capsule / f"ranks/rank{rank:05d}").mkdir()
    monkeypatch.setattr(reader, "MAX_RANKS", 4)
    opened = Capsule.open(capsule)
    assert opened.ranks == (0, 2, 3)
    said = {(each.where, each.what, each.lost) for each in opened.damage()}
    assert ("ranks/rank00001", "is no directory", "the rank") in said
    assert ("ranks", "more ranks than are read", "5 ranks") in said


@pytest.mark.parametrize("put", [put_pipe, put_endless_device])
def test_a_case_log_that_never_ends_is_refused(cli, tmp_path: Path, put) -> None:
    put(tmp_path / "debug-cases.md")
    done = cli("cases")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is no file of at most 64 MiB" in done.stderr


@pytest.mark.parametrize("command", [("cases",), ("analyze", "x.capsule"), ("--list",)])
def test_a_working_directory_that_is_gone_is_named_as_such(cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    code = f"import os; os.rmdir({str(tmp_path / 'gone')!r}); from llmconsole.app.cli import main; main({command})"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=100
    )
    assert "Traceback" not in done.stderr
    assert "standard output" not in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("word", ["nan", "inf", "-1", "many"])
def test_settings_that_make_no_sense_are_left_out(cli, capsule: Path, word: str) -> None:
    done = cli("analyze", str(capsule), LLMCONSOLE_WORKER_MEMORY=word, LLMCONSOLE_WORKER_TIMEOUT=word)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("columns", ["0", "1", "x"])
def test_no_width_makes_a_report_vanish(cli, capsule: Path, columns: str) -> None:
    assert "Nothing" in " ".join(cli("analyze", str(capsule), COLUMNS=columns).stdout.split())


def test_an_empty_path_is_not_the_working_directory(cli, capsule: Path) -> None:
    done = cli("analyze", "", str(capsule))
    assert done.returncode == 2
    assert done.stderr == "llmconsole: an empty path was given; . is the working directory\n"


def test_a_configuration_of_a_million_keys_is_shown_in_part(cli, capsule: Path) -> None:
    manifest = json.loads((capsule / "capsule.json").read_text())
    manifest["config"] = dict.fromkeys((f"k{number}" for number in range(10**6)), 1)
    (capsule / "capsule.json").write_text(json.dumps(manifest, separators=(",", ":")))
    done = cli("show", str(capsule))
    assert done.returncode == 0
    assert "more: llmconsole show --json" in done.stdout
    assert done.stdout.count("\n") < 1200
