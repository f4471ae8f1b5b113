"""W&B run files, read without wandb and compared with what wandb was given."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import import_files
from llmconsole.capsules.importers.wandb import records

JOB = """
import wandb
run = wandb.init(project="p", name="a run", config={"learning_rate": 1e-3, "gradient_accumulation_steps": 4,
                 "model": {"layers": 2}, "api_key": "do-not-show"})
for step in range(150):
    run.log({"train/loss": 3.0 / (step + 1), "train/global_step": 10 * step, "nested": {"deep": {"x": step}},
             "text": "words", "odd": float("nan") if step == 3 else float("inf")})
run.log({"hist": wandb.Histogram([1, 2, 3]), "eval/loss": 0.5, "train/global_step": 1500})
run.summary["best"] = 0.125
run.finish(exit_code=3)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that the real wandb wrote, offline."""
    folder = tmp_path_factory.mktemp("wandb")
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "HOME": str(folder),
    }
    subprocess.run([sys.executable, "-c", JOB], cwd=folder, env={**os.environ, **settings}, check=True, timeout=90)
    return next(folder.glob("wandb/offline-run-*/run-*.wandb"))


def imported(tmp_path: Path, path: Path) -> Capsule:
    return Capsule.open(import_files([path], tmp_path / "out", attach=False))


def notes(capsule: Capsule) -> str:
    return "; ".join(capsule.manifest.raw["imported"]["files"][0]["notes"])


def test_every_logged_number_is_kept_at_the_jobs_own_step(written: Path, tmp_path: Path) -> None:
    capsule = imported(tmp_path, written)
    loss, nested, odd = (capsule.scalars(name) for name in ("loss", "nested.deep.x", "odd"))
    assert loss.step.tolist() == [10 * step for step in range(150)]
    np.testing.assert_array_equal(loss.value, 3.0 / np.arange(1, 151))
    assert loss.time is not None
    assert (np.diff(loss.time) >= 0).all()
    assert nested.value.tolist() == list(range(150))
    assert np.isnan(odd.value[3])
    assert np.isposinf(odd.value[4])
    assert capsule.scalars("eval_loss").step.tolist() == [1500]
    assert "train/global_step" in notes(capsule)


def test_configuration_summary_and_packages_are_in_the_manifest(written: Path, tmp_path: Path) -> None:
    capsule = imported(tmp_path, written)
    manifest = capsule.manifest
    assert manifest.training is not None
    assert manifest.run is not None
    assert manifest.environment is not None
    assert manifest.training.accumulation_steps == 4
    assert manifest.training.optimizer is not None
    assert manifest.training.optimizer.lr == 1e-3
    assert manifest.run.name == "a run"
    assert manifest.config["model"] == {"layers": 2}
    assert manifest.config["wandb_summary"]["best"] == 0.125
    assert "do-not-show" not in (capsule.path / "capsule.json").read_text()
    assert manifest.environment.packages is not None
    assert "wandb" in manifest.environment.packages
    assert any("exit status 3" in event["message"] for event in capsule.records("events"))


def history_ends(data: bytes) -> list[int]:
    """Where the parts end that complete a record of the history (field 2 after the record's number), by hand."""
    ends: list[int] = []
    at, content = 7, b""
    while len(data) - at >= 7:
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        content = data[at + 7 : at + 7 + size] if kind in (1, 2) else content + data[at + 7 : at + 7 + size]
        at += 7 + size
        field_after_number = 2 if content[1] < 0x80 else 3
        if kind in (1, 4) and content[:1] == b"\x08" and content[field_after_number] == 2 << 3 | 2:
            ends.append(at)
    return ends


def test_cut_anywhere_it_keeps_the_rows_before(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    ends = history_ends(data)
    assert len(ends) == 151
    assert len(data) > 36 * 1024  # several blocks, so that records are split over their borders
    random.seed(7)
    for number in range(50):
        cut = random.randrange(len(data))
        path = tmp_path / f"cut-{number}.wandb"
        path.write_bytes(data[:cut])
        try:
            capsule = imported(tmp_path, path)
        except EvidenceError:
            assert cut < 7
            continue
        loss = capsule.scalars("loss")
        assert loss.step.tolist() == [10 * step for step in range(min(150, sum(end <= cut for end in ends)))]


def test_a_damaged_record_costs_no_more_than_its_block(written: Path, tmp_path: Path) -> None:
    data = bytearray(written.read_bytes())
    data[20_000] ^= 1
    path = tmp_path / "damaged.wandb"
    path.write_bytes(data)
    capsule = imported(tmp_path, path)
    loss = capsule.scalars("loss")
    lost = 150 - len(loss)
    assert 0 < lost < 150 * 32_768 / len(data) + 3
    np.testing.assert_array_equal(loss.value, 3.0 / (loss.step / 10 + 1))
    assert "damaged records" in notes(capsule)


def test_the_framing_is_that_of_the_leveldb_log(tmp_path: Path) -> None:
    """Three records by hand: one whole, one split over a block's border, one after the padding."""
    from zlib import crc32

    from llmconsole.capsules.importers.wandb import _Losses

    def part(kind: int, content: bytes) -> bytes:
        return struct.pack("<IHB", crc32(content, crc32(bytes([kind]))), len(content), kind) + content

    head = b":W&B\xe1\xbe\x00"
    first = part(1, b"one")
    room = 32_768 - len(head) - len(first) - 7
    second = part(2, b"a" * room) + part(4, b"b" * 100)
    fill = 65_536 - len(head + first + second) - 7 - 4
    third = part(1, b"c" * fill) + bytes(4)  # fewer than seven bytes are left in the block
    data = head + first + second + third + part(1, b"last")
    losses = _Losses()
    assert list(records([data], losses)) == [b"one", b"a" * room + b"b" * 100, b"c" * fill, b"last"]
    assert (losses.torn, losses.damaged) == (0, 0)
