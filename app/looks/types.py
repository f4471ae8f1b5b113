"""The typed answers of the looks; the screen imports these, and nothing heavy with them."""

from __future__ import annotations

import msgspec

from ..columns import Columns


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What views a capsule can fill; ``changed`` is Unix seconds of the last write, ``version`` differs after each.

    ``world_size``: processes of the job as the manifest says, 0 where it does not.
    """

    status: str
    ranks: tuple[int, ...]
    series: tuple[str, ...]
    has: dict[str, bool]
    trigger_step: int | None
    world_size: int = 0
    changed: float = 0.0
    version: str = ""


class SeriesColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One series cut to the screen; ``last`` is its newest value, ``at`` the value nearest the cursor's step.

    ``beside`` where it comes from the other run that was asked for.
    """

    name: str
    unit: str
    rank: int
    last: float
    last_step: int
    columns: Columns
    at: float | None = None
    at_step: int | None = None
    beside: bool = False


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at a step."""

    step: int
    sign: str
    words: str


class CaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """One case in a list; ``alike`` where it does not hold the query and resembles those that do."""

    id: str
    title: str
    seed: bool
    gated: bool
    alike: bool = False


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


class MemoryPhase(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of one phase, in bytes; None where it was not measured.

    ``unaccounted`` is what is allocated less all parts: below zero the ledger says more than was measured.
    """

    phase: str
    parts: dict[str, int]
    unaccounted: int | None
    fragmentation: int | None
    allocated: int | None
    reserved: int | None
    peak: int | None
    capacity: int | None
    largest_free_block: int | None


class MemoryLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of one rank at one step, which is the ``place``-th of ``count`` steps with a ledger.

    ``computed`` is the peak as the configuration gives it, None where the manifest does not say enough; ``reading``
    what it leaves open.
    """

    rank: int
    ranks: tuple[int, ...]
    step: int | None
    place: int
    count: int
    peak_step: int | None
    phases: tuple[MemoryPhase, ...]
    computed: MemoryPhase | None = None
    reading: str = ""


class LiveStack(msgspec.Struct, frozen=True, kw_only=True):
    """What one stack holds: bytes in ``count`` blocks; ``frames`` as ``function file:line``, innermost first."""

    size: int
    count: int
    category: str
    frames: tuple[str, ...]


class LiveStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Who held the memory of one rank at the instant that matters, the largest first.

    Attributes:
        rank: one of ``ranks``, which have such stacks.
        total: bytes of all ``stacks`` stacks, of which ``rows`` are the largest.
        blocks: blocks altogether.
    """

    rank: int
    ranks: tuple[int, ...]
    total: int
    blocks: int
    stacks: int
    rows: tuple[LiveStack, ...]


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its cells (one character a collective) and its times in milliseconds, where they were measured."""

    rank: int
    cells: str
    host: str
    exit: str
    compute_ms: float | None
    communication_ms: float | None
    data_ms: float | None


class RanksGrid(msgspec.Struct, frozen=True, kw_only=True):
    """A window of the grid rank × collective around a cursor.

    Attributes:
        group: process group on screen, one of ``groups``.
        columns: collectives of the group altogether; ``left`` is the first on screen, ``at`` the one at the cursor.
        count: ranks altogether; ``top`` is the first on screen, ``row`` the one at the cursor.
        first: the first collective in which ranks differ, or None.
        detail: lines on the collective at the cursor.
        longest_ms: the greatest sum of times of any rank, for the scale of the bars.
        note: what the grid leaves out.
    """

    group: str
    groups: tuple[str, ...]
    columns: int
    left: int
    at: int
    count: int
    top: int
    row: int
    first: int | None
    rows: tuple[RankRow, ...]
    detail: tuple[str, ...]
    longest_ms: float
    note: str


class LatencyComponent(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in seconds of one component over the requests that have it; None where they are too few to tell."""

    name: str
    requests: int
    p50: float | None
    p95: float | None
    p99: float | None


class LatencySlice(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with one value of a field: how many, and how many of them are slow.

    Attributes:
        low: lower end of the interval (95 %) of the share of slow requests.
        high: upper end.
        elsewhere: share of slow requests outside the slice.
        held: share of all slow requests that lie in the slice.
        apart: the slice is slower than the rest, with all slices that were looked at allowed for.
    """

    name: str
    requests: int
    slow: int
    share: float
    low: float
    high: float
    elsewhere: float
    held: float
    apart: bool


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of requests goes. ``slow`` is the threshold in seconds above which a request counts as slow."""

    measure: str
    requests: int
    total: LatencyComponent
    components: tuple[LatencyComponent, ...]
    slow: float | None
    slices: tuple[LatencySlice, ...]
    note: str
