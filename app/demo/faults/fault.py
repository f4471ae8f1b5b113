"""What a fault of the demo is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs exactly once in ``file``, by ``new``."""

    file: str
    old: str
    new: str

    def apply(self, directory: Path) -> None:
        """Edit the file below ``directory`` in place.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        path = directory / self.file
        text = path.read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} must occur once and occurs {found} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the engineer writes down when the incident is resolved; ``symptom`` comes from the report."""

    id: str
    title: str
    keywords: str
    root_cause: str
    trigger: str
    prevention: str


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The commit that mends a fault: its edits, and a test that is red before them and green after.

    Attributes:
        message: of the commit.
        edits: on top of the broken tree.
        test: content of ``test_file``.
        test_file: path of the new test, from the root of the repository.
        test_node: the test that holds the fault, ``FILE::CLASS::METHOD``.
        case: what goes into the case log.
    """

    message: str
    edits: tuple[Edit, ...]
    test: str
    test_node: str
    case: Case

    @property
    def test_file(self) -> str:
        """Path of the new test, from the root of the repository."""
        return self.test_node.partition("::")[0]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: what ``--fault`` takes.
        rule: id of the rule that must name it as the first divergence; None where the commit is harmless.
        message: of the commit that brings it in.
        edits: of that commit.
        arguments: command line of ``train.py`` beyond the defaults.
        repair: how it is mended; None where there is nothing to mend.
    """

    name: str
    rule: str | None
    message: str
    edits: tuple[Edit, ...]
    arguments: tuple[str, ...] = ()
    repair: Repair | None = None
