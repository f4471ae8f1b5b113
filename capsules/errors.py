"""The one exception this package raises for evidence that cannot be used."""

from __future__ import annotations


class EvidenceError(Exception):
    """Evidence, or a value offered as evidence, cannot be used; ``str()`` is one line: what, where, what to do.

    Args:
        what: what is wrong, with the value seen and the one expected.
        where: the file, field or record it is in.
        hint: what the reader of the message can do about it.
    """

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.hint:
            line = f"{line}; {self.hint}"
        return " ".join(line.split())
