"""The agent's side of its connections: who they are, what they asked for, and what they hold."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from ..errors import MedusaError, NodeError, NodeRefusedError
from .engines.handover import GIVEN
from .messages import VERSION, Message, close_all, receive, send, text
from .peer import Peer
from .regions.held_region import HeldRegion
from .regions.model_key import check_access_proof, model_key

if TYPE_CHECKING:
    from .agent import Agent

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 4096
_HELLO_WITHIN_S = 10.0


class Client:
    """One connection. Its requests are answered one after the other; it may hold one region."""

    def __init__(self, agent: Agent, connection: socket.socket) -> None:
        self._agent = agent
        self.connection = connection
        self.peer = Peer.of(connection)
        self.held: HeldRegion | None = None
        self.has_engine = False
        self.greeted = False
        self.since = time.monotonic()

    def handle(self, message: Message) -> None:
        """Raises MedusaError, which is the answer then."""
        try:
            if message.kind == "hello":
                self._hello(message)
            elif not self.greeted:
                raise NodeError("expected hello first")
            elif message.kind == "region":
                self._region(message)
            elif message.kind == "engine":
                self._engine(message)
            elif message.kind == "keep":
                self._keep(message)
            elif message.kind == "drop":
                self._drop(message)
            elif message.kind == "status":
                self.answer("status", self._status())
            else:
                raise NodeError(f"the node agent knows no message {message.kind!r}")
        finally:
            message.close()

    def answer(self, kind: str, body: dict[str, object] | None = None, descriptors: tuple[int, ...] = ()) -> None:
        send(self.connection, kind, body, descriptors)

    def refuse(self, error: MedusaError) -> None:
        self.answer("error", {"code": error.code, "message": str(error)})

    def _hello(self, message: Message) -> None:
        version = message.body.get("version")
        if version != VERSION:
            raise NodeError(
                f"the function speaks version {version!r} of the node agent's protocol, the agent {VERSION}; "
                f"bring both to the same version of medusa-runtime"
            )
        self.greeted = True
        self.answer("hello", {"version": VERSION, "pid": os.getpid()})

    def _region(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        self._agent.policy.check(key, self.peer)
        pin, fresh = bool(message.body.get("pin")), bool(message.body.get("fresh"))
        if (pin or fresh) and not self.peer.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to pin a model or to fetch it again")
        check_access_proof(key, message.descriptors)
        self._let_go()
        held = self._agent.want(key, fresh=fresh)
        held.pinned = held.pinned or pin
        self.held = held
        held.leases.add(self.connection.fileno())
        if not message.body.get("background"):
            held.promote()
        if held.sealed:
            self._hand_over(held)
            return
        held.waiting.append(lambda error: self._sealed(held, error))
        self.answer("wait")

    def _sealed(self, held: HeldRegion, error: MedusaError | None) -> None:
        if self.held is not held or self.connection.fileno() < 0:
            return
        try:
            if error is None:
                self._hand_over(held)
            else:
                self.held = None
                self.refuse(error)
        except OSError:
            pass  # it has gone; the loop is told by its connection

    def _hand_over(self, held: HeldRegion) -> None:
        descriptors = held.descriptors()
        held.handed += 1
        try:
            self.answer("region", {"complete": held.complete}, tuple(descriptors))
        finally:
            close_all(descriptors)

    def _engine(self, message: Message) -> None:
        held = self.held
        if held is None or not held.sealed:
            raise NodeError("expected a region first; an engine process is given one")
        if self.has_engine:
            raise NodeRefusedError(
                "expected to be asked for one engine process, and not for another by the same function"
            )
        settings = message.body.get("settings")
        if not isinstance(settings, dict):
            raise NodeError(f"settings: expected an object, found {settings!r}")
        if len(message.descriptors) != len(GIVEN) - 2:
            raise NodeError(f"expected {len(GIVEN) - 2} descriptors, found {len(message.descriptors)}")
        mine = held.descriptors()
        trust = (self._agent.settings.trust_state, self._agent.settings.trust_key)
        bundle_of = held.key if any(trust) else None
        try:
            pid = self._agent.engines.take(
                text(message.body, "kind"), settings, [*mine, *message.descriptors], bundle_of=bundle_of, trust=trust
            )
        finally:
            close_all(mine)
        self.has_engine = True
        self.answer("engine", {"pid": pid})

    def _keep(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        self._agent.policy.check(key, self.peer)
        if len(message.descriptors) != 1:
            raise NodeError(f"expected one descriptor, a region's, found {len(message.descriptors)}")
        self._let_go()
        self.held = self._agent.keep(key, message.descriptors[0])
        self.held.leases.add(self.connection.fileno())
        self.answer("kept")

    def _drop(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        if not self.peer.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to drop a model")
        held = self._agent.regions.get(key)
        if held is None:
            raise NodeError("the node agent holds no such model; expected one that medusa node --status names")
        self._agent.unpin(held)
        if held.in_use:
            raise NodeError(f"{len(held.leases)} functions use this model; it is unpinned, and goes after them")
        self._agent.regions.drop(held)
        self.answer("dropped")

    def _status(self) -> dict[str, object]:
        pool = self._agent.regions
        return {
            "pid": os.getpid(),
            "socket": self._agent.socket_file.path,
            "uptime_s": round(time.monotonic() - self._agent.started_at, 1),
            "budget_bytes": pool.budget_bytes,
            "used_bytes": pool.used_bytes,
            "engines": self._agent.engines.status(),
            "count": len(list(pool)),
            "regions": [held.status() for held in pool if self.peer.trusted or held is self.held][:100],
        }

    def _let_go(self) -> None:
        if self.held is not None:
            self._agent.regions.release(self.held, self.connection.fileno())
            self.held = None

    def close(self) -> None:
        self._let_go()
        self.connection.close()


class Clients:
    """All connections: reads what they send, and ends those that send what is no message."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._clients: set[Client] = set()

    def accept(self) -> None:
        try:
            connection, _ = self._agent.socket_file.socket.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(0.01)  # out of descriptors: the same one would come again at once
            return
        connection.setblocking(False)
        client = Client(self._agent, connection)
        if len(self._clients) >= _MOST_CLIENTS:
            connection.close()
            return
        self._clients.add(client)
        self._agent.watch(connection, lambda: self._read(client))

    def tick(self) -> None:
        """End connections that say nothing."""
        now = time.monotonic()
        for client in [c for c in self._clients if not c.greeted and now - c.since > _HELLO_WITHIN_S]:
            self._end(client)

    def lost(self, held: HeldRegion, error: MedusaError) -> None:
        """Tell those who have been given a region that the rest of it will not come."""
        for client in [client for client in self._clients if client.held is held]:
            client.held = None
            try:
                client.answer("lost", {"message": str(error)})
            except OSError:
                self._end(client)

    def _read(self, client: Client) -> None:
        try:
            message = receive(client.connection)
        except BlockingIOError:
            return
        except (NodeError, OSError) as error:
            logger.warning("a connection of user %d sent what is no message: %s", client.peer.uid, error)
            self._end(client)
            return
        if message is None:
            self._end(client)
            return
        try:
            try:
                client.handle(message)
            except MedusaError as error:
                logger.info("refused to user %d: %s", client.peer.uid, error)
                client.refuse(error)
        except (NodeError, OSError) as error:
            logger.debug("a connection of user %d ends: %s", client.peer.uid, error)
            self._end(client)

    def _end(self, client: Client) -> None:
        if client in self._clients:
            self._clients.discard(client)
            self._agent.unwatch(client.connection)
            client.close()

    def close(self) -> None:
        for client in tuple(self._clients):
            self._end(client)
