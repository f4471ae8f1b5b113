"""The palette: every action of the registry that works here, found by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from .actions import ACTIONS, Action

if TYPE_CHECKING:
    from .app import Console


class ActionProvider(Provider):
    """Offers the actions of the current scopes."""

    @property
    def _actions(self) -> list[Action]:
        """What works here, the screen's own actions before those that work everywhere."""
        scopes = cast("Console", self.app).scopes(self.screen)
        return sorted((each for each in ACTIONS if each.scope in scopes), key=lambda each: scopes.index(each.scope))

    def _keys(self, action: Action) -> str:
        from .screens.help import key_names

        return key_names(cast("Console", self.app).keymap.get(action.id, action.keys))

    async def discover(self) -> Hits:
        """All actions, before anything is typed."""
        for each in self._actions:
            yield DiscoveryHit(each.description, partial(self._run, each), help=self._keys(each))

    async def search(self, query: str) -> Hits:
        """Actions whose description matches."""
        matcher = self.matcher(query)
        for each in self._actions:
            score = matcher.match(each.description)
            if score > 0:
                yield Hit(score, matcher.highlight(each.description), partial(self._run, each), help=self._keys(each))

    async def _run(self, action: Action) -> None:
        await cast("Console", self.app).run_registered(action, self.screen)
