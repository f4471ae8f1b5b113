"""Rules of the stage capture: what the capsule itself lacks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .finding import Evidence, Finding, Where
from .registry import NotCaptured, rule

if TYPE_CHECKING:
    from ..capsules import Capsule
    from ..capsules.damage import Damage

#: Seconds after its last event in which a file without a step may belong to a job that is still starting.
STARTING = 600.0


@rule("capsule/not-replayable", stage="capture", kind="hygiene", severity="info")
def not_replayable(capsule: Capsule) -> Iterator[Finding]:
    """The step cannot be run again from this capsule.

    What it checks:
        The eight things a replay needs: samples and token ids; digests of tokenizer, template, model and adapter;
        position, cursor and random state; shapes, dtypes and placement; configuration; statistics around the first
        anomaly; a trusted path's output beside the one in use; logs and environment.
    Why it matters:
        Without them a hypothesis about the incident cannot be tested by running the step with one thing changed.
    How it decides:
        An item is missing where none of the evidence it stands for is in the capsule. Info, and no divergence.
    Looks like it but is not:
        A capsule that lacks a replay item and still holds enough for every rule that matters here. Raw files (logs,
        dumps, traces, snapshots) never hold a step: of a capsule made of these nothing is said.
    What to try next:
        See the items with `llmconsole show`; hand what the recorder cannot find to it (tokenizer, config, cursor).
    Fix:
        Record the missing items in the next run.
    """
    if _of_raw_files(capsule):
        raise NotCaptured("a recording: raw files hold no step that could be run again")
    items = capsule.replay_items()
    absent = [item for item in items if not item.present]
    if not absent:
        return
    yield Finding(
        title=f"{len(absent)} of {len(items)} items for a replay are missing",
        summary="Missing for a replay: " + "; ".join(item.name for item in absent) + ".",
        confidence="confirmed",
        evidence=tuple(
            Evidence(name=item.name, value="missing", expected="present", note=_words(item.missing)) for item in absent
        ),
        cause="the evidence was not captured",
        next=("see the items with `llmconsole show`",),
        fix=("pass tokenizer, config and cursor to the recorder",),
    )


@rule("capsule/damaged", stage="capture", kind="hygiene", severity="warning")
def damaged(capsule: Capsule) -> Iterator[Finding]:
    """Part of the capsule cannot be read.

    What it checks:
        Torn records and rows, checksums, arrays cut short, attached files whose digest differs, a writer that died.
    Why it matters:
        What is lost may be what would have decided; and what was read is only as complete as this says.
    How it decides:
        Each piece of damage that the reader met, with what is lost and what could still be read. Where it is no more
        than writers that ended without sealing, and the appends they were in, the job was killed and the files are
        sound: that is said instead, with the last step that was recorded, and with the finding of the stage distributed
        that tells why the job ended, where there is one.
    Looks like it but is not:
        A recording that is still being written, whose last row is not complete yet.
    What to try next:
        Copy the capsule again from the node; compare its digest. Of a job that ended without closing the recorder: the
        kernel log (out-of-memory killer), the launcher's log, the signal or exit status.
    Fix:
        None for the lost part. A writer that was killed leaves everything up to its last flush.
    """
    damage = capsule.damage()
    if not damage:
        return
    evidence = tuple(_row(each) for each in damage[:16])
    if _only_unsealed(damage):
        yield _unclosed(capsule, damage, evidence)
        return
    yield Finding(
        title="The capsule is damaged" if len(damage) == 1 else f"The capsule is damaged in {len(damage)} places",
        summary="; ".join(f"{each.what} in {each.where}" if each.where else each.what for each in damage[:3]) + ".",
        confidence="confirmed",
        where=Where(),
        evidence=evidence,
        cause="the writer died, or the files changed after they were written",
        next=("copy the capsule again from the node and compare its digest",),
        fix=("none for the lost part: the rest was read",),
    )


def _row(each: Damage) -> Evidence:
    return Evidence(
        name=str(each.what),
        value=_words(each.lost) or "unknown",
        unit="",
        note=f"{each.where}; still readable: {_words(each.kept)}" if each.kept else str(each.where),
    )


def _only_unsealed(damage: tuple[Damage, ...]) -> bool:
    """Whether all there is are writers that ended without sealing, and torn ends of those writers' own files."""
    theirs = tuple(each.where.removesuffix("rank.json") for each in damage if each.unsealed)
    return bool(theirs) and all(each.unsealed or (each.torn and each.where.startswith(theirs)) for each in damage)


def _unclosed(capsule: Capsule, damage: tuple[Damage, ...], evidence: tuple[Evidence, ...]) -> Finding:
    """The job was killed, or fell silent: how far its record reaches, and where the reason may stand."""
    died = capsule.status == "crashed"
    last = _last_step(capsule)
    reach = "No step was recorded" if last is None else f"The record reaches step {last:,} and is readable up to there"
    torn = sum(each.torn for each in damage)
    cut = f"; {torn} unfinished last {'row was' if torn == 1 else 'rows were'} dropped" if torn else ""
    whose = "; ".join(each.what for each in damage[:3] if each.unsealed)
    if (rule := _why(capsule)) is not None:
        return _explained(damage, f"{reach}{cut}", evidence, rule, died=died)
    return Finding(
        title="The job ended without closing the recorder" if died else "The recorder fell silent without closing",
        summary=f"{reach}{cut}: {whose}.",
        confidence="confirmed",
        where=Where(),
        evidence=(Evidence(name="last recorded step", value="none" if last is None else last), *evidence),
        cause="the process was killed, or ended in a way that Python cannot see"
        if died
        else "the process or its node is gone, or it hangs",
        next=(
            "look in the kernel log for the out-of-memory killer: dmesg -T | grep -i 'killed process'",
            "look in the launcher's or scheduler's log for a signal, an exit status or a time limit",
        ),
        fix=("none for the steps after the last flush: all before it was read",),
    )


def _explained(
    damage: tuple[Damage, ...], reach: str, evidence: tuple[Evidence, ...], rule: str, *, died: bool
) -> Finding:
    """Ranks ended, or hang, without sealing, as they do where another rule's finding ends a job."""
    ranks = sorted({int(each.where[10:15]) for each in damage if each.unsealed and each.where.startswith("ranks/rank")})
    who = f"{'Rank' if len(ranks) == 1 else 'Ranks'} {' and '.join(map(str, ranks))}"
    who = who if len(ranks) <= 2 else f"{len(ranks):,} ranks"
    ended = "ended without sealing" if died else "fell silent without sealing"
    return Finding(
        title=f"{who} {ended} the recording",
        summary=f"{who} {ended}: see {rule} for why. {reach}.",
        confidence="confirmed",
        evidence=evidence,
        cause=f"what {rule} names ended the job" if died else f"what {rule} names holds the job",
        next=(f"go by {rule}; the recording is readable up to its last flush",),
        fix=("none for the steps after the last flush: all before it was read",),
    )


def _why(capsule: Capsule) -> str | None:
    """The rule of the stage distributed whose finding tells why ranks ended, None where none does."""
    from .distributed.deaths import rank_died_first
    from .distributed.diagnosis import diagnosis
    from .distributed.reproduction import reproduction

    if next(iter(rank_died_first(capsule)), None) is not None:
        return "distributed/rank-died-first"
    partings = diagnosis(capsule).partings
    if partings and all(each.ended for each in partings):
        return None  # the calls differed, and went on
    found = reproduction(capsule)
    return found.rule if found is not None else None


def _last_step(capsule: Capsule) -> int | None:
    """The last step of which any evidence is readable."""
    series = (capsule.scalars(key.name, key.rank, key.side) for key in capsule.scalar_keys())
    ends = [int(each.step.max()) for each in series if len(each)]
    stats = capsule.stats()
    ends += [int(stats.step.max())] if len(stats) else []
    ends += [each.step for each in capsule.batches()]
    return max(ends, default=None)


@rule(
    "capsule/nothing-logged",
    stage="capture",
    severity="warning",
    needs=("records.events.message|scalars.loss|scalars.tokens",),
)
def nothing_logged(capsule: Capsule) -> Iterator[Finding]:
    """A log announces a run and holds no step.

    What it checks:
        Imported files that were opened for a run and in which nothing was ever reported.
    Why it matters:
        Such a job did not go wrong in training: it ended before the first report, and its reason stands elsewhere.
    How it decides:
        The importer found the beginning of a file and not a single number. Undetermined, for the file cannot say why.
        A remark where other files of the job hold steps, or where the file was begun within the ten minutes before it
        was read.
    Looks like it but is not:
        A file with one step; the empty file of a rank that leaves reporting to another; a job that is still loading
        data or compiling.
    What to try next:
        The standard error of the job and the scheduler's accounting at the time of the file; files of later attempts in
        the same directory.
    Fix:
        None in the log. Let the job write its exception beside it, and log the first step at once.
    """
    if not _of_raw_files(capsule):
        raise NotCaptured("files that were imported: a recording says itself how it ended")
    silent = [each for each in capsule.records("events") if each.get("type") == "nothing_logged"]
    if not silent:
        return
    others = _last_step(capsule)
    names = [str(each.get("message") or "").partition(":")[0] for each in silent]
    about = {str(each.get("path") or "").rpartition("/")[2]: each for each in _imported(capsule)}
    ages = [age for each in silent if (age := _age(each, about, capsule.manifest.created)) is not None]
    fresh = bool(ages) and min(ages) < STARTING
    mild = others is not None or fresh
    if others is not None:
        more = f" Other files of the job reach step {others:,}: it was started again, or another rank reports."
    elif fresh:
        more = f" It was begun {min(ages):.0f} s before it was read: the job may still be starting."
    else:
        more = " The job died, or was stopped, before its first step."
    yield Finding(
        title="The job ended before its first step" if not mild else "One file of the job holds no step",
        summary=f"{', '.join(names[:3])} announces a run and holds no number.{more}",
        severity="info" if mild else None,
        kind="hygiene" if mild else None,
        confidence="undetermined",
        evidence=(
            Evidence(name="steps in the file", value=0, expected="≥ 1", note=", ".join(names[:6])),
            *(
                Evidence(name="size of the file", value=about[name].get("bytes"), unit="bytes", note=name)
                for name in names[:6]
                if name in about
            ),
        ),
        next=(
            "read the standard error of the job, of every rank: what it says last is the reason",
            "ask the scheduler how it ended (sacct, kubectl describe): exit status, signal, out of memory, time limit",
            "look for files of a later attempt in the same directory",
        ),
        fix=("let the job write its exception beside its log",),
    )


def _of_raw_files(capsule: Capsule) -> bool:
    """Whether the capsule was made of raw files alone."""
    trigger = capsule.manifest.trigger
    return trigger is not None and trigger.kind == "imported"


def _imported(capsule: Capsule) -> list[dict[str, Any]]:
    """What the importer noted of each file."""
    imported = capsule.manifest.raw.get("imported")
    files = imported.get("files") if isinstance(imported, dict) else None
    return [each for each in files if isinstance(each, dict)] if isinstance(files, list) else []


def _age(event: dict[str, Any], about: dict[str, dict[str, Any]], created: str | None) -> float | None:
    """Seconds from the last event in a file, else from its last write (a copy's is its own), to its import."""
    file = about.get(str(event.get("message") or "").partition(":")[0], {})
    modified = event.get("t", file.get("modified"))
    if not isinstance(modified, int | float) or created is None:
        return None
    try:
        return max(0.0, datetime.fromisoformat(created).timestamp() - modified)
    except ValueError:
        return None


def _words(value: object) -> str:
    """A list as words, anything else as text."""
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return "" if value is None else str(value)
