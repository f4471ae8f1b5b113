"""A JSON document of metrics: a list of rows that name a loss, or lists of equal length under the metrics' names."""

from __future__ import annotations

import re
from typing import Any, cast

from ..errors import EvidenceError
from ..limits import MIB
from .json_lines import Records
from .names import STEPS, folded, is_loss
from .prefix import decode_prefix
from .run import Run
from .source import Source

FORMAT = "JSON history of metrics"

_LARGEST = 256 * MIB
#: A row of a list, or a list of numbers under a name, in either of which a loss is named.
_ROWS = re.compile(r'\s*\[\s*\{[^{}\[\]]{0,4000}?"[^"]{0,100}loss[^"]{0,100}"\s*:\s*"?[-+.\dnNI]', re.IGNORECASE)
_LISTS = re.compile(
    r'\s*\{(?:\s*"[^"]{1,200}"\s*:\s*\[[^\[\]{}"]{0,60000}\]\s*,){0,500}?\s*"[^"]{0,100}loss[^"]{0,100}"\s*:\s*\[',
    re.IGNORECASE,
)


def sniff(source: Source) -> bool:
    """Whether the document begins as such a list of rows, or as such lists."""
    head = source.head.decode("utf-8", "replace").lstrip("\ufeff")
    return bool(_ROWS.match(head) or _LISTS.match(head))


def read(source: Source, out: Run) -> None:
    """Every number of every row, as a line of JSON lines is read."""
    document, whole = decode_prefix(source.read(_LARGEST), str(source.path))
    if not whole:
        source.ends_early("what stands before the tear was read")
    rows: list[Any] = cast("list[Any]", document) if isinstance(document, list) else _rows(document, source)
    records = Records(out)
    for row in rows:
        if isinstance(row, dict):
            records.take(cast("dict[str, Any]", row))
        else:
            out.note("rows that are no objects left out")


def _rows(document: Any, source: Source) -> list[Any]:
    """Lists under names as rows, those that are shorter than the longest one left empty at its end."""
    if not isinstance(document, dict):
        raise EvidenceError("holds no rows of metrics", str(source.path))
    lists = {
        name: cast("list[Any]", each)
        for name, each in cast("dict[str, Any]", document).items()
        if isinstance(each, list)
    }
    longest = max(map(len, lists.values()), default=0)
    if not any(is_loss(name) for name in lists):
        raise EvidenceError("holds no list of losses", str(source.path))
    # A list of another length has other steps: only what is as long as the steps, or all, can be told.
    named = next((len(each) for name, each in lists.items() if folded(name) in STEPS), longest)
    kept = {name: each for name, each in lists.items() if len(each) == named}
    return [{name: each[at] for name, each in kept.items()} for at in range(named)]
