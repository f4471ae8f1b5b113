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
    with pytest.raises(Exception, match=r"files of 8,796,[0-9,]+ bytes are more than the [0-9,]+ a digest is made of"):
        worker.call("describe", {"path": str(capsule)}, 60)


def test_half_a_surrogate_pair_in_any_field_is_an_odd_sign_and_no_error(worker: Worker, capsule: Path) -> None:
    manifest = json.loads((capsule / "capsule.json").read_text())
    half = {"status": "\ud800", "phase": "\udfff", "title": "a\ud800b", "\ud800": {"\udc00": ["\udc00"]}}
    (capsule / "capsule.json").write_text(json.dumps(manifest | half))
    shown = worker.call("show", {"path": str(capsule)}, 60)
    assert shown["title"] == "a\ufffdb"
    assert shown["manifest"]["\ufffd"] == {"\ufffd": ["\ufffd"]}
    assert [row["what"][:12] for row in shown["damage"]] == ["field status", "field phase "]
