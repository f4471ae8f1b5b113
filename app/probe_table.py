"""What a loader yielded as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from .probing import Field, Lengths, Yielded
from .text import one_line, visible

_DIM = "bright_black"
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_MOST_TEXT = 600


def head(found: Yielded, capsule: str) -> Iterator[Text]:
    """Which batches were taken, why it ended there, and where they were written."""
    why = {
        "limit": "; --batches N for more",
        "exhausted": "",
        "time": "; then the time was over, --timeout S for more",
        "error": "; then it raised",
    }[found.ended]
    yield Text(f" {extent(found)} in {found.seconds:.3g} s{why}", "bold")
    if found.problem:
        yield Text(f" {one_line(found.problem)}", "red")
    for note in found.notes:
        yield Text(f" {one_line(note)}", "yellow")
    yield Text(f" written to {one_line(capsule)}", _DIM)


def extent(found: Yielded) -> str:
    """What was seen of each loader: all of it, or only its first batches."""
    parts: list[str] = []
    for split, exhausted in found.exhausted.items():
        count = found.batches.get(split, 0)
        which = ("the only" if exhausted else "the first") if count == 1 else "no"
        if count > 1:
            which = f"all {count:,}" if exhausted else f"the first {count:,}"
        name = "training" if split == "train" else split
        parts.append(f"{which} {'batches' if count > 1 else 'batch'} of the {name} loader")
    return " and ".join(parts)


def fields(found: Yielded) -> Table:
    """Names, types and shapes."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for field in found.fields:
        seen = sum(found.batches.values())
        missing = "" if field.seen >= seen else f"in {field.seen} of {seen} batches"
        words = "  ".join(each for each in (one_line(field.note, 60), missing) if each)
        table.add_row(
            Text(f"   {one_line(field.name, 40)}"), Text(_type(field)), Text(_shapes(field)), Text(words, _DIM)
        )
    return table


def _type(field: Field) -> str:
    return field.dtype or field.kind


def _shapes(field: Field) -> str:
    shapes = ["[" + ", ".join(map(str, each)) + "]" for each in field.shapes if each]
    return " or ".join(shapes[:3]) + (" …" if len(shapes) > 3 else "")


def facts(found: Yielded, *, ascii_only: bool) -> Iterator[Text]:
    """Lengths, images, labels, padding and duplicates, a line each where there is something to say."""
    if found.lengths is not None:
        each = found.lengths
        measures = f"mean {each.mean:.4g}, p95 {each.p95:.4g}, p99 {each.p99:.4g}"
        yield Text(f" lengths     {each.min:,} to {each.max:,} tokens, {measures}")
        yield Text(f"             {bars(each, ascii_only=ascii_only)}")
    if found.images:
        sizes = ", ".join(f"{each.count} × {each.width}x{each.height}" for each in found.images[:6])
        yield Text(f" images      {sizes}" + (" …" if len(found.images) > 6 else ""))
    if (labels := found.supervised) is not None and labels.of:
        without = f", {labels.rows_without} of {labels.rows} rows without any" if labels.rows_without else ""
        share = f"{100 * labels.tokens / labels.of:.3g} %"
        yield Text(f" supervised  {labels.tokens:,} of {labels.of:,} tokens ({share}){without}")
    if (padding := found.padding) is not None:
        share = f"{100 * padding.positions / padding.of:.3g} %"
        yield Text(f" padding     {padding.positions:,} of {padding.of:,} positions ({share})")
    if (same := found.duplicates) is not None and same.train:
        parts = [f"{same.within_train} of {same.train:,} training samples come again"]
        if same.validation:
            parts.append(f"{same.within_validation} of {same.validation:,} validation samples")
            parts.append(f"{same.between} of these are in both splits")
        yield Text(f" duplicates  {', '.join(parts)}")


def bars(lengths: Lengths, *, ascii_only: bool) -> str:
    """The histogram on one line: a sample alone in its bin is still seen."""
    signs = _ASCII_BARS if ascii_only else _BARS
    most = max(lengths.histogram)
    return "".join(
        signs[0 if not each else max(1, round(each / most * (len(signs) - 1)))] for each in lengths.histogram
    )


def samples(found: Yielded) -> Iterator[Text]:
    """Decoded samples, control characters made visible."""
    for each in found.samples:
        yield Text(f" {one_line(each.name, 40)}  {each.split}, {each.tokens:,} tokens", _DIM)
        shown = each.text if len(each.text) <= _MOST_TEXT else each.text[: _MOST_TEXT - 1] + "…"
        yield Text("   " + visible(shown.replace("\r", "\\r").replace("\n", "⏎").replace("\t", "⇥")))


def printed(found: Yielded) -> Iterator[Text]:
    """The last lines that the loader printed."""
    if found.printed:
        yield Text(" the loader printed", _DIM)
        for line in found.printed[-5:]:
            yield Text(f"   {one_line(line, 200)}", _DIM)
