"""``gates/CASE.json``: the record as an in-toto statement, in one canonical form, and the check that it still holds.

Statement v1 and the test-result predicate v0.1 are those of the in-toto attestation framework; what they have no
field for stands under ``llmconsole``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import cards
from ..store import Repository
from . import plan as plans
from .items import Result, digest_of

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"

Outcome = Literal["passed", "passed-with-exceptions", "failed"]
_PREDICATE_RESULT: dict[Outcome, str] = {"passed": "PASSED", "passed-with-exceptions": "WARNED", "failed": "FAILED"}


class RecordError(Exception):
    """A record does not hold, or there is none; one line that says which and why."""


class Facts(msgspec.Struct, kw_only=True):
    """What a run of the gate establishes, before it becomes a statement.

    Attributes:
        case: id of the case.
        log: path of the case log from the root of the repository.
        broken: full id of the commit with the fault.
        fixed: full id of the commit with the fix.
        capsule_sha256: digest of the incident's capsule; empty where it is not known.
        plan_sha256: digest of the gate's file, with line ends as in git.
        rules_sha256: digest of all rules' declarations and documentation.
        version: of llmconsole.
        results: the six items.
        environment: python, torch, cuda, driver, gpu, seeds.
        who: ``Name <address>``.
        started: UTC, RFC 3339.
        seconds: how long it took.
    """

    case: str
    log: str
    broken: str
    fixed: str
    capsule_sha256: str
    plan_sha256: str
    rules_sha256: str
    version: str
    results: list[Result]
    environment: dict[str, Any]
    who: str
    started: str
    seconds: float

    @property
    def outcome(self) -> Outcome:
        """Passed where every item did; with exceptions where some were left out with a reason; failed otherwise."""
        verdicts = {each.verdict for each in self.results}
        if verdicts - {"passed", "skipped"}:
            return "failed"
        return "passed-with-exceptions" if "skipped" in verdicts else "passed"


def plan_name(case: str) -> str:
    """Path of the gate's file from the root of the repository."""
    return f"gates/{case}.toml"


def record_name(case: str) -> str:
    """Path of the record from the root of the repository."""
    return f"gates/{case}.json"


def statement(facts: Facts) -> dict[str, Any]:
    """The in-toto statement."""
    subject: list[dict[str, Any]] = [{"name": "fix", "digest": {"gitCommit": facts.fixed}}]
    if facts.capsule_sha256:
        subject.append({"name": "capsule", "digest": {"sha256": facts.capsule_sha256}})
    named: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for each in facts.results:
        named["failed" if each.verdict == "error" else each.verdict].append(each.item)
    return {
        "_type": STATEMENT,
        "subject": subject,
        "predicateType": PREDICATE,
        "predicate": {
            "result": _PREDICATE_RESULT[facts.outcome],
            "configuration": [
                {"name": plan_name(facts.case), "digest": {"sha256": facts.plan_sha256}},
                {"name": "rules", "digest": {"sha256": facts.rules_sha256}},
            ],
            "passedTests": named["passed"],
            "warnedTests": named["skipped"],
            "failedTests": named["failed"],
            "llmconsole": msgspec.to_builtins(facts)
            | {"outcome": facts.outcome, "not_run": {r.item: r.words for r in facts.results if r.verdict == "skipped"}},
        },
    }


def canonical(document: Any) -> bytes:
    """One form of a JSON document: keys sorted, no space, UTF-8, one line end; a number that is none as a string."""
    from ....capsules.jsonio import decode, encode

    plain = decode(encode(document))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def sha256(content: bytes) -> str:
    """Digest in hex."""
    return hashlib.sha256(content).hexdigest()


def read(content: bytes, where: str) -> tuple[dict[str, Any], Facts]:
    """A record's statement and facts.

    Raises:
        RecordError: it is no record of ours, or not in its canonical form.
    """
    from ....capsules.errors import EvidenceError
    from ....capsules.jsonio import decode_object

    try:
        found = decode_object(content)
        facts = msgspec.convert(found["predicate"]["llmconsole"], Facts)
    except (EvidenceError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise RecordError(f"{where} is no gate record ({error})") from error
    if canonical(statement(facts)) != content:
        raise RecordError(f"{where} is not as the gate wrote it: its parts contradict each other")
    return found, facts


def verify(repository: Repository, case: str, digest: Callable[[Path], str] | None = None) -> Facts:
    """Check a record: as committed by the gate, of this case, with digests and commits that hold.

    It refuses whatever was changed, moved or lost since the gate's commit. Whoever makes up a consistent record, card
    and message in one commit of their own is not found out by it: only the signature of that commit says who did.

    Args:
        repository: that of fix and test.
        case: id of the case.
        digest: of a capsule; where it is given, capsules at hand that the record names are compared too.

    Raises:
        RecordError: the first thing that does not hold.
        StoreError: git cannot be asked.
    """
    name, plan = record_name(case), plan_name(case)
    content = _committed(repository, name)
    if content is None:
        raise RecordError(f"{name} is not there; llmconsole gate run {case} makes it")
    commit = repository.newest_touching(name) or "HEAD"
    trailers = repository.trailers(commit)
    if trailers.get("Gate-Sha256") != sha256(content):
        raise RecordError(f"{name} was changed after the gate wrote it, by commit {commit[:12]}")
    _, facts = read(content, name)
    if facts.case != case or trailers.get("Case-Id") != case:
        raise RecordError(f"{name} is the record of another case, {facts.case}")
    if trailers.get("Gate-Result") != facts.outcome:
        raise RecordError(f"{name} says {facts.outcome}, its commit {trailers.get('Gate-Result')}")
    for each in facts.results:
        for run in each.runs:
            if digest_of(run.output) != run.output_sha256:
                raise RecordError(f"{name}: an output of {each.item} does not have the digest recorded for it")
    for which, revision in (("fixed", facts.fixed), ("broken", facts.broken)):
        if repository.commit_id(revision) != revision or not repository.reachable(revision):
            gone = "this clone is shallow; git fetch --unshallow" if repository.shallow() else "it vanished"
            raise RecordError(f"{name}: the {which} commit {revision[:12]} is not in this repository any more ({gone})")
    _check_commit(repository, commit, facts)
    if plan_sha256(repository.show(commit, plan) or b"") != facts.plan_sha256:
        raise RecordError(f"{plan} is not the one that the record was made with")
    written = _committed(repository, plan) or b""
    if plan_sha256(written) != facts.plan_sha256:
        raise RecordError(f"{plan} was changed since the record was made; run the gate again")
    if digest is not None:
        _check_capsules(repository, facts, written, digest)
    return facts


def _committed(repository: Repository, name: str) -> bytes | None:
    """A file as HEAD holds it, where the work tree has the same; None where it has none.

    Raises:
        RecordError: they differ, beyond the line ends that git converts.
    """
    try:
        lying = (repository.root / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{name} cannot be read ({error.strerror})") from error
    held = repository.show("HEAD", name)
    if held is None or (lying != held and lying != repository.show("HEAD", name, filtered=True)):
        raise RecordError(f"{name} differs from what is committed, or was never committed")
    return held


def _check_commit(repository: Repository, commit: str, facts: Facts) -> None:
    """The record's commit holds what a gate commits, and nothing else; the card in it names the record and its outcome.

    Raises:
        RecordError: it is another commit.
    """
    name = record_name(facts.case)
    others = [path for path in repository.touched(commit) if path not in (name, plan_name(facts.case), facts.log)]
    if others:
        raise RecordError(f"{name} was not committed by a gate: commit {commit[:12]} also changes {others[0]}")
    if facts.who not in repository.people(commit):
        raise RecordError(f"{name} was made by {facts.who}, and commit {commit[:12]} by somebody else")
    text = (repository.show(commit, facts.log) or b"").decode("utf-8", "replace")
    card = cards.find(cards.parse(text), facts.case)
    gate = card.get("Gate") if card else ""
    if gate.split()[:1] != [name] or facts.outcome not in gate.split():
        raise RecordError(f"{name} says {facts.outcome}, the card in its commit {gate or 'nothing'}")


def _check_capsules(repository: Repository, facts: Facts, plan: bytes, digest: Callable[[Path], str]) -> None:
    """Capsules that are at hand are still those of the record; they need not be in git, so they may be absent.

    Raises:
        RecordError: one is another now.
    """
    found = plans.parse(plan.decode("utf-8", "replace"), plan_name(facts.case))
    wanted = {found.capsule: facts.capsule_sha256} if found.capsule and facts.capsule_sha256 else {}
    for each in facts.results:
        if isinstance(each.baseline, dict) and {"capsule", "sha256"} <= each.baseline.keys():
            wanted[str(each.baseline["capsule"])] = str(each.baseline["sha256"])
    for name, sha in wanted.items():
        path = repository.root / name
        if path.exists() and digest(path) != sha:
            raise RecordError(f"{record_name(facts.case)} is of another capsule than {name} is now")


def plan_sha256(content: bytes) -> str:
    """Digest of a gate's file, whatever line ends git gives it in a work tree."""
    return sha256(content.replace(b"\r\n", b"\n"))


def junit(facts: Facts) -> bytes:
    """The six items as JUnit XML, for a forge's test report."""
    import xml.etree.ElementTree as ElementTree

    counts = {verdict: str(sum(each.verdict == verdict for each in facts.results))
              for verdict in ("failed", "error", "skipped")}  # fmt: skip
    suite = ElementTree.Element(
        "testsuite",
        name=f"gate {facts.case}",
        tests=str(len(facts.results)),
        failures=counts["failed"],
        errors=counts["error"],
        skipped=counts["skipped"],
        time=f"{facts.seconds:.3f}",
        timestamp=facts.started,
    )
    for each in facts.results:
        seconds = sum(run.seconds for run in each.runs)
        case = ElementTree.SubElement(suite, "testcase", classname=facts.case, name=each.item, time=f"{seconds:.3f}")
        if each.verdict != "passed":
            tag = {"failed": "failure", "error": "error", "skipped": "skipped"}[each.verdict]
            ElementTree.SubElement(case, tag, message=_printable(each.words))
        if output := "\n".join(run.output for run in each.runs):
            ElementTree.SubElement(case, "system-out").text = _printable(output)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return "".join(
        char if char in "\t\n" or " " <= char <= "\ud7ff" or "\ue000" <= char <= "\ufffd" else "�" for char in text
    )
