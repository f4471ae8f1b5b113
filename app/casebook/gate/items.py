"""The six items, each run and judged: what was run, what was seen, and a verdict in words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...text import one_line
from ..store import Repository, StoreError
from . import outcomes, performance
from .outcomes import Judgement, OutcomeError
from .plan import Documents, Equivalence, Item, Performance, Plan, Regression
from .recorded import Recorded, order
from .workshop import Ran, Workshop

Verdict = Literal["passed", "failed", "error", "skipped"]

#: What unittest says where it found no test, with a status that says success before Python 3.12.
_NO_TEST = re.compile(r"^Ran 0 tests in ", re.MULTILINE)

#: What Python says where ``-m`` names a module that is not installed: nothing ran. Python's own errors quote the name.
_NO_MODULE = re.compile(r"^\S.*: No module named [^\s']+$")

#: Analyses a capsule with some rules and gives the report, its digest and what it says of its recording; the caller
#: owns the worker that does it.
Analyze = Callable[[Path, list[str]], tuple[dict[str, Any], str, Recorded]]


class Run(msgspec.Struct, kw_only=True):
    """One command on one revision; ``output`` is the end of what it printed, ``output_sha256`` its digest."""

    revision: str
    command: str
    status: int | None
    seconds: float
    output: str
    output_sha256: str


class Result(msgspec.Struct, kw_only=True):
    """One item as it stands in the record.

    Attributes:
        item: its name.
        verdict: passed, failed (the fix is at fault), error (nothing was shown), skipped.
        words: why, in one sentence.
        observed: what was measured, where it is a number or a list.
        baseline: what it is compared with.
        threshold: where the verdict turns.
        runs: commands that were run for it.
    """

    item: str
    verdict: Verdict
    words: str
    observed: Any = None
    baseline: Any = None
    threshold: Any = None
    runs: list[Run] = []


@dataclass(frozen=True)
class Bench:
    """What items need to run: the trees, the two commits, someone who analyses capsules.

    ``own`` are the paths below which the product commits: they are no part of a fix.
    """

    repository: Repository
    workshop: Workshop
    broken: str
    fixed: str
    own: tuple[str, ...]
    analyze: Analyze


def run_item(name: str, plan: Plan, bench: Bench) -> Result:
    """Run one item, or say why it is not run.

    Raises:
        StoreError: git cannot make a work tree.
    """
    item = plan.item(name)
    if item.skip.strip():
        return Result(item=name, verdict="skipped", words=f"not run because: {item.skip.strip()}")
    if isinstance(item, Regression):
        return _regression(item, bench)
    if isinstance(item, Equivalence) and item.capsule:
        return _quiet(item, bench)
    if isinstance(item, Performance):
        return _performance(item, bench)
    if isinstance(item, Documents):
        return _documents(item, bench)
    return _green(name, item, bench)


def _regression(item: Regression, bench: Bench) -> Result:
    broken_tree, fixed_tree = bench.workshop.tree(bench.broken), bench.workshop.tree(bench.fixed)
    for name in item.files:
        if problem := _carry(bench, name, broken_tree):
            return Result(item="regression", verdict="error", words=problem)
    runs: list[Run] = []
    tests: list[tuple[outcomes.Test, ...]] = []
    status = 0
    for commit, tree in ((bench.broken, broken_tree), (bench.fixed, fixed_tree)):
        ran, path = _tested(item, bench, commit, tree, item.junit)
        runs.append(_kept(item.command, commit, ran))
        which = "broken revision" if commit == bench.broken else "fix"
        if ran.problem:
            return Result(item="regression", verdict="error", words=f"on the {which}: {ran.problem}", runs=runs)
        status = ran.status or 0
        try:
            tests.append(outcomes.read(path))
        except OutcomeError as error:
            cause = f"the command {_ended(ran)}; " if ran.status else ""
            words = f"on the {which} {cause}it {error}" + ("" if ran.status else " (exit status 0)")
            return Result(item="regression", verdict="error", words=words, runs=runs)
    judged = outcomes.judge_regression(tests[0], tests[1], status)
    return Result(
        item="regression",
        verdict=judged.verdict,
        words=judged.words,
        observed=_counts(tests[1]),
        baseline=_counts(tests[0]),
        threshold="a test that fails on broken and passes on fixed; none fails on fixed",
        runs=runs,
    )


def _carry(bench: Bench, name: str, tree: Path) -> str:
    """Put a file of the fixed revision into the broken tree; why that cannot be, or an empty string."""
    if not _inside(name):
        return f"files: {name!r} does not lie in the repository"
    try:
        bench.repository.carry(tree, bench.fixed, Path(name).as_posix())
    except StoreError as error:
        return f"files: {name} cannot be taken from the fixed revision: {error}"
    return ""


def _inside(name: str) -> bool:
    """Whether a name from a gate's file leads to something in a tree, by its words."""
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _green(name: str, item: Item, bench: Bench) -> Result:
    """A command that must succeed on the fix; where it runs tests, some must have run."""
    tree = bench.workshop.tree(bench.fixed)
    ran, path = _tested(item, bench, bench.fixed, tree)
    runs = [_kept(item.command, bench.fixed, ran)]
    if ran.problem:
        return Result(item=name, verdict="error", words=ran.problem, runs=runs)
    try:
        tests = outcomes.read(path)
    except OutcomeError:  # it is no test runner: its exit status speaks for it
        if not ran.status and _NO_TEST.search(ran.output):
            return Result(item=name, verdict="error", words="collects nothing: no test ran", runs=runs)
        if ran.status and _NO_MODULE.search(_last_line(ran)):
            return Result(item=name, verdict="error", words=f"the command {_ended(ran)}", runs=runs)
        judged = Judgement("failed", _ended(ran)) if ran.status else Judgement("passed", "the command succeeds")
        return Result(item=name, verdict=judged.verdict, words=judged.words, observed=ran.status, runs=runs)
    judged = outcomes.judge_green(tests, ran.status or 0)
    return Result(item=name, verdict=judged.verdict, words=judged.words, observed=_counts(tests), runs=runs)


def _tested(item: Item, bench: Bench, commit: str, tree: Path, junit: str = "") -> tuple[Ran, Path]:
    """Run an item's command with a place for its JUnit XML, and say where that is."""
    own = bench.workshop.scratch(f"junit-{commit[:12]}.xml")
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} -p no:cacheprovider {shlex.quote(f'--junitxml={own}')}"
    path = tree / junit if junit else own
    with contextlib.suppress(OSError):
        path.unlink()  # one that lay there says nothing of this run
    return bench.workshop.run(item.command, tree, item.timeout, {"PYTEST_ADDOPTS": options.strip()}), path


def _quiet(item: Equivalence, bench: Bench) -> Result:
    """Rules that must have run, and found nothing, on a capsule recorded after the fix.

    Skipped, failed or undetermined is not quiet. A capsule from before the fix shows nothing, whatever the rules say.
    """
    path = bench.repository.root / item.capsule
    try:
        report, digest, recorded = bench.analyze(path, item.rules)
    except Exception as error:  # the worker's words: unusable, killed, out of time
        return Result(item="equivalence", verdict="error", words=str(error))
    when = order(recorded, bench.repository, bench.broken, bench.fixed, bench.own)
    states = {rule: _state(report, rule) for rule in item.rules}
    loud = {rule: words for rule, words in states.items() if words != "quiet"}
    verdict: Verdict = "passed"
    words = "; ".join(f"{rule} {state}" for rule, state in loud.items())
    if when.problem:
        verdict, words = "error", when.problem
    elif loud:
        verdict = "failed" if any(words.startswith("finds") for words in loud.values()) else "error"
    else:
        ran = f"{len(states)} rules ran and are quiet"
        words = f"{ran}; note: {when.note}" if when.note else ran
    note = {"note": when.note} if when.note else {}
    return Result(
        item="equivalence",
        verdict=verdict,
        words=words,
        observed=states,
        baseline={"capsule": item.capsule, "sha256": digest, "recorded": msgspec.to_builtins(recorded) | note},
        threshold="every rule ran and found nothing at warning or above, on a capsule recorded after the fix",
    )


def _state(report: dict[str, Any], rule: str) -> str:
    """``quiet``, or what the rule did instead."""
    said = [each for each in report["findings"] if each["rule"] == rule]
    loud = next((each for each in said if each["severity"] != "info"), None)
    if loud is not None:
        return f"finds: {loud['summary']}"
    if any(each["confidence"] == "undetermined" for each in said):
        return "is undetermined"
    skipped = next((each for each in report["skipped"] if each["rule"] == rule), None)
    if skipped is not None:
        return f"was skipped: {', '.join(skipped['missing'])} is missing"
    failed = next((each for each in report["errors"] if each["rule"] == rule), None)
    if failed is not None:
        return f"failed: {failed['error']}"
    return "quiet" if said or rule in report["quiet"] else "did not run"


def _performance(item: Performance, bench: Bench) -> Result:
    runs: list[Run] = []
    numbers: dict[str, list[float]] = {bench.broken: [], bench.fixed: []}
    for pair in range(item.pairs):
        order = (bench.broken, bench.fixed) if pair % 2 == 0 else (bench.fixed, bench.broken)
        for commit in order:
            ran = bench.workshop.run(item.command, bench.workshop.tree(commit), item.timeout)
            runs.append(_kept(item.command, commit, ran))
            which = "broken revision" if commit == bench.broken else "fix"
            if ran.problem or ran.status:
                words = ran.problem or _ended(ran)
                return Result(item="performance", verdict="error", words=f"on the {which}: {words}", runs=runs)
            number = performance.number_of(ran.output)
            if number is None or number <= 0:
                words = f"on the {which} it prints no positive number on a line of its own"
                return Result(item="performance", verdict="error", words=words, runs=runs)
            numbers[commit].append(number)
    found = performance.compare(
        numbers[bench.broken],
        numbers[bench.fixed],
        lower_is_better=item.lower_is_better,
        tolerance=item.tolerance,
    )
    return Result(
        item="performance",
        verdict=found.verdict,
        words=found.words,
        observed={"fixed": numbers[bench.fixed], "ratio": found.ratio, "interval": [found.low, found.high]},
        baseline={"broken": numbers[bench.broken]},
        threshold=1 + item.tolerance,
        runs=runs,
    )


def _documents(item: Documents, bench: Bench) -> Result:
    def text(commit: str) -> str:
        parts = (bench.repository.show(commit, name) or b"" for name in item.paths)
        return " ".join(b"\n".join(parts).decode("utf-8", "replace").split())

    absent = [name for name in item.paths if bench.repository.show(bench.fixed, name) is None]
    if absent:
        return Result(item="documents", verdict="error", words=f"not in the fixed revision: {', '.join(absent)}")
    before, after = text(bench.broken), text(bench.fixed)
    wrong: list[str] = []
    for name, pattern in item.patterns().items():
        wanted = " ".join(pattern.split())  # a text may be wrapped differently where it stands
        if wanted not in after:
            wrong.append(f"the {name} is not in the documents of the fix")
        elif wanted in before:
            wrong.append(f"the {name} was there before the fix")
    words = "; ".join(wrong) or "invariant, limit and version came with the fix"
    return Result(
        item="documents",
        verdict="failed" if wrong else "passed",
        words=words,
        observed=item.patterns(),
        baseline=item.paths,
        threshold="absent in broken, present in fixed",
    )


def _kept(command: str, commit: str, ran: Ran) -> Run:
    return Run(
        revision=commit,
        command=command,
        status=ran.status,
        seconds=round(ran.seconds, 3),
        output=ran.output,
        output_sha256=digest_of(ran.output),
    )


def _ended(ran: Ran) -> str:
    """How a command ended that did not succeed, with the last line it printed: there the cause stands as a rule."""
    said = one_line(_last_line(ran), 300)
    return f"ends with status {ran.status}" + (f": {said}" if said else "")


def _last_line(ran: Ran) -> str:
    return ran.output.rstrip().rpartition("\n")[2].strip()


def digest_of(output: str) -> str:
    """SHA-256 of a kept output, in hex."""
    return hashlib.sha256(output.encode("utf-8", "surrogatepass")).hexdigest()


def _counts(tests: tuple[outcomes.Test, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in tests:
        found[each.outcome] = found.get(each.outcome, 0) + 1
    return found
