"""Rules of the stage capture: what the capsule itself lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .finding import Evidence, Finding, Where
from .registry import rule

if TYPE_CHECKING:
    from ..capsules import Capsule
    from ..capsules.damage import Damage


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
        A capsule that lacks a replay item and still holds enough for every rule that matters here.
    What to try next:
        See the items with `llmconsole show`; hand what the recorder cannot find to it (tokenizer, config, cursor).
    Fix:
        Record the missing items in the next run.
    """
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
        sound: that is said instead, with the last step that was recorded.
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


def _last_step(capsule: Capsule) -> int | None:
    """The last step of which any evidence is readable."""
    series = (capsule.scalars(key.name, key.rank, key.side) for key in capsule.scalar_keys())
    ends = [int(each.step.max()) for each in series if len(each)]
    stats = capsule.stats()
    ends += [int(stats.step.max())] if len(stats) else []
    ends += [each.step for each in capsule.batches()]
    return max(ends, default=None)


def _words(value: object) -> str:
    """A list as words, anything else as text."""
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return "" if value is None else str(value)
