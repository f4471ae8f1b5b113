"""Rates of the engine over random incidents; half of them carry a cause outside its catalogue.

A small form of ``benchmarks/engine.py``, through capsules on disk.
"""

from __future__ import annotations

import pytest
import torch

from tests.analyzers.sweep import incidents, rates

KNOWN = tuple(incidents.FAULTS)
UNKNOWN = tuple(f"unknown:{name}" for name in incidents.UNKNOWN)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_half_of_the_incidents_carry_a_cause_outside_the_catalogue() -> None:
    assert len(UNKNOWN) >= len(KNOWN)
    assert not set(incidents.UNKNOWN) & set(incidents.FAULTS)


@pytest.mark.parametrize("mode", [rates.FP32_TWO_STEPS, rates.BF16_LOGITS_TWO], ids=lambda mode: mode.name)
def test_known_faults_are_named_and_unknown_ones_are_undetermined(mode: incidents.Mode) -> None:
    said = rates.run(mode, (*KNOWN, *UNKNOWN), range(1))
    assert said.count("unknown:undetermined") == len(UNKNOWN), said.wrong
    named = said.count("fault:confirmed") + said.count("fault:likely")
    assert named >= said.count("fault:") - 1, said
    assert not said.wrong


def test_two_faults_at_once_are_named_together() -> None:
    some = tuple(incidents.PAIRS)[::4]
    said = rates.run(rates.FP32_TWO_STEPS, some, range(1))
    assert said.count("fault:confirmed") + said.count("equivalent") >= len(some) - 1, said
    assert not said.wrong


def test_a_healthy_job_is_quiet_in_every_mode() -> None:
    for mode in rates.MODES:
        said = rates.run(mode, ["healthy"], range(3))
        assert said.count("healthy:quiet") == 3, (mode.name, said.wrong)


def test_coarse_numbers_confirm_nothing() -> None:
    assert rates.run(rates.PRINTED_TWO, KNOWN, range(1)).count("fault:confirmed") == 0
    said = rates.run(rates.BF16_LOSS, (*KNOWN, *UNKNOWN), range(1))
    assert said.count("fault:confirmed") == 0
    assert said.count("unknown:named-confirmed") == 0


def test_with_its_fault_taken_out_of_the_catalogue_nothing_is_confirmed_at_two_steps() -> None:
    said = rates.run(rates.FP32_TWO_STEPS, KNOWN, range(1), without_truth=True)
    assert said.count("unknown:named-confirmed") == 0, said.wrong
