"""data/duplicate-batch, data/split-leak, data/low-diversity and data/mixture-shift on made-up runs."""

from __future__ import annotations

import hashlib
from itertools import count

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import falling_loss, write_scalars

REPEAT = "data/duplicate-batch"
LEAK = "data/split-leak"
VARIETY = "data/low-diversity"
MIXTURE = "data/mixture-shift"


def sha(word):
    return hashlib.sha256(str(word).encode()).hexdigest()


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


# -- batches that come again


def begins(batches, first=0, **fields):
    return [
        {"kind": "step_begin", "step": first + at, "micro": 0, "batch_sha256": sha(each), **fields}
        for at, each in enumerate(batches)
    ]


def run(build, *events, manifest=None, samples=()):
    def fill(writer):
        for group in events:
            writer.records("events", group)
        writer.records("samples", samples)

    return build(fill, manifest)


@pytest.mark.fires(REPEAT)
@pytest.mark.parametrize(
    ("batches", "repeats"),
    [
        ([0, 1, 2, 3, 3, 4, 5, 6, 7], 1),
        ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 4),
        ([0, 1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 8], 3),
    ],
    ids=["one twice", "each twice", "a block again"],
)
def test_a_batch_comes_again_while_new_ones_follow(build, findings_of, batches, repeats):
    finding, numbers = one(findings_of(REPEAT, run(build, begins(batches))))
    assert (finding.severity, finding.kind) == ("warning", "divergence")
    assert numbers["repeated batches"] == repeats
    assert finding.where.step == next(at for at, each in enumerate(batches) if each in batches[:at])


@pytest.mark.fires(REPEAT)
def test_an_epoch_on_record_confirms_it(build, findings_of):
    finding, _ = one(findings_of(REPEAT, run(build, begins([0, 1, 2, 0], epoch=0.5))))
    assert (finding.confidence, finding.where.step) == ("confirmed", 3)


@pytest.mark.fires(REPEAT)
def test_every_step_on_one_batch_may_be_on_purpose(build, findings_of):
    finding, numbers = one(findings_of(REPEAT, run(build, begins([0] * 20))))
    assert numbers["distinct batches"] == 1
    assert (finding.severity, finding.confidence, finding.cause) == ("info", "undetermined", None)
    assert any("overfit" in each for each in finding.next)


@pytest.mark.fires(REPEAT)
def test_every_step_on_one_batch_of_many_is_an_iterator_made_anew(build, findings_of):
    known = {"training": {"dataset_samples": 64, "micro_batch": 4}}
    (finding,) = findings_of(REPEAT, run(build, begins([0] * 20), manifest=known))
    assert (finding.severity, finding.confidence) == ("warning", "likely")
    assert "made anew" in finding.cause


@pytest.mark.fires(REPEAT)
def test_a_loader_that_starts_from_its_beginning_at_a_resume(build, findings_of):
    loaded = [{"kind": "checkpoint_loaded", "step": 6, "path": "step-6"}]
    finding, numbers = one(findings_of(REPEAT, run(build, begins(range(6)), loaded, begins(range(4), first=6))))
    assert finding.title == "Data is replayed after the resume"
    assert (finding.where.step, numbers["batches replayed"], numbers["step of the batch"]) == (6, 4, 0)


def at(positions, first=0):
    return [
        {"kind": "step_begin", "step": first + n, "micro": 0, "data_cursor": {"offset": each}}
        for n, each in enumerate(positions)
    ]


@pytest.mark.fires(REPEAT)
def test_a_position_that_jumps_at_a_resume_is_a_gap(build, findings_of):
    loaded = [{"kind": "checkpoint_loaded", "step": 6}]
    finding, numbers = one(findings_of(REPEAT, run(build, at(range(0, 48, 8)), loaded, at(range(72, 104, 8), first=6))))
    assert finding.title == "Data is skipped at the resume"
    assert (numbers["position"], numbers["batches skipped"]) == (72, 3)


@pytest.mark.fires(REPEAT)
def test_without_events_the_captured_batches_are_compared(build, findings_of):
    rows = np.random.default_rng(0).integers(10, 99, (9, 2, 8))
    order = [0, 1, 2, 2, 3, 4, 5, 6]
    finding, _ = one(
        findings_of(REPEAT, build(lambda w: [w.batch(step=s, input_ids=rows[each]) for s, each in enumerate(order)]))
    )
    assert finding.where.step == 3


@pytest.mark.quiet(REPEAT)
@pytest.mark.parametrize(
    "why",
    [
        "distinct",
        "epochs",
        "shuffled epochs of one",
        "epoch on record",
        "overfit",
        "rollouts",
        "run again",
        "ranks",
        "short epoch",
        "restored",
        "tried again",
    ],
)
def test_lawful_repetitions_are_quiet(build, findings_of, why):
    manifest, events = {}, [begins(range(20))]
    if why == "epochs":
        events = [begins([*range(8)] * 4)]
    elif why == "shuffled epochs of one":
        generator = np.random.default_rng(1)
        events = [begins(np.concatenate([generator.permutation(10) for _ in range(4)]).tolist())]
    elif why == "epoch on record":
        events = [
            begins(range(5), epoch=0),
            begins([3, 9, 1, 8, 7], first=5, epoch=1),
            begins([30, 31], first=10, epoch=2),
        ]
    elif why == "overfit":
        manifest, events = {"run": {"overfit": True}}, [begins([0] * 20)]
    elif why == "rollouts":
        manifest, events = {"training": {"objective": "grpo"}}, [begins([0, 0, 1, 1, 2, 2, 3, 3])]
    elif why == "run again":
        loaded = [{"kind": "checkpoint_loaded", "step": 6}]
        events = [begins(range(8)), loaded, begins(range(6, 12), first=6)]
    elif why == "ranks":
        events = [begins(range(8)), begins(range(8), rank=1)]
    elif why == "short epoch":
        manifest = {"training": {"dataset_samples": 32, "micro_batch": 8}}
        events = [begins([0, 1, 2, 3, 0, 1, 2, 3, 9, 10])]
    elif why == "restored":
        events = [at(range(0, 48, 8)), [{"kind": "checkpoint_loaded", "step": 6}], at(range(48, 96, 8), first=6)]
    elif why == "tried again":  # step 3 raised before the optimizer, was caught, and its batch came at step 4
        stepped = [{"kind": "optimizer_step", "step": step} for step in range(12) if step != 3]
        raised = [{"kind": "exception", "step": 3, "type": "OSError", "message": "stale handle"}]
        events = [begins([0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10]), stepped, raised]
    assert not findings_of(REPEAT, run(build, *events, manifest=manifest))


def test_batches_drawn_with_replacement_are_only_noted(build, findings_of):
    drawn = np.random.default_rng(0).integers(0, 8, 40).tolist()
    finding, _ = one(findings_of(REPEAT, run(build, begins(drawn))))
    assert finding.severity == "info"


# -- splits


def split(names, split, **fields):
    return [
        {"sha256": sha(name), "id": str(at), "split": split, "length": 50, **fields} for at, name in enumerate(names)
    ]


@pytest.mark.fires(LEAK)
def test_common_samples_are_counted_by_content(build, findings_of):
    records = split(range(100), "train", step=3) + split([5, 6, 200, 201, 202, 203, 204, 205], "validation")
    finding, numbers = one(findings_of(LEAK, build(lambda w: w.records("samples", records))))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert (numbers["common samples"], numbers["share of validation"]) == (2, 0.25)


@pytest.mark.fires(LEAK)
def test_a_few_percent_are_a_warning_and_rows_of_batches_count(build, findings_of):
    rows = np.arange(3200).reshape(100, 32)

    def fill(writer):
        writer.batch(step=0, split="train", input_ids=rows[:52])
        writer.batch(step=1, split="validation", input_ids=rows[50:])

    finding, numbers = one(findings_of(LEAK, build(fill)))
    assert (finding.severity, numbers["common samples"], numbers["share of validation"]) == ("warning", 2, 0.04)


@pytest.mark.quiet(LEAK)
@pytest.mark.parametrize("why", ["ids count from 0 in each", "overfit"])
def test_splits_apart_are_quiet(build, findings_of, why):
    held = split(range(10, 14), "validation") if why.startswith("ids") else split(range(4), "validation")
    manifest = {"run": {"overfit": True}} if why == "overfit" else {}
    assert not findings_of(LEAK, build(lambda w: w.records("samples", split(range(4), "train") + held), manifest))


def test_short_answers_alike_by_chance_are_noted_and_one_split_is_not_judged(build, findings_of):
    short = [{**each, "length": 2} for each in split(["yes", "no"], "train") + split(["yes"], "validation")]
    finding, _ = one(findings_of(LEAK, build(lambda w: w.records("samples", short))))
    assert finding.severity == "info"
    report = analyze(build(lambda w: w.records("samples", split([1], "train"))), [rule_named(LEAK)])
    assert report.skipped


@pytest.mark.fires(LEAK)
@pytest.mark.quiet(LEAK)
@pytest.mark.parametrize("ends", [(True, True), (False, True), (True, False)])
def test_no_common_sample_in_a_part_of_the_loaders_is_undetermined(build, findings_of, ends):
    def fill(writer):
        writer.records("samples", split(range(4), "train") + split(range(10, 14), "validation"))
        for name, exhausted in zip(("train", "validation"), ends, strict=True):
            event = {"kind": "loader_read", "split": name, "batches": 64, "exhausted": exhausted}
            writer.record("events", event)

    found = findings_of(LEAK, build(fill))
    if all(ends):
        assert not found
        return
    finding, _ = one(found)
    assert (finding.severity, finding.confidence) == ("info", "undetermined")
    parts = ["all 64" if each else "the first 64" for each in ends]
    assert f"{parts[0]} of training and {parts[1]} of validation were read: no sample" in finding.summary
    assert "--batches" in finding.next[0]


# -- variety


def answers(opening, seed=0, rows=24, prompt=8, length=24):
    """Rows of a random prompt, masked, and a random answer that begins with ``opening``."""
    ids = np.random.default_rng(seed).integers(100, 5000, (rows, prompt + length))
    ids[:, prompt : prompt + len(opening)] = opening
    labels = ids.copy()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels}


SFT = {"training": {"objective": "sft"}}


@pytest.mark.fires(VARIETY)
def test_answers_that_open_alike_and_few_samples_many_times(build, findings_of):
    manifest = {"training": {"objective": "sft", "dataset_samples": 24, "epochs": 30}}
    finding, numbers = one(findings_of(VARIETY, build(lambda w: w.batch(step=0, **answers(range(6))), manifest)))
    assert finding.severity == "warning"
    assert (numbers["answers with one opening"], numbers["passes over each sample"]) == (1.0, 30)
    finding, _ = one(findings_of(VARIETY, build(lambda w: w.batch(step=0, **answers(range(6))), SFT)))
    assert finding.severity == "info"  # one sign alone


@pytest.mark.fires(VARIETY)
def test_phrases_from_two_templates(build, findings_of):
    generator = np.random.default_rng(0)
    phrases = generator.integers(100, 900, (2, 40))
    ids = phrases[generator.integers(0, 2, 40)]
    ids[np.arange(40), 2 + np.arange(40) % 3] = 3000 + np.arange(40)  # one slot each
    _, numbers = one(findings_of(VARIETY, build(lambda w: w.batch(step=0, input_ids=ids, labels=ids), SFT)))
    # 40 rows of 33 grams: the slot spoils the at most 5 grams at the beginning, the others are those of two phrases.
    assert numbers["distinct 8-grams"] < 0.2


@pytest.mark.quiet(VARIETY)
@pytest.mark.parametrize(
    "why", ["varied", "a system prompt everywhere", "labels of a class", "overfit", "repeated epochs of a large set"]
)
def test_data_that_says_enough_is_quiet(build, findings_of, why):
    made, manifest = answers([]), dict(SFT)
    if why == "a system prompt everywhere":
        ids = np.random.default_rng(2).integers(100, 5000, (24, 40))
        ids[:, :12] = np.arange(12)
        made = {"input_ids": ids, "labels": ids}
    elif why == "labels of a class":
        made = answers([7, 8], length=2)
    elif why == "overfit":
        made, manifest = answers(range(6)), {"run": {"overfit": True}, **SFT}
    elif why == "repeated epochs of a large set":
        manifest = {"training": {"objective": "sft", "dataset_samples": 50_000, "epochs": 12}}
    assert not findings_of(VARIETY, build(lambda w: w.batch(step=0, **made), manifest))


# -- mixture


def mixture(shares, steps=60, batch=8, at=40, seed=0):
    """Samples of two domains whose share of code jumps at a step."""
    generator, number = np.random.default_rng(seed), count()
    before, after = shares
    return [
        {"step": step, "id": str(next(number)), "split": "train", "domain": "code" if code else "web"}
        for step in range(steps)
        for code in generator.random(batch) < (before if step < at else after)
    ]


def jump(at=40, steps=60):
    loss = falling_loss(steps)
    loss[at:] += 6.0
    return loss


CHANGED = [{"kind": "mixture_changed", "step": 40}]


@pytest.mark.fires(MIXTURE)
@pytest.mark.parametrize("events", [[], CHANGED], ids=["unplanned", "planned"])
def test_the_mixture_jumps_where_the_loss_does(build, findings_of, events):
    def fill(writer):
        writer.records("samples", mixture((0.2, 0.9)))
        writer.records("events", events)
        write_scalars(writer, loss=jump())

    finding, numbers = one(findings_of(MIXTURE, build(fill)))
    assert abs(finding.where.step - 40) <= 1
    assert numbers["total variation"] == pytest.approx(0.7, abs=0.15)
    assert numbers["planned"] == ("yes" if events else "no")


@pytest.mark.fires(MIXTURE)
def test_a_lasting_rise_is_enough_where_nobody_planned_it(build, findings_of):
    loss = falling_loss(60)
    loss[40:] += 0.5

    def fill(writer):
        writer.records("samples", mixture((0.2, 0.9)))
        write_scalars(writer, loss=loss)

    _, numbers = one(findings_of(MIXTURE, build(fill)))
    assert "loss level" in numbers


@pytest.mark.quiet(MIXTURE)
@pytest.mark.parametrize("why", ["planned without trouble", "trouble without a shift", "trouble before", "no trouble"])
def test_a_shift_or_trouble_alone_is_quiet(build, findings_of, why):
    samples, loss, events = mixture((0.2, 0.9)), falling_loss(60), []
    if why == "planned without trouble":
        events = CHANGED
    elif why == "trouble without a shift":
        samples, loss = mixture((0.4, 0.4)), jump()
    elif why == "trouble before":
        loss = jump(at=20)

    def fill(writer):
        writer.records("samples", samples)
        writer.records("events", events)
        write_scalars(writer, loss=loss)

    assert not findings_of(MIXTURE, build(fill))
