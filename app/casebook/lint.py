"""What is wrong with a case log: lines of a merge, ids taken twice, fields, tests, rules and gates that are missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from . import cards
from .gate.record import RecordError, record_name, verify
from .log import own
from .nodes import find_test
from .store import Repository, StoreError

#: Fields that a case of the user's must have; what only a gate can give is asked for by the gate.
REQUIRED = ("Class", "Rules", "Symptom", "Root cause", "Trigger", "Fix", "Prevention", "Regression test")

#: Markers of an unresolved merge, as git writes them; ======= alone may be a heading's underline.
_CONFLICT = re.compile(r"(?:<{7}|\|{7}|>{7})(?: .*)?$|={7}$")


class Problem(msgspec.Struct, kw_only=True):
    """One thing that is wrong: the line (from 1), the case (empty where it belongs to none), and words."""

    line: int
    case: str
    words: str


def lint(text: str, file: Path, rules: Collection[str], repository: Repository | None) -> list[Problem]:
    """Everything wrong with a case log, by line.

    Args:
        text: of the log.
        file: where it lies.
        rules: ids of all rules.
        repository: in which tests and gates are looked up; None leaves them out.
    """
    found = [*_conflicts(text), *_headings(text)]
    first: dict[str, int] = {}
    for card in own(text):  # nothing is asked of the cases that ship with the product
        line = card.start + 1
        if card.id in first:
            words = f"the id {card.id} is taken by the case in line {first[card.id]}"
            found.append(Problem(line=line, case=card.id, words=words))
        first.setdefault(card.id, line)
        found += _fields(card, rules)
        if repository is not None:
            found += _test(card, repository)
            found += _gate(card, repository)
    return sorted(found, key=lambda each: each.line)


def _conflicts(text: str) -> Iterator[Problem]:
    """Lines that a merge left; a separator counts only between the other two."""
    inside = False
    for number, line in enumerate(cards.split_lines(text), start=1):
        mark = _CONFLICT.match(line.rstrip("\r\n"))
        if not mark or (line.startswith("=") and not inside):
            continue
        inside = not line.startswith(">")
        words = f"conflict marker {line[:7]}: resolve the merge, keep the cases of both sides"
        yield Problem(line=number, case="", words=words)


def _headings(text: str) -> Iterator[Problem]:
    """Sections that look like cases and are none, as their fields would not be found."""
    starts = {card.start for card in cards.parse(text)}
    for number, line in enumerate(cards.split_lines(text)):
        near = re.match(r"##\s+([A-Za-z0-9_-]+)\s+(?:·|-|—|–|:)\s+\S", line)
        if near and number not in starts and not cards.valid_id(near[1]):
            words = f"{near[1]} is no case id: lower-case words joined by single dashes"
            yield Problem(line=number + 1, case="", words=words)


def _fields(card: cards.Card, rules: Collection[str]) -> Iterator[Problem]:
    missing = [name for name in REQUIRED if not card.get(name).strip()]
    if missing:
        yield Problem(line=card.start + 1, case=card.id, words=f"missing: {', '.join(missing)}")
    word = (re.split(r"[\s,;]", card.get("Class").strip(), maxsplit=1) or [""])[0]
    if word and word not in cards.CLASSES:
        yield Problem(
            line=_line(card, "Class"), case=card.id, words=f"class {word} is none of {', '.join(cards.CLASSES)}"
        )
    for rule in card.get("Rules").replace(",", " ").split():
        if rule not in rules:
            yield Problem(line=_line(card, "Rules"), case=card.id, words=f"no rule is called {rule}")


def _test(card: cards.Card, repository: Repository) -> Iterator[Problem]:
    node = card.get("Regression test").strip()
    if not node:
        return
    path = node.partition("::")[0]
    outside = path.startswith(("-", "/")) or ".." in Path(path).parts
    content = None if outside else repository.show("HEAD", path)
    if content is None:
        yield Problem(line=_line(card, "Regression test"), case=card.id, words=f"{path} is no file at HEAD")
    elif not find_test(content, node):
        yield Problem(line=_line(card, "Regression test"), case=card.id, words=f"{path} holds no test {node} at HEAD")


def _gate(card: cards.Card, repository: Repository) -> Iterator[Problem]:
    gate = card.get("Gate").strip()
    if not gate:
        return
    try:
        facts = verify(repository, card.id)
    except (RecordError, StoreError) as error:
        yield Problem(line=_line(card, "Gate"), case=card.id, words=f"the gate does not verify: {error}")
        return
    if record_name(card.id) not in gate:
        words = f"the card names {gate.split()[0]}, the gate of this case is {record_name(card.id)}"
        yield Problem(line=_line(card, "Gate"), case=card.id, words=words)
    if facts.outcome not in gate.replace("·", " ").split():
        yield Problem(line=_line(card, "Gate"), case=card.id, words=f"the card says {gate}; the record {facts.outcome}")


def _line(card: cards.Card, name: str) -> int:
    field = next((each for each in card.fields if each.name.casefold() == name.casefold()), None)
    return (field.start if field else card.start) + 1
