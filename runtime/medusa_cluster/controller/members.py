"""The members of the cluster, and whether they answer: our own heartbeats beside Ray's list of nodes.

Each node server is asked for its status a few times a second, without Ray. The answers are the heartbeat. Ray's list
says where the node servers are. A call through Ray, once a second, shows whether orders reach a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from medusa_runtime.errors import ClusterError, MedusaError

from .nodes import KnownNode, Nodes
from .reports import node_status
from .state import State

logger = logging.getLogger(__name__)

_LIST_S = 0.5  # between two readings of Ray's list
_STATUS_S = 0.25  # between two questions to a node
_OFTEN_ASKED = 64  # with more nodes than this, each is asked less often
_ANSWERS_WITHIN_S, _LAST_WITHIN_S = 1.5, 0.5  # time for an answer; the last question before the loss may get less
_LOST_AFTER_S = 2.5  # a node without an answer for so long is lost
_LEAST_FAILURES = 2  # more than one, because a controller that was stopped for a while misses the last answer
_REACH_S = 1.0  # between two calls through Ray
_REACHED_WITHIN_S = 3.0
_SILENT_AFTER_S = 4.0  # a node that no order has reached for so long is silent
_GIVE_UP_S = 60.0  # after a node's loss, its actor is ended
FORGET_LOST_S = 3600.0  # after a node's loss, the status no longer shows it


class Members:
    """The watch over every node that Ray has ever listed, until it has been lost for an hour.

    ``on_status`` is called with a node whose status is new.
    """

    def __init__(self, state: State, nodes: Nodes, on_status: Callable[[KnownNode], None]) -> None:
        self._state = state
        self._nodes = nodes
        self._on_status = on_status
        self._urls: dict[str, str] = {}  # name → URL of the node server, as Ray listed it last
        self._listed: set[str] = set()
        self._following: dict[str, list[asyncio.Task[None]]] = {}
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}  # node → why its status could not be used, as was recorded

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                try:
                    found = await self._nodes.servers()
                    if found is not None:
                        self._take_list(found)
                except Exception:
                    logger.exception("the cluster's members could not be listed")
                await asyncio.sleep(_LIST_S)
        finally:
            for task in (*(task for tasks in self._following.values() for task in tasks), *self._forgetting.values()):
                task.cancel()

    def _take_list(self, servers: Mapping[str, str]) -> None:
        nodes = self._state.nodes
        self._listed = set(servers)
        self._urls.update(servers)
        for name in servers:
            if name not in nodes:
                node = nodes[name] = KnownNode(name)
                follow = (self._follow_status(node), self._follow_orders(node))
                self._following[name] = [asyncio.create_task(work) for work in follow]
        for name, node in list(nodes.items()):
            lost_s = 0.0 if node.lost_at is None else time.monotonic() - node.lost_at
            never_came = not node.status and name not in servers
            if (lost_s > _GIVE_UP_S or never_came) and name not in servers and not node.given_up:
                node.given_up = True
                task = self._forgetting[name] = asyncio.create_task(self._forget(node))
                task.add_done_callback(lambda _, name=name: self._forgetting.pop(name, None))  # type: ignore[misc]
            if lost_s > FORGET_LOST_S or never_came:
                del nodes[name]
                self._urls.pop(name, None)
                self._refused.pop(name, None)
                for task in self._following.pop(name):
                    task.cancel()

    def _pause_s(self) -> float:
        return max(len(self._state.nodes) / _OFTEN_ASKED, 1)

    async def _follow_status(self, node: KnownNode) -> None:
        """Ask a node server for its status again and again."""
        failing_since, failures = 0.0, 0
        while True:
            began = time.monotonic()
            left_s = failing_since + _LOST_AFTER_S - began if failures else _ANSWERS_WITHIN_S
            within_s = min(max(left_s, _LAST_WITHIN_S), _ANSWERS_WITHIN_S)
            try:
                found = self._checked(node, await self._nodes.status(node.name, self._urls[node.name], within_s))
            except Exception as error:
                logger.debug("the node %s did not answer: %s", node.name, error, exc_info=_unforeseen(error))
                failing_since, failures = failing_since or began, failures + 1
                away = node.name not in self._listed or time.monotonic() - failing_since >= _LOST_AFTER_S
                if node.lost_at is None and node.status and failures >= _LEAST_FAILURES and away:
                    self._lose(node)
            else:
                failing_since, failures = 0.0, 0
                try:
                    self._take_status(node, found)
                except Exception:  # go on: the next status may be better, and the node's loss has to be noticed
                    logger.exception("the status of the node %s could not be used", node.name)
            await asyncio.sleep(_STATUS_S * self._pause_s())

    def _checked(self, node: KnownNode, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a node's status, if it is one. Raises ClusterError, after an event that says so once."""
        try:
            return node_status(found)
        except ClusterError as error:
            if self._refused.get(node.name) != str(error):
                self._refused[node.name] = str(error)
                text = f"the node {node.name} cannot be used: {error}"
                self._state.record_event("node-refused", text, node=node.name)
            raise

    async def _follow_orders(self, node: KnownNode) -> None:
        """Check again and again whether orders reach a node. This also keeps its actor ready."""
        failing_since = 0.0
        while True:
            began = time.monotonic()
            if node.spare and self._state.is_drained(node.name):
                await self._forget(node)  # Ray ends no node that has an actor
                await asyncio.sleep(_REACH_S)
                continue
            if await self._reaches(node):
                failing_since = 0.0
                self._reach(node)
            else:
                failing_since = failing_since or began
                if time.monotonic() - failing_since > _SILENT_AFTER_S and not node.silent and node.lost_at is None:
                    self._mark_silent(node)
            await asyncio.sleep(_REACH_S * self._pause_s() if node.reached else _STATUS_S)

    async def _forget(self, node: KnownNode) -> None:
        """End a node's actor. If that fails, as while Ray is away, it is tried again."""
        try:
            await self._nodes.forget(node.name)
        except Exception:
            logger.exception("the actor of the node %s could not be ended", node.name)
            node.given_up = False

    async def _reaches(self, node: KnownNode) -> bool:
        if node.name not in self._listed:
            return False
        try:
            await self._nodes.call(node.name, {"op": "ping"}, _REACHED_WITHIN_S)
        except Exception as error:
            logger.debug("orders do not reach the node %s: %s", node.name, error, exc_info=_unforeseen(error))
            return False
        return True

    def _take_status(self, node: KnownNode, found: Mapping[str, Any]) -> None:
        back, new = node.lost_at is not None, not node.status
        node.lost_at, node.given_up = None, False
        node.status, node.seen_at = found, time.monotonic()
        if back:
            self._state.record_event("node-back", f"the node {node.name} is back", node=node.name)
        elif new and node.reached:
            self._note_joined(node)
        self._on_status(node)

    def _reach(self, node: KnownNode) -> None:
        first, node.reached, node.silent = not node.reached, True, False
        if first and node.status:
            self._note_joined(node)

    def _note_joined(self, node: KnownNode) -> None:
        if not node.joined:
            node.joined = True
            self._state.record_event("node-joined", f"the node {node.name} has joined", node=node.name)
        self._state.wake()

    def _mark_silent(self, node: KnownNode) -> None:
        node.silent = True
        if node.reached:
            text = f"the node {node.name} serves, but cannot be told anything"
            self._state.record_event("node-silent", text, node=node.name)
            self._state.wake()

    def _lose(self, node: KnownNode) -> None:
        node.lost_at, node.reached = time.monotonic(), False
        self._state.lose_node(node)


def _unforeseen(error: Exception) -> bool:
    return not isinstance(error, MedusaError)
