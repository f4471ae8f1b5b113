"""data/missing-field and data/nonfinite-input; and all data rules on evidence that is odd or hostile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter

FIELD = "data/missing-field"
INPUT = "data/nonfinite-input"
IDS = np.arange(10, 26).reshape(2, 8)
SFT = {"training": {"objective": "sft"}}


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


@pytest.mark.fires(FIELD)
@pytest.mark.parametrize(
    ("keys", "field", "slip"),
    [
        (["input_ids", "label", "attention_mask"], "labels", "label"),
        (["input_ids", "labels", "attn_mask"], "attention_mask", "attn_mask"),
        (["input_ids", "labels", "attention_msak"], "attention_mask", "attention_msak"),
        (["input_id", "labels", "attention_mask"], "input_ids", "input_id"),
        (["inputIds", "labels", "attention_mask"], "input_ids", "inputIds"),
    ],
)
def test_a_name_one_slip_away(build, findings_of, keys, field, slip):
    arrays = {name: IDS for name in ("labels", "attention_mask") if name in keys}
    arrays |= {"input_ids": IDS} if "input_ids" in keys else {}
    finding, numbers = one(findings_of(FIELD, build(lambda w: w.batch(step=0, keys=keys, **arrays))))
    assert (finding.severity, finding.where.tensor, numbers["field"]) == ("warning", field, slip)


def test_a_slip_that_the_recorder_understood_is_only_noted(build, findings_of):
    """A loop of its own that reads batch["label"]: it works, and another reader would not."""
    keys = ["input_ids", "label", "attention_mask"]
    capsule = build(lambda w: w.batch(step=0, keys=keys, input_ids=IDS, labels=IDS, attention_mask=IDS > 0))
    assert one(findings_of(FIELD, capsule))[0].severity == "info"


@pytest.mark.fires(FIELD)
def test_no_labels_where_the_objective_needs_them(build, findings_of):
    keys = ["input_ids", "attention_mask"]
    fill = lambda w: w.batch(step=0, keys=keys, input_ids=IDS, attention_mask=IDS > 0)  # noqa: E731
    assert one(findings_of(FIELD, build(fill, SFT)))[0].severity == "warning"
    finding, _ = one(findings_of(FIELD, build(fill)))
    assert (finding.severity, finding.confidence) == ("info", "undetermined")


@pytest.mark.fires(FIELD)
def test_padding_to_the_left_without_a_mask(build, findings_of):
    ids = IDS.copy()
    ids[1, :3] = 0
    manifest = {**SFT, "tokenizer": {"pad_id": 0, "eos_id": 2}}
    finding, numbers = one(findings_of(FIELD, build(lambda w: w.batch(step=0, input_ids=ids, labels=ids), manifest)))
    assert (finding.severity, finding.where.tensor, numbers["padding tokens"]) == ("warning", "attention_mask", 3)


@pytest.mark.quiet(FIELD)
@pytest.mark.parametrize(
    "why",
    ["complete", "x and y", "pairs", "rollouts", "loss in the loop", "pixels", "no mask needed", "ignored padding"],
)
def test_fields_that_are_not_needed_or_called_otherwise_on_purpose(build, findings_of, why):
    keys, manifest, arrays = ["input_ids", "labels", "attention_mask"], dict(SFT), {"input_ids": IDS, "labels": IDS}
    if why == "complete":
        arrays["attention_mask"] = IDS > 0
    elif why == "x and y":
        keys = ["x", "y"]
    elif why == "pairs":
        keys = [f"{side}_{name}" for side in ("chosen", "rejected") for name in keys]
        manifest = {"training": {"objective": "dpo"}}
    elif why == "rollouts":
        keys, manifest = ["prompt_ids", "completion_ids", "advantages"], {"training": {"objective": "grpo"}}
        arrays = {}
    elif why == "loss in the loop":
        keys, arrays = ["input_ids"], {"input_ids": IDS, "reported_loss": 3.2}
    elif why == "pixels":
        keys, arrays, manifest = ["pixel_values", "class"], {}, {}
    elif why == "no mask needed":
        keys = ["input_ids", "labels"]
    elif why == "ignored padding":
        ids = IDS.copy()
        ids[1, 5:] = 0
        keys, arrays = ["input_ids", "labels"], {"input_ids": ids, "labels": np.where(ids == 0, -100, ids)}
        manifest = {**SFT, "tokenizer": {"pad_id": 0, "eos_id": 2}}
    assert not findings_of(FIELD, build(lambda w: w.batch(step=0, keys=keys, **arrays), manifest))


# -- inputs that are no numbers


def pixels(*bad):
    made = np.zeros((2, 3, 4, 4), np.float32)
    for at, value in zip([(1, 0, 0, 0), (1, 2, 3, 3)], bad, strict=False):
        made[at] = value
    return made


@pytest.mark.fires(INPUT)
def test_pixels_that_are_not_finite_name_their_row(build, findings_of):
    def fill(writer):
        writer.batch(step=5, input_ids=IDS, pixel_values=pixels(np.nan, np.inf), sample_ids=["a", "b"])

    finding, numbers = one(findings_of(INPUT, build(fill)))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert (finding.where.step, finding.where.sample, finding.where.tensor) == (5, "b", "pixel_values")
    assert numbers == {"NaN": 1, "Inf": 1}


def input_row(step, name, **fields):
    return {
        "step": step, "order": 0, "name": name, "role": "input", "dtype": "float32", "shape": [4], "numel": 4,
        "nan": 0, "posinf": 0, "neginf": 0, **fields,
    }  # fmt: skip


@pytest.mark.fires(INPUT)
def test_the_first_bad_input_of_the_statistics(build, findings_of):
    rows = [
        input_row(0, "input_features"),
        input_row(3, "input_features", nan=2),
        input_row(4, "input_features", nan=4),
    ]
    finding, numbers = one(findings_of(INPUT, build(lambda w: w.stats(rows))))
    assert (finding.where.step, numbers["NaN"]) == (3, 2)


@pytest.mark.fires(INPUT)
def test_captured_media(build, findings_of):
    capsule = build(lambda w: w.tensor("media/pixels", pixels(np.nan), step=2))
    assert findings_of(INPUT, capsule)[0].where.tensor == "media/pixels"


@pytest.mark.quiet(INPUT)
def test_masks_and_outputs_may_hold_infinities(build, findings_of):
    def fill(writer):
        bias = np.where(np.eye(8) > 0, 0, -np.inf).astype(np.float32)
        writer.batch(step=0, input_ids=IDS, attention_bias=bias, logits=np.full((2, 8, 3), np.nan, np.float32))
        writer.batch(step=1, input_ids=IDS, pixel_values=pixels())
        writer.stats([input_row(0, "attention_mask", neginf=3)])

    assert not findings_of(INPUT, build(fill))


# -- odd evidence

DATA = [each for each in all_rules() if each.id.startswith("data/")]
NUMBER = st.integers(-200, 200)


@st.composite
def batches(draw):
    """Batches of small and odd shapes, with ids, labels and masks that have nothing to do with one another."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    some = lambda *shape: generator.integers(draw(st.sampled_from([-100, 0])), draw(st.integers(1, 9)), shape)  # noqa: E731
    made = {"input_ids": some(rows, length)}
    for name in ("labels", "attention_mask", "position_ids", "segment_ids", "loss_mask"):
        if draw(st.booleans()):
            made[name] = some(rows, length)
    if draw(st.booleans()):
        made["attention_mask"] = some(rows, length, length)
    if draw(st.booleans()):
        made["cu_seqlens"] = np.sort(some(3))
    if draw(st.booleans()):
        made["roles"] = generator.integers(0, 8, (rows, length))
    if draw(st.booleans()):
        made["token_loss"] = np.where(generator.random((rows, length)) < 0.2, np.nan, 1.0)
    made["split"] = draw(st.sampled_from([None, "train", "validation"]))
    return made


SAMPLES = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 9),
        "length": st.integers(0, 99),
        "split": st.sampled_from(["train", "test", ""]),
        "sha256": st.sampled_from(["a", "b", ""]),
        "domain": st.sampled_from(["p", "q", ""]),
        "epoch": st.floats(),
        "truncated": st.booleans(),
    },
)
EVENTS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["step_begin", "checkpoint_loaded", "mixture_changed", ""])},
    optional={
        "step": st.integers(0, 9),
        "batch_sha256": st.sampled_from(["a", "b"]),
        "epoch": st.floats(),
        "data_cursor": st.dictionaries(st.sampled_from(["p", "epoch"]), st.integers(-5, 5) | st.text(max_size=2)),
    },
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(batches(), min_size=1, max_size=4), st.data())
def test_no_rule_fails_on_odd_evidence(tmp_path_factory, made, data):
    small = st.none() | NUMBER
    tokenizer = {name: data.draw(small) for name in ("bos_id", "eos_id", "pad_id")}
    tokenizer |= {"adds_bos": data.draw(st.none() | st.booleans())}
    tokenizer |= {"response_template_ids": data.draw(st.lists(NUMBER, max_size=3))}
    training = {"objective": data.draw(st.sampled_from([None, "sft", "masked-lm", "x"]))}
    training |= {
        "packing": data.draw(st.none() | st.booleans()),
        "max_length": data.draw(st.none() | st.integers(0, 9)),
    }
    path = tmp_path_factory.mktemp("odd") / "odd.capsule"
    with CapsuleWriter(path, manifest={"tokenizer": tokenizer, "training": training}) as writer:
        for step, each in enumerate(made):
            writer.batch(step=step, **each)
        writer.records("samples", data.draw(st.lists(SAMPLES, max_size=12)))
        writer.records("events", data.draw(st.lists(EVENTS, max_size=12)))
    report = analyze(Capsule.open(path), DATA)
    assert not report.errors
