"""The words that people type, in English and Chinese, find the case; the best place comes first."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.app import paths
from llmconsole.app.casebook import cards, search

SEED = cards.parse(paths.seed_cases(), seed=True)

_WORDS = (
    "溢出",
    "复读机",
    "loss",
    "不降",
    "NaN",
    "grad",
    "norm",
    "ｎａｎ",
    "GRAD",
    "straße",
    "STRASSE",
    "é",
    "e\u0301",
    "溢",
    "\udcff",
)


def find(query: str, log: str | None = None) -> list[str]:
    return [card.id for card in search.search(SEED if log is None else cards.parse(log), query)]


@pytest.mark.parametrize(
    ("query", "id"),
    [
        ("溢出", "nan-in-mid-run"),
        ("复读机", "parrot-after-finetuning"),
        ("NaN first step", "nan-at-first-step"),
        ("loss 不降", "loss-stuck-at-ln-v"),
        ("显存", "out-of-memory-after-hours"),
        ("卡死", "hang-in-collective"),
        ("ｎａｎ 第一步", "nan-at-first-step"),
        ("DISTRIBUTEDSAMPLER", "several-gpus-odd-loss"),
        ("rule:objective/labels-not-shifted", "loss-near-zero-copies-input"),
        ("class:serving p99", "ttft-p99-high"),
        ('"overfit one batch"', "one-batch-not-overfitted"),
        ("rule：kv/cancel-leak", "kv-pages-never-return"),
        ("NaN 溢出", "nan-in-mid-run"),
    ],
)
def test_finds_the_seed_case_first(query: str, id: str):
    assert find(query)[0] == id


def test_parts_of_words_are_enough():
    assert "loss-spike" in find("grad norm")


def test_every_word_must_occur():
    assert find("NaN 溢出 payment") == []


def test_a_colon_that_names_no_field_is_part_of_the_word():
    log = "## a-b · Port 127.0.0.1:8080 fails\n\n- **Class:** serving\n"
    assert find("127.0.0.1:8080", log) == ["a-b"]


def test_a_phrase_that_is_still_being_typed_finds_what_it_will_find():
    log = "## a-b · one two\n\n## c-d · two one\n"
    assert find('"two o', log) == ["c-d"]


@given(
    st.lists(st.lists(st.sampled_from(_WORDS), min_size=1, max_size=6), min_size=1, max_size=6),
    st.lists(st.sampled_from(_WORDS), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_exactly_the_cards_that_hold_every_word_are_found(texts: list[list[str]], words: list[str]):
    fields = ("Symptom", "Keywords", "Own field", "Root cause", "Fix", "Trigger")
    parts = [
        f"## c-{number} · Case\n\n" + "".join(f"- **{fields[at]}:** {word}\n" for at, word in enumerate(text))
        for number, text in enumerate(texts)
    ]

    def folded(text: str) -> str:
        return unicodedata.normalize("NFKC", text).casefold()

    expected = {
        f"c-{number}" for number, part in enumerate(parts) if all(folded(word) in folded(part) for word in words)
    }
    assert set(find(" ".join(words), "\n".join(parts))) == expected


def test_a_phrase_is_not_its_words():
    log = "## a-b · one two\n\n## c-d · two one\n"
    assert find('"two one"', log) == ["c-d"]


def test_title_beats_keywords_beat_symptom_beat_cause_beat_the_rest():
    log = (
        "## r-r · x\n\n- **Prevention:** word\n\n## c-c · x\n\n- **Root cause:** word\n\n"
        "## s-s · x\n\n- **Symptom:** word\n\n## k-k · x\n\n- **Keywords:** word\n\n## t-t · word\n"
    )
    assert find("word", log) == ["t-t", "k-k", "s-s", "c-c", "r-r"]


def test_among_equals_the_newest_occurrence_comes_first():
    log = "".join(f"## c-{year} · word\n\n- **Occurrences:** {year}-01-01 run x\n\n" for year in (2025, 2027, 2026))
    assert find("word", log) == ["c-2027", "c-2026", "c-2025"]


class TestTheSeedCases:
    def test_hold_the_ten_classics_and_the_field_symptoms(self):
        assert len(SEED) >= 23
        assert len({card.id for card in SEED}) == len(SEED)

    @pytest.mark.parametrize("card", SEED, ids=lambda card: card.id)
    def test_say_what_to_suspect_in_which_order_and_what_to_do(self, card: cards.Card):
        for name in ("Class", "Keywords", "Rules", "Symptom", "First suspect", "Other suspects", "Fix", "Prevention"):
            assert card.get(name), name
        assert card.get("Class").split(",")[0] in cards.CLASSES
        assert any("\u4e00" <= char <= "\u9fff" for char in card.get("Keywords"))

    def test_cover_every_case_that_a_rule_names(self):
        from llmconsole.analyzers.registry import all_rules

        rules_of = {card.id: card.get("Rules").replace(",", " ").split() for card in SEED}
        absent = [
            (rule.id, case) for rule in all_rules() for case in rule.cases if rule.id not in rules_of.get(case, [])
        ]
        assert not absent, "a rule that names a case must be found from that case, and the other way round"
