"""A report as a file: text, SVG, or one HTML page. What ``render`` prints; nothing in it is fetched from anywhere."""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from .text import one_line

if TYPE_CHECKING:
    from ..analyzers.report import Report

Format = Literal["txt", "svg", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

#: Characters in a line.
WIDTH = 100

# rich fetches its web font from a server; ours falls back to what the machine has.
_WEB_FONT = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)

# The policy lets the page load nothing at all, whatever a capsule may have got into it.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
body {{ margin: 1.5rem; color: {foreground}; background: {background}; }}
pre {{ font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre-wrap; line-height: 1.35; }}
{stylesheet}
</style>
</head>
<body>
<pre><code>{code}</code></pre>
</body>
</html>
"""


class ExportError(Exception):
    """The file cannot be written as asked; one line that says why and what to do."""


def format_of(path: Path) -> Format:
    """The format that a file name asks for.

    Raises:
        ExportError: it is none of ours.
    """
    suffix = path.suffix.lower().lstrip(".")
    for each in FORMATS:
        if suffix == each:
            return each
    raise ExportError(f"{path}: give the file a name that ends in {', '.join(f'.{each}' for each in FORMATS)}")


def rendered(report: Report, format: Format) -> str:
    """The report as the content of a file of this format."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    from .render import print_report

    printer = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor",
        markup=False, emoji=False, highlight=False, legacy_windows=False,
    )  # fmt: skip
    print_report(report, printer)
    title = one_line(", ".join(each.capsule.title or each.capsule.id for each in report.reports), 200)
    if format == "txt":
        return "\n".join(line.rstrip() for line in printer.export_text().splitlines()) + "\n"
    if format == "html":
        escaped = html.escape(f"llmconsole: {title}").replace("{", "&#123;").replace("}", "&#125;")
        page = _PAGE.replace("%TITLE%", escaped)
        return printer.export_html(theme=DEFAULT_TERMINAL_THEME, code_format=page, inline_styles=False)
    # rich makes its class names from the content's address otherwise: the same report gives the same file.
    name = hashlib.sha256(printer.export_text(clear=False).encode("utf-8", "replace")).hexdigest()[:12]
    return _WEB_FONT.sub("", printer.export_svg(title=title, unique_id=f"r{name}"))


def write(report: Report, path: Path) -> None:
    """Write a report to a new file in the format that its name asks for; an existing file is never replaced.

    Raises:
        ExportError: the name says no format, the file is there already, or the disk refuses.
    """
    content = rendered(report, format_of(path))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(content)
    except FileExistsError:
        raise ExportError(f"{path} is there already and is not replaced; name another file") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}; name a file elsewhere") from error


def write_beside(report: Report, directory: Path, format: Format) -> Path:
    """Write a report into a directory under a name of its own (``sft-7b-report.html``, then ``…-report-2.html``).

    Raises:
        ExportError: the disk refuses.
    """
    capsule = report.reports[0].capsule
    stem = re.sub(r"[^\w.-]+", "-", Path(capsule.path).stem or capsule.id).strip("-.")[:80] or "capsule"
    for number in range(1, 1000):
        path = directory / f"{stem}-report{'' if number == 1 else f'-{number}'}.{format}"
        if not os.path.lexists(path):
            write(report, path)
            return path
    raise ExportError(f"{directory} holds a thousand reports of {stem}; move some away")
