"""``gates/CASE.toml``: how the six items of a gate are answered. Written by ``gate init``, edited by people."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

#: The six items, in the order in which they run.
ITEMS = ("regression", "neighbours", "equivalence", "performance", "faults", "documents")

#: What each item asks, for people.
QUESTIONS = {
    "regression": "red on the broken revision, green on the fix",
    "neighbours": "the same kind of fault in neighbouring shapes",
    "equivalence": "the path in use equals the reference",
    "performance": "no slow-down beyond the tolerance",
    "faults": "fault injection and recovery",
    "documents": "invariant, limit and version are written down",
}

#: A time limit in seconds, of at most 30 days.
Seconds = Annotated[float, Meta(gt=0, le=30 * 86_400.0)]
_SHELL = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1"})


class PlanError(Exception):
    """The gate's file cannot be used; one line that says where and what to do."""


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every item has.

    Attributes:
        skip: why it is not run; the gate then passes with exceptions at best.
        command: without a shell; ``bash -c '…'`` where one is needed. Runs in a work tree of the revision.
        timeout: seconds for one run.
    """

    skip: str = ""
    command: str = ""
    timeout: Seconds = 900.0

    def missing(self) -> str:
        """What has to be written before the item can run, or an empty string."""
        return "" if self.command.strip() else 'needs a command, or skip = "reason"'


class Regression(Item, forbid_unknown_fields=True, kw_only=True):
    """Run on both revisions.

    Attributes:
        broken: revision with the fault.
        fixed: revision with the fix.
        files: taken from ``fixed`` into the broken tree, where the test was not there yet.
        junit: where the command writes its JUnit XML (from the root of the tree), where it is not pytest.
    """

    broken: str = ""
    fixed: str = "HEAD"
    files: list[str] = []
    junit: str = ""


class Equivalence(Item, forbid_unknown_fields=True, kw_only=True):
    """Rules that must be quiet on a capsule recorded after the fix, or a command."""

    capsule: str = ""
    rules: list[str] = []

    def missing(self) -> str:
        """A capsule with rules, or a command."""
        if self.capsule and self.rules:
            return ""
        return "" if self.command.strip() else 'needs a capsule with rules, or a command, or skip = "reason"'


class Performance(Item, forbid_unknown_fields=True, kw_only=True):
    """A command that prints one number, run on both revisions in turn; ``tolerance`` is a share (0.05: 5 %)."""

    lower_is_better: bool = True
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.05
    pairs: Annotated[int, Meta(ge=5, le=101)] = 7


class Documents(Item, forbid_unknown_fields=True, kw_only=True):
    """Texts that are absent in the broken revision of ``paths`` and present in the fixed one."""

    paths: list[str] = []
    invariant: str = ""
    limit: str = ""
    version: str = ""

    def patterns(self) -> dict[str, str]:
        """The three texts by name."""
        return {name: getattr(self, name) for name in ("invariant", "limit", "version")}

    def missing(self) -> str:
        """Paths, and all three texts."""
        empty = [name for name, text in (*self.patterns().items(), ("paths", "".join(self.paths))) if not text.strip()]
        return f'needs {", ".join(empty)}, or skip = "reason"' if empty else ""


class Plan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole gate; ``capsule`` is the incident's, from the root of the repository."""

    capsule: str = ""
    regression: Regression = msgspec.field(default_factory=Regression)
    neighbours: Item = msgspec.field(default_factory=Item)
    equivalence: Equivalence = msgspec.field(default_factory=Equivalence)
    performance: Performance = msgspec.field(default_factory=Performance)
    faults: Item = msgspec.field(default_factory=Item)
    documents: Documents = msgspec.field(default_factory=Documents)

    def item(self, name: str) -> Item:
        """One of the six."""
        return getattr(self, name)


def parse(text: str, where: str) -> Plan:
    """Read the file's text.

    Raises:
        PlanError: it is no TOML, or holds something else than a gate; or an item can neither run nor be left out.
    """
    try:
        found = msgspec.convert(tomllib.loads(text), Plan)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise PlanError(f"{where}: {error}") from error
    problems: list[str] = []
    for name in ITEMS:
        item = found.item(name)
        if item.skip.strip():
            continue
        if problem := item.missing() or _command_problem(item.command):
            problems.append(f"[{name}] {problem}")
    if all(found.item(name).skip.strip() for name in ITEMS):
        problems.append("every item is skipped, so nothing would be shown")
    if PurePosixPath(found.regression.junit).is_absolute() or ".." in PurePosixPath(found.regression.junit).parts:
        problems.append("[regression] junit does not lie in the tree")
    if not found.regression.broken.strip():
        problems.append("[regression] needs broken, the revision with the fault")
    if problems:
        raise PlanError(f"{where}: {'; '.join(problems)}")
    return found


def arguments(command: str) -> list[str]:
    """The words of a command, as a shell would part them."""
    return shlex.split(command)


def _command_problem(command: str) -> str:
    if not command.strip():
        return ""
    try:
        words = arguments(command)
    except ValueError as error:
        return f"command: {error}"
    if "\x00" in command or not words:
        return "command is empty"
    shell = next((word for word in words if word in _SHELL), "")
    return f"command: no shell reads {shell}; write bash -c '…'" if shell else ""


def draft(*, broken: str, fixed: str, test: str, capsule: str, rules: list[str]) -> str:
    """The file as ``gate init`` writes it: what is known filled in, the rest to be filled or left out with a reason."""
    path = test.partition("::")[0]
    # JSON strings of text without control characters are TOML strings too.
    quoted = {name: msgspec.json.encode(value).decode() for name, value in locals().items() if isinstance(value, str)}
    listed = ", ".join(msgspec.json.encode(rule).decode() for rule in rules)
    command = msgspec.json.encode(f"{shlex.quote(_python())} -m pytest -q {shlex.quote(test)}" if test else "").decode()
    return f"""# How this fix is proved. Give every item what it needs, or skip = "reason" (a pass with exceptions).
# Commands run without a shell, in temporary work trees of the revisions. llmconsole gate run does it all.
capsule = {quoted["capsule"]}

[regression]                # must fail on `broken` and pass on `fixed`
command = {command}
broken = {quoted["broken"]}
fixed = {quoted["fixed"]}
files = [{quoted["path"] if path else ""}]   # taken from `fixed` into the broken tree, where the test was not there yet

[neighbours]                # the same kind of fault, in neighbouring shapes
command = ""

[equivalence]               # a capsule recorded after the fix on which these rules are quiet, or a command
capsule = ""
rules = [{listed}]

[performance]               # a command that prints one number; run on both revisions in turn
command = ""
lower_is_better = true
tolerance = 0.05

[faults]                    # fault injection and recovery
command = ""

[documents]                 # texts that came with the fix: absent in `broken`, present in `fixed`
paths = []
invariant = ""
limit = ""
version = ""
"""


def _python() -> str:
    """The interpreter that a command would find by name, else the one that runs this."""
    import shutil

    return next((name for name in ("python", "python3") if shutil.which(name)), sys.executable)
