"""Links that flows share: each flow has an equal part of every link it crosses, as TCP connections do.

Fluid: rates change only when a flow starts or ends. A flow that forwards what another one brings is as slow as that
one once it has caught up. What a flow leaves of its part of a link, because another link is narrower, is not given to
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_NEVER = float("inf")
_ALMOST_BYTES = 1.0


def call_after(env: Any, delay_s: float, call: Callable[[], None]) -> None:
    """Call a function after a delay on the simulated clock. This is much cheaper than a process of simpy."""
    env.timeout(delay_s).callbacks.append(lambda _: call())


class Link:
    """One direction of a cable, a switch's uplink, or a disk. ``moved_bytes`` counts the flows that have left it."""

    __slots__ = ("bytes_per_s", "flows", "moved_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.moved_bytes = bytes_per_s, 0.0
        self.flows: dict[Flow, None] = {}  # a set in the order of arrival

    @property
    def share(self) -> float:
        return self.bytes_per_s / max(len(self.flows), 1)


class Flow:
    """Bytes on their way. ``upstream`` is the flow that brings the bytes which this one forwards."""

    __slots__ = ("_at_s", "_call", "_env", "_turn", "done", "followers", "links", "rate", "size", "upstream")

    def __init__(
        self, env: Any, links: tuple[Link, ...], size: float, call: Callable[[], None], upstream: Flow | None
    ) -> None:
        self._env, self._call = env, call
        self.links, self.size, self.upstream = links, size, upstream
        self.done, self.rate = 0.0, 0.0
        self.followers: dict[Flow, None] = {}
        self._at_s: float = env.now
        self._turn = 0
        if upstream is not None:
            upstream.followers[self] = None

    @property
    def progress(self) -> float:
        """The bytes that have arrived by now."""
        now: float = self._env.now
        return min(self.size, self.done + self.rate * (now - self._at_s))

    def settle(self) -> bool:
        """Set the rate by the links' present shares. Return whether it has changed."""
        self.done, self._at_s = self.progress, self._env.now
        rate = min((link.share for link in self.links), default=_NEVER)
        until = _NEVER
        if self.upstream is not None:
            gap = self.upstream.progress - self.done
            if gap <= _ALMOST_BYTES:
                rate = min(rate, self.upstream.rate)
            elif rate > self.upstream.rate:
                until = gap / (rate - self.upstream.rate)
        changed = rate != self.rate
        self.rate = rate
        self._wake(min(until, (self.size - self.done) / rate if rate > 0 else _NEVER))
        return changed

    def _wake(self, delay_s: float) -> None:
        self._turn += 1
        turn = self._turn
        if delay_s < _NEVER:
            call_after(self._env, max(delay_s, 0.0), lambda: self._woken(turn))

    def _woken(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self.size - self.progress <= _ALMOST_BYTES:
            self._call()
        else:
            settle([self])

    def silence(self) -> None:
        """Cancel all calls that this flow has scheduled."""
        self._turn += 1


class Network:
    """The flows of a simulation."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.moved_bytes = 0.0

    def start(
        self, links: Iterable[Link], size: float, arrived: Callable[[], None], upstream: Flow | None = None
    ) -> Flow:
        """Start a flow. ``arrived`` is called once it has arrived completely and left its links."""
        flow: Flow

        def end() -> None:
            self.stop(flow)
            arrived()

        flow = Flow(self._env, tuple(links), size, end, upstream)
        for link in flow.links:
            link.flows[flow] = None
        settle(_touched(flow.links))
        if not flow.links:
            settle([flow])
        return flow

    def stop(self, flow: Flow) -> None:
        """Take a flow off its links, finished or not. Those that follow it go on without it."""
        flow.done, flow.rate = flow.progress, 0.0
        self.moved_bytes += flow.done
        flow.silence()
        for link in flow.links:
            if flow in link.flows:
                del link.flows[flow]
                link.moved_bytes += flow.done
        if flow.upstream is not None:
            flow.upstream.followers.pop(flow, None)
        touched = _touched(flow.links)
        for follower in flow.followers:
            follower.upstream = None
            touched.setdefault(follower)
        flow.followers.clear()
        settle(touched)


def settle(flows: Iterable[Flow]) -> None:
    """Give flows their present rates, and then those that follow one whose rate has changed."""
    pending = list(flows)
    while pending:
        changed = [flow for flow in pending if flow.settle()]
        pending = [follower for flow in changed for follower in flow.followers]


def _touched(links: Iterable[Link]) -> dict[Flow, None]:
    return dict.fromkeys(flow for link in links for flow in link.flows)
