"""What all records have in common, and the number types of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..limits import MAX_INT64

#: A number of things, bytes or tokens: never negative.
Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Integer = Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)]


class Part(msgspec.Struct, kw_only=True):
    """Base of every object inside a record."""


class Record(Part):
    """Fields any record may have; ``t`` in Unix seconds."""

    step: Count | None = None
    rank: Count | None = None
    t: float | None = None


class Frame(Part):
    """One line of a stack trace."""

    name: str | None = None
    file: str | None = None
    line: Integer | None = None
