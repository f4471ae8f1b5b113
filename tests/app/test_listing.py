"""The list of capsules follows what happens in a directory, by inotify and by looking each time."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llmconsole.app.listing import Entry, Lister
from llmconsole.capsules import CapsuleWriter
from llmconsole.capsules.watch import Watch, is_remote, mount_type

NOBODY = 65534


@pytest.fixture(params=["inotify", "scandir"])
def lister(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lister]:
    folder = tmp_path / "runs"
    folder.mkdir()
    found = Lister(folder, inotify=None if request.param == "inotify" else False)
    found.listing()
    assert found.watch.mode == request.param
    yield found
    found.watch.close()


def write(path: Path, title: str = "run", steps: int = 3) -> Path:
    with CapsuleWriter(path, title=title, phase="training") as writer:
        writer.scalars("loss", step=range(steps), value=[1.0] * steps, rank=0)
    return path


def until(lister: Lister, happened: Callable[[list[Entry]], bool]) -> list[Entry]:
    """The kernel tells of a change a moment after it was made."""
    deadline = time.monotonic() + 20
    while True:
        entries = list(lister.listing().entries)
        if happened(entries):
            return entries
        assert time.monotonic() < deadline, entries
        time.sleep(0.01)


def test_a_new_capsule_appears(lister: Lister) -> None:
    write(lister.directory / "a.capsule", "first")
    assert [each.title for each in until(lister, lambda entries: len(entries) == 1)] == ["first"]
    write(lister.directory / "b.capsule", "second")
    until(lister, lambda entries: {each.title for each in entries} == {"first", "second"})


def test_a_directory_becomes_a_capsule_when_its_manifest_appears(lister: Lister) -> None:
    path = lister.directory / "late.capsule"
    whole = write(lister.directory.parent / "elsewhere.capsule")
    path.mkdir()
    for _ in range(3):
        assert lister.listing().entries == ()
        time.sleep(0.02)
    for each in ("ranks", "capsule.json"):
        os.rename(whole / each, path / each)
    until(lister, lambda entries: [each.name for each in entries] == ["late.capsule"])


def test_a_capsule_grows(lister: Lister) -> None:
    with CapsuleWriter(lister.directory / "live.capsule", title="live", phase="training") as writer:
        writer.scalar_row(1, {"loss": 2.0})
        writer.flush()
        before = until(lister, lambda entries: len(entries) == 1 and entries[0].step == 1)
        assert before[0].status == "recording"
        writer.scalar_row(7, {"loss": 1.0})
        writer.flush()
        until(lister, lambda entries: entries[0].step == 7)
    until(lister, lambda entries: entries[0].status == "sealed")


def test_a_capsule_is_replaced_by_another_of_its_name(lister: Lister) -> None:
    path = write(lister.directory / "a.capsule", "old")
    until(lister, lambda entries: len(entries) == 1)
    new = write(lister.directory.parent / "new.capsule", "new")
    shutil.rmtree(path)
    os.rename(new, path)
    until(lister, lambda entries: [each.title for each in entries] == ["new"])


def test_a_sealed_capsule_gets_another_manifest_or_an_incident(lister: Lister) -> None:
    path = write(lister.directory / "a.capsule", "old")
    until(lister, lambda entries: len(entries) == 1)
    manifest = json.loads((path / "capsule.json").read_text())
    (path / ".new").write_text(json.dumps({**manifest, "title": "corrected"}))
    os.replace(path / ".new", path / "capsule.json")
    until(lister, lambda entries: entries[0].title == "corrected")
    (path / "incident.json").write_text(json.dumps({"status": "fixed"}))
    until(lister, lambda entries: entries[0].incident == "fixed")
    (path / "capsule.json").write_text("{")
    until(lister, lambda entries: "capsule.json" in entries[0].problem)


def test_a_capsule_is_deleted(lister: Lister) -> None:
    path = write(lister.directory / "a.capsule")
    until(lister, lambda entries: len(entries) == 1)
    shutil.rmtree(path)
    until(lister, lambda entries: entries == [])


def test_the_directory_itself_goes_and_comes_back(lister: Lister) -> None:
    write(lister.directory / "a.capsule")
    until(lister, lambda entries: len(entries) == 1)
    shutil.rmtree(lister.directory)
    listing = lister.listing()
    assert listing.entries == ()
    assert "choose another with llmconsole DIR" in listing.problem
    lister.directory.mkdir()
    write(lister.directory / "b.capsule", "again")
    assert [each.title for each in until(lister, lambda entries: len(entries) == 1)] == ["again"]
    assert lister.listing().problem == ""


def test_nothing_is_read_while_nothing_happens(lister: Lister) -> None:
    write(lister.directory / "a.capsule")
    until(lister, lambda entries: len(entries) == 1)
    time.sleep(0.1)  # the last events of the writer
    lister.listing()
    before = lister.listing()
    assert lister.watch.changed() is (lister.watch.mode == "scandir")
    assert lister.listing() == before


def test_directories_that_hold_evidence_are_named_where_there_is_none_directly(lister: Lister) -> None:
    for name in ("notes", "logs", "a"):
        (lister.directory / name).mkdir()
    (lister.directory / "notes" / "read.me").write_text("nothing of a known format\n")
    lister.listing()
    assert lister.listing().below == ()
    write(lister.directory / "a" / "one.capsule")
    (lister.directory / "logs" / "train.log").write_text("step 1 loss 2.5\nstep 2 loss 2.4\nstep 3 loss 2.3\n")
    deadline = time.monotonic() + 20
    while (found := lister.listing()).below != ("a", "logs") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (found.below, found.entries) == (("a", "logs"), ())
    write(lister.directory / "b.capsule")
    until(lister, lambda entries: len(entries) == 1)
    assert lister.listing().below == ()


@pytest.mark.parametrize("inotify", [None, False])
def test_what_may_not_be_read_is_a_row_with_words(tmp_path: Path, inotify: bool | None) -> None:
    folder = tmp_path / "runs"
    closed, half = write(folder / "closed.capsule"), write(folder / "half.capsule")
    open_one = write(folder / "open.capsule")
    for path in (tmp_path, *tmp_path.parents):  # another user must be able to come as far as here
        if path.stat().st_uid == os.getuid() and path != Path("/") and "pytest" in str(path):
            path.chmod(0o755)
    for path in (open_one, half, *open_one.rglob("*"), *half.rglob("*")):
        path.chmod(0o755)
    closed.chmod(0)
    (half / "capsule.json").chmod(0)
    Lister(folder, inotify=False).listing()  # all modules are loaded before anyone loses the right to
    entries = {each.name: each for each in as_another_user(folder, inotify)}
    assert entries["open.capsule"].problem == ""
    assert "ermission" in entries["closed.capsule"].problem
    assert "ermission" in entries["half.capsule"].problem
    closed.chmod(0o700)


def as_another_user(folder: Path, inotify: bool | None) -> list[Entry]:
    """Entries as a user without privileges finds them; root may read everything."""
    import msgspec

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writing, msgspec.json.encode(Lister(folder, inotify=inotify).listing().entries))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return msgspec.json.decode(said, type=list[Entry])


def test_a_large_directory_is_listed_by_names_first_and_read_the_newest_first(tmp_path: Path) -> None:
    for number in range(12):
        path = write(tmp_path / f"{number:02}.capsule", f"title {number}")
        os.utime(path / "capsule.json", (1e9 + number, 1e9 + number))
    lister = Lister(tmp_path, inotify=False)
    first = lister.listing(budget=0.0)
    assert first.unread == len(first.entries) == 12
    assert lister.listing(budget=0.0) == first
    whole = lister.listing()
    assert whole.unread == 0
    assert [each.title for each in whole.entries] == [f"title {number}" for number in range(11, -1, -1)]


def test_without_a_watch_to_be_had_each_look_reads_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from watchdog.observers import Observer

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(Observer, "start", full)
    watch = Watch(tmp_path)
    assert [watch.changed() for _ in range(3)] == [True] * 3
    assert watch.mode == "scandir"


def test_network_file_systems_are_known_by_their_mount() -> None:
    mounts = (
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - nfs4 server:/export rw\n"
        "40 35 98:1 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw\n"
        "41 35 98:2 / /home/me/x rw - fuse.sshfs host: rw\n"
    )
    assert mount_type(mounts, os.makedev(98, 0)) == "nfs4"
    assert mount_type(mounts, os.makedev(98, 1)) == "lustre"
    assert mount_type(mounts, os.makedev(98, 2)) == "fuse.sshfs"
    assert mount_type(mounts, os.makedev(98, 3)) == ""
    assert not is_remote(Path("/proc"))
