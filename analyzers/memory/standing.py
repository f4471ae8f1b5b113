"""Many live blocks of one line in a snapshot whose trace is too short to show whether they become more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..finding import Evidence, Finding
from .allocator import alike, by_stack, histories, located, own_frame
from .growth import last_event, long_enough
from .records import gib
from .thresholds import LOGGED_ALIKE, LOGGED_BYTES, LOGGED_GROWTH, MANY_ALIKE

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History

#: Functions by which a model is made or its weights are read, layer after layer.
_MODEL: Final = re.compile(r"load|weight|param|init|build|model|create|buffer", re.IGNORECASE)
NEXT: Final = "record a trace: torch.cuda.memory._record_memory_history() some twenty steps before the snapshot"


@dataclass(frozen=True)
class Standing:
    """Live blocks of one size and stack, more than most models have layers, of a rank."""

    rank: int
    history: History
    stack: int
    count: int
    size: int

    @property
    def words(self) -> str:
        """How many there are, and of which line."""
        return f"{self.count:,} live blocks ({gib(self.size)}) come from {self.place}."

    @property
    def place(self) -> str:
        """The line that made them."""
        return own_frame(self.history, self.stack)

    def is_pace_of(self, slope: float) -> bool:
        """Whether a growth of so many bytes a step is that of about one of these blocks, or of a few."""
        return slope >= LOGGED_GROWTH * self.size / self.count

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The number of blocks, and their bytes."""
        return (
            Evidence(name="live blocks", value=self.count, expected=f"< {MANY_ALIKE}", note=self.place),
            Evidence(name="bytes of them", value=self.size, unit="B"),
        )


def standing(capsule: Capsule) -> Standing | None:
    """The most such blocks of the first rank whose trace is too short, where nothing says that they are meant."""
    for rank, history in histories(capsule).items():
        if not long_enough(history) and (found := _many(rank, history)) is not None:
            return found
    return None


def open_question(capsule: Capsule, found: Standing) -> Finding:
    """The finding where nothing tells whether the blocks become more."""
    return Finding(
        confidence="undetermined",
        title="Many small blocks of one line",
        summary=f"{found.words} One a step, and they are kept by mistake; one a layer or a parameter, and nothing is "
        "wrong: the trace is too short to tell.",
        where=located(capsule, found.rank),
        evidence=found.evidence,
        next=(NEXT,),
    )


def _many(rank: int, history: History) -> Standing | None:
    live = history.live(last_event(history))
    for stack, count, _ in by_stack(live):
        if stack <= 0 or count < MANY_ALIKE or history.stacks.category_of(stack) != "unknown":
            continue
        if any(_MODEL.search(name) for name, _, _ in history.stacks.of(stack)):
            continue
        sizes = live.size[live.stack == stack]
        same = sizes[alike(sizes)]
        if len(same) >= LOGGED_ALIKE * count and same[0] <= LOGGED_BYTES:
            return Standing(rank, history, stack, len(same), int(same.sum()))
    return None
