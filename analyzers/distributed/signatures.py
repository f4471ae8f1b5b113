"""What two ranks must agree on in one collective, and how two calls differ.

Sizes may differ legally in all-to-all, in uneven gathers and scatters given as lists, and on the ranks of a rooted call
that have no input or no output. A flat tensor and a scalar of one element are the same to every back end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from ...capsules.dtypes import torch_name

Shapes = tuple[tuple[int, ...], ...]
Difference = Literal["op", "dtype", "shape"]
Agreement = tuple[object, ...]

#: Spellings of one operation; underscores and case are taken off first.
_FAMILIES = {
    "allreduce": "all_reduce",
    "allreducebarrier": "barrier",
    "monitoredbarrier": "barrier",
    "allgatherbase": "all_gather_base",
    "allgatherintotensor": "all_gather_base",
    "allgather": "all_gather",
    "reducescatterbase": "reduce_scatter_base",
    "reducescattertensor": "reduce_scatter_base",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
POINT_TO_POINT = frozenset(("send", "recv"))
#: The operation of a call that is on record without one.
UNTOLD = "?"
#: Calls that end on one rank before all ranks have entered them.
ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter", "send", "recv"))


def family(op: str) -> str:
    """The operation behind one of its spellings: ``nccl:_all_gather_base`` and ``_ALLGATHER_BASE`` are one."""
    bare = op.rpartition(":")[2].strip().lower()
    return _FAMILIES.get(bare.replace("_", ""), bare)


def dtype_name(name: str | None) -> str | None:
    """The name of a dtype in torch, without prefix, None where it is not known."""
    return torch_name(name) if name else None


@dataclass(frozen=True)
class Signature:
    """One collective as it was called. ``parts`` holds the calls of a coalesced one, in order."""

    op: str
    dtype: str | None
    inputs: Shapes
    outputs: Shapes
    parts: tuple[Signature, ...] = ()

    @cached_property
    def family(self) -> str:
        """The operation, whatever its spelling."""
        return family(self.op)

    @cached_property
    def whole(self) -> bool:
        """Whether operation, dtype and shapes are all on record; a rank without input or output lawfully lacks some."""
        if self.parts or self.family == "barrier":
            return True
        return self.op != UNTOLD and bool(self.dtype and self.inputs and self.outputs)

    @property
    def shapes(self) -> Shapes:
        """The shapes to show: of the inputs, else of the outputs."""
        return self.inputs or self.outputs

    def __str__(self) -> str:
        if self.parts:
            return f"{len(self.parts)} coalesced calls, first {self.parts[0]}"
        dtype = f"{self.dtype} " if self.dtype else ""
        shown = ", ".join(str(list(each)) for each in self.shapes[:3]) + (", …" if len(self.shapes) > 3 else "")
        return f"{self.op} {dtype}{shown}".strip()


@dataclass(frozen=True)
class Rules:
    """Liberties that the calls of this job show: an uneven gather, an all-to-all with an empty side."""

    uneven_gather: bool = False
    empty_all_to_all: bool = False


def liberties(signatures: Iterable[Signature]) -> Rules:
    """What the job's own calls show to be lawful in it."""
    uneven = empty = False
    for each in signatures:
        if each.family == "gather":
            uneven |= not _even(each.outputs)
        elif each.family == "all_to_all":
            empty |= not (each.inputs and each.outputs) or any(not math.prod(s) for s in (*each.inputs, *each.outputs))
    return Rules(uneven, empty)


def agreement(call: Signature, rules: Rules) -> Agreement:
    """What must be equal on all ranks that make this call: operation, dtype and shapes, as far as each must."""
    if call.parts:
        return ("coalesced", *(agreement(each, rules) for each in call.parts))
    name = call.family
    if name == "barrier":
        return (name, None, None)
    if name == "all_to_all":
        return (name, None if rules.empty_all_to_all else call.dtype, None)
    return (name, call.dtype, _shapes(call, name, rules))


def _shapes(call: Signature, name: str, rules: Rules) -> object:
    inputs, outputs = canonical(call.inputs), canonical(call.outputs)
    if name == "all_gather" and len(outputs) > 1:
        return (inputs if _even(outputs) else None, outputs)
    if name == "gather":
        return None if rules.uneven_gather else inputs
    if name == "scatter":
        return outputs
    return inputs or outputs


def canonical(shapes: Shapes) -> Shapes:
    """Shapes without their dimensions of one element."""
    return tuple(tuple(size for size in shape if size != 1) for shape in shapes)


def _even(shapes: Shapes) -> bool:
    return len({math.prod(each) for each in shapes}) <= 1


def difference(one: Agreement, other: Agreement) -> Difference:
    """The first respect in which two unequal agreements differ."""
    if one[0] != other[0]:
        return "op"
    if one[0] == "coalesced":
        for a, b in zip(cast("tuple[Agreement, ...]", one[1:]), cast("tuple[Agreement, ...]", other[1:]), strict=False):
            if a != b:
                return difference(a, b)
        return "op"
    return "dtype" if one[1] != other[1] else "shape"


def same_count(one: Signature, other: Signature) -> bool:
    """Whether two calls move the same number of elements though their shapes differ."""
    return sum(map(math.prod, one.shapes)) == sum(map(math.prod, other.shapes))
