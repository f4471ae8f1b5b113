"""The batch by token: a token, the label that asks for it, and what it cost stand in one column."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmconsole.app.batch_table import legend, notes, sample
from llmconsole.app.looks.batch import batch
from llmconsole.capsules import CapsuleWriter

IGNORED = -100
#: "abcde", and "xy" with three bytes of padding; the prompt "ab" and the "x" are not supervised.
IDS = np.array([[97, 98, 99, 100, 101], [120, 121, 0, 0, 0]])
UNSHIFTED = np.array([[IGNORED, IGNORED, 99, 100, 101], [IGNORED, 121, IGNORED, IGNORED, IGNORED]])
SHIFTED = np.hstack([UNSHIFTED[:, 1:], np.full((2, 1), IGNORED)])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
#: Nats of the next token at each position, and of the token itself.
NEXT = np.array([[1.0, 2.0, 3.0, 4.0, 9.0], [0.5, 7.0, 7.0, 7.0, np.nan]])
SAME = np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [0.6, 0.7, 7.0, 7.0, 7.0]])


def write(path: Path, labels: Any = UNSHIFTED, *, vocabulary: int = 256, **evidence: Any) -> str:
    """A capsule with one batch at step 3 whose losses are those above, as log-sum-exp 6 and logits."""
    target_logits = np.full((2, 5, 3), np.nan)
    target_logits[..., 0], target_logits[..., 1] = 6 - SAME, 6 - NEXT
    target_logits[1, 1:3, 2] = 6 - 7.0
    usual: dict[str, Any] = {"logsumexp": np.full((2, 5), 6.0), "target_logits": target_logits, "attention_mask": MASK}
    given = {"input_ids": IDS, "labels": labels, "reported_loss": 2.375, "sample_ids": ["first", "second"]}
    manifest = {"model": {"vocab_size": vocabulary}, "tokenizer": {"pad_id": 0}}
    with CapsuleWriter(path, title="batch", phase="training", manifest=manifest) as writer:
        writer.batch(step=3, rank=0, split="train", micro=0, **{**usual, **given, **evidence})
    return str(path)


@pytest.mark.parametrize(("labels", "layout"), [(UNSHIFTED, "unshifted"), (SHIFTED, "shifted")])
def test_both_layouts_show_the_same_columns_and_say_which_they_are(tmp_path: Path, labels: Any, layout: str) -> None:
    sheet = batch(write(tmp_path / "a.capsule", labels))
    first, second = sheet.samples
    assert sheet.layout == layout
    assert first.token[:5] == ["a", "b", "c", "d", "e"]
    assert first.label[:5] == ["", "", "c", "d", "e"]
    assert first.asked[:5] == [False, False, True, True, True]
    assert first.loss[1:5] == [1.0, 2.0, 3.0, 4.0]
    assert math.isnan(first.loss[0])  # nothing predicts the first token
    assert (first.supervised, first.mean) == (3, 3.0)
    assert second.token[:5] == ["x", "y", "\\x00", "\\x00", "\\x00"]
    assert (second.length, second.supervised, second.mean) == (2, 1, 0.5)
    assert sheet.mean == (2 + 3 + 4 + 0.5) / 4
    assert {"unshifted": "under its own token", "shifted": "under the token before it"}[layout] in notes(sheet)[0]


def test_the_worst_tokens_come_one_after_the_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.capsule")
    found = [batch(path, worst=place).worst for place in range(5)]
    assert [(each.row, each.text, each.loss) for each in found if each is not None] == [
        (0, "e", 4.0),
        (0, "d", 3.0),
        (0, "c", 2.0),
        (1, "y", 0.5),
        (0, "e", 4.0),
    ]


def test_a_loss_that_is_no_number_is_worse_than_any(tmp_path: Path) -> None:
    kept = np.where(np.arange(5) == 1, np.nan, NEXT)
    sheet = batch(write(tmp_path / "a.capsule", token_loss=kept), worst=0)
    assert sheet.worst is not None
    assert (sheet.worst.text, math.isnan(sheet.worst.loss)) == ("c", True)
    assert sheet.loss_from == "token_loss"


def test_scored_padding_is_added_where_it_stands(tmp_path: Path) -> None:
    sheet = batch(write(tmp_path / "a.capsule"), faults=["pad-in-loss"])
    first, second = sheet.samples
    assert second.added == [0, 0, 1, 1, 1]
    assert second.fault == ["", "", "\\x00", "\\x00", "\\x00"]
    assert second.fault_loss[2:] == [7.0, 7.0, 7.0]
    assert not any(first.added)
    assert sheet.fault == "pad-in-loss: 3 positions (+) are scored beside the 4 asked for, at 7 nats each"


def test_labels_that_are_not_shifted_score_each_token_on_itself(tmp_path: Path) -> None:
    first = batch(write(tmp_path / "a.capsule"), faults=["labels-not-shifted"]).samples[0]
    assert first.fault == ["", "", "", "c", "d"]  # under d, the position of c, which is scored on c
    assert first.fault_loss[3:] == pytest.approx([0.3, 0.4])


def test_a_wrong_denominator_marks_what_it_counts(tmp_path: Path) -> None:
    sheet = batch(write(tmp_path / "a.capsule"), faults=["ignored-in-denominator"])
    assert sheet.samples[1].added == [0, 0, 2, 2, 2]
    assert "4 positions (÷) count in the denominator only" in sheet.fault  # "b" and the padding


def test_a_fault_of_the_reduction_says_that_no_token_changes(tmp_path: Path) -> None:
    sheet = batch(write(tmp_path / "a.capsule"), faults=["sum"])
    assert "not which tokens count" in sheet.fault


def test_labels_of_no_known_layout_stay_where_they_are(tmp_path: Path) -> None:
    labels = np.array([[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])
    sheet = batch(write(tmp_path / "a.capsule", labels))
    assert sheet.layout == ""
    assert sheet.samples[0].label[0] == "\\x07"
    assert "fit neither layout" in notes(sheet)[0]


def test_ids_of_a_larger_vocabulary_are_numbers_and_special_ones_have_names(tmp_path: Path) -> None:
    path = tmp_path / "a.capsule"
    manifest = {"tokenizer": {"vocab_size": 32_000, "special_ids": {"<pad>\x1b[31m": 0}}}
    with CapsuleWriter(path, title="ids", phase="training", manifest=manifest) as writer:
        writer.batch(step=0, rank=0, input_ids=IDS)
    sheet = batch(str(path))
    assert sheet.samples[1].token == ["120", "121", *["<pad>\\x1b[31m"] * 3]
    assert (sheet.samples[0].label, sheet.samples[0].loss, sheet.loss_from) == ([], [], "")


def test_a_mask_that_says_nothing_new_is_told_in_words(tmp_path: Path) -> None:
    assert batch(write(tmp_path / "a.capsule")).samples[0].mask == [1, 1, 1, 1, 1]
    roles = np.array([[2, 2, 3, 3, 3], [2, 3, 0, 0, 0]])
    sheet = batch(write(tmp_path / "b.capsule", roles=roles))
    assert sheet.samples[0].mask == []
    assert "mask 0 at padding only" in legend(sheet)


def test_columns_are_aligned_under_each_other(tmp_path: Path) -> None:
    sheet = batch(write(tmp_path / "a.capsule", vocabulary=300))
    lines, fit = sample(sheet, sheet.samples[0], 80)
    assert fit == 5
    assert [line.plain.split() for line in lines[1:]] == [
        ["token", "97", "98", "99", "100", "101"],
        ["label", "·", "·", "99", "100", "101"],
        ["mask", "1", "1", "1", "1", "1"],
        ["loss", "2.0", "3.0", "4.0"],
    ]
    places = [line.plain.index(word) for line, word in zip(lines[1:], ("99", "99", "1", "2.0"), strict=True)]
    assert places[0] == places[1] == places[3]


def test_the_nearest_captured_step_answers(tmp_path: Path) -> None:
    path = tmp_path / "a.capsule"
    with CapsuleWriter(path, title="steps", phase="training", manifest={}) as writer:
        for step in (0, 50, 100):
            writer.batch(step=step, rank=0, input_ids=IDS)
    assert [batch(str(path), step=step).step for step in (0, 20, 30, 99, 10_000)] == [0, 0, 50, 100, 100]
    assert batch(str(path), position=0, by=1).step == 50
    assert batch(str(path), position=2, by=1).step == 100
    assert batch(str(path), step=0, left=3, top=1).samples[0].token == ["0", "0"]
