"""data/pad-is-eos, data/bos-count and data/template-not-found on rows written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

PAD = "data/pad-is-eos"
BOS = "data/bos-count"
TEMPLATE = "data/template-not-found"
SHARED = {"tokenizer": {"pad_id": 2, "eos_id": 2}}
WITH_BOS = {"tokenizer": {"bos_id": 1, "eos_id": 2, "pad_id": 0, "adds_bos": True}}


def one(findings):
    (finding,) = findings
    return finding, {entry.name: entry.value for entry in finding.evidence}


# -- padding and end of text (mlabonne/llm-course#33: pad = eos = 2, rows that end 2, 2, 2 and every 2 masked)

ANSWERS = np.array([[10, 11, 12, 13, 2, 2, 2], [20, 21, 22, 23, 24, 2, 2]])
ENDS = np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]])


@pytest.mark.fires(PAD)
@pytest.mark.parametrize("masked", [True, False])
def test_masking_the_padding_id_takes_the_end_of_text_with_it(build, findings_of, masked):
    labels = np.where(ANSWERS == 2, -100, ANSWERS)
    extra = {"attention_mask": ENDS} if masked else {}
    capsule = build(lambda w: w.batch(step=0, input_ids=ANSWERS, labels=labels, **extra), SHARED)
    finding, numbers = one(findings_of(PAD, capsule))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed" if masked else "likely")
    assert numbers["labels that ask for the end"] == 0
    assert numbers["real ends that are masked"] == (2 if masked else 0)
    assert numbers["pad_id"] == 2


@pytest.mark.fires(PAD)
def test_generations_that_run_to_the_limit_are_told_beside_it(build, findings_of):
    def fill(writer):
        writer.batch(step=0, input_ids=ANSWERS, labels=np.where(ANSWERS == 2, -100, ANSWERS))
        writer.records("generations", [{"id": str(n), "finish_reason": "length"} for n in range(4)])

    _, numbers = one(findings_of(PAD, build(fill, SHARED)))
    assert numbers["generations ended by length"] == 1.0


@pytest.mark.quiet(PAD)
@pytest.mark.parametrize("why", ["kept by the mask", "pad of its own", "another stop", "a stream", "all masked"])
def test_an_end_that_is_asked_for_or_not_meant_is_quiet(build, findings_of, why):
    ids, manifest = ANSWERS, SHARED
    labels = np.where(ANSWERS == 2, -100, ANSWERS)
    if why == "kept by the mask":
        labels = np.where(ENDS == 1, ANSWERS, -100)
    elif why == "pad of its own":
        manifest = {"tokenizer": {"pad_id": 0, "eos_id": 2}}
    elif why == "another stop":
        manifest = {"tokenizer": {"pad_id": 2, "eos_id": 2, "stop_ids": [13, 24]}}
    elif why == "a stream":
        ids = labels = np.arange(10, 26).reshape(2, 8)
    else:
        labels = np.full_like(ids, -100)  # that is another finding
    assert not findings_of(PAD, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), manifest))


@pytest.mark.quiet(PAD)
def test_turns_that_end_in_a_token_of_their_own_are_quiet(build, findings_of):
    """A chat model whose padding is its end-of-text id and whose turns all end in 90, which is asked for."""
    ids = np.array([[10, 11, 90, 2, 2], [12, 90, 2, 2, 2], [13, 14, 15, 90, 2], [16, 17, 90, 2, 2]])
    mask = (ids != 2).astype(int)
    labels = np.where(mask == 1, ids, -100)
    capsule = build(lambda w: w.batch(step=0, input_ids=ids, labels=labels, attention_mask=mask), SHARED)
    assert not findings_of(PAD, capsule)


# -- beginning of text


def rows(head, count=4, length=8, start=10):
    body = np.arange(start, start + count * length).reshape(count, length)
    return np.hstack((np.tile(head, (count, 1)).astype(int), body)) if head else body


@pytest.mark.fires(BOS)
def test_two_leading_bos_in_training(build, findings_of):
    finding, numbers = one(findings_of(BOS, build(lambda w: w.batch(step=0, input_ids=rows([1, 1])), WITH_BOS)))
    assert (finding.severity, finding.confidence) == ("warning", "confirmed")
    assert (numbers["leading BOS"], numbers["rows or prompts"]) == (2, 4)
    assert finding.title.startswith("Training")


@pytest.mark.fires(BOS)
def test_two_leading_bos_after_padding_to_the_left(build, findings_of):
    ids = np.hstack((np.zeros((4, 3), int), rows([1, 1])))
    _, numbers = one(findings_of(BOS, build(lambda w: w.batch(step=0, input_ids=ids), WITH_BOS)))
    assert numbers["leading BOS"] == 2


@pytest.mark.fires(BOS)
def test_no_bos_where_the_tokenizer_adds_one(build, findings_of):
    finding, numbers = one(findings_of(BOS, build(lambda w: w.batch(step=0, input_ids=rows([])), WITH_BOS)))
    assert (numbers["leading BOS"], finding.confidence) == (0, "likely")


def prompts(*heads):
    return [{"id": str(n), "prompt_ids": [*head, 30, 31]} for n, head in enumerate(heads)]


@pytest.mark.fires(BOS)
@pytest.mark.parametrize(
    ("trained", "asked", "adds", "side"),
    [
        ([1], [1, 1], True, "Inference"),
        ([1], [], True, "Inference"),
        ([], [1], False, "Inference"),
        ([1], [], None, "One of the two sides"),
    ],
)
def test_which_side_is_wrong_follows_from_the_tokenizer(build, findings_of, trained, asked, adds, side):
    tokenizer = {"bos_id": 1, "eos_id": 2, "pad_id": 0} | ({} if adds is None else {"adds_bos": adds})

    def fill(writer):
        writer.batch(step=0, input_ids=rows(trained))
        writer.records("generations", prompts(asked, asked, asked))

    finding, _ = one(findings_of(BOS, build(fill, {"tokenizer": tokenizer})))
    assert finding.title.startswith(side)
    assert (finding.confidence == "undetermined") is (adds is None)


@pytest.mark.quiet(BOS)
@pytest.mark.parametrize("why", ["one", "not added", "stream", "turns", "equal sides", "bos is eos"])
def test_beginnings_as_they_are_meant_are_quiet(build, findings_of, why):
    tokenizer = dict(WITH_BOS["tokenizer"])
    ids, sides = rows([1]), []
    if why == "not added":
        tokenizer["adds_bos"], ids = False, rows([])
    elif why == "stream":  # rows cut from a stream of documents
        ids = rows([])
        ids[1, 5] = ids[3, 2] = 1
    elif why == "turns":
        ids[:, 4] = 1
    elif why == "equal sides":
        sides = prompts([1], [1])
    elif why == "bos is eos":
        tokenizer["eos_id"] = 1
        ids = rows([1, 1])

    def fill(writer):
        writer.batch(step=0, input_ids=ids)
        writer.records("generations", sides)

    assert not findings_of(BOS, build(fill, {"tokenizer": tokenizer}))


# -- the response template (huggingface/trl#1920: "Answer: " is 33706 25 220, "Answer: hi" is 33706 25 23105)

ANSWER = {"tokenizer": {"response_template_ids": [33706, 25, 220]}}
IN_CONTEXT = np.array([[50, 51, 33706, 25, 23105, 60], [52, 53, 33706, 25, 11424, 61]])


@pytest.mark.fires(TEMPLATE)
@pytest.mark.parametrize("labelled", [True, False])
def test_a_template_whose_last_token_merges_in_context(build, findings_of, labelled):
    extra = {"labels": np.full_like(IN_CONTEXT, -100)} if labelled else {}
    finding, numbers = one(
        findings_of(TEMPLATE, build(lambda w: w.batch(step=0, input_ids=IN_CONTEXT, **extra), ANSWER))
    )
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert numbers["rows without the template"] == 2
    assert numbers["rows with all but the last id"] == 2
    assert numbers["last id in context"] == 23105
    assert "last token merges" in finding.cause
    assert numbers.get("rows without a supervised token") == (1.0 if labelled else None)


@pytest.mark.fires(TEMPLATE)
def test_a_template_whose_first_token_merges(build, findings_of):
    manifest = {"tokenizer": {"response_template_ids": [835, 13291, 29901]}}
    ids = np.array([[5, 2277, 13291, 29901, 7], [6, 2277, 13291, 29901, 8]])
    finding, numbers = one(
        findings_of(TEMPLATE, build(lambda w: w.batch(step=0, input_ids=ids, labels=np.full_like(ids, -100)), manifest))
    )
    assert numbers["first id in context"] == 2277
    assert finding.confidence == "confirmed"


@pytest.mark.fires(TEMPLATE)
def test_a_template_missing_from_a_part_of_the_rows(build, findings_of):
    ids = np.arange(100, 180).reshape(10, 8)
    ids[:, 3:6] = [33706, 25, 220]
    ids[:2, 3] = 9
    labels = np.where(np.arange(8) > 5, ids, -100)
    labels[:2] = -100
    finding, numbers = one(
        findings_of(TEMPLATE, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), ANSWER))
    )
    assert (finding.severity, numbers["rows without the template"]) == ("warning", 2)
    assert numbers["rows without a supervised token"] == 0.2


@pytest.mark.quiet(TEMPLATE)
@pytest.mark.parametrize("why", ["found", "labels are there all the same", "a row cut before the answer"])
def test_a_template_that_is_found_or_not_needed_is_quiet(build, findings_of, why):
    ids = np.arange(100, 420).reshape(40, 8)
    if why == "labels are there all the same":
        labels = ids.copy()
    else:
        ids[:, 3:6] = [33706, 25, 220]
        labels = np.where(np.arange(8) > 5, ids, -100)
    if why == "a row cut before the answer":
        ids[7] = np.arange(8) + 700
        labels[7] = -100
    assert not findings_of(TEMPLATE, build(lambda w: w.batch(step=0, input_ids=ids, labels=labels), ANSWER))


@pytest.mark.fires(BOS)
@pytest.mark.parametrize(
    ("prompt", "leading"), [([128000, 128000, 128006, 882], 2), ([128006, 882, 128007], 0)], ids=["doubled", "lost"]
)
def test_prompts_of_llama_3_judged_by_themselves(build, findings_of, prompt, leading):
    """OpenRLHF#393: the template's BOS and the tokenizer's; switching both off goes too far."""
    manifest = {"tokenizer": {"bos_id": 128000, "adds_bos": True}}
    finding, numbers = one(
        findings_of(BOS, build(lambda w: w.record("generations", {"id": "a", "prompt_ids": prompt}), manifest))
    )
    assert (numbers["leading BOS"], finding.title.split()[0]) == (leading, "Inference")
