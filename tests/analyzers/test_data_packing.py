"""data/packing-contamination: two samples of 3 and 5 tokens in one row (MeetKai/functionary#265)."""

from __future__ import annotations

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named

RULE = "data/packing-contamination"
A, B = [11, 12, 13], [21, 22, 23, 24, 25]
IDS = np.array([A + B])
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
RUNNING, RESTARTED = np.arange(8)[None], np.array([[0, 1, 2, 0, 1, 2, 3, 4]])
DENSE = np.tril(np.ones((1, 8, 8), int))
BLOCKS = DENSE * (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
#: Losses of the predicting positions; of the report: 44.141 apart, 37.55 packed, 44.17 packed and kept apart.
APART_A, APART_B = [10.0, 7.141], [9.0, 8.0, 6.0, 4.0]
PACKED = [10.0, 7.141, 6.0, 7.0, 6.0, 3.0, 4.409]  # the third predicts the first token of B: nobody alone pays for it
CLEAN = [10.0, 7.15, 6.0, 9.0, 8.0, 6.01, 4.01]


def alone(writer, micro, tokens, losses):
    row = np.array([tokens])
    writer.batch(step=0, micro=micro, input_ids=row, labels=row, token_loss=np.array([[*losses, np.nan]]))


def packed(writer, micro, losses, **extra):
    writer.batch(step=0, micro=micro, input_ids=IDS, labels=IDS, token_loss=np.array([[*losses, np.nan]]), **extra)


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


@pytest.mark.fires(RULE)
def test_the_three_loss_sums_of_the_report(build, findings_of):
    def fill(writer):
        alone(writer, 0, A, APART_A)
        alone(writer, 1, B, APART_B)
        packed(writer, 2, PACKED, segment_ids=SEGMENTS, position_ids=RUNNING, attention_mask=DENSE)
        packed(writer, 3, CLEAN, segment_ids=SEGMENTS, position_ids=RESTARTED, attention_mask=BLOCKS)

    finding, numbers = one(findings_of(RULE, build(fill)))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert numbers["pairs across documents"] == 15  # each of 5 tokens sees 3 foreign ones
    assert numbers["loss sum packed"] == pytest.approx(37.55)
    assert next(e for e in finding.evidence if e.name == "loss sum packed").expected == pytest.approx(44.141)
    assert numbers["difference"] == pytest.approx(-6.591)
    assert "-14.9 %" in finding.summary
    assert "44.17" in next(e for e in finding.evidence if e.name == "loss sum packed").note


@pytest.mark.fires(RULE)
def test_positions_that_run_on_without_a_mask_are_likely_and_the_sums_confirm(build, findings_of):
    extra = {"segment_ids": SEGMENTS, "position_ids": RUNNING}
    finding, _ = one(findings_of(RULE, build(lambda w: packed(w, 0, PACKED, **extra))))
    assert (finding.severity, finding.confidence) == ("warning", "likely")

    def fill(writer):
        alone(writer, 0, A, APART_A)
        alone(writer, 1, B, APART_B)
        packed(writer, 2, PACKED, **extra)

    finding, _ = one(findings_of(RULE, build(fill)))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")


@pytest.mark.fires(RULE)
def test_positions_restart_and_the_mask_is_dense(build, findings_of):
    finding, numbers = one(
        findings_of(RULE, build(lambda w: packed(w, 0, PACKED, position_ids=RESTARTED, attention_mask=DENSE)))
    )
    assert (finding.confidence, numbers["positions restart"]) == ("confirmed", "yes")


def test_a_stream_declared_as_packed_is_only_noted(build, findings_of):
    ids = np.array([[11, 12, 9, 21, 22, 23, 24, 9]])
    manifest = {"training": {"packing": True}, "tokenizer": {"eos_id": 9}}
    finding, _ = one(findings_of(RULE, build(lambda w: w.batch(step=0, input_ids=ids, position_ids=RUNNING), manifest)))
    assert (finding.severity, finding.confidence) == ("info", "undetermined")


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "extra",
    [
        {"segment_ids": SEGMENTS, "position_ids": RESTARTED, "attention_mask": BLOCKS},
        {"position_ids": RESTARTED},
        {"position_ids": RESTARTED, "attention_mask": np.ones((1, 8), int)},
        {"cu_seqlens": np.array([0, 3, 8]), "position_ids": RUNNING},
        {"segment_ids": SEGMENTS, "position_ids": RUNNING, "attention_mask": SEGMENTS + 1},
        {"position_ids": RUNNING, "attention_mask": DENSE},
        {"segment_ids": SEGMENTS * 0 + 1, "position_ids": RUNNING},
        {"segment_ids": np.array([[1, 1, 1, 1, 1, 0, 0, 0]]), "position_ids": RUNNING},
    ],
    ids=[
        "blocks",
        "kernel reads positions",
        "mask of ones",
        "padding-free",
        "numbered mask",
        "one document",
        "one number",
        "padding 0",
    ],
)
def test_documents_kept_apart_or_never_marked_are_quiet(build, findings_of, extra):
    assert not findings_of(RULE, build(lambda w: packed(w, 0, PACKED, **extra)))


@pytest.mark.quiet(RULE)
def test_the_same_under_a_clean_pair_of_sums(build, findings_of):
    def fill(writer):
        alone(writer, 0, A, APART_A)
        alone(writer, 1, B, APART_B)
        packed(writer, 2, CLEAN, segment_ids=SEGMENTS, position_ids=RESTARTED, attention_mask=BLOCKS)

    assert not findings_of(RULE, build(fill))


def test_marked_documents_without_positions_or_mask_cannot_be_judged(build):
    report = analyze(build(lambda w: packed(w, 0, PACKED, segment_ids=SEGMENTS)), [rule_named(RULE)])
    assert "position_ids" in report.skipped[0].missing[0]
