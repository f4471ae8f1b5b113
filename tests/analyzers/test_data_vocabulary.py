"""data/token-out-of-vocabulary on batches whose ids are written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

RULE = "data/token-out-of-vocabulary"
VOCABULARY = {"model": {"vocab_size": 100, "embedding_rows": 104}, "tokenizer": {"vocab_size": 100}}


def batch(ids, labels=None, **fields):
    ids = np.array(ids)
    return lambda writer: writer.batch(
        step=3, input_ids=ids, labels=np.array(labels) if labels is not None else None, sample_ids=["a", "b"], **fields
    )


@pytest.mark.fires(RULE)
@pytest.mark.parametrize(("token", "position"), [(104, 2), (-1, 0), (50_000, 1)])
def test_an_id_outside_the_embedding_is_confirmed_with_its_position(build, findings_of, token, position):
    ids = [[1, 2, 3], [4, 5, 6]]
    ids[1][position] = token
    (finding,) = findings_of(RULE, build(batch(ids), VOCABULARY))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert (finding.where.step, finding.where.sample) == (3, "b")
    assert finding.evidence[0].value == token
    assert finding.evidence[0].expected == "0 … 103"
    assert finding.evidence[1].value == position


@pytest.mark.quiet(RULE)
def test_the_largest_id_of_the_vocabulary_is_lawful(build, findings_of):
    assert not findings_of(RULE, build(batch([[0, 50, 99], [1, 2, 3]], [[0, 50, 99], [-100, -100, 3]]), VOCABULARY))


@pytest.mark.fires(RULE)
def test_a_padding_id_of_minus_one_in_the_inputs_is_reported(build, findings_of):
    (finding,) = findings_of(RULE, build(batch([[1, 2, -1], [1, -1, -1]]), VOCABULARY))
    assert finding.evidence[0].value == -1
    assert finding.evidence[2].value == 3  # three such ids


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(("ignored", "label"), [(None, -100), (None, -1), (-7, -7), (-1, -1)])
def test_labels_at_the_ignore_index_are_lawful(build, findings_of, ignored, label):
    manifest = {**VOCABULARY, "training": {"ignore_index": ignored}}
    assert not findings_of(RULE, build(batch([[1, 2, 3], [4, 5, 6]], [[1, label, 3], [4, 5, label]]), manifest))


@pytest.mark.fires(RULE)
def test_another_negative_label_is_not_lawful(build, findings_of):
    manifest = {**VOCABULARY, "training": {"ignore_index": -100}}
    (finding,) = findings_of(RULE, build(batch([[1, 2, 3], [4, 5, 6]], [[1, -1, 3], [4, 5, 6]]), manifest))
    assert finding.evidence[0].note == "labels"


@pytest.mark.fires(RULE)
def test_an_id_in_the_padding_rows_of_the_embedding_is_a_warning(build, findings_of):
    (finding,) = findings_of(RULE, build(batch([[1, 2, 102], [4, 5, 6]]), VOCABULARY))
    assert (finding.severity, finding.confidence) == ("warning", "likely")


@pytest.mark.quiet(RULE)
def test_an_added_special_token_in_those_rows_is_lawful(build, findings_of):
    manifest = {**VOCABULARY, "tokenizer": {"vocab_size": 100, "special_ids": {"<call>": 102}}}
    assert not findings_of(RULE, build(batch([[1, 2, 102], [4, 5, 6]]), manifest))


@pytest.mark.quiet(RULE)
def test_a_placeholder_of_an_image_is_no_token(build, findings_of):
    roles = np.array([[3, 5, 3], [3, 3, 3]])
    assert not findings_of(RULE, build(batch([[1, -200, 3], [4, 5, 6]], roles=roles), VOCABULARY))
