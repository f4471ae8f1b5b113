"""Edits of a case log touch only their own lines, whatever surrounds them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.app.casebook import cards

LOG = """\
# Debug cases

Prose that stays.

## loss-stuck · Loss sits at ln(V)

- **Class:** not-converging
- **Keywords:** plateau, 损失不降
- **Unknown field:** kept
- **Symptom:** 10.82 for 4,000 steps
  and a second line of it
- **Occurrences:** 2026-11-29 run sft-7b, step 0, capsule 01JDV

## Notes without an id

- **Class:** not a card

<!--
## hidden-case · In a comment
-->

```markdown
## fenced-case · In a fence
```

## second-case · Another one
- **Class:** kernel
- **Root cause:** tail block
"""

words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029\x85"), max_size=40)
newlines = st.sampled_from(["\n", "\r\n"])
blocks = st.sampled_from(
    [
        "Some prose.\n",
        "```\n## not-a-card · fenced\n- **Class:** x\n```\n",
        "<!-- a comment\n## not-a-card · commented\n-->\n",
        "> ## quoted-card · in a quote\n",
        "## Section without id\n\n- **Class:** nothing\n",
        "\x0c form feed and \u2028 separator\n",
        "Title\n-----\n",
        "* a list\n* of things\n",
        "\tindented code\n\n",
        "| a | b |\n|---|---|\n",
        "    ## not-a-card · indented\n",
        "# Chapter\n",
    ]
)


@st.composite
def logs(draw: st.DrawFn) -> str:
    """A case log as people leave one behind: cards between prose, fences and comments, with any line ends."""
    parts: list[str] = []
    for number in range(draw(st.integers(0, 3))):
        parts += draw(st.lists(blocks, max_size=2))
        bullet = draw(st.sampled_from(["- ", "* ", "-   "]))
        fields = [f"{bullet}**Class:** kernel\n", f"{bullet}**Fix:** do\n  this\n", f"{bullet}**Own field:** [x](y)\n"]
        chosen = draw(st.lists(st.sampled_from(fields), unique=True, max_size=3))
        parts.append(f"\n## case-{number} · Number {number}\n" + draw(st.sampled_from(["", "\n"])) + "".join(chosen))
        parts.append(draw(st.sampled_from(["", "\n", "\n\n\n"])))
    parts += draw(st.lists(blocks, max_size=2))
    text = "".join(parts)
    if draw(st.booleans()):
        text = text.rstrip("\n")
    return text.replace("\n", draw(newlines))


class TestParsing:
    def test_finds_the_sections_with_an_id_and_nothing_in_fences_or_comments(self):
        assert [card.id for card in cards.parse(LOG)] == ["loss-stuck", "second-case"]

    def test_gives_fields_with_further_lines_and_unknown_names(self):
        card = cards.parse(LOG)[0]
        assert card.title == "Loss sits at ln(V)"
        assert card.get("symptom") == "10.82 for 4,000 steps\nand a second line of it"
        assert card.get("Unknown field") == "kept"
        assert card.get("Gate") == ""

    def test_a_card_ends_before_the_next_section(self):
        assert "Notes" not in cards.parse(LOG)[0].text

    def test_survives_a_byte_order_mark_in_front_of_the_first_card(self):
        assert [card.id for card in cards.parse("\ufeff## a-b · C\n")] == ["a-b"]


class TestAppending:
    def test_writes_the_fields_in_the_order_of_the_grammar(self):
        text = cards.append("", "a-b", "T", {"Fix": "f", "Class": "kernel", "Own": "o", "Trigger": " "})
        assert text == cards.HEADER + "\n## a-b · T\n\n- **Class:** kernel\n- **Fix:** f\n- **Own:** o\n"

    @pytest.mark.parametrize("open_end", ["```\ncode\n", "<!-- never closed\n", "~~~\n"])
    def test_refuses_a_file_that_ends_inside_an_open_fence_or_comment(self, open_end: str):
        with pytest.raises(cards.CardError, match="close it"):
            cards.append(LOG + "\n" + open_end, "a-b", "T", {"Class": "kernel"})

    @pytest.mark.parametrize("id", ["", "-x", "a b", "A", "../x", "a--b", "x" * 81])
    def test_refuses_what_is_no_id(self, id: str):
        with pytest.raises(cards.CardError, match="case id"):
            cards.append(LOG, id, "T", {})

    @pytest.mark.parametrize("title", ["C #", "##", "a # b", "```", "<!-- x", "* a", "a\\"])
    def test_a_title_reads_back_as_it_was_given(self, title: str):
        (card,) = cards.parse(cards.append("", "a-b", title, {"Class": "kernel"}))
        assert card.title == title

    def test_a_case_without_a_title_is_refused(self):
        with pytest.raises(cards.CardError, match="no title"):
            cards.append(LOG, "a-b", " ", {"Class": "kernel"})

    def test_text_cannot_open_a_section_or_carry_an_escape_sequence(self):
        text = cards.append("", "a-b", "T\n## evil-one · X", {"Fix": "f\n\n## evil-two · Y\n- **Class:** z\x1b[2J"})
        assert [card.id for card in cards.parse(text)] == ["a-b"]
        assert "\x1b" not in text

    @given(logs(), words, words)
    @settings(max_examples=80, deadline=None)
    def test_every_byte_before_the_new_section_stays(self, text: str, title: str, fix: str):
        before = cards.parse(text)
        after = cards.append(text, "new-case", f"t{title}", {"Class": "kernel", "Fix": fix})
        assert after.startswith(text)
        parsed = cards.parse(after)
        assert [card.text.rstrip() for card in parsed[:-1]] == [card.text.rstrip() for card in before]
        assert parsed[-1].id == "new-case"
        assert parsed[-1].get("Fix") == cards.single_line(fix)


class TestChangingAField:
    def test_replaces_the_lines_of_that_field_alone(self):
        changed = cards.set_field(LOG, "loss-stuck", "Symptom", "one line")
        assert changed == LOG.replace(
            "- **Symptom:** 10.82 for 4,000 steps\n  and a second line of it\n", "- **Symptom:** one line\n"
        )

    def test_adds_a_field_that_was_not_there_after_the_last_one(self):
        changed = cards.set_field(LOG, "second-case", "Fix", "pad")
        assert changed == LOG + "- **Fix:** pad\n"

    def test_keeps_a_missing_final_newline_missing(self):
        changed = cards.set_field(LOG.rstrip("\n"), "second-case", "Root cause", "x")
        assert changed.endswith("- **Root cause:** x")

    def test_occurrences_are_added_below_those_that_are_there(self):
        once = cards.add_occurrence(LOG, "loss-stuck", "2026-11-30 run b")
        twice = cards.add_occurrence(once, "loss-stuck", "2026-12-01 run c")
        line = "- **Occurrences:** 2026-11-29 run sft-7b, step 0, capsule 01JDV\n"
        assert twice == LOG.replace(line, line + "  - 2026-11-30 run b\n  - 2026-12-01 run c\n")

    def test_an_occurrence_that_was_wrapped_by_hand_keeps_its_bytes(self):
        text = "## a-b · T\n\n*   **Occurrences:** 2026-01-01 run a,\n    located in\t11 min\n*   **Gate:** none"
        added = cards.add_occurrence(text, "a-b", "2026-02-02 run b")
        assert added == text.replace("\t11 min\n", "\t11 min\n    - 2026-02-02 run b\n")

    @given(logs(), words, st.sampled_from(["Class", "Fix", "Own field", "Gate"]), st.data())
    @settings(max_examples=120, deadline=None)
    def test_every_byte_outside_the_field_stays(self, text: str, value: str, name: str, data: st.DataObject):
        known = cards.parse(text)
        if not known:
            return
        card = data.draw(st.sampled_from(known))
        changed = cards.set_field(text, card.id, name, value)
        lines, new = cards.split_lines(text), cards.split_lines(changed)
        old = next((field for field in card.fields if field.name == name), None)
        start, end = (old.start, old.end) if old else (card.fields[-1].end if card.fields else card.end,) * 2
        tail = lines[end:]
        assert new[len(new) - len(tail) :] == tail
        assert "".join(new).startswith("".join(lines[:start]))
        after = cards.find(cards.parse(changed), card.id)
        assert after is not None
        assert after.get(name) == cards.single_line(value)
        others = [(field.name, field.value) for field in card.fields if field.name != name]
        assert [(field.name, field.value) for field in after.fields if field.name != name] == others


#: Lines that people, programs and merges leave in a Markdown file.
LINES = (
    "", "", "prose", "```", "  ```", "~~~", "<!-- comment", "-->", "<!-- ## one-line · c -->", "> ## quoted · q",
    "- item", "  - nested", "\t- after a tab", "* star", "1. one", "- **Fix:** do", "  this",
    "-\t**Gate:** gates/x.json · passed", "*   **Occurrences:** 2026 a", "    - 2026 b", "- **Occurrences:**",
    "  - 2026-01-01 one", "- **Own:** [x](y) `c`", "  ## in-item · fenced or not", "    ## code-x · indented",
    "Title", "-----", "# Chapter", "## no id", "| a | b |", "\x0c", "\u2028 sep", "\x85", "中文 🎉", "\udcff",
    "- **Fix**: outside", "lazy", "<div>", "</pre>", "[ref]: x", "- - **Fix:** in", " - **Class:** one blank",
    "<script>", "- ```", "-",
)  # fmt: skip
VALUES = (
    "passed",
    "a\nb",
    "gates/a.json · passed 2026-11-29",
    "## x-y · z",
    "```",
    "<!--",
    "- b",
    "",
    "\udcff",
    "\u2028",
    "---",
)


@st.composite
def wild(draw: st.DrawFn) -> str:
    """Anything at all between, before and within cards, in any order; line ends of one kind or mixed."""
    lines: list[str] = []
    for number in range(draw(st.integers(0, 3))):
        lines += draw(st.lists(st.sampled_from(LINES), max_size=4))
        lines.append(draw(st.sampled_from(["## case-%d · T", "##  case-%d - T ##", "  ## case-%d: T"])) % number)
        lines += draw(st.lists(st.sampled_from(LINES), max_size=6))
    ends = draw(st.sampled_from([("\n",), ("\r\n",), ("\n", "\r\n"), ("\r",)]))
    text = "".join(line + draw(st.sampled_from(ends)) for line in lines)
    return draw(st.sampled_from(["", "\ufeff"])) + (text.rstrip("\r\n") if draw(st.booleans()) else text)


def told(known: tuple[cards.Card, ...]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What cards say, wherever they stand."""
    return [(each.id, each.title, [(field.name, field.value) for field in each.fields]) for each in known]


class TestAnyMarkdown:
    """An edit does what it should and nothing else, or it is refused."""

    @given(wild())
    @settings(max_examples=80, deadline=None)
    def test_parsing_loses_no_byte(self, text: str):
        lines = cards.split_lines(text)
        assert "".join(lines) == text
        assert all("".join(lines[card.start : card.end]) == card.text for card in cards.parse(text))

    @given(wild(), st.sampled_from(VALUES))
    @settings(max_examples=80, deadline=None)
    def test_appending(self, text: str, value: str):
        try:
            after = cards.append(text, "new-case", "T " + value, {"Class": "kernel", "Own": value})
        except cards.CardError:
            return
        assert after.startswith(text)
        assert told(cards.parse(after)[:-1]) == told(cards.parse(text))
        assert cards.parse(after)[-1].get("Own") == cards.single_line(value)

    @given(wild(), st.sampled_from(VALUES), st.sampled_from(["Gate", "Fix", "New one", "add", "same"]), st.data())
    @settings(max_examples=250, deadline=None)
    def test_changing_a_card(self, text: str, value: str, name: str, data: st.DataObject):
        """Setting a field (the gate's edit is one), adding an occurrence, writing a field back as it was read."""
        known = cards.parse(text)
        if not known:
            return
        card = cards.find(known, data.draw(st.sampled_from(known)).id)
        assert card is not None
        if name == "same":
            if not card.fields:
                return
            name = data.draw(st.sampled_from(card.fields)).name
            value = card.get(name)
        adds = name == "add"
        name = "Occurrences" if adds else name
        old = next((field for field in card.fields if field.name.casefold() == name.casefold()), None)
        try:
            changed = (
                cards.add_occurrence(text, card.id, value) if adds else cards.set_field(text, card.id, name, value)
            )
        except cards.CardError:
            return
        lines = cards.split_lines(text)
        start, end = (old.start, old.end) if old else (card.fields[-1].end if card.fields else card.end,) * 2
        start = end if adds and old and old.value else start
        head, tail = "".join(lines[:start]), "".join(lines[end:])
        assert changed.startswith(head)
        assert changed.endswith(tail)
        assert len(changed) >= len(head) + len(tail)
        after = cards.find(cards.parse(changed), card.id)
        assert after is not None
        new = next(field for field in after.fields if field.name.casefold() == name.casefold())
        rest = [[field for field in each.fields if field not in (old, new)] for each in (card, after)]
        assert [(each.name, each.value) for each in rest[0]] == [(each.name, each.value) for each in rest[1]]
        others = [[each for each in parsed if each not in (card, after)] for parsed in (known, cards.parse(changed))]
        assert told(tuple(others[0])) == told(tuple(others[1]))
        if not adds:
            assert cards.single_line(new.value) == cards.single_line(value)
