"""A missing division seen by sizes alone: gradient norms and losses of two sides, evaluations, sums of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.objective.gradients import divided_afterwards
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]
REDUCTION = "objective/reduction"


def sides(name: str, whole: Sequence[float], accumulated: Sequence[float]) -> Callable[[CapsuleWriter], None]:
    def fill(writer: CapsuleWriter) -> None:
        for side, values in (("whole batch", whole), ("accumulated", accumulated)):
            writer.scalars(name, step=list(range(1, len(values) + 1)), value=list(values), rank=0, side=side)

    return fill


def accumulating(steps: int) -> dict[str, Any]:
    return {"training": {"accumulation_steps": steps, "max_grad_norm": 1.0}}


@pytest.mark.fires("objective/reduction")
@pytest.mark.parametrize("declared", [accumulating(4), {}], ids=["declared", "undeclared"])
def test_gradient_norms_that_are_exactly_four_times_apart(
    build: Build, findings_of: Say, declared: dict[str, Any]
) -> None:
    """MakazhanAlpamys/Soup#720: 0.2638700074 for the whole batch, 1.0554800295 accumulated over four."""
    (finding,) = findings_of(REDUCTION, build(sides("grad_norm", [0.2638700074], [1.0554800295]), declared))
    assert (finding.severity, finding.confidence) == ("warning", "likely")
    assert finding.evidence[1].value == pytest.approx(4.0, abs=1e-6)
    assert "no learning rate" in finding.summary


@pytest.mark.fires("objective/reduction")
@pytest.mark.recorded("objective/reduction")
def test_the_same_measured_on_a_real_model(build: Build, findings_of: Say) -> None:
    """Four equal micro-batches; one loop forgets 1/4. A control that divides agrees to rounding."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))

    def norm(parts: int, divide: bool) -> float:
        model.zero_grad()
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(xs), ys) / (parts if divide else 1)).backward()
        return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    assert norm(4, divide=True) == pytest.approx(norm(1, divide=True))
    wrong = build(sides("grad_norm", [norm(1, True)], [norm(4, False)]), accumulating(4))
    right = build(sides("grad_norm", [norm(1, True)], [norm(4, True)]), accumulating(4))
    assert findings_of(REDUCTION, wrong)
    assert not findings_of(REDUCTION, right)


@pytest.mark.quiet("objective/reduction")
@pytest.mark.parametrize(("factor", "steps"), [(1.0, 4), (3.98, 4), (4.0, 8), (2.5, 4)])
def test_norms_that_differ_otherwise_are_quiet(build: Build, findings_of: Say, factor: float, steps: int) -> None:
    assert not findings_of(REDUCTION, build(sides("grad_norm", [0.3], [0.3 * factor]), accumulating(steps)))


def test_losses_of_two_logs_where_one_doubles(build: Build, findings_of: Say) -> None:
    """transformers#35438: 10.5949 at the first log with accumulation 1, erroneously doubled with 2."""
    capsule = build(sides("loss", [10.5949, 9.1], [21.1703, 18.4]), accumulating(2))
    (finding,) = findings_of(REDUCTION, capsule)
    assert finding.where.step == 1
    assert not findings_of(REDUCTION, build(sides("loss", [10.5949, 9.1], [10.5851, 9.2]), accumulating(2)))


def evaluated(factor: float, accumulation: int) -> tuple[Callable[[CapsuleWriter], None], dict[str, Any]]:
    def fill(writer: CapsuleWriter) -> None:
        steps = list(range(10, 110, 10))
        held = [2.0 - step / 200 for step in steps]
        writer.scalars("loss", step=steps, value=[factor * each * 1.02 for each in held], rank=0)
        writer.scalars("eval_loss", step=steps[::3], value=held[::3], rank=0)

    return fill, accumulating(accumulation)


@pytest.mark.fires("objective/reduction")
def test_a_training_loss_at_eight_times_the_evaluation_loss_with_eight_steps(build: Build, findings_of: Say) -> None:
    """modelscope/ms-swift#2361: the logged loss multiplied by the accumulation, the evaluation unchanged."""
    (finding,) = findings_of(REDUCTION, build(*evaluated(8.0, 8)))
    assert (finding.severity, finding.confidence) == ("warning", "likely")


@pytest.mark.quiet("objective/reduction")
@pytest.mark.parametrize(("factor", "accumulation"), [(1.0, 8), (1.4, 2), (5.0, 8), (8.0, 4)])
def test_other_distances_of_training_and_evaluation_are_quiet(
    build: Build, findings_of: Say, factor: float, accumulation: int
) -> None:
    assert not findings_of(REDUCTION, build(*evaluated(factor, accumulation)))


class TestRecordedSumsOfAllRanks:
    """Two ranks with 100 and 50 tokens and other sums: own means, all as one batch, one rank's denominator."""

    FIRST, SECOND = 312.3477189, 98.7654329

    def capsule(self, build: Build, number: float) -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            for step in range(2):
                writer.scalars("loss", step=[step], value=[number * (1 + step)], rank=0)
                for rank, (tokens, total) in enumerate(((100, self.FIRST), (50, self.SECOND))):
                    sums = {"step": step, "micro": 0, "tokens": tokens, "loss_sum": total * (1 + step)}
                    writer.record("microbatches", sums, rank=rank)

        return build(fill, {"training": {"reduction": "token-mean"}, "run": {"world_size": 2}})

    @pytest.mark.parametrize(
        ("number", "fault"),
        [
            ((FIRST + SECOND) / 100, "one-rank-denominator"),
            (2 * FIRST / 100, "times-world-size"),
            (FIRST / 200, "divided-by-world-size"),
        ],
    )
    def test_a_wrong_scale_is_confirmed(self, build: Build, findings_of: Say, number: float, fault: str) -> None:
        (finding,) = findings_of(REDUCTION, self.capsule(build, number))
        assert finding.confidence == "confirmed"
        assert finding.counterfactual is not None
        assert fault in finding.counterfactual.classes[0]

    @pytest.mark.parametrize(
        "number", [FIRST / 100, (FIRST / 100 + SECOND / 50) / 2, (FIRST + SECOND) / 150], ids=["own", "mean", "all"]
    )
    def test_own_mean_mean_over_ranks_and_all_as_one_batch_are_quiet(
        self, build: Build, findings_of: Say, number: float
    ) -> None:
        assert not findings_of(REDUCTION, self.capsule(build, number))


@pytest.mark.parametrize(
    ("norms", "seen", "divided"),
    [
        ([1.0, 1.4], 1.4, False),  # independent gradients
        ([1.0, 2.0], 2.0, False),  # equal ones
        ([1.0, 0.7], 0.7, True),
        ([1.0, 2.0], 1.0, True),  # row taken before the division
        ([1.0, 0.05], 0.05, None),  # the second cancels the first: a division by two would not do that
        ([1.0, 0.2, 0.9], 0.9, None),  # they cancel all along
        ([1.0, 1.4, 1.75, 2.0], 2.0, False),
        ([1.0, 1.4, 1.75, 0.5], 0.5, True),
    ],
)
def test_what_the_growth_of_the_accumulated_gradient_says(
    build: Build, norms: list[float], seen: float, divided: bool | None
) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.record("param_groups", {"step": 0, "name": "w", "group": 0, "shape": [4]})
        row = {"step": 0, "name": "w", "role": "gradient", "dtype": "float32", "shape": [4], "numel": 4}
        writer.stats([row | {"order": at, "micro": at, "rms": norm / 2} for at, norm in enumerate(norms)])
        writer.scalars("grad_norm", step=[0], value=[seen], rank=0)

    assert divided_afterwards(build(fill), [0]) is divided
