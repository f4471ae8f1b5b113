"""What a stranger may put where a capsule's files should be: a pipe, a folder, terabytes of nothing."""

from __future__ import annotations

import json
import os
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
