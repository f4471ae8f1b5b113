"""What the named tests said of themselves: JUnit XML, read as the untrusted output of somebody's command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...text import one_line

Outcome = Literal["passed", "failed", "error", "skipped"]

_LARGEST = 64 << 20
#: A failure with one of these is a test that could not start, whatever it would have said of the fault.
_NOT_RUN = re.compile(r"\b(?:ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b")


class OutcomeError(Exception):
    """The outcomes of a run cannot be read; words for the record."""


@dataclass(frozen=True)
class Test:
    """One test: its name, what became of it, and the first line of what it said."""

    name: str
    outcome: Outcome
    words: str = ""


def read(path: Path) -> tuple[Test, ...]:
    """The tests of a JUnit XML file.

    Raises:
        OutcomeError: there is no such file, or it is none.
    """
    import xml.etree.ElementTree as ElementTree

    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as stream:
            content = stream.read(_LARGEST + 1)
    except OSError as error:
        raise OutcomeError("wrote no JUnit XML, so a test that failed cannot be told from one that could not start "
                           "(pytest writes it; others name theirs with junit = \"PATH\")") from error  # fmt: skip
    # Entities could expand to gigabytes; no writer of test results declares any. UTF-16, full of NULs, would hide them.
    if len(content) > _LARGEST or any(mark in content for mark in (b"<!DOCTYPE", b"<!ENTITY", b"\0")):
        raise OutcomeError("wrote JUnit XML that is too large, in UTF-16, or declares entities")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise OutcomeError(f"wrote JUnit XML that cannot be read ({error})") from error
    return tuple(_tests(root))


def _tests(root: object) -> Iterator[Test]:
    from xml.etree.ElementTree import Element

    assert isinstance(root, Element)
    for case in root.iter("testcase"):
        name = "::".join(part for part in (case.get("classname", ""), case.get("name", "")) if part)
        outcome: Outcome = "passed"
        words = ""
        for kind in ("error", "failure", "skipped"):
            said = case.find(kind)
            if said is None:
                continue
            words = (said.get("message") or said.text or "").strip().split("\n")[0]
            outcome = "skipped" if kind == "skipped" else "error" if kind == "error" else "failed"
            if outcome == "failed" and (_NOT_RUN.match(words) or said.get("type", "").endswith("ImportError")):
                outcome = "error"
            break
        yield Test(one_line(name, 500), outcome, one_line(words, 300))


@dataclass(frozen=True)
class Judgement:
    """``passed``, or not and why: ``failed`` where the fix is at fault, ``error`` where nothing was shown."""

    verdict: Literal["passed", "failed", "error"]
    words: str


def judge_green(tests: tuple[Test, ...], status: int) -> Judgement:
    """Whether a run on the fixed revision is green: something ran, and nothing failed."""
    ran = [each for each in tests if each.outcome != "skipped"]
    if not ran:
        skipped = f" ({len(tests)} skipped)" if tests else ""
        return Judgement("error", f"collects nothing: no test ran{skipped}")
    bad = [each for each in ran if each.outcome != "passed"]
    if bad:
        first = bad[0]
        return Judgement("failed", f"{len(bad)} of {len(ran)} tests fail: {first.name}: {first.words}".rstrip(": "))
    if status:
        return Judgement("failed", f"{_passing(len(ran))} and the command ends with status {status}")
    return Judgement("passed", _passing(len(ran)))


def _passing(count: int) -> str:
    return "1 test passes" if count == 1 else f"{count:,} tests pass"


def judge_regression(broken: tuple[Test, ...], fixed: tuple[Test, ...], status: int) -> Judgement:
    """Red on the broken revision, green on the fixed one, of the same tests.

    Args:
        broken: what the tests said there.
        fixed: and here.
        status: exit status on the fixed revision.
    """
    green = judge_green(fixed, status)
    failed = [each for each in broken if each.outcome == "failed"]
    if green.verdict == "error":
        return Judgement("error", f"on the fix it {green.words}")
    if green.verdict == "failed":
        where = "fails on both revisions" if failed else "fails on the fix"
        return Judgement("failed", f"not fixed: {where}: {green.words}")
    if not failed:
        stopped = next((each for each in broken if each.outcome == "error"), None)
        if stopped is not None:
            return Judgement("error", f"not red: on the broken revision it could not run ({stopped.words or 'error'})")
        if not any(each.outcome == "passed" for each in broken):
            words = f"every test ({len(broken)}) is skipped or expected to fail" if broken else "collects nothing"
            return Judgement("error", f"not red: {words} on the broken revision")
        return Judgement("failed", "does not reproduce the fault: passes on both revisions")
    healed = {each.name for each in fixed if each.outcome == "passed"}
    red = [each for each in failed if each.name in healed]
    if not red:
        return Judgement("error", "the tests that fail on the broken revision are not those that pass on the fix")
    return Judgement("passed", f"red on broken ({red[0].name}: {red[0].words}), green on fixed ({green.words})")
