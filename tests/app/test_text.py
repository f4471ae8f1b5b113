"""Whatever a capsule says, the terminal only ever gets characters that print."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.app.text import ending, keep_tail, one_line, safe_json, stand_in, visible

HOSTILE = {
    "a colour": ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
    "a window title": ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    "a C1 introducer": ("\x9b2J", "\\x9b2J"),
    "a bidirectional override": ("abc\u202edef", "abc\\u202edef"),
    "an isolate": ("\u2066x\u2069", "\\u2066x\\u2069"),
    "a zero-width space": ("a\u200bb", "a\\u200bb"),
    "a byte order mark": ("\ufeffa", "\\ufeffa"),
    "a lone surrogate": ("\udcff", "\\udcff"),
    "a tag": ("\U000e0041", "\\U000e0041"),
    "a line separator": ("a\u2028b", "a\\u2028b"),
    "a carriage return": ("good\rbad", "good\\rbad"),
    "a backspace": ("a\x08b", "a\\x08b"),
    "a blank letter": ("\u3164", "\\u3164"),
}


@pytest.mark.parametrize(("raw", "shown"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_does_not_print_is_shown_as_an_escape(raw: str, shown: str):
    assert visible(raw) == shown


@pytest.mark.parametrize("text", ["plain", "损失不降", "ﷺ é ß", "→ ✗ ±", "[bold]markup[/bold]", "全角\u3000空格", "🙂"])
def test_what_prints_stays(text: str):
    assert visible(text) == text


def test_a_block_may_keep_its_line_ends():
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@given(st.text())
@settings(max_examples=50)
def test_nothing_that_prints_is_anything_but_printable(text: str):
    shown = visible(text)
    assert all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in shown)


@given(st.text(st.characters()))
def test_json_stays_equal_and_holds_no_control_character(text: str):
    document = safe_json(json.dumps({"text": text}, ensure_ascii=False))
    assert json.loads(document) == {"text": text}
    assert all(unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp") for char in document)
    assert not set("\u202e\u2066\u200b\x1b\x7f\x9b\ufeff") & set(document)


def test_json_for_an_ascii_terminal_is_ascii():
    document = safe_json('{"a": "损🙂"}', ascii_only=True)
    assert document.isascii()
    assert json.loads(document) == {"a": "损🙂"}


def test_one_line_joins_lines_and_leaves_out_the_middle():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("x" * 50 + "y" * 50, 30) == "x" * 20 + " … " + "y" * 10


def test_a_long_name_keeps_its_tail():
    assert keep_tail("model.layers.23.mlp.down", 12) == "…23.mlp.down"


def test_a_long_sentence_ends_at_a_word():
    assert ending("one two three, four", 16) == "one two three …"


def test_signs_have_stand_ins_of_the_same_width():
    error = UnicodeEncodeError("latin-1", "✗✓–", 0, 3, "missing")
    assert stand_in(error) == ("x+-", 3)
