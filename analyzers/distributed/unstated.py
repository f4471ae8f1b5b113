"""Calls of which not everything is on record: what is unknown can neither accuse a rank nor acquit it.

A field may be missing, or be nothing that can be read. Such a call is compared by what it does say: where that is what
the other ranks say under the number, it is taken for theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .collectives import Calls, Ints, Table
from .signatures import UNTOLD, Rules, Signature, agreement


def as_the_others_say(table: Table, signatures: Sequence[Signature], rules: Rules) -> Ints:
    """int64[N]: the signature of each row, for one that is not whole that of other ranks which it does not contradict.

    Args:
        table: calls sorted by (group, rank, seq).
        signatures: to which ``table.signature`` points.
        rules: the liberties of the job.
    """
    partial = np.array([not each.whole for each in signatures], np.bool_)
    if not len(table) or not partial[table.signature].any():
        return table.signature
    numbers: dict[object, int] = {}
    agreed = np.array([numbers.setdefault(agreement(each, rules), len(numbers)) for each in signatures], np.int64)
    order = np.lexsort((table.seq, table.group))
    group, seq, own = (each[order] for each in (table.group, table.seq, table.signature))
    starts = np.flatnonzero((np.diff(group, prepend=-1) != 0) | (np.diff(seq, prepend=-1) != 0))
    differ = np.maximum.reduceat(agreed[own], starts) != np.minimum.reduceat(agreed[own], starts)
    differ &= np.logical_or.reduceat(partial[own], starts)
    ends = np.append(starts[1:], len(own))
    found = table.signature.copy()
    for start, end in zip(starts[differ].tolist(), ends[differ].tolist(), strict=True):
        here = own[start:end]
        others = [each for each, _ in Counter(here[~partial[here]].tolist()).most_common()]
        for at in (start + np.flatnonzero(partial[here])).tolist():
            call = signatures[int(own[at])]
            same = (each for each in others if _may_be(call, signatures[each], rules))
            found[order[at]] = next(same, own[at])
    return found


def _may_be(call: Signature, other: Signature, rules: Rules) -> bool:
    """Whether nothing that a call says contradicts another one."""
    if call.parts or other.parts:
        return False
    op = other.op if call.op == UNTOLD else call.op
    filled = Signature(op, call.dtype or other.dtype, call.inputs or other.inputs, call.outputs or other.outputs)
    return agreement(filled, rules) == agreement(other, rules)


def on_record(calls: Calls, row: int) -> bool:
    """Whether everything that is shown of a call of the table was stated by its own rank."""
    record, call = calls.record(int(calls.table.record[row])), calls.call(row)
    if "kind" in record:  # the words of a watchdog, which name sizes alone
        return True
    shown = (("op", call.op), ("dtype", call.dtype), ("shapes_in", call.inputs), ("shapes_out", call.outputs))
    return all(record.get(name) or not value for name, value in shown)
