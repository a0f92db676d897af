"""The connections of the agent: they are accepted, read, and ended if they break the protocol."""

from __future__ import annotations

import logging
import socket
import time
from functools import partial

from ..errors import MedusaError, NodeError, NodeRefusedError
from .callers.peer import Caller, Peer
from .event_loop import TURN_S, EventLoop
from .messages import receive
from .regions.region_entry import RegionEntry
from .services import Services
from .session import Session
from .socket_file import SocketFile

logger = logging.getLogger(__name__)

_HELLO_WITHIN_S = 10.0
_LOGGED_EVERY_S = 1.0  # the least time between log lines about an account's refusals, and about failed accepts
_MOST_LOGGED = 64  # accounts whose refusals are logged within that time


class Connections:
    """The open sessions, each on a connection of its own."""

    def __init__(self, services: Services, loop: EventLoop) -> None:
        self._services = services
        self._loop = loop
        self._sessions: set[Session] = set()
        self._logged_at = 0.0
        self._refusal_logged_at: dict[str, float] = {}  # by account

    def accept(self, listener: SocketFile) -> None:
        """Accept the connections that wait on this socket, unless their callers have too many."""
        until = time.monotonic() + TURN_S
        while self._accept_one(listener) and time.monotonic() < until:
            pass

    def _accept_one(self, listener: SocketFile) -> bool:
        connection = None
        try:
            connection, _ = listener.socket.accept()
            peer = Peer.of(connection)
        except OSError as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, BlockingIOError):
                if (now := time.monotonic()) - self._logged_at > _LOGGED_EVERY_S:
                    self._logged_at = now
                    logger.warning("a connection could not be accepted: %s", error)
                time.sleep(0.01)  # if there are no descriptors left, the same connection would come again at once
            return False
        self._begin(connection, Caller(peer, listener.path, listener.prefixes))
        return True

    def _begin(self, connection: socket.socket, caller: Caller) -> None:
        connection.setblocking(False)
        session = Session(self._services, connection, caller)
        try:
            self._services.accounts.charge(caller, "connections")
        except NodeRefusedError as error:
            self._services.accounts.count_refusal(caller, error)
            try:
                session.refuse(error)
            except OSError:
                pass
            connection.close()
            return
        self._sessions.add(session)
        self._loop.watch(connection, partial(self._read, session), caller.account)

    def tick(self) -> None:
        """End connections that have not sent a hello in time."""
        now = time.monotonic()
        for session in [one for one in self._sessions if not one.greeted and now - one.connected_at > _HELLO_WITHIN_S]:
            self._end(session)

    def report_loss(self, entry: RegionEntry, error: MedusaError) -> None:
        """Report to all sessions with this region that the rest of it will not come."""
        for session in [one for one in self._sessions if one.entry is entry]:
            session.entry = None
            entry.leases.pop(session.connection.fileno(), None)  # it fetches for itself
            try:
                session.answer("lost", {"message": str(error)})
            except OSError:
                self._end(session)

    def _read(self, session: Session) -> None:
        try:
            message = receive(session.connection)
        except BlockingIOError:
            return
        except (NodeError, OSError) as error:
            self._count_refusal(session, NodeError(f"what it sent is no message: {error}"))
            self._end(session)
            return
        if message is None:
            self._end(session)
            return
        try:
            try:
                session.handle(message)
            except MedusaError as error:
                self._count_refusal(session, error)
                session.refuse(error)
        except (NodeError, OSError) as error:
            logger.debug("a connection of %s ends: %s", session.caller.account, error)
            self._end(session)
        except Exception:
            # A bug of the agent. It must not end the connections of other callers.
            logger.exception("a message of %s could not be answered; its connection ends", session.caller.account)
            self._count_refusal(session, NodeError("the node agent failed to answer"))
            self._end(session)

    def _count_refusal(self, session: Session, error: MedusaError) -> None:
        self._services.accounts.count_refusal(session.caller, error)
        account, logged_at, now = session.caller.account, self._refusal_logged_at, time.monotonic()
        if now - logged_at.get(account, 0.0) < _LOGGED_EVERY_S:
            return
        if len(logged_at) >= _MOST_LOGGED:
            logged_at = {name: at for name, at in logged_at.items() if now - at < _LOGGED_EVERY_S}
            self._refusal_logged_at = logged_at
        if len(logged_at) < _MOST_LOGGED:
            logged_at[account] = now
            logger.info("refused to %s: %s", account, error)

    def _end(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            self._services.accounts.refund(session.caller, "connections")
            self._loop.unwatch(session.connection)
            session.close()

    def close(self) -> None:
        for session in tuple(self._sessions):
            self._end(session)
