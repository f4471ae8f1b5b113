"""data/lengths: a ledger whose numbers are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

RULE = "data/lengths"


def ledger(findings):
    (finding,) = findings
    assert (finding.severity, finding.kind) == ("info", "hygiene")
    return {entry.name: entry.value for entry in finding.evidence}


@pytest.mark.fires(RULE)
def test_lengths_of_sample_records_are_summed_up(build, findings_of):
    def fill(writer):
        writer.records("samples", [{"step": 0, "id": str(n), "length": n} for n in (10, 20, 30, 40)])

    numbers = ledger(findings_of(RULE, build(fill)))
    assert numbers["length samples"] == 4
    assert numbers["length mean"] == 25
    assert numbers["length deviation"] == pytest.approx(np.sqrt((15**2 + 5**2 + 5**2 + 15**2) / 4))
    assert (numbers["length min"], numbers["length max"]) == (10, 40)
    assert numbers["length p95"] == pytest.approx(38.5)  # 95 % of the way along three gaps of 10
    assert numbers["length p99"] == pytest.approx(39.7)


@pytest.mark.fires(RULE)
def test_without_records_unmasked_tokens_of_the_batches_are_counted(build, findings_of):
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    numbers = ledger(
        findings_of(RULE, build(lambda w: w.batch(step=0, input_ids=np.ones((2, 4), int), attention_mask=mask)))
    )
    assert (numbers["length min"], numbers["length max"]) == (2, 4)


@pytest.mark.fires(RULE)
def test_documents_of_a_packed_row_count_one_by_one(build, findings_of):
    numbers = ledger(
        findings_of(
            RULE,
            build(lambda w: w.batch(step=0, input_ids=np.ones((1, 8), int), cu_seqlens=np.array([0, 3, 8]))),
        )
    )
    assert (numbers["length min"], numbers["length max"]) == (3, 5)


@pytest.mark.fires(RULE)
def test_image_sizes_are_part_of_the_ledger(build, findings_of):
    def fill(writer):
        writer.record("samples", {"step": 0, "id": "a", "image_size": [20, 10]})
        writer.record("samples", {"step": 0, "id": "b", "image_size": {"width": 40, "height": 10}})

    assert ledger(findings_of(RULE, build(fill)))["image size mean"] == 300


def test_records_without_any_length_say_nothing(build, findings_of):
    assert not findings_of(RULE, build(lambda w: w.record("samples", {"step": 0, "id": "a", "loss": 2.0})))


@pytest.mark.fires(RULE)
def test_images_are_given_in_many_ways_and_their_edges_are_told(build, findings_of):
    def fill(writer):
        for size in ([20, 10], {"width": 40, "height": 10}, 16, [3, 8, 24], [0, 5]):
            writer.record("samples", {"step": 0, "image_size": size})
        writer.record("media_samples", {"id": "m", "image": {"width": 100, "height": 50}})

    numbers = ledger(findings_of(RULE, build(fill)))
    assert numbers["image size samples"] == 5  # the one without a width is none
    assert (numbers["image width min"], numbers["image width max"]) == (16, 100)
    assert (numbers["image height min"], numbers["image height max"]) == (8, 50)
    # Widths 16, 20, 24, 40, 100: 80 % of the way from the fourth to the fifth.
    assert numbers["image width p95"] == pytest.approx(40 + 0.8 * 60)
