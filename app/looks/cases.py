"""The case log, searched here: the index is made once and kept until the user's file changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..casebook import cards
from ..casebook.log import load, seed
from ..casebook.resolve import ResolveError
from ..casebook.search import Index
from ..casebook.show import is_gated
from ..casebook.store import Repository, StoreError
from .types import CaseCard, CaseCommit, CaseHistory, CaseLine, CaseList

_MOST_ALIKE = 8
_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")


@dataclass(frozen=True)
class _Log:
    stamp: tuple[int, int, int] | None
    cards: tuple[cards.Card, ...]
    index: Index
    problem: str = ""


_logs: dict[Path, _Log] = {}


def case_list(query: str, start: str, limit: int = 300) -> CaseList:
    """The cases that hold a query, best first.

    Args:
        query: words, phrases in quotes, ``field:value``.
        start: the directory from which the user's case log is found.
        limit: rows at most; the number found is told in full.
    """
    file = paths.case_file(Path(start))
    log = _log(file)
    found = log.index.search(query)
    alike = _alike(found, log.cards) if query.startswith("rule:") and " " not in query.strip() else []
    rows = [
        CaseLine(
            id=card.id, title=card.title, seed=card.seed, gated=is_gated(card.get("Gate")), alike=index >= len(found)
        )
        for index, card in enumerate([*found, *alike][:limit])
    ]
    return CaseList(file=str(file), total=len(log.cards), found=len(found), rows=tuple(rows), problem=log.problem)


def own_cases(rule: str, start: str) -> tuple[str, ...]:
    """Ids of the user's own cases that name a rule, the newest first; none where the log cannot be read."""
    found = _log(paths.case_file(Path(start))).index.search(f"rule:{rule}")
    return tuple(card.id for card in found if not card.seed and rule in _words(card, "Rules"))


def _alike(found: list[cards.Card], known: tuple[cards.Card, ...]) -> list[cards.Card]:
    """Cases that share rules, keywords and class with those found, the most alike first."""
    wanted = {name: {word for card in found for word in _words(card, name)} for name in ("Rules", "Keywords", "Class")}
    inside = {card.text for card in found}
    scored: list[tuple[int, cards.Card]] = []
    for card in known:
        shared = {name: len(wanted[name] & set(_words(card, name))) for name in wanted}
        # One class holds dozens of cases: alone it makes none alike.
        if card.text not in inside and shared["Rules"] + shared["Keywords"] > 0 and sum(shared.values()) > 1:
            scored.append((2 * shared["Rules"] + shared["Keywords"] + shared["Class"], card))
    scored.sort(key=lambda each: -each[0])
    return [card for _, card in scored[:_MOST_ALIKE]]


def _words(card: cards.Card, name: str) -> list[str]:
    """The words of a field that holds a list."""
    separator = r"[,\s]+" if name == "Rules" else r"\s*,\s*"
    return [word for word in re.split(separator, card.get(name).casefold().strip()) if word]


def case_card(id: str, start: str, seed: bool | None = None) -> CaseCard | None:
    """One case, or None where there is none of that id; ``seed`` tells apart two of one id, None takes the first."""
    known = _log(paths.case_file(Path(start))).cards
    card = next((each for each in known if each.id == id and seed in (None, each.seed)), None)
    if card is None:
        return None
    fields = tuple((each.name, each.value) for each in card.fields)
    return CaseCard(id=card.id, title=card.title, seed=card.seed, fields=fields)


def case_history(id: str, start: str) -> CaseHistory:
    """Occurrences, gate and commits of a case, from its cards (the user's and ours) and from git."""
    known = [each for each in _log(paths.case_file(Path(start))).cards if each.id == id]
    told = [each.get("Occurrences") for each in known]
    occurrences = [line.lstrip("-*+ ").strip() for text in told for line in text.split("\n") if line.strip(" -*+")]
    commits, note = _commits(id, " ".join([*told, *(each.get("Fix") for each in known)]), start)
    gate = next((value for each in known if (value := each.get("Gate"))), "")
    return CaseHistory(id=id, occurrences=tuple(occurrences), gate=gate, commits=commits, note=note)


def _commits(id: str, text: str, start: str) -> tuple[tuple[CaseCommit, ...], str]:
    try:
        repository = Repository(paths.case_file(Path(start)).parent)
        found = repository.log_of_trailer("Case-Id", id)
        seen = {each[0] for each in found}
        for name in dict.fromkeys(_COMMIT.findall(text)):
            commit = repository.commit_id(name)
            if commit is not None and commit not in seen:
                seen.add(commit)
                found.append((commit, repository.date(commit), repository.subject(commit)))
    except StoreError as error:
        return (), str(error)
    commits = tuple(CaseCommit(id=commit, date=date, subject=subject) for commit, date, subject in found)
    return commits, "" if commits else f"no commit in {repository.root} names this case"


def _log(file: Path) -> _Log:
    stamp = _stamp(file)
    kept = _logs.get(file)
    if kept is None or kept.stamp != stamp:
        problem = ""
        try:
            known = load(file)
        except ResolveError as error:
            known, problem = seed(), str(error)
        kept = _logs[file] = _Log(stamp, known, Index(known), problem)
    return kept


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
