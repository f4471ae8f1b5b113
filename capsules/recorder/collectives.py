"""One sequence of collectives a rank: torch's flight recorder, with what Python's callers add to it.

Where the flight recorder follows a group, its entries are the truth (C++ is in them), and the calls seen from Python
only say who waited, how long and whether a buffer was written meanwhile. Where it does not (Gloo's sends and receives,
back ends without one, a torch of before), the calls themselves are the sequence. Never both for one kind of operation.

The stream holds the newest operations without a hole, as the flight recorder does: appended to, and written anew where
it has grown to twice that or where an operation went on after it was written.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from ..layout import rank_directory
from ..writer import CapsuleWriter
from .calls import Call, Calls
from .flight import Group, Groups, Record, read
from .internals import process_groups, sequence_number
from .journal import Journal
from .operation import Operation, Row

#: Operations that the stream keeps; as many as torch's flight recorder by default.
MOST_ROWS = 2000
#: Operations that are held back until they are over; the oldest of more are written as they are.
MOST_OPEN = 512
#: Share of the time that reading the flight recorder may take. It costs by what it holds: 0.1 to 50 ms.
SHARE = 0.005
#: Seconds without a window after which the watchdog looks.
BETWEEN = 5.0

#: ``last_seq``, ``last_started`` and ``last_completed``, each by group.
Numbers = dict[str, dict[str, int]]


class Collectives:
    """Follows the process groups of this rank and writes their operations. Safe to call from several threads.

    Args:
        writer: of the capsule.
        mark: when the window that is open began (Unix seconds), and its step.
    """

    def __init__(self, writer: CapsuleWriter, mark: Callable[[], tuple[float, int] | None]) -> None:
        self._writer = writer
        self._mark = mark
        self._groups = Groups()
        self.calls = Calls(self._groups)
        self._journal: Journal | None = None
        self.calls.journal = self._note
        self.lost = 0  # operations that the flight recorder had dropped before they were read
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=4096)  # when windows began, and their steps
        self._open: list[Operation] = []
        self._unmatched: list[Call] = []
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._in_file = 0
        self._anew = False
        self._next_record = 0
        self._order = 0
        self._pairs: dict[str, int] = {}  # group → sends and receives that only calls show
        self._uncounted: dict[str, int] = {}  # group → operations in its number that are no collectives
        self._latest: dict[str, tuple[int, int]] = {}  # group of Gloo → last recorded: number of operation, and its own
        self._names: dict[str, str] = {}  # local id → name of the group
        self._failed: dict[str, int] = {}  # group → its first collective that failed
        self._done: dict[str, int] = {}  # group → the last collective that was seen to be over
        self._last: dict[str, int] = {}  # group → the last collective that was seen
        self._every = 1
        self._cost = 0.0  # seconds of the last look
        self._looked = time.monotonic()
        self._state: Any = None  # numbers of the groups, and who waits, when they last moved
        self._stood = 0.0
        self._windows = 0

    # -- when to look

    def window(self, began: float, step: int) -> None:
        """A window has ended. All ranks look at windows of like numbers, so that none waits for another's look."""
        self.begun(began, step)
        self._windows += 1
        if self._windows % self._every == 0:
            self.collect()
            every = 1
            while self._cost > SHARE * (time.time() - began) * every and every < 1 << 16:
                every *= 2
            self._every = every

    def begun(self, began: float, step: int) -> None:
        """A window has begun; may be said again."""
        if not self._marks or self._marks[-1][0] < began:
            self._marks.append((began, step))

    # -- reading

    def collect(self, everything: bool = False, wait: float = 0.0) -> bool:
        """Read what has happened since and write it.

        Args:
            everything: also what is still under way, as it stands.
            wait: seconds to wait for another thread that is at it.

        Returns:
            Whether it was done.
        """
        if not self._lock.acquire(timeout=wait):
            return False
        started = time.perf_counter()
        try:
            calls = [*self._unmatched, *self.calls.take()]
            record = read() if self._groups.recorded else None
            calls += self.calls.take()
            self._refresh(record)
            self._add(record, calls)
            self._note_failures()
            self._write(everything)
            return True
        finally:
            self._cost, self._looked = time.perf_counter() - started, time.monotonic()
            self._lock.release()

    def _refresh(self, record: Record | None) -> None:
        """What has become of the operations that were under way."""
        known = {} if record is None else {entry["record_id"]: entry for entry in record.entries}
        for operation in self._open:
            if operation.entry is not None:
                gone = operation.entry | {"retired": True}  # so many have come after it
                operation.entry = known.get(operation.entry["record_id"], gone)

    def _add(self, record: Record | None, calls: list[Call]) -> None:
        entries = [] if record is None else [e for e in record.entries if e["record_id"] >= self._next_record]
        entries.sort(key=lambda entry: entry["record_id"])
        if entries and self._rows and entries[0]["record_id"] > self._next_record:
            self.lost += entries[0]["record_id"] - self._next_record
            self._rows.clear()  # a hole would read as calls that this rank did not make
            self._open = []
            self._anew = True
        made_by = {
            (call.group.name, number): call
            for call in calls
            if not call.own_row
            for number in range(call.before + 1, max(call.after, call.before + 1) + 1)
        }
        found: list[Operation] = []
        used: set[int] = set()
        last = 0.0
        for entry in entries:
            name, group = self._named(entry)
            number = entry["op_id"] if _is_gloo(entry) else entry["collective_seq_id"]
            call = None if entry["is_p2p"] else made_by.get((name, number))
            used.add(id(call))
            last = max(last, entry["time_created_ns"] / 1e9 if call is None else call.began)
            seq = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            found.append(Operation(name, group, last, entry, call, seq))
            self._next_record = entry["record_id"] + 1
        found += [Operation(call.group.name, call.group, call.began, None, call) for call in calls if call.own_row]
        # Calls that have just begun are not in the recorder yet.
        self._unmatched = [c for c in calls if not c.own_row and id(c) not in used and not c.settled][-MOST_OPEN:]
        for operation in sorted(found, key=lambda each: each.created):
            self._number(operation)
            operation.order, self._order = self._order, self._order + 1
            operation.step = self._at(operation.created)
            self._open.append(operation)

    def _at(self, created: float) -> int | None:
        """The window in which something happened, or the last before it."""
        if (mark := self._mark()) is not None:
            self.begun(*mark)
        at = bisect_right(self._marks, (created, 1 << 62)) - 1
        return self._marks[at][1] if at >= 0 else None

    def _named(self, entry: dict[str, Any]) -> tuple[str, Group | None]:
        name = str(entry["process_group"][0])
        self._names[str(entry["pg_id"])] = name
        return name, self._groups.named(name)

    def _number(self, operation: Operation) -> None:
        """Give it its number in the group. Gloo counts sends and receives among the others, and records neither."""
        name, entry, call = operation.name, operation.entry, operation.call
        if entry is not None:
            if _is_gloo(entry):
                self._uncounted[name] = entry["op_id"] - entry["collective_seq_id"]
                self._latest[name] = entry["op_id"], entry["collective_seq_id"]
        elif call is not None and call.p2p:
            operation.seq = self._pairs[name] = self._pairs.get(name, 0) + 1
            self._uncounted[name] = self._uncounted.get(name, 0) + call.group.gloo
        elif call is not None:
            operation.seq = max(call.before + 1 - self._uncounted.get(name, 0), 1)
        if not operation.p2p and operation.seq is not None:
            self._last[name] = max(operation.seq, self._last.get(name, 0))

    def _note(self, call: Call) -> None:
        """Put a call on disk before it is made, and again when it has returned."""
        try:
            if self._journal is None:
                self._journal = Journal(self._writer.path / rank_directory(self._writer.rank))
            if call.number:
                call.written["state"] = "completed"
                self._journal.put(call.number, call.written)
                return
            name = call.group.name
            seq = self.calls.pairs[name] if call.p2p else call.before + 1 - self._not_collectives(name)
            call.written = Operation(name, call.group, call.began, None, call, seq, step=self._at(call.began)).row(None)
            call.written.pop("order")
            call.number = self._journal.begin(call.written)
        except OSError:
            self.calls.journal = None

    def _not_collectives(self, name: str) -> int:
        """How many operations of a group of Gloo are none, as of now."""
        return self._uncounted.get(name, 0) + self.calls.pairs[name] - self._pairs.get(name, 0)

    def close(self, collected: bool) -> None:
        """Look at nothing any more; where what was collected is all, the journal goes."""
        self.calls.close()
        if self._journal is not None and collected:
            self._journal.close()
        self.calls.journal = None

    # -- failures, which torch counts as completions

    def _note_failures(self) -> None:
        for operation in self._open:
            if operation.call is not None and operation.call.failed and not operation.p2p:
                self._fail(operation.name, operation.seq)

    def _fail(self, name: str, seq: int | None) -> None:
        if seq is not None:
            self._failed[name] = min(seq, self._failed.get(name, seq))

    def failed_since(self, since: float) -> None:
        """An error has come out of what C++ asked for after then (a backward): none of it is known to be complete."""
        self.collect(wait=1.0)
        with self._lock:
            for row in self._rows.values():
                if row["t_created"] >= since and "async_op" not in row and not row.get("p2p"):
                    row["state"] = "started"
                    self._fail(row["group"], row.get("seq"))
                    self._anew = True
            for operation in self._open:
                if operation.created >= since and operation.call is None and not operation.p2p:
                    self._fail(operation.name, operation.seq)

    # -- the last numbers of each group

    def numbers(self) -> Numbers:
        """The last collective of each group that was enqueued, started and completed; costs microseconds.

        Before anything was read from a group its name is not known, and it is left out.
        """
        record = read(entries=False) if self._groups.recorded else None
        found: Numbers = {"last_seq": dict(self._last), "last_started": {}, "last_completed": {}}
        for name, seq in self._done.items():
            found["last_completed"][name] = min(seq, self._failed.get(name, seq + 1) - 1)
        for local, numbers in (record.status if record is not None else {}).items():
            name = self._names.get(local)
            if name is None:
                continue
            failed = self._failed.get(name)
            for each, field in (("last_seq", "enqueued"), ("last_started", "started"), ("last_completed", "completed")):
                value = numbers.get(f"last_{field}_collective", -1)
                if value >= 0:
                    value = self._as_collective(name, value)
                    value = value if failed is None or each == "last_seq" else min(value, failed - 1)
                    found[each][name] = max(value, found[each].get(name, 0))
        for group in process_groups():
            about = self._groups.of(group)
            if about.gloo and about.recorded:
                found["last_seq"][about.name] = max(sequence_number(group) - self._not_collectives(about.name), 0)
        return found

    def late(self, most: float, exact: float | None = None) -> tuple[Operation, float] | None:
        """The oldest operation under way, where it has been so for too long, and for how many seconds.

        Costs microseconds as long as the numbers of the groups move or nothing is under way.

        Args:
            most: seconds, or half the time-out of its group where that is less.
            exact: seconds whatever the time-out is.
        """
        now = time.time()
        if not self._stands(now, exact or most):
            return None
        self.collect()
        operation = self.oldest()
        if operation is None:
            return None
        timeout = operation.group.timeout if operation.group is not None else None
        limit = exact if exact is not None else min(most, timeout / 2 if timeout else most)
        return (operation, now - operation.created) if now - operation.created >= limit else None

    def _stands(self, now: float, most: float) -> bool:
        """Whether it is worth to look closer: something is under way and nothing has moved for a second or so."""
        record = read(entries=False) if self._groups.recorded else None
        status = {} if record is None else record.status
        under_way = any(
            each.get("last_enqueued_collective", -1) > each.get("last_completed_collective", -1)
            for each in status.values()
        )
        waiting = {id(call) for call in list(self.calls.blocked.values())}
        state = (repr(status), frozenset(waiting))
        if state != self._state or not (under_way or waiting):
            self._state, self._stood = state, now
            return False
        return now - self._stood >= min(most, 5.0) / 2

    def between(self) -> None:
        """Read on where no window has ended for long: before the first, in an evaluation, in steps that take long."""
        idle = time.monotonic() - self._looked
        if idle > max(BETWEEN, self._cost / SHARE):
            self.collect()

    def coverage(self) -> str:
        """What is not seen, so that silence there is not taken for health."""
        unseen = "what other libraries send, and reads of a buffer before the wait, are not seen"
        if self._groups.recorded:
            source = "from torch's flight recorder, C++ included, Gloo's sends and receives from calls of Python"
        else:
            source = "from calls of Python only, since torch's flight recorder is off: DDP's buckets are not among them"
        lost = f"; {self.lost} had been dropped before they were read, those after them are kept" if self.lost else ""
        return f"coverage: collectives come {source}; {unseen}{lost}"

    @property
    def failed(self) -> bool:
        """Whether any collective failed."""
        return bool(self._failed)

    def _as_collective(self, name: str, operation: int) -> int:
        """The number among the collectives of the last one that is an operation of that number, or an earlier one."""
        if name not in self._latest:
            return operation
        number, seq = self._latest[name]
        return max(seq if operation >= number else 0, operation - self._not_collectives(name))

    def oldest(self) -> Operation | None:
        """The oldest operation that is under way, as last collected; one that failed, or waits for nobody, is not."""
        with self._lock:
            waits = {id(call) for call in self.calls.blocked.values()}
            waiting = [
                each
                for each in self._open
                if not each.completed and not (each.call and each.call.failed)
                # A receive that was posted ahead of time waits for nobody yet.
                if each.entry is not None or id(each.call) in waits
            ]
        return min(waiting, key=lambda each: each.created, default=None)

    # -- writing

    def _write(self, everything: bool) -> None:
        fresh: list[Row] = []
        kept: list[Operation] = []
        for at, operation in enumerate(self._open):
            over = operation.over or len(self._open) - at > MOST_OPEN
            if operation.over and operation.seq is not None and not operation.p2p:
                name = operation.name
                self._done[name] = max(operation.seq, self._done.get(name, 0))
            if not over:
                kept.append(operation)
            if not over and not everything:
                continue
            row = operation.row(self._failed.get(operation.name))
            if not operation.written:
                fresh.append(row)
            elif self._rows.get(operation.order) != row:
                self._anew = True
            self._rows[operation.order] = row
            operation.written = True
        self._open = kept
        while len(self._rows) > MOST_ROWS:
            self._rows.popitem(last=False)
        if self._anew or self._in_file + len(fresh) > 2 * MOST_ROWS:
            self._writer.rewrite("collectives", self._rows.values())
            self._in_file, self._anew = len(self._rows), False
        elif fresh:
            self._writer.records("collectives", fresh)
            self._in_file += len(fresh)


def _is_gloo(entry: dict[str, Any]) -> bool:
    return str(entry["profiling_name"]).startswith("gloo:")
