"""``show --memory``, ``--ranks`` and ``--latency`` print what the console's views draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmconsole.capsules import CapsuleWriter

from .conftest import Run

GIB = 1 << 30


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    path = tmp_path / "machine.capsule"
    with CapsuleWriter(path, title="machine", phase="training") as writer:
        writer.record(
            "memory", {"step": 3, "phase": "forward", "weights": 3 * GIB, "allocated": 4 * GIB, "capacity": 8 * GIB}
        )
        for rank in range(3):
            writer.records(
                "collectives",
                (
                    {"rank": rank, "group": "dp", "group_ranks": [0, 1, 2], "seq": seq, "op": "all_reduce",
                     "state": "completed"}
                    for seq in range(5 if rank != 1 else 4)
                ),
            )  # fmt: skip
        writer.records("requests", ({"id": str(n), "queue": 0.1, "ttft": 0.2 + n / 1e3} for n in range(100)))
    return path


def test_each_view_of_the_machine_has_a_text(cli: Run, capsule: Path) -> None:
    memory = cli("show", str(capsule), "--memory").stdout
    assert "4 of 8 GiB" in memory
    assert "? 1 GiB" in memory  # allocated less what the ledger accounts for
    ranks = cli("show", str(capsule), "--ranks").stdout
    assert "first difference at 5" in ranks
    assert "missing: rank 1" in ranks
    latency = cli("show", str(capsule), "--latency").stdout
    assert "time to first token of 100 requests" in latency


def test_each_view_of_the_machine_has_a_document(cli: Run, capsule: Path) -> None:
    for option, field in (("--memory", "memory"), ("--ranks", "ranks"), ("--latency", "latency")):
        document = json.loads(cli("show", str(capsule), option, "--json").stdout)
        assert document["format"] == "llmconsole.show-machine/1"
        assert document[field]


def test_what_was_not_captured_is_said(cli: Run, tmp_path: Path) -> None:
    with CapsuleWriter(tmp_path / "bare.capsule", title="bare") as writer:
        writer.scalars("loss", step=[0], value=[1.0], rank=0)
    for option in ("--memory", "--ranks", "--latency"):
        done = cli("show", str(tmp_path / "bare.capsule"), option)
        assert done.returncode == 0
        assert " was" in done.stdout or "no request" in done.stdout or "captured" in done.stdout
        command = {"--memory": "llmconsole show SNAPSHOT --memory", "--ranks": "llmconsole show DUMPS --ranks"}
        assert command.get(option, "") in " ".join(done.stdout.split())


def test_a_job_of_one_process_is_not_sent_for_dumps(cli: Run, tmp_path: Path) -> None:
    for world_size, sent in ((1, False), (2, True)):
        path = tmp_path / f"{world_size}.capsule"
        with CapsuleWriter(path, title="bare", manifest={"run": {"world_size": world_size}}) as writer:
            writer.scalars("loss", step=[0], value=[1.0], rank=0)
        words = " ".join(cli("show", str(path), "--ranks").stdout.split())
        assert ("TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9)" in words) is sent
        assert ("This job ran in one process" in words) is not sent


def test_the_doctor_says_where_keys_are_changed_and_what_is_wrong_there(cli: Run, tmp_path: Path) -> None:
    config = tmp_path / "config"
    assert "keys.toml" in cli("doctor", "--json", XDG_CONFIG_HOME=str(config)).stdout
    (config / "llmconsole").mkdir(parents=True)
    (config / "llmconsole" / "keys.toml").write_text('app.help = "f1"\nno.such = "x"\n')
    checks = json.loads(cli("doctor", "--json", XDG_CONFIG_HOME=str(config)).stdout)["checks"]
    (row,) = [each for each in checks if each["name"] == "key map"]
    assert row["state"] == "warn"
    assert "1 changed" in row["found"]
    assert "no.such" in row["found"]
