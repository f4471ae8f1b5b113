"""What a capsule says of itself: status, needs, inventory, the eight replay items, the digest."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.jsonio import decode, encode
from llmconsole.capsules.process import host, process_start

NOW = 1_700_000_000.0
IDS = np.arange(12).reshape(3, 4)


class TestStatus:
    def status(self, path, after: float) -> str:
        return Capsule.open(path, clock=lambda: NOW + after).status

    def edit(self, path, rank=0, **fields) -> None:
        file = path / f"ranks/rank{rank:05d}/rank.json"
        file.write_bytes(encode(decode(file.read_bytes()) | fields))

    def test_a_fresh_heartbeat_means_recording(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        assert self.status(path, 29.9) == "recording"

    def test_without_one_a_living_process_is_stale(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        assert self.status(path, 30.0) == "stale"

    def test_without_one_a_process_that_is_gone_has_crashed(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        self.edit(path, pid=child.pid)
        assert self.status(path, 29.9) == "recording"
        assert self.status(path, 30.0) == "crashed"

    def test_a_killed_process_that_its_parent_has_not_waited_for_has_crashed(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        child = subprocess.Popen(["sleep", "60"])
        started = process_start(child.pid)
        self.edit(path, pid=child.pid, process_start=started)
        assert self.status(path, 31) == "stale"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it ended, and stays a zombie
        try:
            assert process_start(child.pid) == started
            assert self.status(path, 31) == "crashed"
        finally:
            child.wait()

    def test_a_pid_that_belongs_to_another_process_by_now_is_gone(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        assert process_start(os.getpid()) is not None
        self.edit(path, pid=os.getpid(), process_start="00000000:1")
        assert self.status(path, 31) == "crashed"

    def test_of_another_host_nobody_knows(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        self.edit(path, host=f"not-{host()}", pid=2**22 + 1)
        assert self.status(path, 31) == "stale"

    def test_one_dead_rank_makes_the_capsule_crashed(self, path):
        w = CapsuleWriter(path, clock=lambda: NOW)
        w.heartbeat(rank=1)
        self.edit(path, rank=1, process_start="00000000:1")
        w.heartbeat(rank=0)
        assert self.status(path, 31) == "crashed"

    def test_a_living_rank_beside_a_sealed_one_is_still_recording(self, path):
        w = CapsuleWriter(path, clock=lambda: NOW)
        w.heartbeat(rank=1)
        w.heartbeat(status="sealed")
        assert self.status(path, 1) == "recording"

    def test_when_all_ranks_sealed_and_only_the_manifest_did_not_it_is_sealed(self, path):
        w = CapsuleWriter(path, clock=lambda: NOW)
        w.heartbeat(status="sealed")
        assert self.status(path, 100) == "sealed"

    def test_a_capsule_killed_before_its_first_heartbeat_is_known_by_its_creator(self, path):
        CapsuleWriter(path, clock=lambda: NOW)
        for file in (path / "ranks/rank00000").iterdir():
            file.unlink()
        (path / "ranks/rank00000").rmdir()
        assert self.status(path, 1) == "stale"
        manifest = decode((path / "capsule.json").read_bytes())
        (path / "capsule.json").write_bytes(
            encode(manifest | {"writer": manifest["writer"] | {"process_start": "0:1"}})
        )
        assert self.status(path, 1) == "crashed"
        assert [each.what for each in Capsule.open(path).damage()] == ["writer died before it wrote any evidence"]

    def test_appending_renews_the_heartbeat_every_few_seconds(self, path):
        now = [NOW]
        w = CapsuleWriter(path, clock=lambda: now[0])
        for second in range(60):
            now[0] = NOW + second
            w.scalar_row(second, {"loss": 1.0})
        assert self.status(path, 59 + 24) == "recording"
        assert self.status(path, 59 + 30) == "stale"

    def test_a_torn_tail_is_damage_only_when_nobody_can_be_writing_it(self, path):
        w = CapsuleWriter(path, clock=lambda: NOW)
        w.scalar_row(0, {"loss": 1.0})
        w.record("events", {"kind": "log"})
        for name in ("scalars.bin", "records/events.jsonl"):
            with (path / "ranks/rank00000" / name).open("ab") as file:
                file.write(b"LCBK{")
        assert Capsule.open(path, clock=lambda: NOW + 1).damage() == ()
        found = {each.what for each in Capsule.open(path, clock=lambda: NOW + 31).damage()}
        assert found == {
            "last line is torn",
            "last block is torn",
            "writer of rank 0 has not been heard of for long",
        }


@pytest.fixture
def full(path) -> Path:
    """A capsule from which the failure can be replayed."""
    digests = {name: {"sha256": "ab"} for name in ("model", "tokenizer", "chat_template")}
    manifest = {
        "identity": digests,
        "position": {"global_step": 3, "tokens_seen": 0, "data_cursor": {"shard": 1}},
        "placement": {"0": {"device": "cpu"}},
        "config": {"lr": 1.0},
        "environment": {"python": "3.11"},
        "model": {"rope": {"theta": 1e4}},
        "trigger": {"kind": "spike", "step": 3},
    }
    row = {"name": "l", "role": "activation", "shape": [2], "stride": [1], "device": "cpu", "dtype": "float16"}
    with CapsuleWriter(path, title="t", phase="training", manifest=manifest) as w:
        w.scalars("loss", step=[1, 2, 3], value=[2.0, 1.0, float("nan")])
        w.stats([row | {"step": 2}, row | {"step": 3}])
        w.norms(3, [("l", "gradient", "float16", (2,), 1.0, 0, 0)])
        w.batch(step=3, input_ids=IDS, labels=IDS, sample_ids=list("abc"), reported_loss=1.0)
        w.rng(step=3, torch=b"state")
        w.tensor("reference/out", np.ones(4, np.float32), step=3)
        w.tensor("observed/out", np.ones(4, np.float16), step=3)
        w.record("events", {"kind": "exception", "message": "boom"})
    return path


class TestNeeds:
    @pytest.mark.parametrize(
        ("need", "there"),
        [
            ("scalars.loss", True),
            ("scalars.grad_norm", False),
            ("stats", True),
            ("stats.gradient", True),
            ("stats.update", False),
            ("batches", True),
            ("batches.labels", True),
            ("batches.logits", False),
            ("batches.reported_loss", True),
            ("batches.reported_decimals", False),
            ("tensors.reference/out", True),
            ("tensors.reference/*", True),
            ("tensors.decode/*", False),
            ("records.events", True),
            ("records.events.message", True),
            ("records.events.path", False),
            ("records.requests", False),
            ("manifest.model.rope", True),
            ("manifest.model.rope.style", False),
            ("manifest.position.tokens_seen", True),
            ("manifest.training.optimizer", False),
            ("rng", True),
            ("files", False),
            ("batches.logits|batches.labels", True),
            ("batches.logits | scalars.grad_norm", False),
            ("nonsense.loss", False),
        ],
    )
    def test_a_need_is_there_or_not(self, full, need, there):
        assert Capsule.open(full).has(need) is there

    def test_an_empty_capsule_has_nothing(self, path):
        CapsuleWriter(path).close()
        c = Capsule.open(path)
        families = ("scalars", "stats", "batches", "tensors", "records", "rng", "files")
        assert [c.has(each) for each in families] == [False] * 7


class TestReplay:
    def test_a_capsule_with_all_eight_items_is_replayable(self, full):
        items = Capsule.open(full).replay_items()
        assert len(items) == 8
        assert [each.missing for each in items] == [()] * 8
        assert all(each.present for each in items)

    def test_an_empty_capsule_says_what_each_item_lacks(self, path):
        CapsuleWriter(path).close()
        items = Capsule.open(path).replay_items()
        assert not any(each.present for each in items)
        assert items[0].missing == ("batches.input_ids", "batches.sample_ids|records.samples")
        assert items[2].missing == (
            "manifest.position.global_step",
            "manifest.position.tokens_seen",
            "manifest.position.data_cursor",
            "rng",
        )
        assert items[5].missing == ("stats",)

    def test_statistics_must_reach_the_step_of_the_trigger_and_one_before_it(self, path):
        with CapsuleWriter(path, manifest={"trigger": {"kind": "spike", "step": 3}}) as w:
            w.norms(4, [("l", "gradient", "float16", (2,), 1.0, 0, 0)])
        assert Capsule.open(path).replay_items()[5].missing == ("stats at step 3", "stats before step 3")

    def test_what_a_job_has_none_of_is_named_none(self, path):
        none = {"name": "none"}
        identity = {"model": {"sha256": "a"}, "tokenizer": none, "chat_template": none, "adapter": {"name": "lora"}}
        CapsuleWriter(path, manifest={"identity": identity}).close()
        assert Capsule.open(path).replay_items()[1].missing == ("manifest.identity.adapter.sha256",)


def test_the_inventory_counts_everything(full):
    c = Capsule.open(full)
    inventory = decode(encode(c.inventory()))
    assert inventory["title"] == "t"
    assert inventory["status"] == "sealed"
    assert inventory["trigger"]["kind"] == "spike"
    assert inventory["scalars"] == [
        {
            "name": "loss",
            "rank": 0,
            "side": None,
            "unit": "nats/token",
            "rows": 3,
            "first_step": 1,
            "last_step": 3,
            "nonfinite": 1,
        }
    ]
    assert inventory["stats"] == {
        "rows": 3,
        "full_rows": 2,
        "names": 1,
        "roles": {"activation": 2, "gradient": 1},
        "first_step": 2,
        "last_step": 3,
    }
    assert inventory["batches"] == {"count": 1, "steps": [3], "arrays": {"input_ids": 1, "labels": 1}}
    assert inventory["tensors"] == [
        {"group": "reference", "count": 1, "bytes": 16},
        {"group": "observed", "count": 1, "bytes": 8},
    ]
    assert inventory["records"] == {"events": 1}
    assert inventory["rng_steps"] == [3]
    assert inventory["damage"] == []
    assert inventory["digest"] == c.digest()


class TestDigest:
    def by_hand(self, path: Path) -> str:
        """What ``find . -type f | LC_ALL=C sort | sha256sum`` and a second sha256sum make of it."""
        found = {}
        for directory, _, names in os.walk(path):
            for name in names:
                file = Path(directory, name)
                found[file.relative_to(path).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        found.pop("incident.json", None)
        lines = sorted(f"{name}\t{digest}\n".encode() for name, digest in found.items())
        return hashlib.sha256(b"".join(lines)).hexdigest()

    def test_it_is_the_hash_of_the_sorted_list_of_hashes(self, full):
        (full / "files").mkdir(exist_ok=True)
        for name in ("b", "a", "ä", "a-b", "a.b", "Z"):
            (full / "files" / name).write_text(name)
        assert Capsule.open(full).digest() == self.by_hand(full)

    def test_neither_the_incident_nor_unfinished_files_are_evidence(self, full):
        before = Capsule.open(full).digest()
        (full / "incident.json").write_text("{}")
        (full / ".tmp-1-ab").write_text("half")
        assert Capsule.open(full).digest() == before
        (full / "ranks/incident.json").write_text("{}")
        assert Capsule.open(full).digest() != before

    def test_reading_everything_changes_nothing(self, full):
        def state():
            return {each: each.stat().st_mtime_ns for each in full.rglob("*")}

        before, times = self.by_hand(full), state()
        c = Capsule.open(full)
        c.inventory(), c.damage(), c.rng(3), [each.input_ids for each in c.batches()]
        assert (self.by_hand(full), state()) == (before, times)


class TestLoading:
    def test_importing_the_package_costs_no_numpy_hdf5_or_torch(self):
        code = (
            "import sys, llmconsole.capsules as c; assert not {'numpy', 'h5py', 'torch', 'msgspec', 'git', 'rich'} & "
            "set(sys.modules), sys.modules; c.Capsule; c.CapsuleWriter; assert not {'h5py', 'torch'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_listing_reads_the_manifest_only(self, full, monkeypatch):
        opened = []
        original = os.open
        monkeypatch.setattr(
            os, "open", lambda path, *rest, **more: opened.append(path) or original(path, *rest, **more)
        )
        c = Capsule.open(full)
        assert (c.title, c.status, c.manifest.phase, c.trigger.kind) == ("t", "sealed", "training", "spike")
        assert [Path(each).name for each in opened] == ["capsule.json"]

    def test_a_million_rows_are_read_as_columns(self, path):
        values = np.random.default_rng(0).standard_normal(1_000_000)
        with CapsuleWriter(path) as w:
            w.scalars("x", step=range(1_000_000), value=values)
        np.testing.assert_array_equal(Capsule.open(path).scalars("x").value, values)

    def test_the_inventory_is_a_type_that_can_be_decoded(self, full):
        from llmconsole.capsules.inventory import Inventory

        inventory = Capsule.open(full).inventory()
        assert msgspec.convert(decode(encode(inventory)), Inventory).stats == inventory.stats
