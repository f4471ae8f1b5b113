"""The FP64 token cross-entropy against values worked out by hand and against torch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.reference.token_ce import Scores, logsumexp, mean, target_logits


def test_log_sum_exp_of_equal_logits_is_ln_of_their_number() -> None:
    assert logsumexp(np.zeros((1, 1, 8), dtype=np.float32))[0, 0] == pytest.approx(math.log(8), abs=1e-15)


def test_log_sum_exp_does_not_overflow_where_exp_does() -> None:
    # ln(e^1000 + e^1000) = 1000 + ln 2
    assert logsumexp(np.array([[1000.0, 1000.0]]))[0] == pytest.approx(1000 + math.log(2), abs=1e-12)


def test_log_sum_exp_carries_what_is_not_finite() -> None:
    rows = np.array([[np.inf, 0.0], [-np.inf, -np.inf], [-np.inf, 0.0], [np.nan, 0.0]])
    got = logsumexp(rows)
    assert got[0] == np.inf
    assert got[1] == -np.inf
    assert got[2] == 0.0
    assert math.isnan(got[3])


def test_a_two_token_row_worked_out_by_hand() -> None:
    # logits (0, ln 3): p = (1/4, 3/4); target 1 costs ln 4/3, target 0 costs ln 4.
    logits = np.array([[[0.0, math.log(3)], [0.0, math.log(3)]]])
    scores = Scores.from_logits(logits, np.array([[1, 0]]))
    counted = np.ones((1, 2), dtype=bool)
    losses = scores.losses(np.array([[1, 0]]), counted)
    assert losses[0] == pytest.approx([math.log(4 / 3), math.log(4)], abs=1e-15)
    assert mean(losses, counted) == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, abs=1e-15)


def test_positions_that_are_not_counted_add_nothing_and_none_counted_is_zero_by_zero() -> None:
    scores = Scores.from_logits(np.zeros((1, 3, 4)), np.array([[0, 1, 2]]))
    counted = np.array([[True, False, False]])
    losses = scores.losses(np.array([[1, 2, 0]]), counted)
    assert losses.sum() == pytest.approx(math.log(4))
    assert mean(losses, counted) == pytest.approx(math.log(4))
    assert math.isnan(mean(losses, np.zeros((1, 3), dtype=bool)))


def test_target_logits_run_over_the_row_boundary_and_end_in_nan() -> None:
    ids = np.array([[0, 1], [2, 3]])
    logits = np.arange(16, dtype=np.float64).reshape(2, 2, 4)
    got = target_logits(logits, ids)
    # (0, 1) follows token 1, then row 1 begins with 2, 3.
    assert got[0, 1].tolist() == [logits[0, 1, 1], logits[0, 1, 2], logits[0, 1, 3]]
    assert got[1, 1, 0] == logits[1, 1, 3]
    assert np.isnan(got[1, 1, 1:]).all()
    assert np.isnan(got[1, 0, 2])


def test_an_id_outside_the_vocabulary_has_no_logit() -> None:
    assert np.isnan(target_logits(np.zeros((1, 2, 4)), np.array([[9, -1]]))[0, 0, :2]).all()


@pytest.mark.parametrize("seed", range(5))
def test_full_and_compact_scores_agree_with_torch_in_double(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, 19, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(0, 19, (3, 7), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 19), labels[:, 1:].reshape(-1), ignore_index=-100)

    targets = np.concatenate([ids[:, 1:].numpy(), np.full((3, 1), -1)], axis=1)
    counted = np.concatenate([(labels[:, 1:] != -100).numpy(), np.zeros((3, 1), dtype=bool)], axis=1)
    full = Scores.from_logits(logits.numpy(), ids.numpy())
    compact = Scores(full.logsumexp, full.input_ids, full.following)
    for scores in (full, compact):
        assert mean(scores.losses(targets, counted), counted) == pytest.approx(float(expected), rel=1e-13)


def test_compact_scores_say_nan_for_a_token_that_was_not_kept() -> None:
    full = Scores.from_logits(np.zeros((1, 4, 9)), np.array([[1, 2, 3, 4]]))
    compact = Scores(full.logsumexp, full.input_ids, full.following)
    losses = compact.losses(np.array([[8, 3, 3, 4]]), np.ones((1, 4), dtype=bool))
    assert np.isnan(losses[0, 0])
    assert losses[0, 1] == pytest.approx(math.log(9))


def test_a_loss_the_job_kept_stands_in_where_the_scores_do_not_reach() -> None:
    full = Scores.from_logits(np.zeros((1, 2, 9)), np.array([[1, 2]]))
    compact = Scores(full.logsumexp, full.input_ids, full.following, known_loss=np.array([[5.0, 7.0]]))
    targets = np.array([[2, 8]])
    counted = np.ones((1, 2), dtype=bool)
    assert compact.losses(targets, counted, job_targets=targets)[0] == pytest.approx([math.log(9), 7.0])
    assert np.isnan(compact.losses(np.array([[2, 6]]), counted, job_targets=targets)[0, 1])
