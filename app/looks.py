"""What the console asks the worker to see: lists, curves, layers … each a small typed answer, cut to the screen.

Every look has a command that prints the same; none of them changes anything.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .listing import Lister, stamp_of

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Capsules kept open between looks; a capsule that changed is opened again.
_KEPT = 4

_listers: dict[str, Lister] = {}
_open: OrderedDict[str, tuple[object, Capsule]] = OrderedDict()


def listing(directory: str, known: int = -1) -> Any:
    """The capsules of a directory, or None where nothing changed since version ``known``."""
    lister = _listers.setdefault(directory, Lister(Path(directory)))
    found = lister.listing()
    return None if found.version == known else found


def curves(
    path: str,
    names: Sequence[str],
    columns: int,
    start: float | None = None,
    stop: float | None = None,
    log: bool = False,
    rank: int | None = None,
) -> dict[str, Any]:
    """Series reduced to pixel columns: name → unit, rank, last value, columns. A series not recorded is absent."""
    from .columns import reduce_to_columns

    capsule = opened(path)
    found: dict[str, Any] = {}
    for name in names:
        series = capsule.scalars(name, rank)
        if len(series):
            found[name] = {
                "unit": series.unit,
                "rank": series.rank,
                "last": float(series.value[-1]),
                "columns": reduce_to_columns(series.step, series.value, columns, start=start, stop=stop, log=log),
            }
    return found


def opened(path: str) -> Capsule:
    """A capsule, kept open until it changes."""
    from ..capsules import Capsule

    stamp = stamp_of(Path(path))
    if path in _open and _open[path][0] == stamp and stamp is not None:
        _open.move_to_end(path)
        return _open[path][1]
    capsule = Capsule.open(os.fspath(path))
    _open[path] = (stamp, capsule)
    while len(_open) > _KEPT:
        _open.popitem(last=False)
    return capsule


METHODS: dict[str, Callable[..., Any]] = {"listing": listing, "curves": curves}
