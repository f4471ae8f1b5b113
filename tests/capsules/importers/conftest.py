"""One real run of the transformers Trainer, and what importers need to read what it left behind."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import Run, Source, import_files

REAL = Path(__file__).resolve().parents[4] / "shared" / "real"


@dataclass(frozen=True)
class Trained:
    """What one run left: its printed output with progress bars, its state, its event files, and its own history."""

    log: Path
    state: Path
    events: tuple[Path, ...]
    history: tuple[dict[str, Any], ...]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A tiny GPT trained for 24 steps by the real Trainer, reporting to TensorBoard, evaluating every 8 steps."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("trained")
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    ids = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(place / "out"),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=8,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=["tensorboard"],
        use_cpu=True,
        seed=0,
    )
    printed = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(place / "events"))
            with contextlib.redirect_stderr(printed):
                trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
                trainer.train()
        trainer.save_state()
    finally:
        torch.set_num_threads(threads)
    log = place / "train.out"
    log.write_text(printed.getvalue())
    events = sorted(place.rglob("events.out.tfevents.*"))
    history = tuple(dict(each) for each in trainer.state.log_history)
    return Trained(log, place / "out" / "trainer_state.json", tuple(events), history)


Imports = Callable[..., Capsule]


@pytest.fixture
def imported(tmp_path: Path) -> Imports:
    """Import files, or text that is written to a file first, and open the capsule."""

    def make(*given: Path | str | bytes, name: str = "train.log") -> Capsule:
        files: list[Path] = []
        for each in given:
            if not isinstance(each, Path):
                path = tmp_path / name
                path.write_bytes(each if isinstance(each, bytes) else each.encode())
                files.append(path)
            else:
                files.append(each)
        return Capsule.open(import_files(files, tmp_path / "imported", attach=False))

    return make


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of files that real jobs left behind."""
    if not REAL.is_dir():
        pytest.skip("../shared/real is not here")
    return REAL


def values(capsule: Capsule, name: str, **where: Any) -> list[tuple[int, float]]:
    """Steps with values of one series."""
    found = capsule.scalars(name, **where)
    return list(zip(found.step.tolist(), found.value.tolist(), strict=True))


def notes(capsule: Capsule) -> str:
    """What the importer noted of the files."""
    return "; ".join(note for each in capsule.manifest.raw["imported"]["files"] for note in each["notes"])


class Points(Run):
    """Keeps the points of an importer in memory, in the order in which they came, and counts the rest."""

    def __init__(self) -> None:
        self.rank, self.format = 0, ""
        self.found: list[tuple[str, int | None, int, str]] = []
        self.events: list[str] = []

    def scalar(self, name, step, value, time=None, unit="", side=None, rank=None) -> None:
        assert isinstance(step, int)
        assert isinstance(value, int | float)
        self.found.append((name, rank, step, repr(value)))

    def scalars(self, name, steps, values, times=None, unit="", side=None, rank=None) -> None:
        for step, value in zip(steps, values, strict=True):
            self.scalar(name, int(step), float(value), None, unit, side, rank)

    def event(self, kind, step=None, rank=None, **fields) -> None:
        self.events.append(kind)

    def record(self, stream, record, rank=None) -> None:
        self.events.append(stream)

    def manifest(self, fields) -> None:
        pass

    def note(self, text, times=1) -> None:
        pass


def points(importer: Any, path: Path) -> list[tuple[str, int | None, int, str]]:
    """All points of a file."""
    found = Points()
    importer.read(Source(path), found)
    return found.found
