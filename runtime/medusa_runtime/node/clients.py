"""The agent's side of its connections: who they are, what they asked for, and what they hold."""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import MedusaError, NodeError, NodeRefusedError
from ..region.seals import seals_of
from ..storage.base import scheme_of
from .asker import Asker, Folder, folder_of
from .engines.handover import GIVEN
from .messages import VERSION, Message, close_all, flag, receive, send, text
from .peer import Caller, Peer, sees_the_same_files
from .regions.held_region import HeldRegion
from .regions.model_key import model_key
from .socket_file import SocketFile

if TYPE_CHECKING:
    from .agent import Agent

logger = logging.getLogger(__name__)

_HELLO_WITHIN_S = 10.0
_LOGGED_EVERY_S = 1.0  # refusals of one connection
_MB = 1 << 20
_LEAST_KV_MB, _MOST_KV_MB = 16, 2048  # of an engine whose function names no size


class Client:
    """One connection. Its requests are answered one after the other; it may hold one region."""

    def __init__(self, agent: Agent, connection: socket.socket, caller: Caller) -> None:
        self._agent = agent
        self.connection = connection
        self.caller = caller
        self.held: HeldRegion | None = None
        self.has_engine = False
        self.greeted = False
        self.since = time.monotonic()
        self.logged_at = 0.0

    def handle(self, message: Message) -> None:
        """Answer one message. Raises MedusaError, which is the answer then."""
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
                raise NodeError(f"the node agent knows no message {message.kind[:40]!r}")
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
                f"the function speaks version {str(version)[:40]} of the node agent's protocol, the agent {VERSION}; "
                f"bring both to the same version of medusa-runtime"
            )
        self.greeted = True
        self.answer("hello", {"version": VERSION, "pid": os.getpid()})

    def _region(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        self._agent.policy.check(key, self.caller)
        pin, fresh = flag(message.body, "pin"), flag(message.body, "fresh")
        background = flag(message.body, "background")
        if (pin or fresh) and not self.caller.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to pin a model or to fetch it again")
        if self.held is not None and self.held.key != key and not self.caller.trusted:
            raise NodeRefusedError("expected one model for a connection; open another connection for another model")
        folder = self._folder(key, message)
        self._let_go()
        held = self._agent.want(key, folder=folder, fresh=fresh, caller=self.caller)
        held.pinned = held.pinned or pin
        self.held = held
        held.leases[self.connection.fileno()] = self.caller
        if not background:
            held.promote()
        if held.sealed:
            self._hand_over(held)
            return
        held.waiting.append(partial(self._sealed, held))
        self.answer("wait")

    def _folder(self, key: str, message: Message) -> Folder | None:
        """A local checkpoint's folder, as the caller has opened it, and as whom its files are read."""
        if scheme_of(key):
            return None
        fd = folder_of(key, message.descriptors)
        if self.caller.trusted:
            return Folder(fd)
        peer = self.caller.peer
        confined = not sees_the_same_files(self.connection)
        return Folder(fd, Asker(peer.uid, peer.gid, peer.groups, confined))

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
            raise NodeError(f"settings: expected an object, found {str(settings)[:40]!r}")
        _check_given(message.descriptors)
        if held.folder is not None and held.folder.asker is not None and not held.shard_fds:
            raise NodeRefusedError(f"{held.key}: expected fewer shards for an engine process of the node agent's")
        settings, charged_bytes = self._charge_engine(settings)
        mine = held.descriptors()
        trust = (self._agent.settings.trust_state, self._agent.settings.trust_key)
        bundle_of = held.key if any(trust) else None
        try:
            pid = self._agent.engines.take(
                text(message.body, "kind"),
                settings,
                [*mine, *message.descriptors, *held.shard_fds],
                bundle_of=bundle_of,
                trust=trust,
                on_end=partial(self._engine_ended, charged_bytes),
            )
        except BaseException:
            self._engine_ended(charged_bytes)
            raise
        finally:
            close_all(mine)
        self.has_engine = True
        self.answer("engine", {"pid": pid})

    def _charge_engine(self, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The settings with a size of the KV cache within what the caller may have, and what it is charged for that."""
        accounts, caller = self._agent.accounts, self.caller
        kv_mb = settings.get("kv_cache_mb")
        if kv_mb is not None and (not isinstance(kv_mb, int) or isinstance(kv_mb, bool) or kv_mb < 1):
            raise NodeError(f"kv_cache_mb: expected a whole number above 0, found {str(kv_mb)[:40]!r}")
        if caller.trusted:
            accounts.take(caller, "engines")
            return settings, 0
        had = self._agent.regions.charged_bytes(caller.account) + accounts.has(caller.account, "memory_bytes")
        left_mb = (accounts.memory_bytes - had) // _MB
        if kv_mb is None:
            kv_mb = min(max(left_mb // 4, _LEAST_KV_MB), _MOST_KV_MB)
        if kv_mb > left_mb:
            raise NodeRefusedError(
                f"an engine with {kv_mb} MB for keys and values is too large: {caller.account} may have "
                f"{max(left_mb, 0)} MB more; lower --kv-cache-mb, or raise the node agent's --per-caller memory=…"
            )
        accounts.take(caller, "engines")
        accounts.take(caller, "memory_bytes", kv_mb * _MB)
        return {**settings, "kv_cache_mb": kv_mb}, kv_mb * _MB

    def _engine_ended(self, charged_bytes: int) -> None:
        self._agent.accounts.give(self.caller, "engines")
        if charged_bytes:
            self._agent.accounts.give(self.caller, "memory_bytes", charged_bytes)

    def _keep(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        self._agent.policy.check(key, self.caller)
        if len(message.descriptors) != 1:
            raise NodeError(f"expected one descriptor, a region's, found {len(message.descriptors)}")
        if not scheme_of(key) and not self.caller.trusted:
            raise NodeRefusedError(f"{key}: expected a model of a store; a local one is read again as its caller")
        if self.held is not None:
            raise NodeError("expected to be brought a region before one is asked for on this connection")
        self.held = self._agent.keep(key, message.descriptors[0], self.caller)
        self.held.leases[self.connection.fileno()] = self.caller
        self.answer("kept")

    def _drop(self, message: Message) -> None:
        key = model_key(text(message.body, "url"))
        if not self.caller.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to drop a model")
        found = self._agent.regions.of_key(key)
        if not found:
            raise NodeError("the node agent holds no such model; expected one that medusa node --status names")
        for held in found:
            self._agent.unpin(held)
        if users := sum(len(held.leases) for held in found):
            raise NodeError(f"{users} functions use this model; it is unpinned, and goes after them")
        for held in found:
            self._agent.regions.drop(held)
        self.answer("dropped")

    def _status(self) -> dict[str, object]:
        agent, pool, trusted = self._agent, self._agent.regions, self.caller.trusted
        seen = [held for held in pool if trusted or held is self.held]
        return {
            "pid": os.getpid(),
            "socket": agent.settings.path if trusted else self.caller.socket,
            "uptime_s": round(time.monotonic() - agent.started_at, 1),
            "budget_bytes": pool.budget_bytes,
            "used_bytes": pool.used_bytes if trusted else sum(held.size_bytes for held in seen),
            "engines": agent.engines.status(everything=trusted),
            "replaced": dict(agent.replaced),
            "count": len(list(pool)) if trusted else len(seen),
            "regions": [held.status() for held in seen][:100],
            **agent.accounts.status(everybody=trusted),
        }

    def _let_go(self) -> None:
        if self.held is not None:
            self._agent.regions.release(self.held, self.connection.fileno())
            self.held = None

    def close(self) -> None:
        self._let_go()
        self.connection.close()


def _check_given(descriptors: list[int]) -> None:
    """NodeError unless these are what a function hands to an engine process, which writes to them as the agent."""
    if len(descriptors) != len(GIVEN) - 2:
        raise NodeError(f"expected {len(GIVEN) - 2} descriptors, found {len(descriptors)}")
    listener, timeline, reports, lease = descriptors
    expected = ((listener, stat.S_ISSOCK, "socket"), (reports, stat.S_ISFIFO, "pipe"), (lease, stat.S_ISSOCK, "socket"))
    for descriptor, is_kind, kind in expected:
        if not is_kind(os.fstat(descriptor).st_mode):
            raise NodeError(f"expected a {kind} among the descriptors for an engine process, found something else")
    try:
        seals_of(timeline)
    except OSError:
        raise NodeError("expected a timeline in shared memory for an engine process, found another file") from None


class Clients:
    """All connections: reads what they send, and ends those that send what is no message."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._clients: set[Client] = set()

    def accept(self, door: SocketFile) -> None:
        """Accept one connection on this socket, if its caller may have another one."""
        try:
            connection, _ = door.socket.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(0.01)  # out of descriptors: the same one would come again at once
            return
        connection.setblocking(False)
        caller = Caller(Peer.of(connection), door.path, door.prefixes)
        client = Client(self._agent, connection, caller)
        try:
            self._agent.accounts.take(caller, "connections")
        except NodeRefusedError as error:
            self._agent.accounts.refused(caller, error)
            try:
                client.refuse(error)
            except OSError:
                pass
            connection.close()
            return
        self._clients.add(client)
        self._agent.watch(connection, partial(self._read, client))

    def tick(self) -> None:
        """End connections that say nothing."""
        now = time.monotonic()
        for client in [c for c in self._clients if not c.greeted and now - c.since > _HELLO_WITHIN_S]:
            self._end(client)

    def lost(self, held: HeldRegion, error: MedusaError) -> None:
        """Report to those who have been given a region that the rest of it will not come."""
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
            self._count(client, NodeError(f"it sent what is no message: {error}"))
            self._end(client)
            return
        if message is None:
            self._end(client)
            return
        try:
            try:
                client.handle(message)
            except MedusaError as error:
                self._count(client, error)
                client.refuse(error)
        except (NodeError, OSError) as error:
            logger.debug("a connection of %s ends: %s", client.caller.account, error)
            self._end(client)
        except Exception:
            # A bug of ours, which one caller has met: it must not become the end of all others.
            logger.exception("a message of %s could not be answered; its connection ends", client.caller.account)
            self._count(client, NodeError("it met an error of the node agent's"))
            self._end(client)

    def _count(self, client: Client, error: MedusaError) -> None:
        self._agent.accounts.refused(client.caller, error)
        now = time.monotonic()
        if now - client.logged_at > _LOGGED_EVERY_S:
            client.logged_at = now
            logger.info("refused to %s: %s", client.caller.account, error)

    def _end(self, client: Client) -> None:
        if client in self._clients:
            self._clients.discard(client)
            self._agent.accounts.give(client.caller, "connections")
            self._agent.unwatch(client.connection)
            client.close()

    def close(self) -> None:
        for client in tuple(self._clients):
            self._end(client)
