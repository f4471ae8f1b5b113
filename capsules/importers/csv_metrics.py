"""CSV of metrics: a header, then one row a step; empty cells are metrics that were not logged then."""

from __future__ import annotations

import csv
import re

from .names import BEGAN_ANEW, STEPS, EpochSteps, Naming, folded, is_loss
from .run import Run
from .source import Source

FORMAT = "CSV of metrics"

_DELIMITERS = (",", "\t", ";")
_MOST_COLUMNS = 5000
#: TensorBoard's export of one series: its name is in the file's name only.
_TENSORBOARD = ("wall_time", "step", "value")
_TAG = re.compile(r"tag-(.{1,200}?)(?: ?\(\d+\))?\.csv$")
_TIMES = ("wall_time", "timestamp", "_timestamp")


def sniff(source: Source) -> bool:
    """Whether the first line names columns, a step or a loss among them, and the next one holds as many cells."""
    if not source.text:
        return False
    lines = [line for line in _text(source.head).splitlines()[:30] if line.strip() and not line.startswith("#")]
    if len(lines) < 2:
        return False
    found = _header(lines[0])
    if found is None:
        return False
    delimiter, names = found
    keys = [folded(name) for name in names]
    cells = _cells(lines[1], delimiter)
    numbers = [_number(cell, delimiter) for cell in cells]
    return (
        len(cells) == len(names)
        and any(each is not None for each in numbers)
        and all(_number(name) is None for name in names)
        and (any(is_loss(key) for key in keys) or any(key in STEPS for key in keys))
    )


def read(source: Source, out: Run) -> None:
    """Every number of every row."""
    lines = source.lines()
    found = next(
        (header for line in lines if line.strip()[:1] not in (b"", b"#") and (header := _header(_text(line)))), None
    )
    if found is None:
        return
    delimiter, names = found
    keys = [folded(name) for name in names]
    at_step = next((keys.index(key) for key in STEPS if key in keys), None)
    at_time = next((keys.index(key) for key in _TIMES if key in keys), None)
    if at_step is None and "epoch" in keys and _counts_epochs(source, delimiter, keys.index("epoch")):
        at_step = keys.index("epoch")
        out.note("no column is a step: a step is an epoch")
    elif at_step is None:
        out.note("no column is a step: a step is the number of the row")
    naming = Naming()
    naming.settle(_plain(name) for at, name in enumerate(names) if at not in (at_step, at_time))
    tag = _TAG.search(source.path.name) if tuple(keys) == _TENSORBOARD else None
    columns = [
        (at, naming(tag[1].replace("_", "/", 1) if tag and keys[at] == "value" else _plain(name)))
        for at, name in enumerate(names)
        if at not in (at_step, at_time)
    ]
    at_epoch = keys.index("epoch") if "epoch" in keys and at_step not in (None, keys.index("epoch")) else None
    epochs = EpochSteps()
    row = -1
    for line in lines:
        if not line.strip():
            continue
        row += 1
        cells = _cells(_text(line), delimiter)
        if source.unended and cells:
            cells[-1] = ""  # it may be torn
            out.note("the last line has no end: its last cell may be torn, and was left out")
        if len(cells) > len(names) or (cells and folded(cells[0]) == keys[0] and len(cells) == len(names)):
            out.note("rows do not fit the header; left out" if len(cells) > len(names) else "the header is repeated")
            continue
        step = row if at_step is None else _step(cells[at_step]) if at_step < len(cells) else None
        if step is None:
            out.note("rows name no step; left out")
            continue
        epoch = _step(cells[at_epoch]) if at_epoch is not None and at_epoch < len(cells) else None
        step = step if epoch is None else epochs.step(epoch, step)
        time = _number(cells[at_time]) if at_time is not None and at_time < len(cells) else None
        for at, name in columns:
            if at < len(cells) and (value := _number(cells[at], delimiter)) is not None:
                out.scalar(name, step, value, time)
    if epochs.began_anew:
        out.note(BEGAN_ANEW)


def _counts_epochs(source: Source, delimiter: str, column: int) -> bool:
    """Whether the first rows name whole epochs, each once."""
    rows = [_cells(line, delimiter) for line in _text(source.head).splitlines()[1:50] if line.strip()]
    found = [_step(cells[column]) for cells in rows[:-1] or rows if column < len(cells)]
    return None not in found and len(set(found)) == len(found) > 0


def _header(line: str) -> tuple[str, list[str]] | None:
    for delimiter in _DELIMITERS:
        names = [name.strip() for name in _cells(line.lstrip("\ufeff"), delimiter)]
        if 2 <= len(names) <= _MOST_COLUMNS and sum(map(bool, names)) >= len(names) - 1:
            return delimiter, names
    return None


def _cells(line: str, delimiter: str) -> list[str]:
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # a cell that is too long, a quote that is never closed
        return line.split(delimiter)


def _plain(name: str) -> str:
    """W&B's export puts the run before the metric: ``fancy-run-3 - train/loss``."""
    return name.rpartition(" - ")[2] if " - " in name and not name.endswith(("__MIN", "__MAX")) else name


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def _number(cell: str, delimiter: str = ",") -> float | None:
    """A float. Where commas separate no cells, one in a number is its decimal point, else it groups thousands."""
    try:
        return float(cell)
    except ValueError:
        pass
    try:
        return float(cell.replace(",", "" if delimiter == "," or "." in cell else "."))
    except ValueError:
        return None


def _step(cell: str) -> int | None:
    value = _number(cell)
    return int(value) if value is not None and 0 <= value < 2**63 and value == int(value) else None
