"""data/length-outlier and data/truncation: lengths whose tails and pile-ups are known."""

from __future__ import annotations

import numpy as np
import pytest

OUTLIER = "data/length-outlier"
CUT = "data/truncation"


def records(lengths, **fields):
    return [
        {"step": at // 8, "id": f"s{at}", "length": int(each), "split": "train", **fields}
        for at, each in enumerate(lengths)
    ]


def samples(build, lengths, manifest=None, **fields):
    return build(lambda w: w.records("samples", records(lengths, **fields)), manifest)


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


def normal(count=200, mean=200, spread=50, seed=0):
    return np.random.default_rng(seed).normal(mean, spread, count).clip(20).astype(int)


@pytest.mark.fires(OUTLIER)
def test_three_samples_far_beyond_all_others(build, findings_of):
    lengths = normal()
    lengths[[20, 90, 150]] = 4000, 3500, 5000
    finding, numbers = one(findings_of(OUTLIER, samples(build, lengths)))
    assert (finding.severity, finding.where.sample, finding.where.step) == ("warning", "s150", 150 // 8)
    assert (numbers["longest"], numbers["samples beyond"]) == (5000, 3)
    assert numbers["p95"] == pytest.approx(np.percentile(lengths, 95))
    assert numbers["longest of the others"] == np.sort(lengths)[-4]


@pytest.mark.quiet(OUTLIER)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "tail",
    [
        lambda g: 100 * np.exp(g.normal(0, 1.0, 1000)),  # 0.3 % of these lie beyond 3 × p95
        lambda g: 50 * np.exp(g.normal(0, 1.4, 300)),
        lambda g: g.exponential(200, 500) + 1,
        lambda g: 20 * (g.pareto(2.0, 600) + 1),
        lambda g: g.uniform(1, 400, 100),
    ],
    ids=["log-normal", "wide log-normal", "exponential", "power law", "uniform"],
)
def test_a_smooth_long_tail_is_quiet(build, findings_of, tail, seed):
    lengths = tail(np.random.default_rng(seed)).astype(int) + 1
    assert not findings_of(OUTLIER, samples(build, lengths))


@pytest.mark.quiet(OUTLIER)
def test_a_few_samples_have_no_tail(build, findings_of):
    assert not findings_of(OUTLIER, samples(build, [10, 12, 11, 900]))


def padded(*lengths, width):
    mask = (np.arange(width)[None] < np.array(lengths)[:, None]).astype(int)
    return {"input_ids": mask * 7, "attention_mask": mask}


@pytest.mark.fires(OUTLIER)
def test_more_than_half_padding_is_told_with_its_share(build, findings_of):
    finding, numbers = one(findings_of(OUTLIER, build(lambda w: w.batch(step=4, **padded(20, 4, 3, 5, width=20)))))
    assert numbers["padding share"] == 1 - 32 / 80
    assert (finding.severity, finding.kind, finding.where.step) == ("warning", "hygiene", 4)


def test_a_single_padded_batch_among_full_ones_is_only_noted(build, findings_of):
    def fill(writer):
        for step in range(4):
            writer.batch(step=step, **padded(20, 18, 19, 17, width=20))
        writer.batch(step=4, **padded(20, 4, 3, 5, width=20))

    finding, numbers = one(findings_of(OUTLIER, build(fill)))
    assert (finding.severity, numbers["batches above"]) == ("info", 1)


@pytest.mark.quiet(OUTLIER)
def test_rows_without_padding_or_with_a_third_of_it_are_quiet(build, findings_of):
    capsule = build(
        lambda w: (w.batch(step=0, **padded(6, 4, 5, width=6)), w.batch(step=1, input_ids=np.ones((2, 9), int)))
    )
    assert not findings_of(OUTLIER, capsule)


# -- cut at the maximum length


@pytest.mark.fires(CUT)
def test_samples_marked_as_truncated(build, findings_of):
    def fill(writer):
        writer.records("samples", records(normal(90)))
        writer.records("samples", records([512] * 10, truncated=True))

    finding, numbers = one(findings_of(CUT, build(fill)))
    assert numbers["share of samples"] == 0.1
    assert finding.confidence == "confirmed"


@pytest.mark.fires(CUT)
def test_a_pile_at_the_declared_maximum(build, findings_of):
    lengths = np.minimum(normal(200, 450, 120), 512)
    finding, numbers = one(findings_of(CUT, samples(build, lengths, {"training": {"max_length": 512}})))
    assert numbers["share of samples"] == pytest.approx((lengths == 512).mean())
    assert (finding.severity, numbers["maximum length"]) == ("warning", 512)


def ending(lengths, width, cut_ends):
    """Rows that end in EOS (2), but for those of the full width unless ``cut_ends``."""
    ids, mask = np.zeros((len(lengths), width), int), np.zeros((len(lengths), width), int)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = np.arange(10, 10 + length), 1
        if length < width or cut_ends:
            ids[row, length - 1] = 2
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.fires(CUT)
def test_lost_ends_show_the_cut_where_no_maximum_is_declared(build, findings_of):
    lengths = [12, 31, 7, 20, 32, 32, 25, 32, 9, 17]
    manifest = {"tokenizer": {"eos_id": 2, "pad_id": 0}}
    _, numbers = one(findings_of(CUT, build(lambda w: w.batch(step=0, **ending(lengths, 32, False)), manifest)))
    assert numbers["of them without an end of text"] == 1.0
    assert numbers["share of samples"] == 0.3


@pytest.mark.quiet(CUT)
@pytest.mark.parametrize(
    "why", ["packed", "all of one length", "lengths just reach it", "few", "whole ends", "declared higher"]
)
def test_full_rows_that_are_not_cut_are_quiet(build, findings_of, why):
    manifest = {"training": {"max_length": 512}}
    if why == "packed":
        lengths, manifest = [512] * 80 + [400] * 20, {"training": {"max_length": 512, "packing": True}}
    elif why == "all of one length":
        lengths = [512] * 100
    elif why == "lengths just reach it":
        lengths = list(range(505, 513)) * 10
    elif why == "few":
        lengths = [*range(100, 198), 512, 512]
    elif why == "declared higher":
        lengths = [*range(100, 160), *[256] * 20]
    else:
        capsule = build(
            lambda w: w.batch(step=0, **ending([12, 31, 7, 20, 32, 32, 25, 32], 32, True)),
            {"tokenizer": {"eos_id": 2, "pad_id": 0}},
        )
        assert not findings_of(CUT, capsule)
        return
    assert not findings_of(CUT, samples(build, lengths, manifest))
