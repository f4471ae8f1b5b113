"""The ledger of memory: parts stacked, and what nobody accounts for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconsole.app.ledger_table import ledger_text
from llmconsole.app.looks.memory import memory
from llmconsole.capsules import CapsuleWriter

GIB = 1 << 30


def write(path: Path, *rows: dict[str, Any]) -> str:
    with CapsuleWriter(path / "m.capsule", title="m", phase="training", manifest={}) as writer:
        for row in rows:
            writer.record("memory", row)
    return str(path / "m.capsule")


def test_what_is_allocated_less_its_parts_is_unaccounted(tmp_path: Path):
    path = write(
        tmp_path,
        {"step": 0, "phase": "forward", "weights": 4 * GIB, "activations": 3 * GIB, "allocated": 8 * GIB},
        {"step": 0, "phase": "optimizer", "weights": 4 * GIB, "optimizer": 8 * GIB, "allocated": 11 * GIB},
    )
    ledger = memory(path)
    assert ledger is not None
    forward, optimizer = ledger.phases
    assert (forward.parts, forward.unaccounted) == ({"weights": 4 * GIB, "activations": 3 * GIB}, GIB)
    assert optimizer.unaccounted == -GIB


def test_the_peak_is_where_one_starts_and_steps_without_a_ledger_are_passed_over(tmp_path: Path):
    path = write(
        tmp_path,
        *({"step": step, "phase": "forward", "weights": count * GIB} for step, count in ((0, 1), (10, 5), (30, 2))),
    )
    seen = [memory(path), memory(path, step=10, by=1), memory(path, step=10, by=-9), memory(path, step=16)]
    assert [(each.step, each.place, each.peak_step) for each in seen if each] == [
        (10, 1, 10),
        (30, 2, 10),
        (0, 0, 10),
        (10, 1, 10),
    ]


def test_a_step_is_not_needed_and_nothing_is_no_ledger(tmp_path: Path):
    ledger = memory(write(tmp_path, {"phase": "prefill", "kv_cache": GIB}))
    assert ledger is not None
    assert (ledger.step, ledger.phases[0].unaccounted) == (None, None)
    (tmp_path / "none").mkdir()
    assert memory(write(tmp_path / "none")) is None


def test_what_the_configuration_needs_stands_beside_what_was_measured(tmp_path: Path):
    # 12 layers of 12 h² + 13 h, two norms, and one table of 50,257 × 768: 124 M parameters; 4 + 4 + 8 bytes each.
    manifest = {
        "model": {"layers": 12, "hidden": 768, "heads": 12, "vocab_size": 50257, "tied_embeddings": True,
                  "max_positions": 1024, "parameters": 124_439_808},
        "training": {"micro_batch": 4, "max_length": 1024, "precision": "fp32", "optimizer": {"name": "AdamW"}},
    }  # fmt: skip
    with CapsuleWriter(tmp_path / "m.capsule", title="m", manifest=manifest) as writer:
        writer.record("memory", {"step": 0, "phase": "forward", "weights": 497_759_232, "allocated": 6 * GIB})
    ledger = memory(str(tmp_path / "m.capsule"))
    assert ledger is not None
    assert ledger.computed is not None
    assert ledger.computed.parts["weights"] == 4 * 124_439_808
    assert ledger.computed.parts["optimizer"] == 8 * 124_439_808
    assert "model.attention" in ledger.reading  # materialised or not: the manifest does not say
    assert "from the configuration; between" in ledger_text(ledger, 140).plain


def test_bars_share_one_scale_and_their_pieces_add_up(tmp_path: Path):
    # 80 GiB of capacity on 80 cells: one cell a GiB.
    path = write(
        tmp_path,
        {
            "step": 1,
            "phase": "forward",
            "weights": 14 * GIB,
            "activations": 20 * GIB,
            "allocated": 36 * GIB,
            "reserved": 41 * GIB,
            "capacity": 80 * GIB,
        },
        {"step": 1, "phase": "optimizer", "weights": 14 * GIB, "optimizer": 28 * GIB},
    )
    ledger = memory(path)
    assert ledger is not None
    lines = ledger_text(ledger, 95).plain.split("\n")
    assert lines[2].split() == ["forward", "W" * 14 + "A" * 20 + "??" + "F" * 5, "|"]
    assert len(lines[2]) == 14 + 80
    assert lines[3].strip() == "36 of 80 GiB · ? 2 GiB · reserved 41 GiB"
    assert lines[4].split() == ["optimizer", "W" * 14 + "O" * 28]
    assert lines[5].strip() == "42 GiB by the ledger"
