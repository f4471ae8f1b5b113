"""Evaluations: mode, padding, preprocessing, scores of checkpoints; recorded runs, and made ones beside them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.importers import import_files
from torch import Tensor, nn
from torch.nn import functional

from tests.analyzers.conftest import rule_named
from tests.training.lab.model import GPT

MODE, PADDING = "numerics/eval-mode", "numerics/eval-padding"
PREPROCESSING, DROP, CONTROL = "numerics/eval-preprocessing", "numerics/capability-drop", "numerics/no-control-set"
BOS, PAD, VOCABULARY = 1, 0, 96
A = "a" * 64


def skipped(rule_id: str, capsule: Capsule) -> str:
    """Why one rule was skipped; fails where it was not."""
    report = analyze(capsule, [rule_named(rule_id)])
    assert not report.errors
    assert not report.findings
    (skip,) = report.skipped
    return skip.missing[0]


# -- real runs


def sentences(count: int, seed: int) -> list[list[int]]:
    """Texts of 6 to 20 tokens in which each follows from the one before, most of the time."""
    generator = np.random.default_rng(seed)
    found: list[list[int]] = []
    for _ in range(count):
        row = [BOS, int(generator.integers(2, VOCABULARY))]
        for _ in range(int(generator.integers(4, 19))):
            jump = generator.random() < 0.2
            row.append(int(generator.integers(2, VOCABULARY)) if jump else 2 + (row[-1] * 7 + 3) % (VOCABULARY - 2))
        found.append(row)
    return found


def padded(rows: list[list[int]], left: bool = True) -> dict[str, Tensor]:
    """A batch of rows, filled on one side."""
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + row if left else row + [PAD] * (width - len(row)) for row in rows]
    table = torch.tensor(ids)
    mask = (table != PAD).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": table, "attention_mask": mask, "position_ids": places, "labels": table.where(mask > 0, -100)}


class Hidden(nn.Module):
    """A model behind dropout that is on in every mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, **inputs: Tensor) -> Tensor:
        return functional.dropout(self.model(**inputs), 0.1, training=True) * self.scale


class Job:
    """Eight steps of a small model on sentences padded on the left, with a recorder around them."""

    def __init__(
        self,
        folder: Path,
        dropout: float = 0.0,
        hidden: bool = False,
        low: bool = False,
        model: nn.Module | None = None,
        start: str = "random",
        **told: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model: nn.Module = GPT(dropout=dropout) if model is None else model
        self.model = Hidden(self.model) if hidden else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.low = low
        manifest = {
            "tokenizer": {"pad_id": PAD, "bos_id": BOS},
            "model": {"initialised": start},
            "training": {"precision": "bf16-mixed" if low else "fp32"},
        }
        self.recorder = Recorder(folder, model=self.model, optimizer=self.optimizer, manifest=manifest | told)
        self.rows = sentences(32, 1)
        self.held_out = sentences(8, 2)

    def loss(self, batch: dict[str, Tensor], masked: bool = True, places: bool = True) -> Tensor:
        inputs = {"input_ids": batch["input_ids"]}
        inputs |= {"attention_mask": batch["attention_mask"]} if masked else {}
        inputs |= {"position_ids": batch["position_ids"]} if places else {}
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.low else nullcontext():
            logits = self.model(**inputs)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())

    def train(self, steps: int = 4) -> Job:
        self.model.train()
        for step in range(steps):
            batch = padded(self.rows[8 * (step % 4) :][:8])
            with self.recorder.step(batch=batch):
                self.loss(batch).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def evaluate(
        self, size: int = 4, *, name: str | None = "validation", mode: bool = False, grad: bool = False,
        left: bool = True, reading: Any = lambda row: row, **inputs: bool,
    ) -> Job:  # fmt: skip
        """One pass over the held-out sentences, ``size`` a batch; found by the recorder where ``name`` is None."""
        self.model.train(mode)
        with self.recorder.evaluation(name) if name else nullcontext() as told, torch.set_grad_enabled(grad):
            for start in range(0, 8, size):
                batch = padded([reading(row) for row in self.held_out[start : start + size]], left)
                if told is not None:
                    told.batch(batch, sample_ids=[f"v{start + at}" for at in range(size)])
                self.loss(batch, **inputs)
        return self

    def capsule(self) -> Capsule:
        self.recorder.close()
        assert self.recorder.path is not None
        return Capsule.open(self.recorder.path)


def whole_report(job: Job) -> CapsuleReport:
    report = analyze(job.capsule())
    assert not report.errors
    return report


@pytest.mark.fires(MODE)
@pytest.mark.recorded(MODE)
def test_dropout_in_evaluation_is_confirmed_and_comes_first(tmp_path):
    report = whole_report(Job(tmp_path, dropout=0.1).train().evaluate(mode=True).train().evaluate(mode=True))
    first = report.first_divergence
    assert (first.rule, first.where.step) == (MODE, 3)
    (finding,) = [each for each in report.findings if each.rule == MODE]
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert {each.name: each.value for each in finding.evidence}["evaluations in training mode"] == 2


@pytest.mark.quiet(MODE)
@pytest.mark.quiet(PADDING)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_an_evaluation_in_evaluation_mode_is_quiet_whatever_the_batch_size(tmp_path, low):
    job = Job(tmp_path, dropout=0.1, low=low).train().evaluate(4).evaluate(1).evaluate(8).train().evaluate(name=None)
    capsule = job.capsule()
    for rule in (MODE, PADDING):
        report = analyze(capsule, [rule_named(rule)])
        assert (report.findings, report.errors, report.skipped) == ((), (), ())


@pytest.mark.quiet(MODE)
def test_training_mode_in_a_model_without_dropout_is_a_remark(tmp_path, findings_of):
    (finding,) = findings_of(MODE, Job(tmp_path).train().evaluate(mode=True).capsule())
    assert (finding.severity, finding.kind) == ("info", "hygiene")


@pytest.mark.fires(MODE)
@pytest.mark.recorded(MODE)
def test_a_norm_over_the_batch_makes_a_difference_without_random_numbers(tmp_path, findings_of):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.norm = GPT(), nn.BatchNorm1d(1)

        def forward(self, **inputs: Tensor) -> Tensor:
            logits = self.model(**inputs)
            return self.norm(logits.reshape(-1, 1)).view_as(logits)

    (finding,) = findings_of(MODE, Job(tmp_path, model=Normed()).train().evaluate(mode=True).capsule())
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert "depends on the batch" in finding.summary


@pytest.mark.quiet(MODE)
def test_a_second_look_at_training_samples_is_no_evaluation(build, findings_of):
    def fill(writer):
        looked = {"kind": "eval_begin", "step": 4, "told": False, "supervised": True, "training_mode": True}
        writer.records("events", [{"kind": "step_begin", "step": 4}, looked | {"grad_enabled": False}])
        writer.records("samples", [{"step": 4, "sha256": A, "split": split} for split in ("train", "evaluation")])

    assert not findings_of(MODE, build(fill))


@pytest.mark.fires(MODE)
@pytest.mark.recorded(MODE)
def test_dropout_in_a_pass_that_nobody_named_is_likely(tmp_path, findings_of):
    job = Job(tmp_path, dropout=0.1).evaluate(name=None, mode=True)  # before training: a look at the shapes
    (finding,) = findings_of(MODE, job.train().evaluate(name=None, mode=True).train().capsule())
    assert (finding.severity, finding.confidence, finding.where.step) == ("warning", "likely", 3)


@pytest.mark.fires(MODE)
@pytest.mark.recorded(MODE)
def test_a_graph_in_evaluation_is_a_warning(tmp_path, findings_of):
    (finding,) = findings_of(MODE, Job(tmp_path, dropout=0.1).train().evaluate(grad=True).capsule())
    assert (finding.severity, finding.where.step) == ("warning", 3)
    assert "graph" in finding.title


@pytest.mark.fires(MODE)
@pytest.mark.recorded(MODE)
def test_dropout_that_asks_for_no_mode_shows_in_a_second_evaluation(tmp_path, findings_of):
    (finding,) = findings_of(MODE, Job(tmp_path, hidden=True).train().evaluate().evaluate().capsule())
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert finding.evidence[0].value > 100 * float(finding.evidence[0].expected.removeprefix("≤ "))


@pytest.mark.quiet(MODE)
def test_declared_monte_carlo_dropout_is_quiet(tmp_path, findings_of):
    job = Job(tmp_path / "name", dropout=0.1).train().evaluate(name="mc_dropout", mode=True)
    assert not findings_of(MODE, job.capsule())
    job = Job(tmp_path / "config", dropout=0.1, config={"eval": {"mc_dropout": 8}}).train().evaluate(mode=True)
    assert not findings_of(MODE, job.capsule())


@pytest.mark.quiet(MODE)
def test_other_weights_under_another_name_are_quiet(tmp_path, findings_of):
    job = Job(tmp_path).train().evaluate()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(0.9)  # an average of the weights, swapped in
    assert not findings_of(MODE, job.evaluate(name="ema").capsule())


@pytest.mark.fires(PADDING)
@pytest.mark.recorded(PADDING)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_a_mask_that_is_not_passed_lets_padding_into_the_result(tmp_path, low):
    job = Job(tmp_path, low=low).train(16).evaluate(1, masked=False).evaluate(4, masked=False)
    report = whole_report(job)
    (finding,) = [each for each in report.findings if each.rule == PADDING]
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "confirmed", 15)
    assert report.first_divergence.rule == PADDING
    assert not [each for each in report.findings if each.rule == MODE]
    # Worked out apart from the recorder: the sample alone, and beside the first four.
    sample = finding.where.sample
    row = job.held_out[int(sample[1:])]
    with torch.no_grad():
        alone = float(job.loss(padded([row]), masked=False))
    values = {each.name: each.value for each in finding.evidence}
    assert values["loss, less padded"] == pytest.approx(alone, rel=0.02 if low else 1e-5)


@pytest.mark.fires(PADDING)
def test_positions_that_count_the_padding_are_found_too(tmp_path, findings_of):
    (finding,) = findings_of(
        PADDING, Job(tmp_path).train(16).evaluate(1, places=False).evaluate(4, places=False).capsule()
    )
    assert finding.confidence == "confirmed"


@pytest.mark.quiet(PADDING)
def test_padding_on_the_right_is_seen_by_no_real_token(tmp_path, findings_of):
    job = Job(tmp_path).train().evaluate(1, left=False, masked=False).evaluate(4, left=False, masked=False)
    assert not findings_of(PADDING, job.capsule())


@pytest.mark.quiet(PADDING)
def test_weights_that_moved_between_two_evaluations_are_no_padding(tmp_path):
    assert "evaluated twice" in skipped(PADDING, Job(tmp_path).train().evaluate(1).train().evaluate(4).capsule())


@pytest.mark.quiet(PADDING)
def test_dropout_is_not_taken_for_padding(tmp_path):
    job = Job(tmp_path, dropout=0.1).train().evaluate(1, mode=True).evaluate(4, mode=True)
    assert "evaluated twice" in skipped(PADDING, job.capsule())


@pytest.mark.fires(PREPROCESSING)
@pytest.mark.recorded(PREPROCESSING)
def test_noise_in_validation_samples_is_named(tmp_path, findings_of):
    generator = np.random.default_rng(0)

    def noisy(row: list[int]) -> list[int]:
        return [5 if at and generator.random() < 0.15 else token for at, token in enumerate(row)]

    job = Job(tmp_path).train().evaluate(reading=noisy).train().evaluate(reading=noisy)
    (finding,) = findings_of(PREPROCESSING, job.capsule())
    assert (finding.severity, finding.where.step) == ("warning", 7)
    assert finding.where.sample.startswith("v")


@pytest.mark.fires(PREPROCESSING)
@pytest.mark.recorded(PREPROCESSING)
def test_validation_rows_without_their_beginning_are_named(tmp_path, findings_of):
    (finding,) = findings_of(PREPROCESSING, Job(tmp_path).train().evaluate(reading=lambda row: row[1:]).capsule())
    assert [each.value for each in finding.evidence] == [0.0, 8]


@pytest.mark.quiet(PREPROCESSING)
def test_one_preprocessing_for_both_is_quiet(tmp_path, findings_of):
    assert not findings_of(PREPROCESSING, Job(tmp_path).train().evaluate().train().evaluate(2).capsule())


# -- made: mode


def record(stream: str, *records: dict[str, Any]) -> Any:
    return lambda writer: writer.records(stream, records)


def evaluations(**fields: Any) -> Any:
    """One record for each place of the lists among ``fields``."""
    many = max(len(each) for each in fields.values() if isinstance(each, list))
    pick = [{name: each[at] if isinstance(each, list) else each for name, each in fields.items()} for at in range(many)]
    return record("evaluations", *[{name: each for name, each in row.items() if each is not None} for row in pick])


@pytest.mark.fires(MODE)
def test_an_event_alone_suffices(build, findings_of):
    made = record("events", {"kind": "eval_begin", "step": 9, "training_mode": True, "grad_enabled": True})
    (finding,) = findings_of(MODE, build(made))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "likely", 9)
    assert "gradients on" in finding.summary


@pytest.mark.fires(MODE)
def test_three_losses_of_one_checkpoint_disagree(build, findings_of):
    made = evaluations(name="eval_loss", value=[2.31, 2.47, 2.28], repeat=[0, 1, 2], checkpoint_sha256="a" * 64)
    (finding,) = findings_of(MODE, build(made))
    assert finding.evidence[0].value == pytest.approx(0.19)


@pytest.mark.quiet(MODE)
@pytest.mark.parametrize(
    "fields",
    [
        {"name": "eval_loss", "value": [2.3101, 2.3102, 2.3099]},  # another order of sums
        {"name": "accuracy", "value": [0.61, 0.64, 0.60], "n": 200},  # sampled answers: √(0.6·0.4/200) = 0.035
        {"name": "accuracy", "value": [0.61, 0.64]},  # nothing says how many questions
        {"name": "loss", "value": [2.3, 2.5], "suite": "mc-dropout"},
        {"name": "loss", "value": [2.3, 2.5], "dtype": "float32", "harness_version": ["1", "2"]},
    ],
    ids=["rounding", "sampling", "unknown", "declared", "versions"],
)
def test_repeats_within_what_is_explained_are_quiet(build, findings_of, fields):
    assert not findings_of(MODE, build(evaluations(checkpoint_sha256="a" * 64, step=5, **fields)))


@pytest.mark.fires(MODE)
def test_a_score_and_answers_in_training_mode_are_named(build, findings_of):
    (finding,) = findings_of(MODE, build(evaluations(name="acc", value=[0.5], training_mode=True, step=3)))
    assert (finding.severity, finding.where.step) == ("critical", 3)
    answers = [{"id": "a", "training_mode": True}, {"id": "b", "training_mode": False}]
    (finding,) = findings_of(MODE, build(record("generations", *answers)))
    assert finding.evidence[0].value == 1
    assert not findings_of(MODE, build(record("generations", *answers), {"training": {"objective": "grpo"}}))


# -- made: padding


def two_batches(shift: float, alike: float = 0.0, **attributes: Any) -> Any:
    """Samples a and b side by side, then each alone: b's losses move by ``shift``, a's (not padded) by ``alike``."""
    a, b = [7, 8, 9, 10, 11, 12], [20, 21, 22, 23]
    side = np.array([a, [0, 0, *b]])
    losses = np.array([[2.0, 1.0, 1.5, 2.5, 3.0, np.nan], [np.nan, np.nan, 1.0, 2.0, 1.5, np.nan]])

    def fill(writer):
        mask = (side > 0).astype(np.int64)
        common = {"step": 5, "split": "validation", "logits_dtype": "float32", **attributes}
        writer.batch(micro=0, input_ids=side, attention_mask=mask, token_loss=losses, sample_ids=["a", "b"], **common)
        for micro, (row, own, moved) in enumerate(((a, losses[0], alike), (b, losses[1, 2:], shift)), 1):
            writer.batch(
                micro=micro, input_ids=np.array([row]), attention_mask=np.ones((1, len(row)), np.int64),
                token_loss=own[None] + moved, sample_ids=["ab"[micro - 1]], **common,
            )  # fmt: skip

    return fill


@pytest.mark.fires(PADDING)
def test_one_sample_alone_and_padded_must_agree(build, findings_of):
    (finding,) = findings_of(PADDING, build(two_batches(0.05), {"training": {"precision": "fp32"}}))
    values = {each.name: each.value for each in finding.evidence}
    assert finding.where.sample == "b"
    assert values["difference of its tokens' losses"] == pytest.approx(0.05)
    assert (values["loss, less padded"], values["loss, more padded"]) == pytest.approx((1.55, 1.5))


@pytest.mark.quiet(PADDING)
@pytest.mark.parametrize(
    ("made", "manifest"),
    [
        (two_batches(0.0), {"training": {"precision": "fp32"}}),
        (two_batches(2e-5), {"training": {"precision": "fp32"}}),
        (two_batches(0.05), {"training": {"precision": "bf16-mixed"}}),
        (two_batches(0.05), {"environment": {"gpu": "H100"}, "training": {"precision": "bf16"}}),
    ],
    ids=["equal", "fp32", "bf16", "gpu"],
)
def test_rounding_of_the_dtype_is_quiet(build, findings_of, made, manifest):
    assert not findings_of(PADDING, build(made, manifest))


@pytest.mark.quiet(PADDING)
def test_experts_with_a_capacity_are_said_as_undetermined(build, findings_of):
    manifest = {"training": {"precision": "fp32"}, "model": {"experts": 8}}
    (finding,) = findings_of(PADDING, build(two_batches(0.05, 0.05), manifest))
    assert (finding.severity, finding.confidence, finding.cause) == ("warning", "undetermined", None)


# -- made: preprocessing


@pytest.mark.fires(PREPROCESSING)
def test_two_digests_of_one_preprocessing_are_named(build, findings_of):
    made = evaluations(name="acc", value=[0.5, 0.6], step=[10, 20], preprocessing_sha256=["a" * 64, "b" * 64])
    (finding,) = findings_of(PREPROCESSING, build(made, {"training": {"preprocessing_sha256": "a" * 64}}))
    assert (finding.confidence, finding.where.step) == ("confirmed", 20)
    assert finding.evidence[0].expected == "a" * 64
    (finding,) = findings_of(PREPROCESSING, build(made))
    assert finding.confidence == "likely"


@pytest.mark.fires(PREPROCESSING)
@pytest.mark.parametrize(
    ("augmentation", "named"),
    [
        ({"train": ["flip"], "validation": ["flip"]}, "flip"),
        ({"random_resized_crop": {"scale": 0.3}, "splits": ["train", "validation"]}, "random_resized_crop"),
        ([{"name": "mixup", "split": "all"}], "mixup"),
    ],
)
def test_augmentation_in_validation_is_named(build, findings_of, augmentation, named):
    (finding,) = findings_of(PREPROCESSING, build(lambda writer: None, {"training": {"augmentation": augmentation}}))
    assert finding.evidence[0].value == named


@pytest.mark.quiet(PREPROCESSING)
@pytest.mark.parametrize(
    "augmentation",
    [
        {"train": ["flip", "random_crop"]},
        ["flip", "crop"],
        {"train": ["random_crop"], "validation": ["resize", "center_crop", "normalize"]},
        {"validation": {"crop": "center", "size": 224}},
        {"validation": "none"},
        "mixup",
    ],
    ids=str,
)
def test_augmentation_in_training_only_is_quiet(build, findings_of, augmentation):
    made = evaluations(name="acc", value=[0.5], preprocessing_sha256="a" * 64)
    manifest = {"training": {"augmentation": augmentation, "preprocessing_sha256": "a" * 64}}
    assert not findings_of(PREPROCESSING, build(made, manifest))


# -- made: scores


def two(name: str, values: list[float], **fields: Any) -> list[dict[str, Any]]:
    """A score of the base and of the tuned checkpoint."""
    steps, digests = [0, 1000], ["a" * 64, "b" * 64]
    return [
        {"name": "accuracy", "suite": name, "value": value, "step": step, "checkpoint_sha256": digest, **fields}
        for value, step, digest in zip(values, steps, digests, strict=True)
    ]


@pytest.mark.fires(DROP)
@pytest.mark.recorded(DROP)
def test_an_accuracy_that_falls_for_good_in_a_state_of_the_trainer(tmp_path, findings_of):
    """As the Hugging Face Trainer writes it: a row an evaluation, its loss still falling."""
    accuracy = [0.50, 0.60, 0.66, 0.61, 0.57, 0.53, 0.50]
    rows = [
        {"epoch": at, "step": 100 * at, "eval_accuracy": value, "eval_loss": 2.0 - at / 10, "eval_runtime": 1.5}
        for at, value in enumerate(accuracy, start=1)
    ]
    rows += [{"epoch": at, "step": 100 * at, "loss": 2.1 - at / 10} for at in range(1, 8)]
    file = tmp_path / "trainer_state.json"
    file.write_text(
        json.dumps({"global_step": 700, "max_steps": 700, "log_history": rows, "is_world_process_zero": True})
    )
    (finding,) = findings_of(DROP, Capsule.open(import_files([file], tmp_path / "runs", attach=False)))
    assert finding.evidence[0].value == 300, "the best checkpoint"
    assert "0.66" in finding.summary


@pytest.mark.fires(DROP)
def test_forgetting_is_told_with_both_sides_and_the_standard_error(build, findings_of):
    made = record("evaluations", *two("domain", [61, 78], n=500), *two("general", [64, 49], n=500))
    (finding,) = findings_of(DROP, build(made))
    # √(0.64·0.36/500 + 0.49·0.51/500) = 0.0310: 15 points are 4.84 standard errors.
    assert finding.evidence[0].value == pytest.approx(-4.84, abs=0.01)
    assert (finding.severity, finding.where.step, finding.title[:11]) == ("warning", 1000, "One ability")


@pytest.mark.quiet(DROP)
@pytest.mark.parametrize(
    "made",
    [
        two("general", [56, 49], n=100),  # one standard error
        two("general", [0.56, 0.49], n=100),
        two("general", [0.64, 0.60], stderr=0.02),
        [*two("general", [64, 70], n=500), *two("domain", [61, 78], n=500)],
        two("perplexity", [12.0, 9.0], stderr=0.1),  # lower is better
        [{**each, "higher_is_better": False} for each in two("cost", [3.0, 2.0], stderr=0.1)],
    ],
    ids=["percent", "share", "stderr", "rise", "perplexity", "declared"],
)
def test_scores_within_noise_or_better_are_quiet(build, findings_of, made):
    assert not findings_of(DROP, build(record("evaluations", *made)))


@pytest.mark.quiet(DROP)
def test_another_harness_is_named_and_no_drop_is_claimed(build, findings_of):
    before, after = two("general", [64, 49], n=500)
    made = record("evaluations", before | {"harness_version": "0.4.2"}, after | {"harness_version": "0.4.9"})
    (finding,) = findings_of(DROP, build(made))
    assert (finding.severity, finding.confidence) == ("info", "undetermined")
    assert "version of the harness" in finding.summary
    assert (finding.evidence[0].value, finding.evidence[0].expected) == ("0.4.9", "0.4.2")


@pytest.mark.fires(DROP)
def test_the_old_checkpoint_in_the_new_harness_decides(build, findings_of):
    before, after = two("general", [64, 49], n=500)
    made = [before | {"harness_version": "1"}, before | {"harness_version": "2", "value": 63.0}]
    (finding,) = findings_of(DROP, build(record("evaluations", *made, after | {"harness_version": "2"})))
    assert (finding.severity, "63 → 49" in finding.summary) == ("warning", True)


@pytest.mark.quiet(DROP)
def test_one_of_fifty_seven_subjects_may_fall_by_chance(build, findings_of):
    made = [each for at in range(56) for each in two(f"subject {at}", [0.5, 0.5], n=100)]
    # √(2·0.25/100) = 0.0707: 0.16 are 2.3 standard errors, and 1 − 0.9893⁵⁷ = 46 %.
    (finding,) = findings_of(DROP, build(record("evaluations", *made, *two("subject 56", [0.58, 0.42], n=100))))
    assert finding.severity == "info"
    assert finding.evidence[1].value == pytest.approx(0.45, abs=0.03)


@pytest.mark.fires(DROP)
def test_an_accuracy_of_a_log_that_falls_for_good_is_named(build, findings_of):
    def log(values, **losses):
        def fill(writer):
            for name, each in losses.items():
                writer.scalars(name, step=[100 * at for at in range(len(each))], value=each)
            writer.scalars("loss", step=list(range(10)), value=list(np.linspace(2, 1, 10)))
            writer.scalars("eval_accuracy", step=[100 * at for at in range(len(values))], value=values)

        return build(fill)

    (finding,) = findings_of(DROP, log([0.5, 0.6, 0.66, 0.62, 0.58, 0.53, 0.5]))
    assert (finding.evidence[0].value, finding.where.step) == (200, 300)
    assert not findings_of(DROP, log([0.5, 0.6, 0.66, 0.655, 0.66, 0.658, 0.661]))
    overfitted = [1.9, 1.5, 1.45, 1.52, 1.6, 1.75, 1.9]
    assert not findings_of(DROP, log([0.5, 0.6, 0.66, 0.62, 0.58, 0.53, 0.5], eval_loss=overfitted))


def test_scores_without_their_noise_are_not_judged(build):
    assert "standard error" in skipped(DROP, build(record("evaluations", *two("general", [64, 49]))))


SFT = {"training": {"objective": "sft"}, "model": {"initialised": "pretrained"}}


@pytest.mark.fires(CONTROL)
@pytest.mark.recorded(CONTROL)
def test_a_run_that_tunes_and_evaluates_one_set_is_noted(tmp_path, findings_of):
    job = Job(tmp_path, start="pretrained").train().evaluate().train().evaluate()
    (finding,) = findings_of(CONTROL, job.capsule())
    assert (finding.severity, finding.evidence[0].value) == ("info", 1)


@pytest.mark.fires(CONTROL)
def test_a_tuned_model_that_is_evaluated_on_its_domain_alone_is_noted(build, findings_of):
    (finding,) = findings_of(CONTROL, build(record("evaluations", *two("medical", [61, 78])), SFT))
    assert (finding.severity, finding.kind) == ("info", "hygiene")


@pytest.mark.quiet(CONTROL)
def test_a_control_set_or_training_from_scratch_is_quiet(build, findings_of):
    both = [*two("medical", [61, 78]), *two("mmlu", [64, 63])]
    assert not findings_of(CONTROL, build(record("evaluations", *both), SFT))
    scratch = {"training": {"objective": "causal-lm"}, "model": {"initialised": "random"}}
    assert not findings_of(CONTROL, build(record("evaluations", *two("web", [3.0, 2.5])), scratch))


# -- hostile


ODD = [
    {"kind": "eval_begin"},
    {"kind": "eval_begin", "pass": "x", "step": 3, "told": False},
    {"kind": "eval_begin", "pass": 0, "training_mode": True, "random_drawn": True, "name": "\u202e"},
]


def test_odd_evidence_makes_no_rule_raise(build):
    def fill(writer):
        writer.records("events", ODD)
        writer.records(
            "evaluations",
            [
                {"name": None, "value": float("nan")},
                {"value": 1.0},
                {"value": -1e300, "n": 0},
                {"value": 1e300, "step": 0, "stderr": float("nan")},
                {"name": "acc", "suite": "s", "value": 0.5, "stderr": 0.0, "n": 1, "step": 2},
                {"name": "acc", "suite": "s", "slice": "x", "value": 0.4, "stderr": -1.0, "step": 3},
                {"name": "acc", "suite": "s", "slice": "x", "value": 0.3, "stderr": float("inf"), "step": 4},
            ],
        )
        writer.records("samples", [{"step": 1, "loss": float("nan"), "split": "validation", "length": 0}] * 3)
        writer.batch(step=0, split="validation", input_ids=np.zeros((2, 1), int), token_loss=np.zeros((2, 1)))
        writer.batch(step=0, split="validation", token_loss=np.full((1, 3), np.inf), sample_ids=["a"])
        writer.batch(step=0, split="validation", input_ids=np.zeros((0, 4), int), logits=np.zeros((0, 4, 2)))
        writer.batch(step=1, split="validation", input_ids=np.full((1, 3), 9), logits=np.zeros((1, 3, 2)), evaluation=3)

    manifest = {
        "training": {"augmentation": [[["validation"]], 3, {"val": {"val": None}}]},
        "config": {"a": [{"mc_dropout": 0}]},
        "identity": {"chat_template": {"sha256": "x"}},
    }
    report = analyze(build(fill, manifest))
    assert not report.errors
