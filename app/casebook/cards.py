"""The case log as text: one level-2 section a case, fields as a bulleted list; an edit touches only its own lines.

Markdown is parsed with markdown-it-py, whose tokens carry line numbers: a ``##`` in a code fence or in an HTML comment
is no heading, and what surrounds an edit is never printed anew.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from ..text import visible

CLASSES = (
    "not-converging",
    "overfitting",
    "evaluation",
    "resources",
    "distributed",
    "kernel",
    "serving",
    "application",
)

#: Fields of a card in the order in which a new one is written.
FIELDS = (
    "Class",
    "Keywords",
    "Rules",
    "Symptom",
    "First suspect",
    "Other suspects",
    "Misled by",
    "Root cause",
    "Trigger",
    "Fix",
    "Prevention",
    "Regression test",
    "Gate",
    "Occurrences",
)

HEADER = "# Debug cases\n\nIncidents resolved here, one section each; `llmconsole cases search WORDS` finds them.\n"

_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_HEADING = re.compile(r"(?P<id>[a-z0-9]+(?:-[a-z0-9]+)*)\s+(?:·|-|—|–|:)\s+(?P<title>.+)")
_FIELD = re.compile(r"\*\*(?P<name>[^*\n]{1,60}?)(?::\*\*|\*\*:)[ \t]*(?P<rest>.*)", re.DOTALL)
_BULLET = re.compile(r"^[-*+]\s+")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class CardError(Exception):
    """The case log cannot take this edit; one line that says why and what to do."""


_COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,64})\b")


@dataclass(frozen=True)
class Field:
    """One field of a card and the lines it stands on (``start`` to ``end``, exclusive)."""

    name: str
    value: str
    start: int
    end: int


@dataclass(frozen=True)
class Card:
    """One case: the section from its heading to the next heading of level 1 or 2."""

    id: str
    title: str
    fields: tuple[Field, ...]
    start: int
    end: int
    text: str
    seed: bool = False

    def get(self, name: str) -> str:
        """Value of the first field of that name (any case), or an empty string."""
        return next((each.value for each in self.fields if each.name.casefold() == name.casefold()), "")


def valid_id(text: str) -> bool:
    """Whether ``text`` can be the id of a case: lower-case words joined by single dashes, at most 80 characters."""
    return len(text) <= 80 and _ID.fullmatch(text) is not None


def parse(text: str, *, seed: bool = False) -> tuple[Card, ...]:
    """Every case of a case log, in file order; sections whose heading is no ``id · title`` are left alone."""
    from markdown_it import MarkdownIt

    lines = split_lines(text)
    # A byte order mark would hide a heading in the first line; line numbers do not change.
    tokens = MarkdownIt("commonmark").disable("inline").parse(text.removeprefix("\ufeff"))
    headings = [
        (token.map[0], token.tag, tokens[index + 1].content)
        for index, token in enumerate(tokens)
        if token.type == "heading_open" and token.level == 0 and token.tag in ("h1", "h2") and token.map
    ]
    items = [
        (token.map[0], token.map[1], tokens[index + 2].content)
        for index, token in enumerate(tokens)
        if token.type == "list_item_open"
        and token.level == 1
        and token.map
        and index + 2 < len(tokens)
        and tokens[index + 2].type == "inline"
    ]
    firsts = [first for first, _, _ in items]  # in file order, so a section's items are found without a scan
    cards: list[Card] = []
    for position, (start, tag, content) in enumerate(headings):
        heading = _HEADING.fullmatch(content.strip())
        if tag != "h2" or heading is None:
            continue
        end = headings[position + 1][0] if position + 1 < len(headings) else len(lines)
        end = _without_blank_tail(lines, start, end)
        here = items[bisect_right(firsts, start) : bisect_left(firsts, end)]
        fields = tuple(
            Field(field["name"].strip(), _value(lines, first, stop), first, stop)
            for first, last, inline in here
            if (field := _FIELD.match(inline))
            for stop in [_without_blank_tail(lines, first, last)]
        )
        cards.append(
            Card(
                heading["id"],
                heading["title"].strip().replace("\\#", "#"),
                fields,
                start,
                end,
                "".join(lines[start:end]),
                seed=seed,
            )
        )
    return tuple(cards)


def find(cards: tuple[Card, ...], id: str) -> Card | None:
    """The first case with that id, or None."""
    return next((card for card in cards if card.id == id), None)


def fix_commits(card: Card) -> list[str]:
    """The commits that a card's fix names (``… (commit abc1234)``), in order."""
    return _COMMIT.findall(card.get("Fix"))


def split_lines(text: str) -> list[str]:
    """Lines with their ends, split where Markdown splits them (str.splitlines also splits at form feeds and more)."""
    return _LINE.findall(text)


def format_card(id: str, title: str, values: Mapping[str, str], newline: str = "\n") -> str:
    """A new section; fields in the order of the card grammar, empty ones left out, each on one line."""
    if not valid_id(id):
        raise CardError(f"{id!r} is no case id: use lower-case words joined by dashes, such as loss-stuck-at-ln-v")
    ordered = [name for name in FIELDS if name in values] + [name for name in values if name not in FIELDS]
    rows = [f"- **{name}:** {single_line(values[name])}" for name in ordered if values[name].strip()]
    # Number signs at the end of a heading are decoration in Markdown: `C #` would lose its sign.
    heading = re.sub(r"#+$", lambda signs: "\\#" * len(signs.group()), single_line(title))
    if not heading:
        raise CardError(f"the case {id} has no title")
    return newline.join([f"## {id} · {heading}", "", *rows, ""])


def append(text: str, id: str, title: str, values: Mapping[str, str]) -> str:
    """The log with one more section at its end; every byte before it stays.

    Raises:
        CardError: the end of the file lies in an open code fence or comment, which would swallow the section.
    """
    newline = newline_of(text)
    if not text.strip("\ufeff"):
        text += HEADER.replace("\n", newline)
    gap = "" if text.endswith(("\n", "\r")) else newline
    if (text + gap).rstrip("\r\n") == (text + gap)[: -len(newline)]:  # exactly one line end: no blank line yet
        gap += newline
    result = text + gap + format_card(id, title, values, newline)
    before, after = parse(text), parse(result)
    same = [card.text.rstrip() for card in after[:-1]] == [card.text.rstrip() for card in before]
    if not same or len(after) != len(before) + 1:
        raise CardError(
            f"a section for {id} cannot be appended: the file ends inside an open code fence, comment or list; close it"
        )
    return result


def set_field(text: str, id: str, name: str, value: str) -> str:
    """The log with one field of one case replaced, or added after its last field; every other byte stays.

    ``value`` may hold several lines; further lines become nested bullets.

    Raises:
        CardError: no such case, or the field cannot be told from what surrounds it.
    """
    lines, before = split_lines(text), parse(text)
    card = find(before, id)
    if card is None:
        raise CardError(f"the case log has no case {id}")
    others = [(each.id, each.text) for each in before if each is not card]
    old = next((field for field in card.fields if field.name.casefold() == name.casefold()), None)
    kept = [(field.name, field.value) for field in card.fields if field is not old]
    newline = newline_of(text)
    first, *further = [single_line(line) for line in value.split("\n") if line.strip()] or [""]
    further = [_BULLET.sub("", line, count=1) for line in further]  # they come back from the file with theirs
    block = [f"- **{old.name if old else name}:** {first}".rstrip(), *(f"  - {line}" for line in further)]
    if old is not None:
        start, end = old.start, old.end
        # A list may be indented or use another bullet; the new lines keep to it.
        lead = re.match(r"\s*[-*+]\s+", lines[start])
        if lead:
            indent = " " * (len(lead.group()) - 2)
            block = [lead.group() + block[0][2:], *(indent + line for line in block[1:])]
    else:
        start = end = card.fields[-1].end if card.fields else card.end
        if not card.fields:  # a list of its own, apart from what the section holds
            block = ["", *block]
    if start == len(lines) and not lines[-1].endswith(("\n", "\r")):
        block = ["", *block] if card.fields else ["", "", *block[1:]]
    closed = end < len(lines) or lines[-1].endswith(("\n", "\r"))
    # Prose that follows at once would run on in the new item, so there a blank line parts them.
    for tail in ([], [""]):
        replacement = newline.join(block + tail) + (newline if closed else "")
        result = "".join(lines[:start]) + replacement + "".join(lines[end:])
        after = parse(result)
        changed = find(after, id)
        if changed is None or [(each.id, each.text) for each in after if each is not changed] != others:
            continue
        new = next((field for field in changed.fields if field.name.casefold() == name.casefold()), None)
        if new is None or [(field.name, field.value) for field in changed.fields if field is not new] != kept:
            continue
        if single_line(new.value) == single_line(value):
            return result
    raise CardError(f"the field {name} of {id} cannot be changed alone, its lines belong together; edit it by hand")


def add_occurrence(text: str, id: str, occurrence: str) -> str:
    """The log with one more occurrence in a case, as a bullet below those that are there; they keep their bytes.

    Raises:
        CardError: no such case, or its occurrences are no plain list.
    """
    before = parse(text)
    card = find(before, id)
    field = next((each for each in card.fields if each.name.casefold() == "occurrences"), None) if card else None
    if field is None or not field.value:
        return set_field(text, id, "Occurrences", occurrence)
    lines, newline = split_lines(text), newline_of(text)
    lead = re.match(r"\s*[-*+]\s+", lines[field.start])
    last = lines[field.end - 1]
    closed = last.endswith(("\n", "\r"))
    entry = f"{' ' * len(lead.group() if lead else '- ')}- {single_line(occurrence)}"
    added = entry + newline if closed else newline + entry
    result = "".join(lines[: field.end]) + added + "".join(lines[field.end :])
    cards = parse(result)
    after = find(cards, id)
    same = [each.text for each in cards if each is not after] == [each.text for each in before if each is not card]
    if after is None or not same or after.get("Occurrences") != f"{field.value}\n- {single_line(occurrence)}":
        raise CardError(f"the occurrences of {id} are no plain list; add {single_line(occurrence)!r} by hand")
    return result


def single_line(text: str) -> str:
    """Text as one line of a field: no line ends, no control characters, so that it cannot open a section of its own."""
    return visible(re.sub(r"\s*\n\s*(?:[-*+]\s+)?|\s+", " ", text).strip())


def newline_of(text: str) -> str:
    """The line end that a file uses, judged by its first line."""
    match = re.search(r"\r\n|\r|\n", text)
    return match.group() if match else "\n"


def _value(lines: list[str], start: int, end: int) -> str:
    """A field's text as it stands in the file, without its name and without the indentation of further lines."""
    raw = [line.rstrip("\r\n") for line in lines[start:end]]
    match = _FIELD.search("\n".join(raw))
    if match is None:
        return ""
    first, *further = match["rest"].split("\n")
    return "\n".join([first.strip(), *(line.strip() for line in further)]).strip()


def _without_blank_tail(lines: list[str], start: int, end: int) -> int:
    """``end`` moved up over trailing blank lines, never to ``start``."""
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return end
