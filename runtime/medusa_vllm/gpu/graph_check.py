"""The offline check of a bundle's graphs, in a process that starts as an instance does."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from medusa_runtime.engine.gpu.attempts import CHECK, Attempts
from medusa_runtime.state.graphs import Blueprints, GraphMismatch, Reason, Trigger

if TYPE_CHECKING:
    from medusa_runtime.state.graphs.blueprint import GraphBlueprint

    from .graph_state import VllmGraphState
    from .graphs import RestoredDecodeGraphs


logger = logging.getLogger(__name__)


class GraphCheck:
    """Blueprints of which each graph is restored and replayed, before any user's request does so.

    The worker restores ``unchecked`` with it. A graph that is pinned to its captured addresses is built where vLLM's
    memory is in this process, with its known pointers relocated. If it gives its outputs, the words that pin it do not
    depend on the memory that lies elsewhere here, and it is no longer pinned to that.
    """

    def __init__(self, unchecked: Blueprints, attempts: Attempts) -> None:
        """``attempts`` says which graphs have ended earlier processes. They are left out."""
        self.unchecked = attempts.without_ended(unchecked)
        self._attempts = attempts
        self._state: VllmGraphState | None = None
        self._tried: list[str] = []  # the keys of the graphs that are there while requests are tried out
        self._unused = GraphMismatch(Reason.ABSENT, "a start with it did not come to restore it")

    def restore(self, state: VllmGraphState, trigger: Trigger) -> RestoredDecodeGraphs | None:
        """Restore the full graphs. ``state`` is then also for the piecewise ones."""
        self._state = state
        try:
            graphs = tuple(replace(graph, pinned=()) for graph in self.unchecked.graphs)
            return state.restore(replace(self.unchecked, graphs=graphs), trigger=trigger, attempts=self._attempts)
        except GraphMismatch as mismatch:
            self._unused = mismatch
            raise

    def result(self) -> Blueprints:
        """Return the blueprints without the graphs that did not give their outputs. ``refused`` has the reasons.

        A graph remains pinned to memory that happens to be at its captured address here, as the graphs' pool.
        """
        verified = self._state.verified if self._state is not None else set()
        known = self._state.reasons if self._state is not None else {}
        wrong = [graph.key for graph in self.unchecked.graphs if graph.key not in verified]
        checked = self.unchecked.without({key: str(known.get(key, self._unused)) for key in wrong})
        if pinned := sum(bool(graph.pinned) for graph in self.unchecked.graphs):
            kept = sum(bool(graph.pinned) for graph in checked.graphs)
            logger.info("%d of %d pinned graphs give their outputs with vLLM's memory elsewhere, too", kept, pinned)
        return replace(checked, graphs=tuple(map(self._unpinned, checked.graphs)))

    def begin_requests(self, checked: Blueprints) -> None:
        """Record that requests are tried out in a process with these graphs.

        Which of them a step replays is not known here. So if requests break the context, none of these graphs is kept.
        """
        self._tried = [graph.key for graph in checked.graphs]
        if self._tried:
            self._attempts.begin(CHECK, *self._tried)

    def end_requests(self) -> None:
        """Record that requests have not broken the context."""
        if self._tried:
            self._attempts.succeed()

    def context_is_lost(self) -> bool:
        """Return whether the context is broken, in a process that has restored graphs."""
        return self._state is not None and self._state.context_is_lost()

    def _unpinned(self, graph: GraphBlueprint) -> GraphBlueprint:
        assert self._state is not None  # it has verified the graph
        ranges, same = self.unchecked.ranges, self._state.is_where_captured
        return replace(graph, pinned=tuple(number for number in graph.pinned if same(ranges[number])))


__all__ = ["GraphCheck"]
