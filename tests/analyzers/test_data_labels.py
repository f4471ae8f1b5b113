"""data/labels-misaligned and data/attention-mask-mismatch on rows whose labels and masks are written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import sample_losses, sample_records

LABELS = "data/labels-misaligned"
MASK = "data/attention-mask-mismatch"
CAUSAL = {"training": {"objective": "causal-lm"}}
PADDED = {"tokenizer": {"pad_id": 0, "eos_id": 1, "bos_id": 2}}


def tokens(rows=4, length=16, seed=0, low=10, high=500):
    return np.random.default_rng(seed).integers(low, high, (rows, length))


def shifted(ids, by=1):
    """Labels that name the token ``by`` places on, −100 where the row ends."""
    labels = np.full_like(ids, -100)
    labels[:, :-by] = ids[:, by:]
    return labels


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


# -- labels


@pytest.mark.quiet(LABELS)
@pytest.mark.parametrize("layout", ["unshifted", "shifted", "prompt masked", "all masked", "last label from beyond"])
def test_usual_layouts_are_quiet(build, findings_of, layout):
    ids = tokens()
    labels = ids.copy() if layout in ("unshifted", "prompt masked", "all masked") else shifted(ids)
    if layout == "prompt masked":
        labels[:, :7] = -100
    if layout == "all masked":
        labels[:] = -100
    if layout == "last label from beyond":
        labels[:, -1] = [11, 12, 13, 14]  # rows cut from longer ones
    assert not findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), CAUSAL))


@pytest.mark.fires(LABELS)
@pytest.mark.parametrize("manifest", [CAUSAL, {}])
def test_labels_shifted_twice_are_named_by_their_offset(build, findings_of, manifest):
    ids = tokens()
    finding, numbers = one(
        findings_of(LABELS, build(lambda w: w.batch(step=3, input_ids=ids, labels=shifted(ids, 2)), manifest))
    )
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "confirmed", 3)
    assert numbers["offset"] == 2
    assert numbers["agreement"] == 1.0
    assert numbers["agreement shifted"] < 0.1
    assert "twice" in finding.cause


@pytest.mark.fires(LABELS)
def test_labels_shifted_the_wrong_way_are_named(build, findings_of):
    ids = tokens()
    labels = np.full_like(ids, -100)
    labels[:, 1:] = ids[:, :-1]
    _, numbers = one(findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), CAUSAL)))
    assert numbers["offset"] == -1


@pytest.mark.fires(LABELS)
def test_labels_of_shuffled_rows_belong_to_other_rows(build, findings_of):
    ids = tokens()
    finding, numbers = one(
        findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=ids[[1, 2, 3, 0]]), CAUSAL))
    )
    assert finding.title == "Labels belong to another row"
    assert numbers["labels of"] == "row 1 of the same batch"
    assert numbers["rows that fit nothing"] == 4


@pytest.mark.fires(LABELS)
def test_one_row_of_garbage_targets_among_good_ones_needs_no_declared_objective(build, findings_of):
    ids = tokens()
    labels = ids.copy()
    labels[2] = tokens(1, seed=9)
    finding, numbers = one(findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels))))
    assert (finding.severity, finding.where.sample) == ("critical", "row 2")
    assert numbers["rows that fit nothing"] == 1


def test_targets_of_an_unknown_kind_are_no_alarm(build, findings_of):
    """Nobody said what the job learns: a reversal, a sum, another language."""
    ids = tokens()
    finding, _ = one(findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=tokens(seed=5)))))
    assert (finding.severity, finding.confidence, finding.cause) == ("info", "undetermined", None)


@pytest.mark.fires(LABELS)
def test_single_labels_that_differ_are_counted(build, findings_of):
    ids = tokens()
    labels = ids.copy()
    labels[1, 5], labels[3, 9] = 7, 8
    finding, numbers = one(findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), CAUSAL)))
    assert finding.severity == "warning"
    assert (numbers["labels that differ"], numbers["label"], numbers["layout"]) == (2, 7, "unshifted")


@pytest.mark.fires(LABELS)
def test_a_declared_layout_that_the_data_contradict(build, findings_of):
    ids = tokens()
    capsule = build(lambda w: w.batch(step=0, input_ids=ids, labels=shifted(ids), label_layout="unshifted"), CAUSAL)
    finding, numbers = one(findings_of(LABELS, capsule))
    assert (finding.severity, numbers["layout"]) == ("warning", "shifted")


@pytest.mark.fires(LABELS)
def test_labels_made_by_rolling_end_in_their_first_token(build, findings_of):
    ids = tokens()
    finding, numbers = one(
        findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=np.roll(ids, -1, axis=1)), CAUSAL))
    )
    assert numbers["rows rolled around"] == 4
    assert "roll" in finding.cause


@pytest.mark.quiet(LABELS)
def test_masked_language_model_labels_are_meant_to_differ(build, findings_of):
    """15 % of the positions asked for: of these 80 % replaced by the mask token, 10 % at random, 10 % kept."""
    generator = np.random.default_rng(3)
    words = tokens(8, 64)
    asked = generator.random(words.shape) < 0.15
    kind = generator.random(words.shape)
    ids = np.where(asked & (kind < 0.8), 4, np.where(asked & (kind < 0.9), tokens(8, 64, seed=8), words))
    labels = np.where(asked, words, -100)
    for manifest in ({}, {"training": {"objective": "masked-lm"}}):
        assert not findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), manifest))


@pytest.mark.quiet(LABELS)
def test_tags_are_no_tokens(build, findings_of):
    ids, tags = tokens(), np.random.default_rng(1).integers(0, 5, (4, 16))
    assert not findings_of(LABELS, build(lambda w: w.batch(step=0, input_ids=ids, labels=tags)))


@pytest.mark.quiet(LABELS)
def test_documents_shifted_one_by_one_end_in_a_token_that_is_not_in_the_row(build, findings_of):
    ids = tokens(2, 40)
    labels = shifted(ids)
    labels[:, [9, 19, 29]] = 5
    segments = np.repeat(np.arange(4), 10)[None].repeat(2, 0)
    for extra in ({"segment_ids": segments}, {}):
        capsule = build(lambda w, extra=extra: w.batch(step=0, input_ids=ids, labels=labels, **extra), CAUSAL)
        assert not findings_of(LABELS, capsule)


@pytest.mark.fires(LABELS)
def test_labels_of_another_length_are_known_by_their_shape(build, findings_of):
    shapes = {"input_ids": [2, 16], "labels": [2, 12]}
    capsule = build(
        lambda w: (
            w.batch(step=0, input_ids=tokens(2), shapes=shapes),
            w.batch(step=1, input_ids=tokens(2), labels=tokens(2)),
        ),
        CAUSAL,
    )
    finding, numbers = one(findings_of(LABELS, capsule))
    assert numbers["shape of labels"] == [2, 12]
    assert finding.severity == "warning"


# -- the attention mask


def padded(side="right"):
    """Two rows of 6 and 4 real tokens among 8, padding 0."""
    ids, mask = np.zeros((2, 8), int), np.zeros((2, 8), int)
    for row, length in enumerate((6, 4)):
        where = slice(0, length) if side == "right" else slice(8 - length, 8)
        ids[row, where], mask[row, where] = np.arange(10, 10 + length), 1
    return ids, mask


def causal(mask):
    """[B, T, T]: each token sees the unmasked ones up to itself."""
    length = mask.shape[1]
    return np.tril(np.ones((length, length), int))[None] * mask[:, None, :]


@pytest.mark.quiet(MASK)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["integers", "bools", "square", "documents"])
def test_masks_of_every_kind_that_fit_are_quiet(build, findings_of, side, kind):
    ids, mask = padded(side)
    made = {"integers": mask, "bools": mask > 0, "square": causal(mask), "documents": mask * 3}[kind]
    assert not findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=made), PADDED))


@pytest.mark.fires(MASK)
@pytest.mark.parametrize(("side", "severity"), [("right", "warning"), ("left", "critical")])
def test_padding_that_the_mask_shows(build, findings_of, side, severity):
    ids, _ = padded(side)
    finding, numbers = one(
        findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=np.ones_like(ids)), PADDED))
    )
    assert (finding.severity, numbers["mask"], numbers["positions that disagree"]) == (severity, 1, 6)


@pytest.mark.fires(MASK)
def test_real_tokens_that_the_mask_hides(build, findings_of):
    ids, mask = padded()
    mask[0, 3:6] = 0
    finding, numbers = one(
        findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=mask), PADDED))
    )
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert (numbers["mask"], numbers["positions that disagree"]) == (0, 3)


@pytest.mark.fires(MASK)
@pytest.mark.parametrize("manifest", [PADDED, {}])
def test_a_hole_in_the_mask(build, findings_of, manifest):
    ids, mask = padded()
    mask[0, 2] = 0
    finding, numbers = one(
        findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=mask), manifest))
    )
    assert finding.title == "The attention mask has holes"
    assert numbers["positions that disagree"] == 1


@pytest.mark.fires(MASK)
def test_a_mask_the_wrong_way_round(build, findings_of):
    ids, mask = padded()
    finding, _ = one(
        findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=1 - mask), PADDED))
    )
    assert finding.title == "The attention mask is the wrong way round"


@pytest.mark.quiet(MASK)
def test_a_padding_mask_is_the_other_way_round_by_name(build, findings_of):
    ids, mask = padded()
    capsule = build(
        lambda w: w.batch(step=0, input_ids=ids, attention_mask=1 - mask, keys=["x", "padding_mask"]), PADDED
    )
    assert not findings_of(MASK, capsule)


@pytest.mark.quiet(MASK)
@pytest.mark.parametrize("pads", ["eos shown once", "another id", "between documents"])
def test_padding_of_other_habits_is_quiet(build, findings_of, pads):
    ids, mask = padded()
    manifest = PADDED
    if pads == "eos shown once":  # padding with the end of text, whose first is real
        manifest = {"tokenizer": {"pad_id": 0, "eos_id": 0}}
        mask[0, 6] = mask[1, 4] = 1
    elif pads == "another id":
        ids[mask == 0] = 99
    else:
        ids[0], mask[0] = [10, 11, 0, 0, 12, 13, 0, 0], [1, 1, 0, 0, 1, 1, 0, 0]
    assert not findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=mask), manifest))


@pytest.mark.quiet(MASK)
def test_a_padding_id_that_is_a_character_of_its_own_is_quiet(build, findings_of):
    ids = np.random.default_rng(0).integers(0, 5, (16, 16))
    manifest = {"tokenizer": {"vocab_size": 5, "pad_id": 0}}
    assert not findings_of(MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=ids >= 0), manifest))


@pytest.mark.fires(MASK)
def test_padding_to_the_left_that_a_square_mask_shows(build, findings_of):
    ids, mask = padded("left")
    finding, numbers = one(
        findings_of(
            MASK, build(lambda w: w.batch(step=0, input_ids=ids, attention_mask=causal(np.ones_like(mask))), PADDED)
        )
    )
    assert (finding.severity, numbers["positions that disagree"]) == ("critical", 6)


@pytest.mark.fires(LABELS)
def test_the_loss_of_a_row_with_garbage_targets_is_a_consequence(build):
    """Its sample stands far out, as a poisoned one does; the labels say why."""
    losses = sample_losses(100)
    losses[80][3] = 8.1
    ids = tokens(8, 64)
    labels = ids.copy()
    labels[3] = tokens(1, 64, seed=9)[0]

    def fill(writer):
        writer.records("samples", sample_records(losses, length=128))
        writer.batch(step=80, input_ids=ids, labels=labels)

    report = analyze(
        build(fill, {"model": {"vocab_size": 256}}), [rule_named(LABELS), rule_named("data/poison-sample")]
    )
    assert report.first_divergence.rule == LABELS
    assert {each.rule: each.caused_by for each in report.findings} == {LABELS: None, "data/poison-sample": LABELS}
