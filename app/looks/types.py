"""The typed answers of the looks; the screen imports these, and nothing heavy with them."""

from __future__ import annotations

import msgspec

from ..columns import Columns


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What views a capsule can fill: names of series, which evidence there is, and whether it still grows."""

    status: str
    ranks: tuple[int, ...]
    series: tuple[str, ...]
    has: dict[str, bool]
    trigger_step: int | None


class SeriesColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One series cut to the screen; ``last`` is its newest value, ``at`` the value nearest the cursor's step."""

    name: str
    unit: str
    rank: int
    last: float
    last_step: int
    columns: Columns
    at: float | None = None
    at_step: int | None = None


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at a step."""

    step: int
    sign: str
    words: str


class CaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """One case in a list."""

    id: str
    title: str
    seed: bool
    gated: bool


class CaseList(msgspec.Struct, frozen=True, kw_only=True):
    """The cases that hold a query: how many of ``total`` were found, and the best of them as rows.

    ``problem`` says why the user's own file is not among them.
    """

    file: str
    total: int
    found: int
    rows: tuple[CaseLine, ...]
    problem: str = ""


class CaseCard(msgspec.Struct, frozen=True, kw_only=True):
    """One case with its fields in file order."""

    id: str
    title: str
    seed: bool
    fields: tuple[tuple[str, str], ...]


class CaseCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that names the case in its trailer ``Case-Id``, or that an occurrence names as its fix."""

    id: str
    date: str
    subject: str


class CaseHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a case occurred, its gate, and its commits; ``note`` says why there are none."""

    id: str
    occurrences: tuple[str, ...]
    gate: str
    commits: tuple[CaseCommit, ...]
    note: str


class ResolveDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What a case can be filled with before anyone typed: fields of the form, and where each comes from."""

    values: dict[str, str]
    repository: str
    head: str
    note: str


class ResolvePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be committed; or, in ``problems``, what is missing by field (key "" for what belongs to no field).

    ``incident`` and ``moment`` go back to the worker unchanged, so that it commits what was shown and nothing else.
    """

    problems: dict[str, str]
    file: str = ""
    diff: str = ""
    message: str = ""
    new_case: bool = True
    uncommitted: bool = False
    moment: str = ""
    incident: dict[str, object] = {}


class ResolveDone(msgspec.Struct, frozen=True, kw_only=True):
    """The commit that was made, or ``problem``; ``warning`` where it stands but something after it failed."""

    case: str
    commit: str = ""
    problem: str = ""
    warning: str = ""
