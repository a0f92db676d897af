"""The offline check of a bundle's graphs, in a process that starts as an instance does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_runtime.state.graphs import Blueprints, GraphMismatch, Reason, Trigger

if TYPE_CHECKING:
    from .graph_state import VllmGraphState
    from .graphs import RestoredDecodeGraphs


class GraphCheck:
    """Blueprints of which each graph is restored and replayed, before any user's request does so.

    The worker restores ``unchecked`` with it.
    """

    def __init__(self, unchecked: Blueprints) -> None:
        self.unchecked = unchecked
        self._state: VllmGraphState | None = None
        self._unused = GraphMismatch(Reason.ABSENT, "a start with it did not come to restore it")

    def restore(self, state: VllmGraphState, trigger: Trigger) -> RestoredDecodeGraphs | None:
        """Restore the full graphs. ``state`` is then also for the piecewise ones."""
        self._state = state
        try:
            return state.restore(self.unchecked, trigger=trigger, validate="each")
        except GraphMismatch as mismatch:
            self._unused = mismatch
            raise

    def result(self) -> Blueprints:
        """Return the blueprints without the graphs that did not give their outputs. ``refused`` has the reasons."""
        verified = self._state.verified if self._state is not None else set()
        known = self._state.reasons if self._state is not None else {}
        wrong = [graph.key for graph in self.unchecked.graphs if graph.key not in verified]
        return self.unchecked.without({key: str(known.get(key, self._unused)) for key in wrong})


__all__ = ["GraphCheck"]
