"""The agent's idle engine processes. As many of each kind as are wanted are kept ready."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...config import Settings
from ...errors import MedusaError, NodeError, NodeRefusedError
from ...liveness import is_stopped
from ...process import ReportPipe
from ...registry import engine_kind, engine_names
from ...timeline import Timeline
from ..child import REAPER, Child, HungChildren, as_node_error, start_child
from ..event_loop import EventLoop
from ..messages import close_without_linger, receive, send
from .warm_zygote import run_zygote

logger = logging.getLogger(__name__)

_REFILL_AFTER_S = 1.0  # the function that has just taken an engine process is still starting
_MOST_QUICK_DEATHS = 3
_QUICK_S = 10.0
_MOST_ACCOUNTS = 256  # that are remembered of each kind


@dataclass(eq=False)
class _Engine:
    """An engine process, first idle and later a function's. When its channel ends, the process has ended."""

    pid: int
    pidfd: int
    channel: socket.socket
    warm: bool = False
    on_end: Callable[[], None] | None = None  # called when a function's engine has ended

    def kill(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


@dataclass(eq=False)
class _KindState:
    name: str
    wanted: int
    zygote: Child | None = None
    idle: list[_Engine] = field(default_factory=list)
    serving: list[_Engine] = field(default_factory=list)  # each the engine of a function
    forking: int = 0
    taken: int = 0
    taken_at: dict[str, float] = field(default_factory=dict)  # of each account that has asked, the latest one last
    deaths: list[float] = field(default_factory=list)
    failure: str | None = None
    refill_at: float = 0.0

    def note_request(self, account: str) -> float:
        """Note that an account asks for a process, and return when it took one last: seconds, -inf if it has not."""
        found = self.taken_at[account] = self.taken_at.pop(account, -math.inf)
        if len(self.taken_at) > _MOST_ACCOUNTS:
            del self.taken_at[next(iter(self.taken_at))]
        return found


class EnginePool:
    """Keeps the ``wanted`` number of idle processes of each engine kind, and gives them to functions."""

    def __init__(
        self,
        wanted: Mapping[str, int],
        *,
        gpu_context: bool,
        torch_import: str = "auto",
        timeline: Timeline,
        reports: ReportPipe,
        loop: EventLoop,
    ) -> None:
        self._kinds = {name: _KindState(name, count) for name, count in wanted.items() if count}
        self._gpu_context = gpu_context
        self._torch_import = torch_import
        self._timeline = timeline
        self._reports = reports
        self._loop = loop
        self._hung = HungChildren()

    def tick(self) -> None:
        """Kill hung processes, and fork missing ones, a while after one was taken. Call it about twice a second."""
        self._end_hung()
        for kind in self._kinds.values():
            if kind.failure is not None:
                continue
            if time.monotonic() < kind.refill_at:
                continue
            if kind.zygote is None:
                self._start_zygote(kind)
            missing = kind.wanted - len(kind.idle) - kind.forking
            if missing > 0 and kind.zygote is not None:
                try:
                    # One after the other, because they share the cores that functions do not need.
                    if not kind.forking and all(idle.warm for idle in kind.idle):
                        send(kind.zygote.channel, "fork")
                        kind.forking += 1
                except OSError:
                    self._lost_zygote(kind)

    def _end_hung(self) -> None:
        """Kill processes that were stopped (SIGSTOP). Idle ones may wait for hours, so silence proves nothing."""
        engines = {one.pid: one for kind in self._kinds.values() for one in (*kind.idle, *kind.serving)}
        zygotes = {kind.zygote.pid for kind in self._kinds.values() if kind.zygote is not None}
        for pid, reason in self._hung.find_hung(dict.fromkeys([*engines, *zygotes], time.monotonic_ns)).items():
            logger.warning(
                "the %s process %d hangs: %s; killing it", "zygote" if pid in zygotes else "engine", pid, reason
            )
            if pid in zygotes:
                os.kill(pid, signal.SIGKILL)
            else:
                engines[pid].kill()

    def take(
        self,
        name: str,
        settings: Mapping[str, Any],
        descriptors: Sequence[int],
        *,
        bundle_model: str | None = None,
        trust: Sequence[str | None] = (None, None),
        gpus: str | None = None,
        on_end: Callable[[], None] | None = None,
        account: str = "",
        pause_s: float = 0.0,
    ) -> int:
        """Give an idle process to a function and return its pid. Raises NodeError if none is idle.

        ``bundle_model`` is the model whose state bundle the process may use. ``trust`` says from which prefixes, and
        signed with which keys, it may run code. ``gpus`` is its CUDA_VISIBLE_DEVICES; None: the agent's. ``on_end`` is
        called when the process has ended. If other accounts than ``account`` have asked for processes of this kind, the
        last idle one is refused for ``pause_s`` after this account has taken one, or it could take each as soon as it
        is warm.
        """
        self._check_gpus(gpus)
        kind = self._kind(name)
        warm = [idle for idle in kind.idle if idle.warm and not is_stopped(idle.pid)]  # ``tick`` will kill stopped ones
        left_s = kind.note_request(account) + pause_s - time.monotonic()
        if len(warm) == 1 and left_s > 0 and len(kind.taken_at) > 1:
            raise NodeRefusedError(
                f"the last warm {name} engine process is left to other callers than {account} for {left_s:.0f} s more "
                "(--per-caller pause=…); expected more of them, with --prewarm"
            )
        handover = {"settings": settings, "bundle_model": bundle_model, "trust": trust, "gpus": gpus}
        for idle in warm:
            try:
                send(idle.channel, "take", handover, descriptors)
            except ConnectionError:
                self._forget(kind, idle)
                idle.close()
                continue  # it has just died
            except OSError as error:
                raise as_node_error("hand an engine process to a function", error) from None
            self._forget(kind, idle)
            idle.on_end = on_end
            kind.serving.append(idle)
            self._loop.watch(idle.channel, partial(self._on_serving, kind, idle))
            kind.taken += 1
            kind.taken_at[account] = time.monotonic()
            kind.refill_at = time.monotonic() + _REFILL_AFTER_S
            return idle.pid
        raise NodeError(kind.failure or f"no idle {name} engine process is warm at the moment")

    def _check_gpus(self, gpus: str | None) -> None:
        """Raise NodeRefusedError if the idle processes have a context already, perhaps on other GPUs."""
        if self._gpu_context and gpus is not None and gpus != os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise NodeRefusedError(
                f"the idle engine processes have a context on a GPU already (--gpu-context yes), perhaps not on "
                f"{gpus[:100]!r} of CUDA_VISIBLE_DEVICES; the function has to start an engine of its own"
            )

    def _kind(self, name: str) -> _KindState:
        """Return the processes that can become this engine. Raises NodeError if none are kept."""
        warmed = (engine_kind(name).warmed_as if name in engine_names() else "") or name
        kind = self._kinds.get(name) or self._kinds.get(warmed)
        if kind is None:
            only = f", only {', '.join(self._kinds)}" if self._kinds else ""
            raise NodeError(f"the node agent keeps no {name} engines{only}; start it with --prewarm {warmed}=1")
        return kind

    def _on_serving(self, kind: _KindState, engine: _Engine) -> None:
        """Handle the end of a function's engine, which is the only thing that makes its channel readable."""
        kind.serving.remove(engine)
        self._loop.unwatch(engine.channel)
        engine.close()
        if engine.on_end is not None:
            engine.on_end()

    def status(self, *, everything: bool = True) -> dict[str, dict[str, object]]:
        """Return the number of processes of each kind, and with ``everything`` also their ids."""
        return {
            kind.name: {
                "wanted": kind.wanted,
                "warm": sum(idle.warm for idle in kind.idle),
                "warming": kind.forking + sum(not idle.warm for idle in kind.idle),
                "taken": kind.taken,
                "serving": len(kind.serving),
                "pids": [idle.pid for idle in kind.idle if idle.warm and everything],
                "failure": kind.failure,
            }
            for kind in self._kinds.values()
        }

    def close(self) -> None:
        """End the zygotes, and with them their idle children. Processes that serve a function go on."""
        for kind in self._kinds.values():
            if kind.zygote is not None:
                self._end_zygote(kind)
            for engine in kind.serving:
                self._loop.unwatch(engine.channel)
                engine.close()
            kind.serving.clear()
            kind.failure = "the node agent is stopping"

    def _start_zygote(self, kind: _KindState) -> None:
        kind.forking = 0
        try:
            engine = Settings(engine=kind.name, torch_import=self._torch_import)
            body = partial(run_zygote, engine, self._gpu_context, self._reports)
            kind.zygote = start_child(f"{kind.name}-zygote", body, timeline=self._timeline, reports=self._reports)
        except MedusaError as error:
            logger.warning("%s; trying again in %g s", error, _QUICK_S)
            kind.refill_at = time.monotonic() + _QUICK_S
            return
        self._loop.watch(kind.zygote.channel, lambda: self._on_zygote(kind))

    def _on_zygote(self, kind: _KindState) -> None:
        assert kind.zygote is not None
        try:
            message = receive(kind.zygote.channel)
        except NodeError as error:  # the connection with an engine process is lost, and so the process ends
            logger.warning("an idle %s engine process is lost: %s", kind.name, error)
            kind.forking -= 1
            kind.refill_at = time.monotonic() + _REFILL_AFTER_S
            return
        if message is None:
            self._lost_zygote(kind)
        elif message.kind == "failed":
            self._fail(kind, str(message.body["message"]))
        elif message.kind == "forked":
            kind.forking -= 1
            channel = socket.socket(fileno=message.descriptors[0])
            channel.setblocking(False)
            idle = _Engine(int(message.body["pid"]), message.descriptors[1], channel)
            kind.idle.append(idle)
            self._loop.watch(idle.channel, lambda: self._on_idle(kind, idle))
        else:
            close_without_linger(message.descriptors)

    def _on_idle(self, kind: _KindState, idle: _Engine) -> None:
        message = receive(idle.channel)
        if message is not None and message.kind == "warm":
            idle.warm = True
            logger.debug("%s engine process %d is warm", kind.name, idle.pid)
            self.tick()
            return
        self._forget(kind, idle)
        idle.close()
        logger.warning("idle %s engine process %d ended", kind.name, idle.pid)
        self._count_death(kind)

    def _forget(self, kind: _KindState, idle: _Engine) -> None:
        kind.idle.remove(idle)
        self._loop.unwatch(idle.channel)

    def _lost_zygote(self, kind: _KindState) -> None:
        logger.warning("the node's %s zygote ended", kind.name)
        self._end_zygote(kind)
        self._count_death(kind)

    def _end_zygote(self, kind: _KindState) -> None:
        assert kind.zygote is not None
        zygote, kind.zygote, kind.forking = kind.zygote, None, 0
        for idle in tuple(kind.idle):  # they end with their zygote
            self._forget(kind, idle)
            idle.kill()  # a stopped one would not end by itself
            idle.close()
        self._loop.unwatch(zygote.channel)
        REAPER.kill(zygote)

    def _count_death(self, kind: _KindState) -> None:
        now = time.monotonic()
        kind.deaths = [at for at in kind.deaths if now - at < _QUICK_S] + [now]
        kind.refill_at = now + _REFILL_AFTER_S
        if len(kind.deaths) >= _MOST_QUICK_DEATHS:
            self._fail(kind, f"{kind.name} engine processes ended {len(kind.deaths)} times within {_QUICK_S:g} s")

    def _fail(self, kind: _KindState, message: str) -> None:
        """Give up this kind, so that functions start engines of their own."""
        logger.error("%s; no more of them are kept until the node agent is restarted", message)
        kind.failure = message
        if kind.zygote is not None:
            self._end_zygote(kind)
