"""Raw evidence in the list: known by content, grouped to jobs, followed, never waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from llmconsole.app import imports, raw_files
from llmconsole.app.entry import RAW, Entry
from llmconsole.app.listing import Lister
from llmconsole.app.raw_files import RawFiles

from .test_listing import as_another_user, until, write


def log(path: Path, first: int = 1, last: int = 60, loss: float = 6.0) -> Path:
    path.write_text("".join(f"s:{step} trl:{loss - step / 100:.4f} lr:0.0003\n" for step in range(first, last)))
    return path


def rows(folder: Path) -> list[Entry]:
    return list(Lister(folder, inotify=False).listing().entries)


@pytest.fixture(params=["inotify", "scandir"])
def lister(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lister]:
    folder = tmp_path / "runs"
    folder.mkdir()
    found = Lister(folder, inotify=None if request.param == "inotify" else False)
    found.listing()
    yield found
    found.watch.close()


def test_a_log_is_a_row_beside_capsules_and_other_files_are_none(tmp_path: Path) -> None:
    write(tmp_path / "a.capsule")
    log(tmp_path / "train.log")
    (tmp_path / "README.md").write_text("# Training\n\nStep 1: start. Step 2: wait.\n")
    (tmp_path / "train.py").write_text("loss = 1.0\nprint(f'step {1} loss {loss}')\n")
    (tmp_path / "weights.bin").write_bytes(os.urandom(5000))
    (tmp_path / "empty.log").touch()
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "link.log").symlink_to(tmp_path / "nowhere")
    found = {each.name: each for each in rows(tmp_path)}
    assert sorted(found) == ["a.capsule", "train.log"]
    entry = found["train.log"]
    assert (entry.status, entry.trigger, entry.path) == (RAW, "training log", str(tmp_path / "train.log"))
    assert entry.changed == (tmp_path / "train.log").stat().st_mtime
    assert entry.files == ()


def test_files_of_one_job_are_one_row_and_two_runs_are_two(tmp_path: Path) -> None:
    for number in range(16):
        log(tmp_path / f"part{number}.log", number * 60, number * 60 + 60)
    (row,) = rows(tmp_path)
    assert row.title == f"{tmp_path.name} (16 files)"
    assert row.files == tuple(str(tmp_path / f"part{number}.log") for number in range(16))
    assert row.path == row.files[0]
    log(tmp_path / "another.log", 0, 60, loss=9.0)
    assert len(rows(tmp_path)) == 17


def test_directories_of_processes_are_a_row_a_run(tmp_path: Path) -> None:
    for run in ("one", "two"):
        for rank in range(2):
            place = tmp_path / run / "attempt_0" / str(rank)
            place.mkdir(parents=True)
            log(place / "stdout.log")
            (place / "stderr.log").touch()
    (tmp_path / "exp1").mkdir()
    log(tmp_path / "exp1" / "train.log")
    found = {each.title: each for each in rows(tmp_path)}
    assert sorted(found) == ["one (2 files)", "two (2 files)"]
    files = tuple(str(tmp_path / "two" / "attempt_0" / str(rank) / "stdout.log") for rank in range(2))
    assert (found["two (2 files)"].files, found["two (2 files)"].path) == (files, files[0])


def test_a_log_appears_grows_and_goes(lister: Lister, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lister.directory / "train.log"
    path.touch()
    assert lister.listing().entries == ()
    log(path)
    before = until(lister, lambda entries: len(entries) == 1)[0]
    looked: list[object] = []
    monkeypatch.setattr(RawFiles, "_look_at", lambda *each: looked.append(each))
    with path.open("a") as file:
        file.write("s:60 trl:5.0\n")
    os.utime(path, (before.changed + 5, before.changed + 5))
    until(lister, lambda entries: entries[0].changed == before.changed + 5)
    assert looked == [], "what it is was known"
    path.unlink()
    until(lister, lambda entries: entries == [])


def test_a_run_that_starts_again_beside_another_stops_being_one_job(lister: Lister) -> None:
    log(lister.directory / "a.log", 0, 60)
    log(lister.directory / "b.log", 60, 120)
    until(lister, lambda entries: [len(each.files) for each in entries] == [2])
    log(lister.directory / "b.log", 0, 200)  # replaced by a run of its own
    until(lister, lambda entries: [len(each.files) for each in entries] == [0, 0])


def test_thousands_of_files_do_not_hold_up_the_list(tmp_path: Path) -> None:
    write(tmp_path / "a.capsule")
    for number in range(400):
        (tmp_path / f"{number:04}.txt").write_text("words " * 1000)
    log(tmp_path / "train.log")
    os.utime(tmp_path / "train.log", (1e9, 1e9))  # the oldest comes last
    lister = Lister(tmp_path, inotify=False)
    first = lister.listing(budget=0.0)
    assert first.unread == 402
    assert [each.name for each in first.entries] == ["a.capsule"]
    found = lister.listing(budget=0.05)
    while found.unread:
        found = lister.listing(budget=0.5)
    assert [each.name for each in found.entries] == ["a.capsule", "train.log"]
    assert lister.listing() == found


def test_while_files_wait_a_log_stands_alone_and_unjudged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RawFiles(tmp_path)
    files.named([log(tmp_path / name, first, first + 60).name for name, first in (("b.log", 60), ("a.log", 0))])
    os.utime(tmp_path / "a.log", (1e9, 1e9))
    now = iter([0.0, 2.0])
    monkeypatch.setattr(raw_files, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert [(each.name, each.status) for each in files.entries(until=1.0)] == [("b.log", "")]
    assert files.unread == 1
    assert [(each.name, len(each.files)) for each in files.entries(until=None)] == [("a.log", 2)]


def test_more_files_than_are_looked_at_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_files, "MOST_FILES", 3)
    for number in range(5):
        log(tmp_path / f"{number}.log", number * 60, number * 60 + 60)
    listing = Lister(tmp_path, inotify=False).listing()
    assert listing.problem == "5 files; the 3 first by name are read"
    assert [len(each.files) for each in listing.entries] == [3]


def test_a_log_that_may_not_be_read_is_a_row_with_words(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    log(folder / "open.log")
    for name in ("closed.log", "closed.o"):
        log(folder / name).chmod(0)
    for path in (tmp_path, *tmp_path.parents):  # another user must be able to come as far as here
        if path.stat().st_uid == os.getuid() and path != Path("/") and "pytest" in str(path):
            path.chmod(0o755)
    folder.chmod(0o755)
    (folder / "open.log").chmod(0o644)
    rows(folder)  # all modules are loaded before anyone loses the right to
    found = {each.name: each for each in as_another_user(folder, False)}
    assert sorted(found) == ["closed.log", "open.log"]
    assert found["closed.log"].problem.endswith("closed.log: may not be read (permission denied)")
    assert found["open.log"].problem == ""


def test_the_first_file_stands_for_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCONSOLE_SCRATCH", str(tmp_path))
    one, two = str(log(tmp_path / "a.log", 0, 60)), str(log(tmp_path / "b.log", 60, 120))
    assert len(imports.open_evidence(one).scalars("loss")) == 60
    imports.belong_together(one, [one, two])
    assert len(imports.open_evidence(one).scalars("loss")) == 120
    stamp = imports.stamp_of_job(one)
    assert stamp is not None
    assert len(stamp) == 6
    imports.belong_together(one, [])
    assert len(imports.open_evidence(one).scalars("loss")) == 60
