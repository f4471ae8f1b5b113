"""A line of text that keeps the order of what is typed, however fast it arrives."""

from __future__ import annotations

from textual import events
from textual.widgets import Input


class Line(Input):
    """Textual's input, in which editing keys act at once.

    There a letter is inserted by the widget, while backspace travels up to the app and back as a binding. Over a slow
    line both arrive in one read, and the letters would overtake the backspaces.
    """

    async def _on_key(self, event: events.Key) -> None:
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            event.stop()
            event.prevent_default()
            await self.run_action(binding.action)
            return
        await super()._on_key(event)
