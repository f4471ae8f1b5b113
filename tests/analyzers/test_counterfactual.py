"""The guarantees of the counterfactual engine, on a computation small enough to follow by hand.

The computation is factor · mean(x^power) + offset. Observations come from the formula written out in the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from llmconsole.analyzers.counterfactual import explain
from llmconsole.analyzers.fault import Fault, Observation, Verdict
from llmconsole.analyzers.rounding import UNIT_ROUNDOFF, Noise, scalar_tolerance, tensor_z

X = np.array([1.0, 2.0, 4.0, 5.0])  # mean 3, mean of squares 11.5


@dataclass(frozen=True)
class Sum:
    factor: float = 1.0
    power: int = 1
    offset: float = 0.0


def reference(case: Any, spec: Any, noise: Noise | None, rows: Any) -> float:
    x = noise(case, "x") if noise else case
    return float(spec.factor * np.mean(x**spec.power) + spec.offset)


def fault(name: str, knob: str, value: float) -> Fault:
    return Fault(name, knob, lambda spec: replace(spec, **{knob: value}))


DOUBLE, SQUARE, PLUS_ONE = fault("double", "factor", 2.0), fault("square", "power", 2), fault("plus-one", "offset", 1.0)
CATALOGUE = (DOUBLE, SQUARE, PLUS_ONE)


def asked(
    *values: float, case: np.ndarray = X, decimals: int | None = None, catalogue: tuple[Fault, ...] = CATALOGUE
) -> Verdict:
    observations = [Observation(f"number {n}", case, reference, value, decimals) for n, value in enumerate(values)]
    return explain(observations, [Sum()], catalogue)


def test_the_healthy_number_is_healthy() -> None:
    assert asked(3.0).status == "healthy"


def test_a_single_fault_is_confirmed_by_a_number_at_full_precision() -> None:
    verdict = asked(11.5)
    assert (verdict.status, verdict.classes) == ("confirmed", ((("square",),),))
    assert verdict.z < 1
    assert verdict.chance <= 1e-3


def test_the_table_holds_observed_healthy_runner_up_and_what_was_tried() -> None:
    table = asked(11.5).table
    assert (table.observed, table.healthy) == (11.5, 3.0)
    assert table.candidates[0].faults == ("square",)
    assert table.candidates[0].fits
    # next to 11.5: 12.5 of square + plus-one
    assert table.runner_up is not None
    assert (table.runner_up.faults, table.runner_up.off_by) == (("square", "plus-one"), 1.0)


def test_a_pair_of_different_knobs_is_named_where_no_single_fault_fits() -> None:
    verdict = asked(24.0)  # 2 · 11.5 + 1 would be three faults; 2 · 11.5 = 23; 11.5 + 1 = 12.5; 2 · 3 + 1 = 7
    assert (verdict.status, verdict.classes) == ("undetermined", ())
    assert asked(23.0).classes == ((("double", "square"),),)
    assert asked(23.0).status == "confirmed"


def test_two_faults_of_one_knob_are_never_paired() -> None:
    verdict = asked(9.0, catalogue=(DOUBLE, fault("triple", "factor", 3.0)))
    assert verdict.classes == ((("triple",),),)
    names = {row.faults for row in verdict.table.candidates}
    assert ("double", "triple") not in names


def test_an_unknown_cause_is_undetermined_and_names_nothing() -> None:
    verdict = asked(math.pi)
    assert (verdict.status, verdict.classes) == ("undetermined", ())
    assert math.isnan(verdict.z)


def test_two_printed_decimals_never_confirm_however_many_numbers_there_are() -> None:
    cases = [X * factor for factor in (1.0, 1.7, 2.3, 3.1, 4.2)]
    observations = [
        Observation(f"{n}", case, reference, round(float(np.mean(case**2)), 2), 2) for n, case in enumerate(cases)
    ]
    verdict = explain(observations, [Sum()], CATALOGUE)
    assert verdict.status == "likely"
    assert "two printed decimals" in verdict.reasons[0]


def test_a_pair_is_never_confirmed_by_one_number_of_four_decimals() -> None:
    verdict = asked(23.0, decimals=4)
    assert verdict.status == "likely"
    assert verdict.classes == ((("double", "square"),),)
    assert asked(23.0, decimals=5).status == "confirmed"


def test_several_numbers_must_all_be_reproduced() -> None:
    other = X + 1  # mean 4, mean of squares 18.5
    healthy_then_square = [Observation("a", X, reference, 3.0), Observation("b", other, reference, 18.5)]
    assert explain(healthy_then_square, [Sum()], CATALOGUE).status == "undetermined"
    both = [Observation("a", X, reference, 11.5), Observation("b", other, reference, 18.5)]
    assert explain(both, [Sum()], CATALOGUE).status == "confirmed"


def test_equivalent_faults_are_one_set() -> None:
    twin = fault("times-two", "factor", 2.0 + 1e-13)
    verdict = asked(6.0, catalogue=(DOUBLE, twin, SQUARE))
    assert verdict.status == "confirmed"
    assert verdict.classes == ((("double",), ("times-two",)),)


def test_two_different_faults_that_both_fit_are_undetermined_between_them() -> None:
    near = fault("nearly-double", "factor", 2.0 + 1e-4)
    verdict = asked(6.0, decimals=3, catalogue=(DOUBLE, near, SQUARE))
    assert verdict.status == "undetermined"
    assert set(verdict.classes) == {(("double",),), (("nearly-double",),)}


def test_a_near_runner_up_keeps_a_fault_from_being_confirmed() -> None:
    near = fault("nearly-double", "factor", 2.0 + 4e-4)  # 6.0012: 2.4 tolerances of 5e-4 from 6.0
    verdict = asked(6.0, decimals=3, catalogue=(DOUBLE, near, SQUARE))
    assert verdict.status == "likely"
    assert any("tolerances away" in reason for reason in verdict.reasons)


def test_a_fault_that_changes_nothing_here_is_not_testable_rather_than_excluded() -> None:
    ones = np.ones(4)
    verdict = asked(2.0, case=ones, catalogue=(DOUBLE, SQUARE))
    assert verdict.status == "confirmed"
    assert verdict.inert == ("square",)
    assert asked(1.0, case=ones).status == "healthy"


def test_a_fault_applies_only_where_it_can_occur() -> None:
    long_only = replace(SQUARE, when=lambda case: len(case) > 10)
    verdict = asked(11.5, catalogue=(DOUBLE, long_only, PLUS_ONE))
    assert verdict.status == "undetermined"
    assert "square" not in verdict.inert


def test_any_lawful_specification_is_healthy_and_every_fault_is_tried_on_each() -> None:
    lawful = [Sum(), Sum(power=2)]
    for value, classes in ((3.0, ((),)), (11.5, ((),)), (23.0, (("double",),))):
        verdict = explain([Observation("n", X, reference, value)], lawful, (DOUBLE, PLUS_ONE))
        assert verdict.classes == (classes,)


def test_chance_grows_with_the_tolerance() -> None:
    fine, coarse = asked(11.5, decimals=6), asked(11.5, decimals=1)
    assert fine.chance < coarse.chance
    # one candidate within 10 % of 11.5 in the tier of single faults: 0.05 / (0.1 · 11.5), and 1 % on the half unit
    assert coarse.chance == pytest.approx(0.05 / 1.15, rel=0.02)


def test_a_loss_computed_in_bfloat16_is_not_confirmed_by_one_number() -> None:
    u = UNIT_ROUNDOFF["bfloat16"]
    verdict = explain([Observation("n", X, reference, 11.5, None, u, u)], [Sum()], CATALOGUE)
    assert verdict.status in ("likely", "undetermined")


def test_what_the_engine_says_does_not_change_from_call_to_call() -> None:
    assert asked(11.5) == asked(11.5)
    assert asked(23.0, decimals=4) == asked(23.0, decimals=4)


def test_a_candidate_that_cannot_be_computed_is_left_out() -> None:
    def partial(case: Any, spec: Any, noise: Noise | None, rows: Any) -> float:
        return float("nan") if spec.power == 2 else reference(case, spec, noise, rows)

    verdict = explain([Observation("n", X, partial, 6.0)], [Sum()], CATALOGUE)
    assert (verdict.status, verdict.classes) == ("confirmed", ((("double",),),))


def test_an_observation_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        asked(float("nan"))
    with pytest.raises(ValueError, match="at least one"):
        explain([], [Sum()], CATALOGUE)


def test_the_scalar_tolerance_is_half_a_printed_unit_and_six_sigma() -> None:
    assert scalar_tolerance(2.0, 0.0, 0.0, 2) == pytest.approx(0.005, rel=0.011)
    assert scalar_tolerance(2.0, 3e-3, 2e-3, None) == pytest.approx(6 * 5e-3)


def test_the_same_draw_of_noise_moves_the_same_input_alike_and_by_one_roundoff() -> None:
    noise = Noise(seed=1, draw=2, roundoff=1e-3)
    assert (noise(X, "x") == noise(X, "x")).all()
    assert np.abs(noise(X, "x") / X - 1) == pytest.approx(1e-3)
    many = np.linspace(1.0, 2.0, 1000)
    assert (noise(many, "x") != noise(many, "y")).any()
    assert abs(np.sign(noise(many, "x") - many).sum()) < 150  # five standard deviations of a fair coin


def test_equal_numbers_are_perturbed_alike_since_they_were_rounded_alike() -> None:
    rows = np.tile(np.linspace(1.0, 2.0, 7), (5, 1))
    moved = Noise(seed=1, draw=2, roundoff=1e-3)(rows, "x")
    assert (moved == moved[0]).all()


class TestTensors:
    """The same engine on arrays: rows [T, D] through a matrix product in the job's dtype."""

    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(48, 16))
    weight = rng.normal(size=(16, 12))

    def reference(self, case: Any, spec: Any, noise: Noise | None, rows: Any) -> np.ndarray:
        x, w = (noise(case[0], "x"), noise(case[1], "w")) if noise else case
        x = x if rows is None else x[rows]
        return spec.factor * (x @ w) ** spec.power + spec.offset

    def observed(self, transform: Any, dtype: Any) -> Observation:
        got = transform(self.inputs.astype(dtype) @ self.weight.astype(dtype)).astype(np.float64)
        u = UNIT_ROUNDOFF[np.dtype(dtype).name]
        return Observation("out", (self.inputs, self.weight), self.reference, got, value_roundoff=u, input_roundoff=u)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16])
    def test_healthy_single_pair_and_unknown(self, dtype: Any) -> None:
        for transform, expected in (
            (lambda y: y, ()),
            (lambda y: y * 2, ("double",)),
            (lambda y: y * 2 + 1, ("double", "plus-one")),
        ):
            verdict = explain([self.observed(transform, dtype)], [Sum()], CATALOGUE)
            assert verdict.classes == ((expected,),), transform
            assert verdict.status == ("confirmed" if expected else "healthy")
        verdict = explain([self.observed(np.tanh, dtype)], [Sum()], CATALOGUE)
        assert (verdict.status, verdict.classes) == ("undetermined", ())

    def test_rows_that_are_not_finite_are_left_out(self) -> None:
        seen = self.observed(lambda y: y, np.float32)
        assert isinstance(seen.value, np.ndarray)
        seen.value[3] = np.nan
        assert explain([seen], [Sum()], CATALOGUE).status == "healthy"

    def test_z_of_an_error_of_one_sigma_is_about_one(self) -> None:
        zeros, ones = np.zeros((4, 100)), np.ones((4, 100))
        worst, overall = tensor_z(zeros, zeros + 0.1, 0.1 * ones, 0.0)
        assert (worst, overall) == pytest.approx((1 / math.sqrt(1.05),) * 2)
