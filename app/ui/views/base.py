"""What every view is: a panel of one question, which asks the worker and follows the shared step cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import on
from textual.containers import Vertical
from textual.message import Message

from ..link import Answer, Channel

if TYPE_CHECKING:
    from ...looks.types import Contents
    from ..app import Console


class View(Vertical, can_focus=True):
    """A view of one capsule. Subclasses say which evidence they need and draw what the worker answers.

    Class attributes:
        name_: the word in the tab.
        needs: evidence the view draws, as rules name it; ``|`` between alternatives.
        teach: what to do where it was not captured, in one line.
        channel: which worker answers, unless a question says otherwise.
    """

    name_: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    teach: ClassVar[str] = ""
    channel: ClassVar[Channel] = "look"

    class CursorMoved(Message):
        """A view moved the step cursor; the screen tells the other views."""

        def __init__(self, step: float | None) -> None:
            super().__init__()
            self.step = step

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.step: float | None = None

    @classmethod
    def missing(cls, contents: Contents) -> str:
        """What stands in place of the view where its evidence was not captured."""
        return f"Not captured. {cls.teach}"

    def ask(self, method: str, key: str = "", *, channel: Channel | None = None, **params: Any) -> None:
        """Put a question about this capsule; ``answered`` gets the result."""
        link = cast("Console", self.app).link
        link.ask(self, method, {"path": self.path, **params}, channel=channel or self.channel, key=key)

    @on(Answer)
    def _on_answer(self, answer: Answer) -> None:
        answer.stop()
        if answer.problem:
            self.failed(answer.problem)
        else:
            self.answered(answer)

    def reload(self) -> None:
        """Ask for everything on screen; called when the view opens and when the capsule changed."""

    def answered(self, answer: Answer) -> None:
        """Draw an answer."""

    def failed(self, problem: str) -> None:
        """Say in one line why nothing is drawn."""
        self.border_subtitle = problem.replace("[", r"\[")

    def follow(self, step: float | None) -> None:
        """The shared cursor moved; None takes it away."""
        self.step = step
