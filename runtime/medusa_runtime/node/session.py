"""The agent's side of one caller's connection: it answers the requests, and notes what the caller holds."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..config import layer_range
from ..errors import MedusaError, NodeError, NodeRefusedError, TooLargeError
from ..storage.base import scheme_of
from .callers.impersonation import Folder, Identity, received_folder
from .callers.peer import Caller, shares_mount_namespace
from .child import as_node_error
from .engines.handover import check_descriptors, check_engine, check_rights, with_own_threads
from .messages import VERSION, Message, close_without_linger, flag_field, send, text_field
from .regions.model_key import model_key
from .regions.region_entry import RegionEntry
from .services import Services

_MB = 1 << 20
# Of a message with descriptors, and of opening these; the caller would wait for ever.
_NO_ROOM = (errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LEAST_KV_MB, _MOST_KV_MB = 16, 2048  # the bounds of a KV cache for which the function names no size


class Session:
    """Answers one caller's requests, one after the other. It may hold one region and one engine process."""

    def __init__(self, services: Services, connection: socket.socket, caller: Caller) -> None:
        self._services = services
        self.connection = connection
        self.caller = caller
        self.entry: RegionEntry | None = None
        self.has_engine = False
        self._region_sent = False
        self.greeted = False
        self.connected_at = time.monotonic()

    def handle(self, message: Message) -> None:
        """Answer one message. If this raises MedusaError, answer with that error (see ``refuse``)."""
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
            elif message.kind in ("drop", "unpin"):
                self._drop(message)
            elif message.kind == "status":
                self.answer("status", self._services.status(self.caller, self.entry))
            else:
                raise NodeError(f"the node agent knows no message {message.kind[:40]!r}")
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise as_node_error(f"answer {message.kind!r}", error) from None
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
        if self._region_sent and _has_unread(self.connection):
            raise NodeError("expected an answer to be read before a region is asked for again")
        key = model_key(text_field(message.body, "url"))
        self._services.policy.check(key, self.caller)
        pin, fresh = flag_field(message.body, "pin"), flag_field(message.body, "fresh")
        background, existing_only = flag_field(message.body, "background"), flag_field(message.body, "held")
        layers = self._layers(message)
        if (pin or fresh) and not self.caller.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to pin a model or to fetch it again")
        if self.entry is not None and self.entry.key != key and not self.caller.trusted:
            raise NodeRefusedError("expected one model for a connection; open another connection for another model")
        folder = self._folder(key, message)
        self._release_region()
        entry = self._services.keeper.get_or_fetch(
            key, folder=folder, fresh=fresh, caller=self.caller, layers=layers, existing_only=existing_only
        )
        entry.pinned = entry.pinned or pin
        self.entry = entry
        entry.leases[self.connection.fileno()] = self.caller
        if not background:
            entry.promote()
        if entry.sealed:
            try:
                self._send_region(entry)
            except MedusaError:
                self._release_region()
                raise
            return
        entry.waiting[self.connection.fileno()] = partial(self._sealed, entry)
        self.answer("wait")

    def _layers(self, message: Message) -> str | None:
        """Return the layers (START:STOP) that should come first; None if the caller names none.

        Raises NodeRefusedError if the caller is not trusted.
        """
        if "layers" not in message.body:
            return None
        if not self.caller.trusted:
            raise NodeRefusedError("layers: expected the agent's own user, or root, to say what is fetched first")
        try:
            return layer_range(text_field(message.body, "layers"))
        except ValueError as error:
            raise NodeError(f"layers: expected {error}") from None

    def _folder(self, key: str, message: Message) -> Folder | None:
        """Return a local checkpoint's folder, which the caller has opened, with the identity to read its files with."""
        if scheme_of(key):
            return None
        fd = received_folder(key, message.descriptors)
        if self.caller.trusted:
            return Folder(fd)
        peer = self.caller.peer
        confined = not shares_mount_namespace(self.connection)
        return Folder(fd, Identity(peer.uid, peer.gid, peer.groups, confined))

    def _sealed(self, entry: RegionEntry, error: MedusaError | None) -> None:
        if self.entry is not entry or self.connection.fileno() < 0:
            return
        try:
            if error is None:
                self._send_region(entry)
                return
        except MedusaError as refusal:
            error = refusal
        except OSError:
            return  # the caller has gone, and the end of its connection will be read next
        self._release_region()
        if isinstance(error, NodeRefusedError | TooLargeError):  # a quota, a share or the budget
            self._services.accounts.count_refusal(self.caller, error)
        try:
            self.refuse(error)
        except OSError:
            pass  # the caller has gone, and the end of its connection will be read next

    def _send_region(self, entry: RegionEntry) -> None:
        descriptors = entry.descriptors()
        entry.handouts += 1
        try:
            self.answer("region", {"complete": entry.complete}, tuple(descriptors))
            self._region_sent = True
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise as_node_error("send a region to a function", error) from None
        finally:
            close_without_linger(descriptors)

    def _engine(self, message: Message) -> None:
        entry = self.entry
        if entry is None or not entry.sealed:
            raise NodeError("expected a region first; an engine process is given one")
        if self.has_engine:
            raise NodeRefusedError(
                "expected to be asked for one engine process, and not for another by the same function"
            )
        settings = message.body.get("settings")
        if not isinstance(settings, dict):
            raise NodeError(f"settings: expected an object, found {str(settings)[:40]!r}")
        kind = text_field(message.body, "kind")
        check_engine(kind, settings)
        gpus = message.body.get("gpus")
        if gpus is not None and (not isinstance(gpus, str) or "\0" in gpus):
            raise NodeError(f"gpus: expected the text of CUDA_VISIBLE_DEVICES, found {str(gpus)[:40]!r}")
        if not self.caller.trusted:
            check_rights(settings, gpus)
            settings = with_own_threads(settings)
        check_descriptors(message.descriptors)
        if entry.folder is not None and entry.folder.identity is not None and not entry.files:
            raise NodeRefusedError(f"{entry.key}: expected fewer shards for an engine process of the node agent's")
        trust = (self._services.settings.trust_state, self._services.settings.trust_key)
        bundle_model = entry.key if any(trust) else None
        settings, charged_bytes = self._charge_engine(settings)
        mine: list[int] = []
        try:
            mine = entry.descriptors()
            pid = self._services.engines.take(
                kind,
                settings,
                [*mine, *message.descriptors, *entry.files],
                bundle_model=bundle_model,
                trust=trust,
                gpus=gpus,
                on_end=partial(self._engine_ended, charged_bytes),
                account=self.caller.account,
                pause_s=0.0 if self.caller.trusted else self._services.settings.per_caller.pause_s,
            )
        except BaseException:
            self._engine_ended(charged_bytes)
            raise
        finally:
            close_without_linger(mine)
        self.has_engine = True
        self.answer("engine", {"pid": pid})

    def _charge_engine(self, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Charge the caller for an engine with a KV cache. Return the settings, and the bytes that were charged.

        If the function names no size for the KV cache, the settings get one that the caller may have.
        """
        accounts, caller = self._services.accounts, self.caller
        kv_mb = settings.get("kv_cache_mb")
        if kv_mb is not None and (not isinstance(kv_mb, int) or isinstance(kv_mb, bool) or kv_mb < 1):
            raise NodeError(f"kv_cache_mb: expected a whole number above 0, found {str(kv_mb)[:40]!r}")
        if caller.trusted:
            accounts.charge(caller, "engines")
            return settings, 0
        had = self._services.keeper.regions.charged_bytes(caller.account) + accounts.charged(
            caller.account, "memory_bytes"
        )
        left_mb = (accounts.memory_bytes - had) // _MB
        if kv_mb is None:
            kv_mb = min(max(left_mb // 4, _LEAST_KV_MB), _MOST_KV_MB)
        if kv_mb > left_mb:
            raise NodeRefusedError(
                f"an engine with {kv_mb} MB for keys and values is too large: {caller.account} may have "
                f"{max(left_mb, 0)} MB more; lower --kv-cache-mb, or raise the node agent's --per-caller memory=…"
            )
        accounts.charge(caller, "engines")
        accounts.charge(caller, "memory_bytes", kv_mb * _MB)
        return {**settings, "kv_cache_mb": kv_mb}, kv_mb * _MB

    def _engine_ended(self, charged_bytes: int) -> None:
        self._services.accounts.refund(self.caller, "engines")
        if charged_bytes:
            self._services.accounts.refund(self.caller, "memory_bytes", charged_bytes)

    def _keep(self, message: Message) -> None:
        key = model_key(text_field(message.body, "url"))
        self._services.policy.check(key, self.caller)
        if len(message.descriptors) != 1:
            raise NodeError(f"expected one descriptor, a region's, found {len(message.descriptors)}")
        if not scheme_of(key) and not self.caller.trusted:
            raise NodeRefusedError(f"{key}: expected a model of a store; a local one is read again as its caller")
        if self.entry is not None:
            raise NodeError("expected to be brought a region before one is asked for on this connection")
        self.entry = self._services.keeper.take_back(key, message.descriptors[0], self.caller)
        self.entry.leases[self.connection.fileno()] = self.caller
        self.answer("kept")

    def _drop(self, message: Message) -> None:
        key = model_key(text_field(message.body, "url"))
        if not self.caller.trusted:
            raise NodeRefusedError("expected the agent's own user, or root, to drop a model")
        found = self._services.keeper.regions.of_key(key)
        if not found:
            raise NodeError("the node agent holds no such model; expected one that medusa node status names")
        for entry in found:
            self._services.keeper.unpin(entry)
        if message.kind == "unpin":
            self.answer("unpinned")
            return
        if users := sum(len(entry.leases) for entry in found):
            raise NodeError(f"{users} functions use this model; it is unpinned, and goes after them")
        for entry in found:
            self._services.keeper.regions.drop(entry)
        self.answer("dropped")

    def _release_region(self) -> None:
        if self.entry is not None:
            self._services.keeper.regions.release(self.entry, self.connection.fileno())
            self.entry = None

    def close(self) -> None:
        self._release_region()
        self.connection.close()


def _has_unread(connection: socket.socket) -> bool:
    """Return whether the peer has not yet read everything that was sent to it.

    Descriptors on their way to a peer that does not read them count against a limit of the agent's user (unix(7)).
    """
    unread = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(unread, sys.byteorder) > 0


__all__ = ["Session"]
