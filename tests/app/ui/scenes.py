"""What the snapshots show: a repository with a case, and capsules in every state, with contents that never change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from llmconsole.capsules import CapsuleWriter

from ..conftest import git, make_repository

#: 2026-03-01 12:00:00 UTC: when everything here was last written.
NOON = 1_772_366_400
LONG = "sft-llama-7b-lora-r64-alpha128-dropout0.05-packing-4096-bf16-fsdp2-resume-from-step-118000"

CASE = """\
# Debug cases

## loss-overflow-17 · Loss scale 65536 overflowed the MLP 损失缩放溢出

- **Class:** nonfinite
- **Rules:** numerics/loss-nonfinite, numerics/fp16-overflow
- **Misled by:** a learning rate that was halved twice to no avail
- **Root cause:** layers.23.mlp.down leaves the range of fp16 on long sequences
- **Trigger:** sequences above 3,900 tokens
- **Prevention:** bf16 for the MLP; a ceiling on the loss scale
- **Occurrences:**
  - 2026-02-11 sft-7b
"""

#: A gate that lacks nothing.
GATE = """\
[regression]
command = "python -m pytest -q tests/test_labels.py"
broken = "HEAD~2"
fixed = "HEAD~1"
files = ["tests/test_labels.py"]
[neighbours]
skip = "the only caller"
[equivalence]
skip = "no reference for this model"
[performance]
skip = "one shift"
[faults]
skip = "no state"
[documents]
skip = "in the card"
"""


def repository(root: Path) -> Path:
    """A repository with one case of its own, and ``runs`` beside its code."""
    make_repository(root)
    (root / "debug-cases.md").write_text(CASE)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Resolve loss-overflow-17\n\nCase-Id: loss-overflow-17")
    return root


def age(folder: Path) -> None:
    """Nothing in a folder was written later than it was."""
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (NOON, NOON))


def healthy(path: Path, title: str, at: int = NOON) -> None:
    """A falling loss and nothing else."""
    step = np.arange(400)
    with CapsuleWriter(path, title=title, phase="training") as writer:
        writer.scalars("loss", step=step, value=2 + np.exp(-step / 60) + 0.02 * np.sin(step), rank=0, unit="nats/token")
        writer.scalars("grad_norm", step=step, value=1 + 0.2 * np.cos(step / 9), rank=0)
    _set_times(path, at)


def damaged(path: Path) -> None:
    """A manifest that was cut off."""
    healthy(path, "cut off", NOON - 60)
    (path / "capsule.json").write_text('{"format": "llmconsole.capsule/1", "id": ')
    _set_times(path, NOON - 60)


def stale(path: Path) -> None:
    """Its writer, on another machine, has been silent since noon."""
    healthy(path, "eval-node7", NOON - 120)
    for place, keep in ((path / "capsule.json", False), (path / "ranks/rank00000/rank.json", True)):
        found = json.loads(place.read_text())
        found["status"] = "recording"
        if keep:
            found |= {"heartbeat": NOON - 120, "host": "node7", "pid": 4711}
        place.write_text(json.dumps(found))
    _set_times(path, NOON - 120)


def broken(path: Path) -> None:
    """A run with evidence for every view: NaN at step 18,342 on rank 1, labels that were never shifted."""
    manifest = {
        "run": {"name": "sft-7b", "world_size": 8},
        "model": {"vocab_size": 64, "layers": 6},
        "tokenizer": {"vocab_size": 64},
        "training": {"objective": "causal-lm", "reduction": "token-mean", "precision": "fp16-mixed"},
        "trigger": {"kind": "nonfinite", "step": 18342, "rank": 1, "signal": "loss", "value": "NaN",
                    "message": "last finite layers.4.mlp.up → first bad layers.4.mlp.down"},
    }  # fmt: skip
    with CapsuleWriter(path, title="sft-7b", phase="training", manifest=manifest) as writer:
        _series(writer)
        _layers(writer)
        _batch(writer)
        _machine(writer)
        _requests(writer)
    _set_times(path, NOON - 300)


def investigated(path: Path) -> None:
    """Its incident was opened at 11:00, located at 11:12, and became the repository's case."""
    tried = [
        {"changed": "学习率减半", "observed": "损失照样发散", "verdict": "refuted", "t": "2026-03-01T11:05:00Z"},
        {"changed": "bf16", "observed": "finite for 2,000 steps", "verdict": "supported", "t": "2026-03-01T11:12:00Z"},
    ]
    claims = [
        ("the learning rate is too high, too low, or does not follow its schedule", "a third of the learning rate", ""),
        ("A float16 tensor overflowed: layers.4.mlp.down", "the captured step in bf16", "numerics/fp16-overflow"),
        ("位置编码在长序列上越界", "", ""),
    ]
    hypotheses = [
        {"id": number, "claim": claim, "test": test, "rule": rule, "source": "rule" if rule else "person",
         "t": "2026-03-01T11:00:00Z", "experiments": tried[number - 1 : number]}
        for number, (claim, test, rule) in enumerate(claims, start=1)
    ]  # fmt: skip
    book = {
        "status": "fixed", "opened": "2026-03-01T11:00:00Z", "located": "2026-03-01T11:12:00Z",
        "resolved": "2026-03-01T11:40:00Z", "case": "loss-overflow-17", "hypotheses": hypotheses,
        "notes": [{"text": "node 7 was replaced last week", "t": "2026-03-01T11:02:00Z"}],
    }  # fmt: skip
    (path / "incident.json").write_text(json.dumps(book, ensure_ascii=False))
    os.utime(path / "incident.json", (NOON, NOON))


def logs(folder: Path) -> None:
    """The log of a job in three parts, and a file that is no evidence."""
    for number in range(3):
        steps = range(number * 60, number * 60 + 60)
        lines = "".join(f"s:{step} trl:{6 - step / 100:.4f} lr:0.0003 norm:0.5\n" for step in steps)
        (folder / f"part{number}.log").write_text(lines)
    (folder / "README.md").write_text("# Runs\n")
    age(folder)


def _series(writer: CapsuleWriter) -> None:
    step = np.arange(17_743, 18_343)
    t = np.arange(len(step), dtype=np.float64)
    loss = 2.3 - t / 2000 + 0.05 * np.sin(t / 7)
    loss[-6:] = [2.4, 2.9, 4.2, 7.7, 19.0, np.nan]
    norm = 0.84 + 0.1 * np.cos(t / 11)
    norm[-6:] = [1.5, 4.0, 30.0, 900.0, 6e4, np.inf]
    for name, value, unit in (
        ("loss", loss, "nats/token"),
        ("grad_norm", norm, ""),
        ("learning_rate", 1e-4 * np.minimum(1, t / 100), ""),
        ("memory_allocated", 6.1e10 + 1e8 * (t % 20), "bytes"),
        ("loss_scale", np.full(len(t), 65536.0), ""),
        ("step_time", 1.2 + 0.05 * (t % 3), "s"),
        ("tokens", 4000.0 + t % 7, ""),
    ):
        writer.scalars(name, step=step, value=value, rank=0, unit=unit)
    writer.record("events", {"kind": "checkpoint_saved", "step": 18000, "path": "ckpt/18000"})
    writer.record("events", {"kind": "mixture_changed", "step": 18200})


def _layers(writer: CapsuleWriter) -> None:
    names = [f"layers.{layer}.{part}" for layer in range(6) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")]
    for step in (18_340, 18_341, 18_342):
        rows: list[dict[str, Any]] = []
        for role in ("activation", "gradient"):
            for order, name in enumerate(names if role == "activation" else reversed(names)):
                bad = step == 18_342 and role == "activation" and order >= 19
                large = 40.0 * 2 ** (order / 3 + (step - 18_340) * 1.5)
                largest = min(large, 65504.0)
                rows.append(
                    {"step": step, "order": order, "name": name, "role": role, "dtype": "float16", "micro": 0,
                     "shape": [4, 512, 64], "stride": [32768, 64, 1], "device": "cuda:1", "numel": 131072, "call": 0,
                     "nan": 3 if bad else 0, "posinf": 1 if bad else 0, "neginf": 0, "zeros": 12, "subnormals": order,
                     "min": -largest / 2, "max": largest, "absmax": largest, "absmean": largest / 9,
                     "mean": 0.1, "std": largest / 7, "rms": largest / 7}
                )  # fmt: skip
        writer.stats(rows, rank=0)


def _batch(writer: CapsuleWriter) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 64, size=(3, 40))
    labels = ids.copy()
    labels[:, :14], labels[2, 30:] = -100, -100
    logits = rng.standard_normal((3, 40, 64))
    np.put_along_axis(logits, ids[..., None], 6.0, axis=-1)
    token = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[..., None], -1)[..., 0]
    writer.batch(
        step=18_342, rank=0, micro=0, split="train", input_ids=ids, labels=labels, logits=logits.astype(np.float32),
        attention_mask=np.ones_like(ids), sample_ids=["17a9", "0b3c", LONG], label_layout="unshifted",
        reported_loss=float(token[labels != -100].mean()), loss_dtype="float32", logits_dtype="float32",
    )  # fmt: skip


def _machine(writer: CapsuleWriter) -> None:
    gib = 1 << 30
    for phase, activations, transient in (("forward", 31, 2), ("backward", 24, 6), ("optimizer", 0, 9)):
        writer.record(
            "memory",
            {"step": 18342, "phase": phase, "weights": 13 * gib, "gradients": 7 * gib, "optimizer": 14 * gib,
             "activations": activations * gib, "transient": transient * gib, "capacity": 80 * gib,
             "allocated": (36 + activations + transient) * gib, "reserved": 76 * gib, "peak": 71 * gib,
             "largest_free_block": gib // 2},
        )  # fmt: skip
    common = {"group": "dp", "group_ranks": list(range(8)), "dtype": "bfloat16", "shapes_in": [[4096, 4096]]}
    for rank in range(8):
        writer.records(
            "collectives",
            (
                {**common, "rank": rank, "seq": seq, "op": "all_gather" if rank == 5 and seq == 88 else "all_reduce",
                 "state": "completed" if seq < 88 else "started"}
                for seq in range(89 if rank != 2 else 88)
            ),
        )  # fmt: skip
        writer.record(
            "ranks",
            {"rank": rank, "host": f"node{rank // 4}", "compute_ms": 800.0 + 10 * rank, "communication_ms": 200.0,
             "data_ms": 400.0 if rank == 2 else 20.0, "exit": {"kind": "hang" if rank == 2 else "ok"}},
        )  # fmt: skip


def _requests(writer: CapsuleWriter) -> None:
    writer.records(
        "requests",
        (
            {"id": f"r{n}", "queue": 0.02 + (0.9 if n % 10 == 3 else 0.0) + n / 1e4, "tokenize": 0.004,
             "prefill": 0.18 + (n % 7) / 100, "ttft": 0.21 + (0.9 if n % 10 == 3 else 0.0) + n / 1e4 + (n % 7) / 100,
             "e2e": 2.0 + (n % 13) / 10, "worker": f"w{n % 10}", "tenant": "a" if n % 2 else "b"}
            for n in range(400)
        ),
    )  # fmt: skip


def _set_times(path: Path, at: int) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (at, at))
