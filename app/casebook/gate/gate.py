"""Preparing a gate, running it, and committing card, file and record together where it passes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ... import paths
from .. import cards, store
from ..files import replace_file, restore_file
from ..incident import IncidentError, read_notebook, update_incident
from ..resolve import ResolveError
from ..resolve import read as read_log
from ..store import Repository, StoreError
from . import plan as plans
from . import record
from .at_hand import capsule_of
from .items import Bench, Result, run_item
from .plan import ITEMS, Plan, PlanError
from .record import Facts
from .recorded import Recorded
from .workshop import Workshop

if TYPE_CHECKING:
    from ...worker import Worker

_LARGEST_PLAN = 1 << 20

#: Told while a gate runs: the item, and a line that its command printed (empty where it begins), or its result.
Progress = Callable[[str, "str | Result"], None]


class GateError(Exception):
    """The gate cannot be made or run; one line that says what and what to do."""


class Gate:
    """The gate of one case in one repository.

    Args:
        case: id of the case.
        start: a directory in the repository of fix and test.

    Raises:
        GateError: no such case in the log of this repository.
        StoreError: no repository.
        ResolveError: the log cannot be read.
    """

    def __init__(self, case: str, start: Path) -> None:
        if not cards.valid_id(case):
            raise GateError(f"{case!r} is no case id; llmconsole cases lists them")
        self.case = case
        self.repository = Repository(start)
        self.log = paths.case_file(self.repository.root).resolve()
        card = cards.find(cards.parse(read_log(self.log)), case)
        if card is None:
            raise GateError(f"{self.log} has no case {case}; resolve the incident first (llmconsole incident resolve)")
        self.card = card
        self.plan_file = self.repository.root / record.plan_name(case)
        self.record_file = self.repository.root / record.record_name(case)
        #: What went wrong after the record was committed, in a line; empty where nothing did.
        self.warning = ""

    # -- prepare

    def init(self, capsule: Path | None = None) -> Path:
        """Write the gate's file with what card and git know; what is there already is not replaced.

        Without a capsule, that of the card's newest occurrence is named, where it lies in the repository.

        Raises:
            GateError: the file is there, or cannot be written.
        """
        if self.plan_file.exists():
            raise GateError(f"{self.plan_file} is there already; edit it, then llmconsole gate run {self.case}")
        found = cards.fix_commits(self.card)
        fixed = self.repository.commit_id(found[-1]) if found else None
        broken = self.repository.commit_id(f"{fixed}^") if fixed else None
        text = plans.draft(
            broken=(broken or "")[:12],
            fixed=(fixed or "HEAD")[:12],
            test=self.card.get("Regression test").strip(),
            capsule=self._from_root(capsule or capsule_of(self.card.get("Occurrences"), self.repository.root)),
            rules=self.card.get("Rules").replace(",", " ").split(),
        )
        try:
            self.plan_file.parent.mkdir(exist_ok=True)
            with open(self.plan_file, "x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise GateError(f"{self.plan_file} cannot be written: {error.strerror}") from error
        return self.plan_file

    def _from_root(self, capsule: Path | None) -> str:
        if capsule is None:
            return ""
        path = capsule.resolve()
        root = self.repository.root.resolve()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else os.fspath(path)

    def plan(self) -> tuple[Plan, bytes]:
        """The gate's file, checked, and its bytes.

        Raises:
            GateError: there is none.
            PlanError: it cannot be used.
        """
        try:
            with open(self.plan_file, "rb") as stream:
                content = stream.read(_LARGEST_PLAN + 1)
            text = content.decode("utf-8")
        except FileNotFoundError:
            raise GateError(f"{self.plan_file} is not there; llmconsole gate init {self.case} writes it") from None
        except (OSError, UnicodeDecodeError) as error:
            raise GateError(f"{self.plan_file} cannot be read ({error})") from error
        if len(content) > _LARGEST_PLAN:
            raise GateError(f"{self.plan_file} is larger than {_LARGEST_PLAN >> 20} MiB")
        return plans.parse(text, record.plan_name(self.case)), content

    # -- run

    def run(self, worker: Worker, progress: Progress = lambda _item, _line: None) -> Facts:
        """Run the six items and keep the record as this repository's last run; commit it where the gate passed.

        Raises:
            GateError, PlanError: it cannot be run as it stands: nothing was run.
            StoreError: git refused.
        """
        plan, content = self.plan()
        broken, fixed = self._revisions(plan)
        own = ("gates", self._log_name() or ".")
        dirty = self.repository.changes(own)
        if dirty:
            more = f" and {len(dirty) - 1} more" if len(dirty) > 1 else ""
            raise GateError(f"the work tree has changes that are in no commit ({dirty[0]}{more}); commit or stash them")
        self._check_committable()
        who = store.identity(self.repository.root)
        started, before = datetime.now(UTC), time.monotonic()
        capsule_sha256 = self._capsule_digest(worker, plan)
        item = ""

        def analyze(path: Path, rules: list[str]) -> tuple[dict[str, Any], str, Recorded]:
            known = {each["id"] for each in worker.call("rules")["rules"]}
            if unknown := [rule for rule in rules if rule not in known]:
                raise GateError(f"no rule is called {', '.join(unknown)}; llmconsole rules lists them")
            facts = worker.call("describe", {"path": os.fspath(path)})
            report = worker.call("analyze", {"path": os.fspath(path), "rules": rules})
            return report, facts["sha256"], msgspec.convert(facts["recorded"], Recorded)

        results: list[Result] = []
        try:
            with Workshop(self.repository, lambda line: progress(item, line)) as workshop:
                bench = Bench(self.repository, workshop, broken, fixed, own, analyze)
                for item in ITEMS:
                    progress(item, "")
                    results.append(run_item(item, plan, bench))
                    progress(item, results[-1])
                facts = Facts(
                    case=self.case,
                    log=self._log_name(),
                    broken=broken,
                    fixed=fixed,
                    capsule_sha256=capsule_sha256,
                    plan_sha256=record.plan_sha256(content),
                    rules_sha256=record.sha256(record.canonical(worker.call("rules")["rules"])),
                    version=_version(),
                    results=results,
                    environment=_environment(worker),
                    who=who,
                    started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
                    seconds=round(time.monotonic() - before, 1),
                )
                written = record.canonical(record.statement(facts))
                self._keep_last(written)
                if facts.outcome != "failed":
                    self._commit(facts, written, content, started, workshop)
        except OSError as error:
            place = error.filename or tempfile.gettempdir()
            raise GateError(f"the gate cannot work: {place}: {error.strerror or error}") from error
        if facts.outcome != "failed":
            self._conclude(plan, facts)
        return facts

    def _check_committable(self) -> None:
        """Whatever would keep a gate that passed out of git, said before anything is run.

        Raises:
            GateError: the log lies elsewhere, a path is ignored, or a merge is unfinished.
        """
        if not self._log_name():
            raise GateError(f"{self.log} lies outside {self.repository.root}: a gate is committed beside its case log")
        for file in (self.log, self.plan_file, self.record_file):
            if self.repository.ignored(self.repository.relative(file)):
                raise GateError(f"{file} is excluded by an ignore rule (.gitignore), so no record could be committed")
        if word := self.repository.unfinished():
            raise GateError(f"a {word} is unfinished in {self.repository.root}; conclude it first")

    def last(self) -> Facts | None:
        """The last run in this repository, passed or not, or None.

        Raises:
            RecordError: what was kept of it is damaged.
        """
        try:
            content = self._last_file().read_bytes()
        except OSError:
            return None
        return record.read(content, os.fspath(self._last_file()))[1]

    def _revisions(self, plan: Plan) -> tuple[str, str]:
        found: list[str] = []
        for name in ("broken", "fixed"):
            revision = getattr(plan.regression, name).strip()
            commit = self.repository.commit_id(revision)
            if commit is None:
                raise GateError(f"[regression] {name} = {revision!r} is no commit in {self.repository.root}")
            found.append(commit)
        if found[0] == found[1]:
            raise GateError(f"[regression] broken and fixed are the same commit, {found[0][:12]}")
        return found[0], found[1]

    def _capsule_digest(self, worker: Worker, plan: Plan) -> str:
        """Digest of the incident's capsule: of the one at hand, else the one that the case's commit names."""
        if plan.capsule:
            path = self.repository.root / plan.capsule
            if path.exists():
                return worker.call("describe", {"path": os.fspath(path)})["sha256"]
        for commit, _, _ in self.repository.log_of_trailer("Case-Id", self.case):
            if found := self.repository.trailers(commit).get("Capsule-Sha256"):
                return found
        return ""

    def _log_name(self) -> str:
        """The case log from the root of this repository, or an empty string where it lies in another one."""
        root = self.repository.root.resolve()
        return self.log.relative_to(root).as_posix() if self.log.is_relative_to(root) else ""

    def _last_file(self) -> Path:
        return self.repository.git_directory / "llmconsole" / "gates" / f"{self.case}.json"

    def _keep_last(self, content: bytes) -> None:
        file = self._last_file()
        with contextlib.suppress(OSError):  # a record that passed is committed; of one that failed the words were said
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, content)

    def _commit(self, facts: Facts, written: bytes, plan: bytes, moment: datetime, workshop: Workshop) -> None:
        """Card, gate file and record in one commit; on failure, or when killed, the files are as they were."""
        gate = f"{record.record_name(self.case)} · {facts.outcome} {moment:%Y-%m-%d}"
        capsule = f"Capsule-Sha256: {facts.capsule_sha256}\n" if facts.capsule_sha256 else ""
        words = "\n".join(f"{each.item}: {each.verdict}" for each in facts.results)
        message = (
            f"Gate {self.case}: {facts.outcome}\n\n{words}\n\nCase-Id: {self.case}\n{capsule}"
            f"Gate-Result: {facts.outcome}\nGate-Sha256: {record.sha256(written)}\n"
        )
        with self.repository.locked():
            text = read_log(self.log)
            files = (self.log, self.plan_file, self.record_file)
            before = {file: file.read_bytes() if file.exists() else None for file in files}
            if before[self.plan_file] != plan:
                raise GateError(f"{self.plan_file} changed while the gate ran; run it again")
            head = self.repository.commit_id("HEAD")
            with workshop.restoring(before, self.record_file):
                try:
                    edited = cards.set_field(text, self.case, "Gate", gate)
                    replace_file(self.log, edited.encode("utf-8", "surrogateescape"))
                    replace_file(self.record_file, written)
                    self.repository.commit(files, message, environment=workshop.mark)
                except (cards.CardError, OSError) as error:
                    _restore(before)
                    raise GateError(f"the gate passed and is not committed: {error}") from error
                except BaseException:
                    if self.repository.commit_id("HEAD") == head:
                        _restore(before)
                    raise

    def _conclude(self, plan: Plan, facts: Facts) -> None:
        """Check what was committed, and close the incident beside its capsule.

        The commit stands by now, so what goes wrong is a warning. Where the capsule is elsewhere, the record in git
        says it.
        """
        try:
            record.verify(self.repository, self.case)
            path = self.repository.root / plan.capsule
            if plan.capsule and (path / "capsule.json").is_file() and read_notebook(path).case == self.case:
                update_incident(path, {"status": "gated", "gate": facts.outcome, "gated": facts.started})
        except record.RecordError as error:
            self.warning = f"the record was committed and does not hold, as a hook or filter changed it: {error}"
        except (IncidentError, StoreError) as error:
            self.warning = f"the record was committed; the incident is not marked: {error}"


def _restore(before: dict[Path, bytes | None]) -> None:
    for file, content in before.items():
        with contextlib.suppress(OSError):
            restore_file(file, content)


def _version() -> str:
    from importlib.metadata import version

    return version("llmconsole")


def _environment(worker: Worker) -> dict[str, Any]:
    """What a result depends on besides the code."""
    found = msgspec.convert(worker.call("environment"), dict[str, Any])
    names = ("python", "torch", "cuda", "cudnn", "driver", "nccl", "gpu", "os", "container")
    seeds = {name: os.environ[name] for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG") if name in os.environ}
    return {name: found[name] for name in names if found.get(name) is not None} | {"seeds": seeds}


__all__ = ["Gate", "GateError", "PlanError", "ResolveError", "StoreError"]
