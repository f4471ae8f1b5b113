"""Evaluation passes, checkpoints and recomputation, as the capsule tells of them without a line in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Model(nn.Module):
    """Returns logits, and the loss where it gets targets; its blocks are recomputed where ``preserve`` is given."""

    def __init__(self, preserve: bool | None = None) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.preserve = preserve

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.tokens(idx)
        for block in self.blocks:
            if self.preserve is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve)
        logits = self.head(x)
        return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class Training:
    def __init__(self, folder: Path, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = Model() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.recorder = Recorder(folder / "runs", model=self.model, optimizer=self.optimizer, **options)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(self, seed: int = 0, batch: Any = None) -> None:
        inputs, targets = self.batch(seed)
        with self.recorder.step(batch=(inputs, targets) if batch is None else batch):
            self.model(inputs, targets)[1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def capsule(self) -> Capsule:
        self.recorder.close()
        return Capsule.open(self.recorder.path)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.capsule().records("events") if event["kind"] in kinds]


@pytest.fixture
def training(tmp_path: Path) -> Any:
    return lambda *arguments, **options: Training(tmp_path, *arguments, **options)


class TestEvaluation:
    def test_is_found_where_the_model_runs_without_gradients(self, training: Any) -> None:
        job = training()
        job.step(0)
        job.model.eval()
        with torch.no_grad():
            losses = [job.model(*job.batch(seed))[1].item() for seed in (7, 8, 9)]
        job.model.train()
        job.step(1)
        begin, end = job.events("eval_begin", "eval_end")
        assert (begin["step"], begin["training_mode"], begin["grad_enabled"]) == (0, False, False)
        assert (end["batches"], end["loss"]) == (3, pytest.approx(sum(losses) / 3, rel=1e-6))
        capsule = job.capsule()
        series = capsule.scalars("eval_loss")
        assert (series.step.tolist(), series.value.tolist()) == ([0], [end["loss"]])
        # Two batches are kept; the samples belong to no split, for the loop may look at its training data here.
        kept = [batch for batch in capsule.batches() if batch.split == "validation"]
        assert [batch.reported_loss for batch in kept] == pytest.approx(losses[:2], rel=1e-6)
        assert kept[0].token_loss.mean() == pytest.approx(losses[0], rel=1e-5)
        assert {each["split"] for each in capsule.records("samples")} == {"train", "evaluation"}
        assert len(capsule.records("microbatches")) == 2

    def test_tells_a_model_that_was_left_in_training_mode_and_one_with_a_graph(self, training: Any) -> None:
        job = training()
        job.step(0)
        with torch.no_grad():
            job.model(*job.batch(7))
        job.model.eval()
        job.model(*job.batch(7))
        job.model.train()
        first, second = job.events("eval_begin")
        assert (first["training_mode"], first["grad_enabled"]) == (True, False)
        assert (second["training_mode"], second["grad_enabled"]) == (False, True)

    def test_by_its_name_has_a_split_sample_ids_and_labels_that_the_model_did_not_get(self, training: Any) -> None:
        job = training()
        job.step(0)
        with job.recorder.evaluation("validation") as evaluation, torch.no_grad():
            inputs, targets = job.batch(7)
            evaluation.batch((inputs, targets), sample_ids=["a", "b"])
            loss = F.cross_entropy(job.model(inputs).flatten(0, 1), targets.flatten()).item()
        capsule = job.capsule()
        assert capsule.scalars("eval_loss").value == pytest.approx([loss], rel=1e-5)
        samples = [each for each in capsule.records("samples") if each["split"] == "validation"]
        assert [each["id"] for each in samples] == ["a", "b"]

    def test_the_number_that_the_loop_logs_takes_the_place_of_the_measured_one(self, training: Any) -> None:
        job = training()
        job.step(0)
        with job.recorder.evaluation(), torch.no_grad():
            job.model(*job.batch(7))
            job.recorder.log(eval_loss=1.25)
        assert job.capsule().scalars("eval_loss").value.tolist() == [1.25]

    def test_a_training_step_and_a_model_left_in_evaluation_mode_are_told_apart(self, training: Any) -> None:
        job = training()
        job.step(0)
        job.model.eval()
        job.step(1)
        assert [event["training_mode"] for event in job.events("step_begin")] == [True, False]
        assert job.events("eval_begin") == []


class TestCheckpoints:
    def test_say_what_they_hold_and_what_of_it_was_taken_over(self, training: Any, tmp_path: Path) -> None:
        job = training(contract=True)
        job.step(0)
        path = tmp_path / "model.pt"
        torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": 1}, path)
        job.step(1)
        assert (tmp_path / "llmconsole-contract.json").exists()
        found = torch.load(path)
        found["model"].pop("head.bias")
        job.model.load_state_dict(found["model"], strict=False)
        job.step(2)
        saved, loaded, weights = job.events("checkpoint_saved", "checkpoint_loaded", "weights_loaded")
        parts = ["model", "optimizer", "step"]
        assert (saved["step"], saved["path"], saved["contents"]) == (0, str(path), parts)
        assert (loaded["step"], loaded["path"], loaded["contents"]) == (2, str(path), parts)
        assert loaded["loaded"] == ["model"]  # the optimizer was forgotten
        assert (weights["missing"], weights["expected"], weights["loaded"]) == (["head.bias"], 11, 10)
        assert job.capsule().manifest.contract["path"] == str(path)

    def test_other_files_and_a_copy_of_the_weights_in_memory_are_none(self, training: Any, tmp_path: Path) -> None:
        job = training()
        job.step(0)
        torch.save({"x": torch.ones(3), "names": ["a"]}, tmp_path / "data.pt")
        torch.load(tmp_path / "data.pt")
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        job.step(1)
        assert job.events("checkpoint_saved", "checkpoint_loaded") == []

    def test_everything_replaced_is_put_back(self, training: Any) -> None:
        before = (torch.save, torch.load, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
        job = training()
        assert torch.save is not before[0]
        job.capsule()
        now = (torch.save, torch.load, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
        assert now == before


@pytest.mark.parametrize("preserve", [True, False])
def test_recomputation_is_compared_with_the_forward_pass(training: Any, preserve: bool) -> None:
    job = training(Model(preserve))
    for seed in range(3):
        job.step(seed)
    records = job.capsule().records("recompute")
    assert [each["module"] for each in records] == ["blocks.1", "blocks.0"]  # the first chosen window, backwards
    for record in records:
        assert (record["forward_rng_sha256"] == record["recompute_rng_sha256"]) is preserve
        assert (record["max_abs_difference"] == 0.0) is preserve


class TestBatches:
    def test_one_garbled_row_does_not_hide_the_layout_of_the_others(self, training: Any) -> None:
        job = training()
        rows = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        targets[2] = (targets[2] + 1) % VOCABULARY
        job.batch = lambda seed: (inputs, targets)
        job.step()
        (batch,) = job.capsule().batches()
        assert (batch.label_layout, batch.attributes["odd_rows"]) == ("shifted", [2])
        assert batch.token_loss.mean() == pytest.approx(batch.reported_loss, rel=1e-5)
        assert job.capsule().records("microbatches")[0]["odd_rows"] == [2]

    @pytest.mark.parametrize(
        ("mask", "weights"),
        [
            (lambda kept: kept.float(), False),
            (lambda kept: torch.where(kept, 0.0, torch.finfo(torch.float32).min)[:, None, None, :], False),
            (lambda kept: kept * 0.5, True),
        ],
    )
    def test_floating_point_masks_are_read(self, training: Any, mask: Any, weights: bool) -> None:
        job = training()
        inputs, targets = job.batch(0)
        kept = torch.ones_like(inputs, dtype=torch.bool)
        kept[0, 5:] = False
        name = "loss_mask" if weights else "attention_mask"
        job.step(batch={"x": inputs, "y": targets, name: mask(kept)})
        (batch,) = job.capsule().batches()
        assert batch.array(name).astype(bool).tolist() == kept.tolist()
        assert ("loss_weights" in batch.arrays) is weights

    def test_a_tuple_of_inputs_mask_and_targets_and_an_object_with_fields(self, training: Any) -> None:
        job = training()
        inputs, targets = job.batch(0)
        job.step(batch=(inputs, torch.ones_like(inputs), targets))

        class Fields:
            def __init__(self) -> None:
                self.input_ids, self.labels, self.name = inputs, targets, "b"

        job.step(batch=Fields())
        for batch in job.capsule().batches():
            assert (batch.labels.tolist(), batch.label_layout) == (targets.tolist(), "shifted")


def test_a_reserve_for_the_seal_lies_on_the_disk_while_recording(training: Any) -> None:
    job = training()
    (reserve,) = job.recorder.path.glob("ranks/*/.tmp-reserve")
    assert reserve.stat().st_size >= 1 << 16
    job.step(0)
    assert job.capsule().damage() == ()
    assert not reserve.exists()
