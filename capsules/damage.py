"""What a damaged capsule lost, and what could still be read."""

from __future__ import annotations

import msgspec

from .limits import MAX_ALL_DAMAGE_ROWS, MAX_DAMAGE_ROWS

#: How a writer ended that left its rank open.
DIED = "died without sealing"
SILENT = "has not been heard of for long"
DIED_EARLY = "writer died before it wrote any evidence"

#: What an append that was cut off leaves at the end of a file.
TORN_LINE = "last line is torn"
TORN_BLOCK = "last block is torn"


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it was written: what happened, in which file, what was lost, what was kept."""

    what: str
    where: str
    lost: str = ""
    kept: str = ""

    @property
    def unsealed(self) -> bool:
        """It says that a writer ended, or fell silent, without sealing."""
        return self.what == DIED_EARLY or self.what.endswith((DIED, SILENT))

    @property
    def torn(self) -> bool:
        """It is an append that was cut off: nothing that was written before is missing."""
        return self.what in (TORN_LINE, TORN_BLOCK)


class DamageLog:
    """Collects damage while evidence is read; one place is reported once, a file has a few entries and a count."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[Damage, None]] = {}
        self._further: dict[str, int] = {}

    def add(self, file: str, entry: Damage) -> None:
        """Add what is wrong with one file of the capsule; the same entry again changes nothing."""
        known = self._entries.setdefault(file, {})
        if len(known) < MAX_DAMAGE_ROWS:
            known[entry] = None
        elif entry not in known:
            self._further[file] = self._further.get(file, 0) + 1

    def all(self) -> tuple[Damage, ...]:
        """Every entry, by file and in the order found."""
        found: list[Damage] = []
        for file, entries in sorted(self._entries.items()):
            found += entries
            if more := self._further.get(file):
                found.append(Damage(what=f"{more:,} further damaged places", where=file))
        if len(found) > MAX_ALL_DAMAGE_ROWS:
            more = len(found) - MAX_ALL_DAMAGE_ROWS
            found[MAX_ALL_DAMAGE_ROWS:] = [Damage(what=f"{more:,} further damaged places", where="other files")]
        return tuple(found)
