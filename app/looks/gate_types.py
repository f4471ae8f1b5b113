"""The typed answer of the look at a gate; apart from the others, which home needs before its first paint."""

from __future__ import annotations

import msgspec

from ..casebook.gate.plan import Plan
from ..casebook.gate.record import Facts


class GateLook(msgspec.Struct, kw_only=True):
    """The gate of a case.

    Attributes:
        case: its id; empty where there is none.
        file: path of the gate's file, and whether it is ``there``.
        plan: what it holds, where it can be used; ``problem`` says why not.
        last: the last run in this repository.
        record: whether the committed record still holds, in words; empty where there is none.
    """

    case: str
    file: str = ""
    there: bool = False
    plan: Plan | None = None
    problem: str = ""
    last: Facts | None = None
    record: str = ""
