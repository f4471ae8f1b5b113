"""Whether a capsule was recorded after the fix, by what it says of itself: the revision of the job, else the time.

A revision is a fact of the code that ran, so it decides where this repository knows it. A time is that of a clock, and
decides only where no revision does. Where neither can tell, the gate passes with a note that says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from ...text import one_line
from ..store import Repository

#: Seconds by which the clocks of two hosts may differ.
_CLOCKS = 300.0

_AGAIN = "record one with the fix committed"


class Recorded(msgspec.Struct, kw_only=True):
    """What a capsule says of its recording.

    Attributes:
        created: RFC 3339, when the recording began; empty where the capsule was imported, so that it tells nothing.
        here: whether it was recorded on this host.
        commit: full id of the job's commit; empty where it was not recorded.
        dirty: whether tracked files differed from that commit; None where nobody looked.
    """

    created: str = ""
    here: bool = False
    commit: str = ""
    dirty: bool | None = None


@dataclass(frozen=True)
class Order:
    """``problem``: it was recorded before the fix, or without it; ``note``: why that cannot be told; or neither."""

    problem: str = ""
    note: str = ""


def order(recorded: Recorded, repository: Repository, broken: str, fixed: str, own: tuple[str, ...] = ()) -> Order:
    """Compare a capsule's recording with the fix.

    Args:
        recorded: what the capsule says.
        repository: that of the fix.
        broken: full id of the commit with the fault.
        fixed: full id of the commit with the fix.
        own: paths below which the product itself commits; they are no part of a fix.

    Raises:
        StoreError: git cannot be asked.
    """
    commit = repository.commit_id(recorded.commit) if recorded.commit else None
    if commit is None or not commit.startswith(recorded.commit):  # a branch's name says nothing of when it was recorded
        return _by_time(recorded, repository, fixed)
    name = f"the capsule was recorded at {commit[:12]}"
    changed = f"{name} with changes in no commit" if recorded.dirty else f"{name}, perhaps with changes in no commit"
    if repository.is_ancestor(fixed, commit):
        return Order(note=f"{changed}, so its code may differ from the fix" if recorded.dirty else "")
    if recorded.dirty is not False:  # the usual way of work: run it, see that it holds, commit
        return Order(note=f"{changed}: whether these were the fix {fixed[:12]} cannot be told")
    if repository.is_ancestor(commit, broken):
        return Order(problem=f"{name}, before the fix {fixed[:12]}; {_AGAIN}")
    # A rebase, a cherry-pick or a merge: the files that the fix changed tell whether the fix was in it.
    fix = set(repository.differing(broken, fixed, own))
    if fix and not fix & set(repository.differing(commit, fixed)):
        return Order()
    if fix and not fix & set(repository.differing(commit, broken)):
        return Order(problem=f"{name}, which does not have the fix {fixed[:12]}; {_AGAIN}")
    return Order(note=f"{name}, which does not follow from the fix {fixed[:12]}: whether it has it cannot be told")


def _by_time(recorded: Recorded, repository: Repository, fixed: str) -> Order:
    lacking = (
        f"its revision {one_line(recorded.commit[:12], 20)} is not in this repository"
        if recorded.commit
        else "it holds no revision of the job"
    )
    created = _moment(recorded.created)
    if created is None:
        return Order(note=f"whether the capsule was recorded after the fix cannot be told: {lacking}, and no time")
    made = datetime.fromtimestamp(repository.authored(fixed), UTC)
    form = "%Y-%m-%dT%H:%M:%SZ"
    times = f"the capsule was created {created:{form}} and the fix {fixed[:12]} committed {made:{form}}"
    later, slack = (created - made).total_seconds(), 0.0 if recorded.here else _CLOCKS
    if later < -slack:
        return Order(problem=f"{times}, so it was recorded before the fix ({lacking}); {_AGAIN}")
    if later < slack:
        return Order(note=f"{times}: too close to tell by the clocks of two hosts, and {lacking}")
    return Order(note=f"the capsule was created after the fix; whether its code had it cannot be told: {lacking}")


def _moment(created: str) -> datetime | None:
    """A time of RFC 3339, or None."""
    try:
        found = datetime.fromisoformat(created)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
