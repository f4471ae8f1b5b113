"""A report as a file: the same words, nothing fetched from anywhere, nothing that a capsule could smuggle in."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from llmconsole.analyzers.report import Report
from llmconsole.analyzers.runner import analyze
from llmconsole.app.export import FORMATS, ExportError, Format, rendered, write, write_beside
from llmconsole.capsules import Capsule

from .capsules import diverged, healthy, hostile
from .conftest import Run

HOSTILE_MARKUP = '<script>alert(1)</script>"><img src=x onerror=alert(1)>{0}{title}&lt;'


def report_of(path: Path) -> Report:
    return Report(reports=(analyze(Capsule.open(path)),))


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_says_what_the_terminal_says(tmp_path: Path, format: Format) -> None:
    content = rendered(report_of(diverged(tmp_path / "a.capsule")), format)
    text = content
    if format == "html":
        text = Page(content).text
    elif format == "svg":
        text = " ".join(ElementTree.fromstring(content).itertext()).replace("\xa0", " ")
    assert "numerics/loss-nonfinite" in text
    assert re.search(r"The loss is NaN from step 3 on; it was 2\.3 at step 2", text)


@pytest.mark.parametrize("format", ["svg", "html"])
def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path, format: Format) -> None:
    content = rendered(report_of(diverged(tmp_path / "a.capsule", title=HOSTILE_MARKUP)), format)
    addresses = set(re.findall(r"\w+://[^\s\"'<)]+", content))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}  # a name space, and a comment
    assert not re.search(r"url\((?!#)", content)
    tags = Page(content).tags
    assert not {"script", "img", "link", "iframe", "object", "foreignobject"} & {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "src"]
    assert "alert(1)" in content


@pytest.mark.parametrize("format", FORMATS)
def test_escape_sequences_are_shown_as_text(tmp_path: Path, format: Format) -> None:
    content = rendered(report_of(hostile(tmp_path / "h.capsule")), format)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b]", content)
    assert r"\x1b[31m" in content.replace("&#x27;", "'")


def test_the_same_report_gives_the_same_file(tmp_path: Path) -> None:
    report = report_of(healthy(tmp_path / "a.capsule"))
    for format in FORMATS:
        assert rendered(report, format) == rendered(report, format)


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    report = report_of(healthy(tmp_path / "a.capsule"))
    (tmp_path / "a.txt").write_text("precious")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    for name in ("a.txt", "link.txt"):
        with pytest.raises(ExportError, match="there already"):
            write(report, tmp_path / name)
    assert (tmp_path / "a.txt").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    names = [write_beside(report, tmp_path, "svg").name for _ in range(3)]
    assert names == ["a-report.svg", "a-report-2.svg", "a-report-3.svg"]


def test_the_command_writes_beside_printing_and_refuses_before_it_analyses(cli: Run, tmp_path: Path) -> None:
    diverged(tmp_path / "a.capsule")
    done = cli("analyze", "a.capsule", "--export", "out.html", "--json")
    assert (done.returncode, done.stderr) == (1, "llmconsole: wrote out.html\n")
    assert "loss-nonfinite" in (tmp_path / "out.html").read_text()
    for name, words in (("out.html", "there already"), ("out.pdf", "ends in .txt, .svg, .html")):
        again = cli("analyze", "a.capsule", "--export", name)
        assert (again.returncode, again.stdout) == (2, "")
        assert words in again.stderr
