"""What a damaged capsule lost, and what could still be read."""

from __future__ import annotations

import msgspec

from .limits import MAX_DAMAGE_ROWS


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it was written: what happened, in which file, what was lost, what was kept."""

    what: str
    where: str
    lost: str = ""
    kept: str = ""


class DamageLog:
    """Collects damage while evidence is read; each file reports once, and at most a few entries."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Damage]] = {}

    def report(self, source: str, entries: list[Damage]) -> None:
        """Set what one source (a file, or a step of reading one) has to say; reading it again changes nothing."""
        if len(entries) > MAX_DAMAGE_ROWS:
            more = len(entries) - MAX_DAMAGE_ROWS + 1
            rest = Damage(what=f"{more} further damaged places", where=entries[0].where, lost="", kept="")
            entries = [*entries[: MAX_DAMAGE_ROWS - 1], rest]
        if entries:
            self._entries[source] = entries

    def add(self, source: str, entry: Damage) -> None:
        """Add one entry to a source that reports piece by piece."""
        known = self._entries.get(source, [])
        if entry not in known:
            self.report(source, [*known, entry])

    def all(self) -> tuple[Damage, ...]:
        """Every entry, by source."""
        return tuple(entry for source in sorted(self._entries) for entry in self._entries[source])
