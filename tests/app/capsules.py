"""Small capsules written with the real writer."""

from __future__ import annotations

from pathlib import Path

from llmconsole.capsules import CapsuleWriter

#: One of each kind of text that a terminal would act on.
HOSTILE = "\x1b[31mred\x1b]0;own\x07\u202egnp\u200b[bold]x[/bold]\r\x9b2J"


def diverged(path: Path, title: str = "NaN at 3") -> Path:
    """Four steps of which the last has no finite loss."""
    with CapsuleWriter(path, title=title, phase="training", manifest={"run": {"name": "sft-7b"}}) as writer:
        writer.scalars("loss", step=[0, 1, 2, 3], value=[2.5, 2.4, 2.3, float("nan")], rank=0, unit="nats/token")
    return path


def healthy(path: Path) -> Path:
    """Three steps on which the loss falls."""
    with CapsuleWriter(path, title="healthy", phase="training", manifest={}) as writer:
        writer.scalars("loss", step=[0, 1, 2], value=[2.5, 2.4, 2.3], rank=0, unit="nats/token")
    return path


def hostile(path: Path) -> Path:
    """Escape sequences and markup in every string that a capsule may hold."""
    manifest = {
        "run": {"name": HOSTILE, "command": HOSTILE},
        "config": {HOSTILE: HOSTILE},
        "environment": {"os": HOSTILE},
        "unknown": [HOSTILE],
        "trigger": {"kind": "manual", "step": 3, "message": HOSTILE},
    }
    row = {
        "step": 3,
        "order": 0,
        "role": "activation",
        "dtype": "float16",
        "shape": [4],
        "stride": [1],
        "device": HOSTILE,
    }
    counts = {"numel": 4, "nan": 1, "posinf": 0, "neginf": 0, "zeros": 0, "subnormals": 0, "micro": 0, "call": 0}
    values = {"min": -1.0, "max": 1.0, "absmax": 1.0, "absmean": 1.0, "mean": 0.0, "std": 1.0, "rms": 1.0}
    with CapsuleWriter(path, title=HOSTILE, phase="training", manifest=manifest) as writer:
        writer.scalars("loss", step=[0, 1, 2, 3], value=[2.5, 2.4, 2.3, float("nan")], rank=0, unit=HOSTILE)
        writer.stats([{**row, "name": HOSTILE, **counts, **values}], rank=0)
        writer.record("events", {"kind": "exception", "type": HOSTILE, "message": HOSTILE, "step": 3})
    return path
