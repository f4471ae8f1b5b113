"""Work of one rank that several do: the same file written by each of them."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from . import thresholds as T
from .layout import hosts, layout, shards
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Events by which a rank says that it wrote a file.
_WROTE = re.compile(r"(?:^|_)(?:saved|written|wrote|log_opened|log_file)$")
#: Files that take anything.
_NOWHERE = re.compile(r"^(?:/dev/|nul$)", re.IGNORECASE)
#: A name with an ending is a file; a checkpoint without one is a directory, in which each rank may have its own files.
_FILE = re.compile(r"\.[A-Za-z]\w{0,14}$")
#: What only one of several replicas has to write.
_WHOLE = frozenset(("model", "optimizer"))


@rule("distributed/rank-zero-work-everywhere", stage="distributed", severity="warning", needs=("records.events.path",))
def rank_zero_work_everywhere(capsule: Capsule) -> Iterator[Finding]:
    """Several ranks write the same file.

    What it checks:
        The paths of checkpoints and logs that each rank wrote at a step.

    Why it matters:
        Ranks that write one file at the same time leave whichever came last, or a mixture of both: a checkpoint that
        cannot be read, found out only after the next crash. At best the same bytes go over the network as often as
        there are ranks.

    How it decides:
        The same path of a file, at the same step, from several ranks of one host: confirmed. From ranks of different
        hosts alone: info, since the disk may be each node's own. A directory into which several ranks of plain data
        parallelism each write the model: undetermined, since the files inside may have names of their own. One finding
        for all paths of the same ranks.

    Looks like it but is not:
        Files with the rank in the name; a directory of shards (FSDP, ZeRO, tensor parallelism,
        torch.distributed.checkpoint); random states that each rank keeps; reading, which all ranks may do; /dev/null.

    What to try next:
        Load the checkpoint once, and compare its size and digest with one that rank 0 alone has written.

    Fix:
        Write under "if rank == 0" (of the global rank, on a shared disk) between two barriers that all ranks reach;
        write to a temporary name and rename.
    """
    writers: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    contents: dict[str, set[str]] = defaultdict(set)
    seen: set[int] = set()
    for event in capsule.records("events"):
        path, kind = event.get("path"), event.get("kind")
        if not path or not kind or not _WROTE.search(kind) or _NOWHERE.search(path):
            continue
        seen.add(event["rank"])
        step = event.get("step")
        writers[_normal(path), step if isinstance(step, int) else None].add(event["rank"])
        contents[_normal(path)].update(event.get("contents") or ())
    if not seen:
        raise NotCaptured("paths of what was written")
    by_ranks: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for (path, step), ranks in writers.items():
        if len(ranks) > 1:
            by_ranks[tuple(sorted(ranks))].append((-1 if step is None else step, path))
    whole = _writes_whole(capsule)
    for ranks, places in sorted(by_ranks.items(), key=lambda each: (min(each[1]), each[0])):
        files = sorted(each for each in places if _FILE.search(posixpath.basename(each[1])))
        directories = sorted(each for each in places if each not in files and contents[each[1]] & _WHOLE)
        if files:
            yield _finding(capsule, ranks, files, is_file=True)
        elif directories and whole:
            yield _finding(capsule, ranks, directories, is_file=False)


def _normal(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/"))


def _writes_whole(capsule: Capsule) -> bool:
    """Whether each rank holds all of the model, so that several have the same to write."""
    where = layout(capsule)
    parts = where is None or any(where.has(axis) for axis in ("tensor", "pipeline")) or where.experts
    return not parts and not shards(capsule).optimizer


def _finding(capsule: Capsule, ranks: tuple[int, ...], places: list[tuple[int, str]], is_file: bool) -> Finding:
    named = hosts(capsule)
    known = [named[rank] for rank in ranks if rank in named]
    apart = len(known) == len(ranks) and len(set(known)) == len(ranks)
    step, path = places[0]
    paths = list(dict.fromkeys(each for _, each in places))
    doubt = ""
    if apart:
        doubt = " They are on different hosts: whether the disk is shared is not known."
    elif not is_file:
        doubt = " It is a directory: the files inside may have names of their own."
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Finding(
        severity="info" if apart else None,
        kind="hygiene" if apart else None,
        confidence="undetermined" if apart or not is_file else "confirmed",
        title="Several ranks write the same file" if is_file else "Several ranks write into the same directory",
        summary=f"{named_ranks(ranks).capitalize()} each write {path}{more}"
        + (f", first at step {step}" if step >= 0 else "")
        + f".{doubt}",
        where=Where(step=step if step >= 0 else None, rank=next((rank for rank in ranks if rank), ranks[0])),
        evidence=(
            Evidence(name="path", value=path),
            Evidence(name="ranks that write it", value=list(ranks[: T.RANKS_SHOWN]), expected=[ranks[0]]),
            Evidence(name="writes", value=len(places), expected=len(places), note=f"times {len(ranks)} ranks"),
            *([Evidence(name="hosts", value=sorted(set(known))[:8])] if known else []),
        ),
        cause="the write is not limited to one rank",
        next=("load the file, and compare it with one that rank 0 alone has written",),
        fix=("write on rank 0 only, to a temporary name, and rename",),
    )
