"""One micro-batch as the loop holds it in its hand."""

# pyright: reportPrivateUsage=false
# A step is the half of the recorder that the loop holds.

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

if TYPE_CHECKING:
    from .recorder import Recorder


class Step:
    """One micro-batch under way; made by ``Recorder.step``."""

    def __init__(self, recorder: Recorder, batch: Any, sample_ids: Any, cursor: Any, number: int | None) -> None:
        self._recorder = recorder
        self.batch = batch
        self.sample_ids = sample_ids
        self.cursor = cursor
        self.number = number

    def __enter__(self) -> Self:
        self._run(lambda: self._recorder._begin(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(lambda: self._recorder._end(error))

    def loss(self, loss: Tensor | float) -> None:
        """The loss of this micro-batch, where backward does not show it or shows it divided."""
        self._run(lambda: self._recorder._loop.told(loss))

    def log(self, **values: Tensor | float) -> None:
        """Scalars of one's own, by name; a standard name takes the place of what the recorder found."""
        self._run(lambda: self._recorder._loop.log(values))

    def _run(self, action: Callable[[], None]) -> None:
        recorder = self._recorder
        if recorder._alive():
            with recorder._signals:
                recorder._attempt("steps", action)
