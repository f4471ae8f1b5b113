"""The level of the loss against ln V, and what recorded micro-batch sums say about the reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]
LN_256 = math.log(256)  # 5.545


def losses(*values: float) -> Callable[[CapsuleWriter], Any]:
    return lambda writer: writer.scalars("loss", step=list(range(len(values))), value=list(values), rank=0)


def model(initialised: str | None = "random", **training: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"vocab_size": 256}
    if initialised is not None:
        about["initialised"] = initialised
    return {"model": about, "training": training}


def trained(learning_rate: float, steps: int = 60, scale: float = 0.02) -> list[float]:
    """Losses of a real bigram model of 256 bytes on the alphabet, over and over."""
    torch.manual_seed(0)
    table = nn.Embedding(256, 256)
    nn.init.normal_(table.weight, std=scale)
    optimizer = torch.optim.Adam(table.parameters(), lr=learning_rate)
    ids = torch.arange(97, 123).repeat(4)
    seen: list[float] = []
    for _ in range(steps):
        loss = F.cross_entropy(table(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.fires("objective/uniform-guess")
@pytest.mark.recorded("objective/uniform-guess")
def test_a_run_that_learns_nothing_stays_at_ln_v(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of("objective/uniform-guess", build(losses(*trained(learning_rate=0.0)), model()))
    assert (finding.severity, finding.confidence, finding.where.step) == ("warning", "likely", 12)
    assert finding.evidence[0].expected == pytest.approx(LN_256)


@pytest.mark.quiet("objective/uniform-guess")
def test_a_run_that_starts_at_ln_v_and_falls_is_quiet(build: Build, findings_of: Say) -> None:
    run = trained(learning_rate=0.05)
    assert abs(run[0] - LN_256) < 0.02 * LN_256
    assert not findings_of("objective/uniform-guess", build(losses(*run), model()))


def test_fewer_than_fifty_steps_say_nothing_about_a_plateau(build: Build, findings_of: Say) -> None:
    assert not findings_of("objective/uniform-guess", build(losses(*[LN_256] * 49), model()))
    assert findings_of("objective/uniform-guess", build(losses(*[LN_256] * 50), model()))


@pytest.mark.parametrize(("factor", "fires"), [(1.019, True), (1.021, False), (0.981, True), (0.979, False)])
def test_the_plateau_lies_within_two_percent(build: Build, findings_of: Say, factor: float, fires: bool) -> None:
    assert bool(findings_of("objective/uniform-guess", build(losses(*[LN_256 * factor] * 60), model()))) is fires


@pytest.mark.fires("objective/initial-loss")
@pytest.mark.recorded("objective/initial-loss")
def test_logits_that_start_too_large_are_seen_in_the_first_loss(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of("objective/initial-loss", build(losses(*trained(0.01, steps=3, scale=2.0)), model()))
    assert finding.cause == "the initial logits are too large"
    assert finding.where.step == 0


@pytest.mark.quiet("objective/initial-loss")
@pytest.mark.parametrize("initialised", ["pretrained", "random"])
def test_a_right_start_and_a_pretrained_one_are_quiet(build: Build, findings_of: Say, initialised: str) -> None:
    run = [2.1, 2.0] if initialised == "pretrained" else trained(0.01, steps=3)
    assert not findings_of("objective/initial-loss", build(losses(*run), model(initialised)))


@pytest.mark.parametrize(("off", "fires"), [(0.49, False), (0.51, True), (-0.49, False), (-0.51, True)])
def test_half_a_nat_is_the_limit_on_either_side(build: Build, findings_of: Say, off: float, fires: bool) -> None:
    assert bool(findings_of("objective/initial-loss", build(losses(LN_256 + off), model()))) is fires


@pytest.mark.quiet("objective/initial-loss")
def test_a_sum_over_logits_that_are_as_they_should_be_is_not_blamed_on_them(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        logits = 0.02 * torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(97, 225).view(2, 64)
        total = float(F.cross_entropy(logits[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1), reduction="sum"))
        writer.scalars("loss", step=[0], value=[total], rank=0)  # 126 tokens: about 699
        scores = torch.full((2, 64, 3), float("nan"))
        scores[:, :-1, 1] = logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        writer.batch(step=0, input_ids=ids, logsumexp=logits.logsumexp(-1), target_logits=scores)

    assert not findings_of("objective/initial-loss", build(fill, model()))


def test_a_run_that_continues_is_no_start(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=[5000, 5001], value=[1.2, 1.2], rank=0)

    assert not findings_of("objective/initial-loss", build(fill, model()))


@pytest.mark.fires("objective/reduction")
def test_a_first_loss_of_eight_times_ln_v_with_eight_accumulation_steps(build: Build, findings_of: Say) -> None:
    capsule = build(losses(8.01 * LN_256), model(accumulation_steps=8))
    (finding,) = findings_of("objective/reduction", capsule)
    assert finding.confidence == "likely"
    assert finding.cause is not None
    assert "accumulation" in finding.cause


@pytest.mark.quiet("objective/reduction")
@pytest.mark.parametrize(
    ("loss", "training"),
    [
        (1.01 * LN_256, {"accumulation_steps": 8}),
        (8.0 * LN_256, {"accumulation_steps": 4}),  # eight is nobody's number
        (8.3 * LN_256, {"accumulation_steps": 8}),
        (8.0 * LN_256, {"accumulation_steps": 8, "reduction": "sum"}),
    ],
)
def test_first_losses_without_such_a_factor_are_quiet(
    build: Build, findings_of: Say, loss: float, training: dict[str, Any]
) -> None:
    assert not findings_of("objective/reduction", build(losses(loss), model(**training)))


class TestRecordedSums:
    """transformers#34191 in numbers: micro-batches of 1000 and 10 tokens with means 2 and 8, windows of two.

    Token mean (2·1000 + 8·10) / 1010 = 2.0594; mean of means 5.
    """

    @staticmethod
    def fill(writer: CapsuleWriter, numbers: list[float]) -> None:
        for step, number in enumerate(numbers):
            writer.scalars("loss", step=[step], value=[number], rank=0)
            for micro, (tokens, mean) in enumerate(((1000, 2.0), (10, 8.0 + step))):
                writer.record(
                    "microbatches",
                    {"step": step, "micro": micro, "tokens": tokens, "loss_mean": mean, "loss_sum": mean * tokens},
                )

    @pytest.mark.fires("objective/reduction")
    def test_the_mean_of_means_is_named(self, build: Build, findings_of: Say) -> None:
        declared = {"training": {"reduction": "token-mean", "accumulation_steps": 2}}
        capsule = build(lambda writer: self.fill(writer, [5.0, 5.5]), declared)
        (finding,) = findings_of("objective/reduction", capsule)
        assert finding.counterfactual is not None
        assert finding.counterfactual.classes == (("mean-of-micro-batch-means",),)
        assert finding.counterfactual.healthy == pytest.approx(2080 / 1010) or finding.counterfactual.healthy > 2.06

    def test_it_is_a_warning_where_nobody_declared_the_reduction(self, build: Build, findings_of: Say) -> None:
        (finding,) = findings_of("objective/reduction", build(lambda writer: self.fill(writer, [5.0, 5.5]), {}))
        assert (finding.severity, finding.confidence) == ("warning", "likely")

    @pytest.mark.quiet("objective/reduction")
    def test_the_token_mean_is_quiet(self, build: Build, findings_of: Say) -> None:
        capsule = build(lambda writer: self.fill(writer, [2080 / 1010, 2090 / 1010]), {})
        assert not findings_of("objective/reduction", capsule)

    def test_a_sum_of_means_is_left_open_since_nobody_wrote_whether_means_were_divided(
        self, build: Build, findings_of: Say
    ) -> None:
        assert not findings_of("objective/reduction", build(lambda writer: self.fill(writer, [10.0, 11.0]), {}))
